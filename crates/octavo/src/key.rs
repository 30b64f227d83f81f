//! `octavo key`: creates an API key and its entry for `--api-keys-file`.

use octavo_server::KeyHash;
use uuid::Uuid;

use crate::cli::KeyArgs;
use crate::serve::keys::{NAME, PARALLEL, REQUESTS, SHA256, TOKENS};

/// Prints the entry to standard output and the key, which is stored nowhere, to standard error.
pub(crate) fn run(args: &KeyArgs) {
    let key = random_key();
    eprintln!("The key of {}, which is shown only once: {key}", args.name);
    print!("{}", entry(args, &key));
}

/// A key of 244 random bits.
fn random_key() -> String {
    format!("sk-{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple())
}

/// The entry of a key, in YAML.
fn entry(args: &KeyArgs, key: &str) -> String {
    let limits =
        [(REQUESTS, args.requests_per_minute), (TOKENS, args.tokens_per_minute), (PARALLEL, args.parallel_requests)];
    let limits = limits.into_iter().filter_map(|(field, limit)| Some(format!("  {field}: {}\n", limit?)));
    // The quotes keep a name or hash of digits a text.
    let head = format!("- {NAME}: \"{}\"\n  {SHA256}: \"{}\"\n", args.name, KeyHash::new(key.as_bytes()));
    std::iter::once(head).chain(limits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_long_and_differ() {
        let (one, other) = (random_key(), random_key());
        assert!(one.len() == 67 && one.is_ascii() && one != other);
    }

    #[test]
    fn an_entry_has_the_hash_and_the_limits_that_are_set() {
        let args = KeyArgs {
            name: "team-a".into(),
            requests_per_minute: Some(60),
            tokens_per_minute: None,
            parallel_requests: Some(2),
        };
        let hash = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(
            entry(&args, "abc"),
            format!("- name: \"team-a\"\n  sha256: \"{hash}\"\n  requests-per-minute: 60\n  parallel-requests: 2\n")
        );
    }
}
