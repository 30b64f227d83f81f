//! Normalisation of command lines: vLLM's forms become those of the definition.

use std::collections::HashSet;
use std::ffi::OsString;

use clap::Command;
use serde_json::{Map, Value};

use crate::cli::{is_json, is_switch};

/// Modules that deployments of vLLM run with `python3 -m`, and their commands here.
const MODULES: [(&str, &str); 4] = [
    // The older server, whose only route is /generate.
    ("vllm.entrypoints.api_server", "serve"),
    ("vllm.entrypoints.openai.api_server", "serve"),
    ("vllm.entrypoints.openai.run_batch", "run-batch"),
    ("vllm.entrypoints.cli.main", ""),
];

/// vLLM's short names of flags. A command's own flags take precedence over names of one letter.
const SHORT: [(&str, &str); 20] = [
    ("-tp", "tensor-parallel-size"),
    ("-pp", "pipeline-parallel-size"),
    ("-dp", "data-parallel-size"),
    ("-dpn", "data-parallel-rank"),
    ("-dpr", "data-parallel-start-rank"),
    ("-dpl", "data-parallel-size-local"),
    ("-dpa", "data-parallel-address"),
    ("-dpp", "data-parallel-rpc-port"),
    ("-dpb", "data-parallel-backend"),
    ("-dph", "data-parallel-hybrid-lb"),
    ("-dpe", "data-parallel-external-lb"),
    ("-dcp", "decode-context-parallel-size"),
    ("-pcp", "prefill-context-parallel-size"),
    ("-ep", "enable-expert-parallel"),
    ("-cc", "compilation-config"),
    ("-ac", "attention-config"),
    ("-sc", "speculative-config"),
    ("-q", "quantization"),
    ("-n", "nnodes"),
    ("-r", "node-rank"),
];

/// Maximum nesting of a dotted name.
const MAX_DEPTH: usize = 32;

/// Converts `[python3] [-m vllm.entrypoints.openai.api_server] ARGS` and `ARGS` alone to `serve ARGS`, and `vllm COMMAND`
/// and `octavo COMMAND` to `COMMAND`. A whole command therefore works in place of an image's entry point and after it.
pub(crate) fn entry(mut args: Vec<OsString>) -> Vec<OsString> {
    let text = |args: &[OsString], at: usize| args.get(at).and_then(|arg| arg.to_str()).map(str::to_owned);
    let name = |arg: &str| arg.rsplit('/').next().unwrap_or_default().to_owned();
    if text(&args, 0).is_some_and(|arg| name(&arg).starts_with("python")) {
        args.remove(0);
        if text(&args, 0).as_deref() == Some("-u") {
            args.remove(0);
        }
    }
    if text(&args, 0).as_deref() == Some("-m")
        && let Some(module) = text(&args, 1)
        && let Some((_, command)) = MODULES.iter().find(|(name, _)| *name == module)
    {
        args.splice(..2, (!command.is_empty()).then(|| command.into()));
    }
    if args.len() > 1 && text(&args, 0).is_some_and(|arg| ["octavo", "vllm"].contains(&name(&arg).as_str())) {
        args.remove(0);
    }
    let first = text(&args, 0);
    if first.is_some_and(|arg| arg.starts_with('-') && !["-h", "--help", "-V", "--version"].contains(&arg.as_str())) {
        args.insert(0, "serve".into());
    }
    args
}

/// Converts the flags of a subcommand to the form of its definition: `-` for `_` in names, long names for vLLM's short
/// ones, `--x=false` for `--no-x`, and one JSON object for dotted names. Values stay as they are.
///
/// # Errors
/// A dotted name has no value, or the flag's other value is not a JSON object.
pub(crate) fn spell(args: Vec<OsString>, command: &Command) -> Result<Vec<OsString>, String> {
    let flags = Flags::from_command(command);
    let mut dotted: Vec<(String, Map<String, Value>)> = vec![];
    let mut spelled = Vec::with_capacity(args.len());
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        if arg == "--" {
            spelled.push(arg);
            spelled.extend(args);
            break;
        }
        let Some(token) = arg.to_str().and_then(|text| flags.token(text)) else {
            spelled.push(arg);
            continue;
        };
        let Some(path) = token.path else {
            spelled.push(token.to_arg(&flags));
            continue;
        };
        let named = format!("--{}.{path}", token.name);
        let value = match token.value {
            Some(value) => value,
            None => {
                let next = args.next().and_then(|next| next.into_string().ok());
                next.ok_or_else(|| format!("{named} needs a value"))?
            }
        };
        let at = dotted.iter().position(|(name, _)| *name == token.name).unwrap_or_else(|| {
            dotted.push((token.name.clone(), Map::new()));
            dotted.len() - 1
        });
        set_at_path(&mut dotted[at].1, &path, leaf(&value)).map_err(|why| format!("{named}: {why}"))?;
    }
    for (name, keys) in dotted {
        let mut object = whole(&mut spelled, &name)?;
        merge(&mut object, keys);
        // Inserted at the front, since arguments after `--` are not flags.
        spelled.insert(0, format!("--{name}={}", Value::Object(object)).into());
    }
    Ok(spelled)
}

/// The names in a subcommand's definition.
struct Flags {
    switches: HashSet<String>,
    json: HashSet<String>,
    long: HashSet<String>,
    short: HashSet<char>,
}

/// A parsed flag.
struct Token {
    name: String,
    /// Keys within a JSON flag.
    path: Option<String>,
    value: Option<String>,
}

impl Flags {
    fn from_command(command: &Command) -> Self {
        let names = |wanted: fn(&clap::Arg) -> bool| {
            command.get_arguments().filter(move |arg| wanted(arg)).filter_map(|arg| arg.get_long()).map(str::to_owned)
        };
        Self {
            switches: names(is_switch).collect(),
            json: names(is_json).collect(),
            long: names(|_| true).collect(),
            short: command.get_arguments().filter_map(clap::Arg::get_short).collect(),
        }
    }

    /// Parses a flag; `None` for arguments that stay as they are.
    fn token(&self, text: &str) -> Option<Token> {
        let (flag, value) = match text.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (text, None),
        };
        if let Some(flag) = flag.strip_prefix("--") {
            let (name, path) = match flag.split_once('.') {
                Some((name, path)) => (name.replace('_', "-"), Some(path.to_owned())),
                None => (flag.replace('_', "-"), None),
            };
            // Only JSON flags have dotted names; others are unknown flags.
            let known = path.is_none() || self.json.contains(&name);
            return known.then_some(Token { name, path, value });
        }
        self.short_token(flag, value)
    }

    /// `-tp`, `-cc.mode`, `-O3`.
    fn short_token(&self, flag: &str, value: Option<String>) -> Option<Token> {
        let (name, path) = match flag.split_once('.') {
            Some((name, path)) => (name, Some(path.to_owned())),
            None => (flag, None),
        };
        if let Some(level) = name.strip_prefix("-O").filter(|_| self.long.contains("optimization-level")) {
            if path.is_some() {
                return Some(Token { name: "compilation-config".into(), path, value });
            }
            let value = value.or_else(|| (!level.is_empty()).then(|| level.to_owned()));
            return Some(Token { name: "optimization-level".into(), path: None, value });
        }
        let (_, long) = SHORT.iter().find(|(short, _)| *short == name)?;
        let taken = name.len() == 2 && name.chars().last().is_some_and(|letter| self.short.contains(&letter));
        (self.long.contains(*long) && !taken).then(|| Token { name: (*long).to_owned(), path, value })
    }
}

impl Token {
    fn to_arg(&self, flags: &Flags) -> OsString {
        if self.value.is_none()
            && let Some(positive) = self.name.strip_prefix("no-")
            && flags.switches.contains(positive)
            && !flags.long.contains(&self.name)
        {
            return format!("--{positive}=false").into();
        }
        match &self.value {
            Some(value) => format!("--{}={value}", self.name).into(),
            None => format!("--{}", self.name).into(),
        }
    }
}

/// Removes all values of a flag from `args` and returns the last one.
fn whole(args: &mut Vec<OsString>, name: &str) -> Result<Map<String, Value>, String> {
    let (flag, attached) = (format!("--{name}"), format!("--{name}="));
    let mut found = None;
    let mut at = 0;
    while at < args.len() && args[at] != "--" {
        if args[at] == *flag && at + 1 < args.len() {
            found = args.drain(at..at + 2).next_back();
        } else if args[at].to_str().is_some_and(|arg| arg.starts_with(&attached)) {
            found = args.remove(at).to_str().map(|arg| arg[attached.len()..].into());
        } else {
            at += 1;
        }
    }
    let Some(found) = found else { return Ok(Map::new()) };
    let text = found.to_string_lossy();
    serde_json::from_str(&text).map_err(|error| format!("{flag}: '{text}' is not a JSON object: {error}"))
}

/// A value as JSON or a Python constant, otherwise as a string.
fn leaf(text: &str) -> Value {
    match text {
        "True" => Value::Bool(true),
        "False" => Value::Bool(false),
        "None" => Value::Null,
        _ => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned())),
    }
}

/// Sets `a.b.c`; `a.b+` appends to a list.
fn set_at_path(object: &mut Map<String, Value>, path: &str, value: Value) -> Result<(), String> {
    let mut keys: Vec<&str> = path.split('.').collect();
    let last = keys.pop().unwrap_or_default();
    if keys.len() >= MAX_DEPTH || last.is_empty() || keys.contains(&"") {
        return Err("names separated by single dots are expected".into());
    }
    let mut object = object;
    for key in keys {
        let inner = object.entry(key).or_insert_with(|| Value::Object(Map::new()));
        object = inner.as_object_mut().ok_or_else(|| format!("'{key}' has a value already"))?;
    }
    match last.strip_suffix('+') {
        None => {
            object.insert(last.to_owned(), value);
        }
        Some(list) => match object.entry(list).or_insert_with(|| Value::Array(vec![])) {
            Value::Array(items) => items.push(value),
            _ => return Err(format!("'{list}' has a value that is no list")),
        },
    }
    Ok(())
}

/// Merges `over` into `under`. Objects are merged, other values replaced, as deep as dotted names may be.
fn merge(under: &mut Map<String, Value>, over: Map<String, Value>) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(Value::Object(under)), Value::Object(over)) => merge(under, over),
            (_, value) => {
                under.insert(key, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    fn serve(args: &[&str]) -> Result<Vec<String>, String> {
        let command = crate::cli::command();
        let spelled = spell(words(args), command.find_subcommand("serve").unwrap())?;
        Ok(spelled.into_iter().map(|arg| arg.into_string().unwrap()).collect())
    }

    #[test]
    fn whole_commands_and_entry_points_of_vllm_are_serve() {
        let module = "vllm.entrypoints.openai.api_server";
        for line in [
            vec!["--model", "m"],
            vec!["-m", module, "--model", "m"],
            vec!["python3", "-m", module, "--model", "m"],
            vec!["/usr/bin/python3.12", "-u", "-m", module, "--model", "m"],
            vec!["python", "-m", "vllm.entrypoints.api_server", "--model", "m"],
            vec!["vllm", "serve", "--model", "m"],
            vec!["octavo", "serve", "--model", "m"],
            vec!["/usr/local/bin/octavo", "--model", "m"],
            vec!["python3", "-m", "vllm.entrypoints.cli.main", "serve", "--model", "m"],
        ] {
            assert_eq!(entry(words(&line)), words(&["serve", "--model", "m"]), "{line:?}");
        }
        let batch = ["python", "-m", "vllm.entrypoints.openai.run_batch", "-i", "x"];
        assert_eq!(entry(words(&batch)), words(&["run-batch", "-i", "x"]));
    }

    #[test]
    fn other_lines_stay_as_they_are() {
        for line in [
            vec![],
            vec!["--help"],
            vec!["-V"],
            vec!["pull", "vllm"],
            vec!["vllm"],
            vec!["octavo"],
            vec!["serve", "-m"],
        ] {
            assert_eq!(entry(words(&line)), words(&line), "{line:?}");
        }
        // Not a module of ours: serve, which then says that it knows no -m.
        assert_eq!(entry(words(&["-m", "http.server"])), words(&["serve", "-m", "http.server"]));
    }

    #[test]
    fn names_take_either_spelling_and_values_none() {
        let line = ["m_1", "--max_model_len", "4k", "--served_model_name=a_b", "c_d"];
        assert_eq!(serve(&line).unwrap(), ["m_1", "--max-model-len", "4k", "--served-model-name=a_b", "c_d"]);
    }

    #[test]
    fn a_switch_has_an_opposite() {
        assert_eq!(serve(&["--no_enable_prefix_caching"]).unwrap(), ["--enable-prefix-caching=false"]);
        assert_eq!(serve(&["--no-trust-remote-code"]).unwrap(), ["--trust-remote-code=false"]);
        assert_eq!(serve(&["--no-port"]).unwrap(), ["--no-port"]);
    }

    #[test]
    fn short_names_are_long_ones() {
        let cases = [
            (vec!["-tp", "2"], vec!["--tensor-parallel-size", "2"]),
            (vec!["-tp=2"], vec!["--tensor-parallel-size=2"]),
            (vec!["-q", "awq"], vec!["--quantization", "awq"]),
            (vec!["-O3"], vec!["--optimization-level=3"]),
            (vec!["-O", "3"], vec!["--optimization-level", "3"]),
            (vec!["-O.mode=3"], vec![r#"--compilation-config={"mode":3}"#]),
            (vec!["-cc.mode", "3"], vec![r#"--compilation-config={"mode":3}"#]),
            (vec!["-h"], vec!["-h"]),
        ];
        for (line, expected) in cases {
            assert_eq!(serve(&line).unwrap(), expected, "{line:?}");
        }
    }

    #[test]
    fn dotted_names_make_one_object() {
        let line = [
            "--structured-outputs-config.backend=guidance",
            "m",
            "--structured_outputs_config.a.b_c",
            "True",
            "--structured-outputs-config",
            r#"{"backend":"auto","a":{"x":1}}"#,
            "--structured-outputs-config.list+",
            "one",
        ];
        let expected = r#"--structured-outputs-config={"backend":"guidance","a":{"x":1,"b_c":true},"list":["one"]}"#;
        assert_eq!(serve(&line).unwrap(), [expected, "m"]);
    }

    #[test]
    fn bad_dotted_names_are_sentences() {
        let deep = format!("--hf-overrides{}=1", ".a".repeat(100));
        for (line, part) in [
            (vec!["--hf-overrides.a"], "needs a value"),
            (vec!["--hf-overrides..a=1"], "single dots"),
            (vec![deep.as_str()], "single dots"),
            (vec!["--hf-overrides.a=1", "--hf-overrides.a.b=1"], "has a value already"),
            (vec!["--hf-overrides.a=1", "--hf-overrides", "x"], "not a JSON object"),
            (vec!["--hf-overrides.a=1", "--hf-overrides.a+=1"], "no list"),
        ] {
            let error = serve(&line).unwrap_err();
            assert!(error.contains("--hf-overrides") && error.contains(part), "{line:?}: {error}");
        }
        assert_eq!(serve(&["--port.x=1"]).unwrap(), ["--port.x=1"], "clap says that it is unknown");
    }

    #[test]
    fn after_two_dashes_there_are_no_flags() {
        let line = ["--hf-overrides.a=1", "--", "--max_model_len"];
        assert_eq!(serve(&line).unwrap(), [r#"--hf-overrides={"a":1}"#, "--", "--max_model_len"]);
    }

    proptest! {
        #[test]
        fn any_line_is_spelled_or_an_error(line in prop::collection::vec("(--|-)?[a-zO_.=+-]{0,12}", 0..8)) {
            let line: Vec<&str> = line.iter().map(String::as_str).collect();
            let _ = serve(&line);
            let _ = crate::cli::parse(words(&line), &|_| None);
        }
    }
}
