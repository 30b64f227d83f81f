//! Flags from the `--config` file and from the environment (`OCTAVO_<FLAG>`).
//!
//! Both become arguments of the form `--flag=value` before the user's own, so that all values are parsed in one way.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::cli::{argv, is_given, is_json, is_switch};
use crate::yaml::{self, Content, Node};
use clap::error::{ContextKind, ContextValue, Error};
use clap::{Arg, ArgMatches, Command};

/// Looks up environment variables, those of the process or of a test.
pub(crate) type Environment<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Flags without which a server needs no key. One that is set but empty is an error, so that a secret that is missing
/// opens no server.
pub(crate) const LOCKS: [&str; 2] = ["api-key", "api-keys-file"];

/// The flag that names the file.
const CONFIG: &str = "config";

/// Commands whose flags can be set by variables. People type the flags of the other commands.
pub(crate) const WITH_VARIABLES: [&str; 3] = ["serve", "run-batch", HEALTH];

/// The beginning of the variables' names.
pub(crate) const PREFIX: &str = "OCTAVO_";

/// The command that has variables but no configuration file.
const HEALTH: &str = "health";

/// A flag from the file or the environment.
#[derive(Debug)]
pub(crate) struct Setting {
    /// Long name without the dashes.
    flag: String,
    /// `--flag=value`, once for each value.
    tokens: Vec<OsString>,
    /// Origin of the value, for messages.
    origin: String,
}

impl Setting {
    /// The setting as arguments.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = OsString> + '_ {
        self.tokens.iter().cloned()
    }
}

/// The settings of the file and the variables that the command line (`given`) does not set.
///
/// # Errors
/// The file cannot be read, or has an invalid key or value; the error names the file and the key.
pub(crate) fn settings(
    command: &Command,
    given: &ArgMatches,
    environment: &Environment<'_>,
) -> Result<Vec<Setting>, String> {
    let with_file = find(command, CONFIG).is_some();
    // `bench serve` has the name of `serve` but no configuration file.
    if !with_file && command.get_name() != HEALTH {
        return Ok(vec![]);
    }
    let is_open = |flag: &str| find(command, flag).is_some_and(|arg| !is_given(given, arg.get_id().as_str()));
    let variables = WITH_VARIABLES.contains(&command.get_name());
    let mut variables = if variables { from_environment(command, environment) } else { vec![] };
    variables.retain(|setting| is_open(&setting.flag));

    let by_variable = variables.iter().position(|setting| setting.flag == CONFIG);
    let path = match by_variable {
        Some(at) => variables.remove(at).tokens[0].to_str().and_then(|token| Some(token.split_once('=')?.1.to_owned())),
        None if with_file => given.get_one::<PathBuf>(CONFIG).map(|path| path.to_string_lossy().into_owned()),
        None => None,
    };
    let mut settings = match path {
        Some(path) => from_file(command, Path::new(&path))?,
        None => vec![],
    };
    settings.retain(|setting| is_open(&setting.flag));
    variables.retain(|variable| settings.iter().all(|setting| setting.flag != variable.flag));
    settings.extend(variables);
    Ok(settings)
}

/// The origin of the value that caused `error`, if it is not from the command line.
pub(crate) fn origin(settings: &[Setting], error: &Error) -> Option<String> {
    let Some(ContextValue::String(named)) = error.get(ContextKind::InvalidArg) else { return None };
    let named = named.strip_prefix("--")?;
    let end = named.find([' ', '[', '=']).unwrap_or(named.len());
    let setting = settings.iter().find(|setting| setting.flag == named[..end])?;
    Some(format!("--{} was set by {}", setting.flag, setting.origin))
}

fn find<'a>(command: &'a Command, flag: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| arg.get_long() == Some(flag))
}

fn takes_several(arg: &Arg) -> bool {
    arg.get_num_args().is_some_and(|range| range.max_values() > 1)
}

fn token(flag: &str, value: &str) -> OsString {
    format!("--{flag}={value}").into()
}

/// The name of the variable that sets a flag.
pub(crate) fn variable(flag: &str) -> String {
    format!("{PREFIX}{}", flag.replace('-', "_").to_ascii_uppercase())
}

/// Every supported flag whose variable is set and not empty.
fn from_environment(command: &Command, environment: &Environment<'_>) -> Vec<Setting> {
    let mut settings = vec![];
    for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
        let Some(flag) = arg.get_long() else { continue };
        let name = variable(flag);
        let Some(value) = environment(&name).filter(|value| !value.is_empty()) else { continue };
        // Kubernetes sets this variable for a service named octavo.
        if flag == "port" && value.contains("://") {
            continue;
        }
        // A flag with several values takes a JSON list or words.
        let list = takes_several(arg).then(|| serde_json::from_str::<Vec<String>>(&value).ok());
        let values = match list {
            None => vec![value],
            Some(Some(values)) => values,
            Some(None) => value.split_whitespace().map(str::to_owned).collect(),
        };
        let tokens = values.iter().map(|value| token(flag, value)).collect();
        settings.push(Setting { flag: flag.to_owned(), tokens, origin: format!("the variable {name}") });
    }
    settings
}

fn from_file(command: &Command, path: &Path) -> Result<Vec<Setting>, String> {
    let file = path.display().to_string();
    let document = yaml::read_file(path).map_err(|why| format!("--config {why}"))?;
    from_yaml(command, document, &file).map_err(|why| format!("--config {file}: {why}"))
}

fn from_yaml(command: &Command, document: Option<Node>, file: &str) -> Result<Vec<Setting>, String> {
    let flags = match document {
        Some(Node { content: Content::Map(flags), .. }) => flags,
        Some(node) if !node.is_null() => return Err("a map of flags is expected, such as `max-model-len: 4096`".into()),
        _ => return Ok(vec![]),
    };
    let mut settings: Vec<Setting> = vec![];
    for (key, value) in &flags {
        let Some((flag, tokens)) = from_entry(command, key, value).map_err(|why| format!("key '{key}': {why}"))? else {
            continue;
        };
        let origin = format!("the key '{key}' of {file}");
        match settings.iter_mut().find(|setting| setting.flag == flag) {
            // Two spellings of a flag are an error; dotted keys of a flag are combined.
            Some(_) if !key.contains('.') => return Err(format!("key '{key}': the flag --{flag} is there twice")),
            Some(setting) => setting.tokens.extend(tokens),
            None => settings.push(Setting { flag, tokens, origin }),
        }
    }
    for setting in &mut settings {
        setting.tokens = argv::spell(std::mem::take(&mut setting.tokens), command)?;
    }
    Ok(settings)
}

/// A flag and its arguments; `None` if the value is null.
fn from_entry(command: &Command, key: &str, value: &Node) -> Result<Option<(String, Vec<OsString>)>, String> {
    let (name, path) = key.split_once('.').map_or((key, None), |(name, path)| (name, Some(path)));
    let name = name.replace('_', "-");
    let (arg, opposite) = match find(command, &name) {
        Some(arg) => (arg, false),
        None => {
            let positive = name.strip_prefix("no-").and_then(|name| find(command, name)).filter(|arg| is_switch(arg));
            (positive.ok_or_else(|| unknown(command, &name))?, true)
        }
    };
    let flag = arg.get_long().unwrap_or_default().to_owned();
    if flag == CONFIG {
        return Err("a configuration cannot name another".into());
    }
    let content = &value.content;
    if LOCKS.contains(&flag.as_str())
        && (value.is_null() || matches!(content, Content::List(items) if items.is_empty()))
    {
        return Err(format!("--{flag} has no value; give one, or remove the key to serve without API keys"));
    }
    if value.is_null() {
        return Ok(None);
    }
    let tokens = match (path, content) {
        (Some(path), _) if is_json(arg) => vec![token(&format!("{flag}.{path}"), &value.json().to_string())],
        (Some(_), _) => return Err(format!("--{flag} has no keys")),
        (None, _) if is_switch(arg) => vec![token(&flag, &(truth(value)? != opposite).to_string())],
        (None, Content::Map(_)) if is_json(arg) => vec![token(&flag, &value.json().to_string())],
        (None, Content::List(items)) if takes_several(arg) => {
            items.iter().map(|item| Ok(token(&flag, text(item)?))).collect::<Result<_, String>>()?
        }
        (None, Content::List(_)) => return Err("one value is expected, not a list".into()),
        (None, Content::Text { .. } | Content::Map(_)) => vec![token(&flag, text(value)?)],
    };
    Ok(Some((flag, tokens)))
}

/// The message for an unknown key, with the most similar known key.
fn unknown(command: &Command, name: &str) -> String {
    let known = command.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(Arg::get_long);
    match nearest(known, name) {
        Some(known) => format!("there is no flag --{name}; did you mean '{known}'?"),
        None => format!("there is no flag --{name}"),
    }
}

/// The known name that is most similar to a name, if it is similar enough to be meant.
pub(crate) fn nearest<'a>(known: impl Iterator<Item = &'a str>, name: &str) -> Option<&'a str> {
    let (distance, known) = known.map(|known| (strsim::levenshtein(known, name), known)).min()?;
    (distance <= 1 + name.len() / 4).then_some(known)
}

/// A Boolean of YAML 1.2 or 1.1.
fn truth(value: &Node) -> Result<bool, String> {
    match text(value)?.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Ok(true),
        "false" | "no" | "off" | "0" => Ok(false),
        other => Err(format!("true or false is expected, not '{other}'")),
    }
}

fn text(value: &Node) -> Result<&str, String> {
    value.text().ok_or_else(|| "a text or a number is expected".into())
}
