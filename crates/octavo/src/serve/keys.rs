//! The file of `--api-keys-file`: clients with names, keys and limits.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, anyhow};
use octavo_server::{ApiKeys, KeyEntry, KeyHash, KeyLimits};
use octavo_sockets::FileWatch;
use tracing::{info, warn};

use crate::cli;
use crate::yaml::{self, Content, Node};

/// Interval of the checks whether the file has changed.
const REFRESH: Duration = Duration::from_secs(2);

/// Maximum number of characters of a name, which is a label in the metrics.
const MAX_NAME: usize = 64;

/// The fields of an entry.
pub(crate) const NAME: &str = "name";
pub(crate) const SHA256: &str = "sha256";
const KEY: &str = "key";
pub(crate) const REQUESTS: &str = "requests-per-minute";
pub(crate) const TOKENS: &str = "tokens-per-minute";
pub(crate) const PARALLEL: &str = "parallel-requests";
const MIN_PRIORITY: &str = "min-priority";
const FIELDS: [&str; 7] = [NAME, SHA256, KEY, REQUESTS, TOKENS, PARALLEL, MIN_PRIORITY];

/// The file and its entries when it was read first.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeysFile {
    path: PathBuf,
    pub(crate) entries: Vec<KeyEntry>,
    watch: FileWatch,
}

impl KeysFile {
    /// Reads the file.
    ///
    /// # Errors
    /// The file cannot be read, has no entry, or has an invalid one; the error names the line and the entry.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let watch = FileWatch::new(vec![path.to_owned()]);
        let entries = read(path).map_err(|why| anyhow!(why))?;
        Ok(Self { path: path.to_owned(), entries, watch })
    }

    /// Replaces the keys whenever the file changes. A file that cannot be used leaves them as they are.
    pub(crate) async fn follow(mut self, keys: ApiKeys) {
        loop {
            self.watch.changed(REFRESH).await;
            let path = self.path.clone();
            let Ok(entries) = tokio::task::spawn_blocking(move || read(&path)).await else { continue };
            match entries {
                Ok(entries) => {
                    keys.replace(&entries);
                    info!(file = %self.path.display(), entries = entries.len(), "the API keys were replaced");
                }
                Err(error) => warn!(error, "the API keys were not replaced: those in use stay"),
            }
        }
    }
}

fn read(path: &Path) -> Result<Vec<KeyEntry>, String> {
    let document = yaml::read_file(path).map_err(|why| format!("--api-keys-file {why}"))?;
    entries(document).map_err(|why| format!("--api-keys-file {}: {why}", path.display()))
}

fn entries(document: Option<Node>) -> Result<Vec<KeyEntry>, String> {
    let items = match document {
        Some(Node { content: Content::List(items), .. }) if !items.is_empty() => items,
        Some(node) if !node.is_null() && !matches!(node.content, Content::List(_)) => {
            return Err(format!(
                "line {}: a list of entries is expected, each of which begins with `- name:`",
                node.line
            ));
        }
        _ => return Err("there is no entry; `octavo key NAME` creates one".into()),
    };
    let mut entries: Vec<KeyEntry> = Vec::with_capacity(items.len());
    let mut owners: HashMap<KeyHash, String> = HashMap::new();
    for (index, item) in items.iter().enumerate() {
        let named = entry_name(item).map_or_else(|| (index + 1).to_string(), |name| format!("'{name}'"));
        let at = |line: usize, why: &str| format!("line {line}, entry {named}: {why}");
        let entry = entry(item).map_err(|Fault { line, why }| at(line, &why))?;
        if entries.iter().any(|known| known.name == entry.name) {
            return Err(at(item.line, "another entry has the same name; the keys of one client are a list"));
        }
        for hash in &entry.hashes {
            if let Some(owner) = owners.insert(*hash, entry.name.clone()) {
                return Err(at(item.line, &format!("its key is also a key of the entry '{owner}'")));
            }
        }
        entries.push(entry);
    }
    Ok(entries)
}

/// The reason why an entry is invalid. It contains no value of a key.
struct Fault {
    line: usize,
    why: String,
}

fn fault<T>(line: usize, why: impl Into<String>) -> Result<T, Fault> {
    Err(Fault { line, why: why.into() })
}

/// The fields of an entry by their names with dashes.
fn fields(item: &Node) -> Result<Vec<(String, &Node)>, Fault> {
    let Content::Map(fields) = &item.content else {
        return fault(item.line, "a map is expected, such as `name: team-a`");
    };
    Ok(fields.iter().map(|(name, value)| (name.replace('_', "-"), value)).collect())
}

/// The name of an entry that may be invalid otherwise.
fn entry_name(item: &Node) -> Option<String> {
    let fields = fields(item).ok()?;
    let (_, value) = fields.iter().find(|(field, _)| field == NAME)?;
    value.text().filter(|name| check_name(name).is_ok()).map(str::to_owned)
}

fn entry(item: &Node) -> Result<KeyEntry, Fault> {
    let mut entry = KeyEntry { name: String::new(), hashes: vec![], limits: KeyLimits::default(), min_priority: None };
    let mut seen = vec![];
    for (field, value) in fields(item)? {
        if seen.contains(&field) {
            return fault(value.line, format!("'{field}' is there twice"));
        }
        set_field(&mut entry, &field, value)?;
        seen.push(field);
    }
    if entry.name.is_empty() {
        return fault(item.line, "'name' is missing");
    }
    if entry.hashes.is_empty() {
        return fault(item.line, "the key is missing: give its hash as 'sha256', or the key itself as 'key'");
    }
    Ok(entry)
}

fn set_field(entry: &mut KeyEntry, field: &str, value: &Node) -> Result<(), Fault> {
    match field {
        NAME => {
            let name = text(field, value)?;
            check_name(name).or_else(|why| fault(value.line, why))?;
            name.clone_into(&mut entry.name);
        }
        SHA256 => add_hashes(entry, field, value, |text| {
            KeyHash::from_hex(text).ok_or("has 64 hexadecimal digits, as `octavo key NAME` prints them")
        })?,
        KEY => add_hashes(entry, field, value, |text| {
            let visible = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
            visible.then(|| KeyHash::new(text.as_bytes())).ok_or("has visible ASCII characters only, and at least one")
        })?,
        REQUESTS => entry.limits.requests_per_minute = limit(field, value)?,
        TOKENS => entry.limits.tokens_per_minute = limit(field, value)?,
        PARALLEL => entry.limits.parallel_requests = limit(field, value)?,
        MIN_PRIORITY => {
            let text = text(field, value)?;
            let priority =
                text.parse().or_else(|_| fault(value.line, format!("'{field}': '{text}' is not a whole number")));
            entry.min_priority = Some(priority?);
        }
        _ => {
            let hint = cli::nearest(FIELDS.into_iter(), field);
            let hint = hint.map(|known| format!("; did you mean '{known}'?")).unwrap_or_default();
            return fault(value.line, format!("there is no field '{field}'{hint}"));
        }
    }
    Ok(())
}

/// Whether a name can be a label and a part of a log line.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let valid = |letter: char| letter.is_ascii_alphanumeric() || "._-@/+".contains(letter);
    match name.chars().count() {
        1..=MAX_NAME if name.chars().all(valid) => Ok(()),
        _ => Err(format!("'{NAME}' has 1 to {MAX_NAME} letters, digits and characters of `._-@/+`")),
    }
}

fn text<'a>(field: &str, value: &'a Node) -> Result<&'a str, Fault> {
    match value.text().filter(|_| !value.is_null()) {
        Some(text) => Ok(text),
        None => fault(value.line, format!("'{field}' has no value, or is not one text or number")),
    }
}

/// A limit; the absence of a field, not a value, means that there is none.
fn limit(field: &str, value: &Node) -> Result<Option<NonZeroU32>, Fault> {
    let count = cli::small_count(text(field, value)?).or_else(|why| fault(value.line, format!("'{field}': {why}")))?;
    Ok(NonZeroU32::new(count))
}

/// Adds the hash that a text or each text of a list has.
fn add_hashes(
    entry: &mut KeyEntry,
    field: &str,
    value: &Node,
    hash: impl Fn(&str) -> Result<KeyHash, &'static str>,
) -> Result<(), Fault> {
    let texts = match &value.content {
        Content::List(items) => items.iter().collect(),
        _ => vec![value],
    };
    for node in texts {
        let hash = hash(text(field, node)?).or_else(|why| fault(node.line, format!("'{field}' {why}")))?;
        entry.hashes.push(hash);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(source: &str) -> Result<Vec<KeyEntry>, String> {
        entries(yaml::read(source)?)
    }

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn an_entry_has_a_name_keys_and_limits() {
        let text = format!(
            "# clients\n- name: team-a\n  sha256: {ABC}\n  requests-per-minute: 600\n  tokens_per_minute: 200k\n  \
             parallel-requests: '8'\n  min-priority: -2\n- name: 7\n  key: [old, new]\n"
        );
        let limits = |requests, tokens, parallel| KeyLimits {
            requests_per_minute: NonZeroU32::new(requests),
            tokens_per_minute: NonZeroU32::new(tokens),
            parallel_requests: NonZeroU32::new(parallel),
        };
        let expected = [
            KeyEntry {
                name: "team-a".into(),
                hashes: vec![KeyHash::new(b"abc")],
                limits: limits(600, 200_000, 8),
                min_priority: Some(-2),
            },
            KeyEntry {
                name: "7".into(),
                hashes: vec![KeyHash::new(b"old"), KeyHash::new(b"new")],
                limits: limits(0, 0, 0),
                min_priority: None,
            },
        ];
        assert_eq!(parse(&text).unwrap(), expected);
        let json = format!(r#"[{{"name": "team-a", "sha256": ["{ABC}"]}}]"#);
        assert_eq!(parse(&json).unwrap()[0].hashes, [KeyHash::new(b"abc")]);
    }

    #[test]
    fn an_invalid_entry_is_named_with_its_line() {
        for (text, part) in [
            ("", "there is no entry; `octavo key NAME` creates one"),
            ("[]", "there is no entry"),
            ("\nteam: sk-1", "line 2: a list of entries is expected"),
            ("- sk-1", "line 1, entry 1: a map is expected"),
            ("- name: a\n  key: k\n- key: l", "line 3, entry 2: 'name' is missing"),
            ("- name: a", "line 1, entry 'a': the key is missing"),
            ("- name: a\n  key:", "entry 'a': 'key' has no value"),
            ("- name: a\n  key: []", "entry 'a': the key is missing"),
            ("- name: a\n  key: 'k l'", "line 2, entry 'a': 'key' has visible ASCII"),
            ("- name: a\n  key: |\n    k\n", "entry 'a': 'key' has visible ASCII"),
            ("- name: a\n  key:\n  - k\n  - ''", "line 4, entry 'a': 'key' has visible ASCII"),
            ("- name: a\n  sha256: abc", "line 2, entry 'a': 'sha256' has 64 hexadecimal digits"),
            ("- name: 'a b'\n  key: k", "line 1, entry 1: 'name' has 1 to 64 letters"),
            ("- name: a\n  key: k\n  tokens-per-minute: 0", "line 3, entry 'a': 'tokens-per-minute': '0' is not"),
            ("- name: a\n  key: k\n  parallel-requests: -1", "'parallel-requests': '-1' is not"),
            ("- name: a\n  key: k\n  requests-per-minute: 5G", "'requests-per-minute': '5G' is too large"),
            ("- name: a\n  key: k\n  requests-per-minute:", "'requests-per-minute' has no value"),
            ("- name: a\n  key: k\n  min-priority: high", "'min-priority': 'high' is not a whole number"),
            ("- name: a\n  key: k\n  request-per-minute: 1", "did you mean 'requests-per-minute'?"),
            ("- name: a\n  key: k\n  min_priority: 1\n  min-priority: 1", "line 4, entry 'a': 'min-priority' is there"),
            ("- name: a\n  key: k\n- name: a\n  key: l", "line 3, entry 'a': another entry has the same name"),
            ("- name: a\n  key: k\n- name: b\n  key: k", "line 3, entry 'b': its key is also a key of the entry 'a'"),
            ("- name: a\n  key: [k, k]", "its key is also a key of the entry 'a'"),
            ("- name: a\n  key: k\n  key: l", "line 3: the same key is there twice"),
            ("- name: [", "line"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn an_error_shows_no_key() {
        for text in ["- sk-secret", "- name: a\n  sha256: sk-secret", "- name: a\n  key: 'sk-secret '", "sk-secret"] {
            let error = parse(text).unwrap_err();
            assert!(!error.contains("sk-secret"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_list_of_entries_or_an_error(
            text in "(- |  )?(name|key|sha256|tokens-per-minute)?:? ?[a-z0-9\\[\\]{},:'\n -]{0,40}",
        ) {
            if let Ok(entries) = parse(&text) {
                prop_assert!(entries.iter().all(|entry| !entry.name.is_empty() && !entry.hashes.is_empty()));
            }
        }
    }
}
