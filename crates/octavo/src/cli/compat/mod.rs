//! vLLM's flags that are not supported: accepted with a warning where ignoring them is harmless, refused otherwise.

mod table;

use std::marker::PhantomData;

use anyhow::{Result, bail};
use clap::builder::BoolishValueParser;
use clap::error::Error;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

pub(crate) use table::{FLAGS, flag};

/// The values that a flag takes on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Takes {
    /// Nothing; `--no-NAME` is its opposite.
    Switch,
    /// One value.
    Value,
    /// One value or several.
    Values,
    /// A JSON object, whole or by dotted names.
    Json,
}

/// The effect of an unsupported flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Accepted with a warning that gives the reason.
    NoEffect(&'static str),
    /// Refused with the reason.
    Refused(&'static str),
    /// These values are accepted silently; other values are refused with the reason.
    Only(&'static [&'static str], &'static str),
}

/// An unsupported flag of vLLM.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Flag {
    /// Without the dashes.
    pub(crate) name: &'static str,
    pub(crate) takes: Takes,
    pub(crate) outcome: Outcome,
}

/// A table of unsupported flags.
pub(crate) trait Table: std::fmt::Debug {
    /// Its rows.
    const FLAGS: &'static [Flag];
}

/// The flags of `vllm serve`.
#[derive(Debug)]
pub(crate) struct ServeFlags;

impl Table for ServeFlags {
    const FLAGS: &'static [Flag] = FLAGS;
}

/// The unsupported flags of `vllm serve` on a command line.
pub(crate) type CompatArgs = Unsupported<ServeFlags>;

/// The unsupported flags of a command line, each once, with all its values.
#[derive(Debug)]
pub(crate) struct Unsupported<T> {
    given: Vec<(&'static Flag, Vec<String>)>,
    table: PhantomData<T>,
}

impl<T: Table> Unsupported<T> {
    /// The warnings to log, one for each flag.
    ///
    /// # Errors
    /// Some flags are refused; the error has one line for each.
    pub(crate) fn check(&self) -> Result<Vec<String>> {
        let (mut warnings, mut errors) = (vec![], vec![]);
        for (flag, values) in &self.given {
            match flag.outcome {
                Outcome::NoEffect(why) => warnings.push(format!("--{} has no effect: {why}", flag.name)),
                Outcome::Refused(_) if values.iter().all(|value| is_off(value)) => {}
                Outcome::Refused(why) => errors.push(format!("--{}: {why}", flag.name)),
                Outcome::Only(known, why) => {
                    if let Some(value) = values.iter().find(|value| !known.contains(&value.as_str())) {
                        errors.push(format!("--{} {value}: {why} (accepted: {})", flag.name, known.join(", ")));
                    }
                }
            }
        }
        if !errors.is_empty() {
            bail!("{}", errors.join("\n"));
        }
        Ok(warnings)
    }
}

/// Whether a value disables a feature.
fn is_off(value: &str) -> bool {
    ["false", "none", "null", "{}", "[]", "0", ""].iter().any(|off| value.eq_ignore_ascii_case(off))
}

impl<T: Table> Args for Unsupported<T> {
    fn augment_args(command: Command) -> Command {
        command.next_help_heading(None::<&str>).args(T::FLAGS.iter().map(argument))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn argument(flag: &'static Flag) -> Arg {
    let arg = Arg::new(flag.name).long(flag.name).hide(true);
    match flag.takes {
        // `cli::command` makes it a switch with an opposite, as all switches.
        Takes::Switch => arg.action(ArgAction::SetTrue).value_parser(BoolishValueParser::new()),
        Takes::Value => arg.action(ArgAction::Append).num_args(1).allow_negative_numbers(true),
        Takes::Json => arg.action(ArgAction::Append).num_args(1).value_name(crate::cli::JSON),
        Takes::Values => arg.action(ArgAction::Append).num_args(1..).allow_negative_numbers(true),
    }
}

impl<T: Table> FromArgMatches for Unsupported<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let given = T::FLAGS.iter().filter(|flag| crate::cli::is_given(matches, flag.name));
        let values = |flag: &Flag| match flag.takes {
            Takes::Switch => vec![matches.get_flag(flag.name).to_string()],
            _ => matches.get_many::<String>(flag.name).unwrap_or_default().cloned().collect(),
        };
        Ok(Self { given: given.map(|flag| (flag, values(flag))).collect(), table: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_flag_is_there_once_with_a_reason() {
        let mut names = HashSet::new();
        for flag in FLAGS {
            assert!(names.insert(flag.name), "--{} is there twice", flag.name);
            assert!(!flag.name.contains('_') && !flag.name.starts_with('-'), "{}", flag.name);
            let (Outcome::NoEffect(why) | Outcome::Refused(why) | Outcome::Only(_, why)) = flag.outcome;
            assert!(why.len() > 10 && !why.ends_with('.'), "--{}: {why}", flag.name);
        }
    }

    fn check(name: &str, values: &[&str]) -> Result<Vec<String>> {
        let flag = FLAGS.iter().find(|flag| flag.name == name).unwrap();
        let given = vec![(flag, values.iter().map(|&value| value.to_owned()).collect())];
        CompatArgs { given, table: PhantomData }.check()
    }

    #[test]
    fn what_changes_nothing_is_one_warning_with_its_reason() {
        let warnings = check("swap-space", &["4", "8"]).unwrap();
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].starts_with("--swap-space has no effect: "), "{warnings:?}");
    }

    #[test]
    fn values_that_are_what_happens_anyway_are_silent() {
        assert!(check("tensor-parallel-size", &["1"]).unwrap().is_empty());
        let error = check("tensor-parallel-size", &["2"]).unwrap_err().to_string();
        assert!(error.starts_with("--tensor-parallel-size 2: ") && error.contains("accepted: 1"), "{error}");
    }

    #[test]
    fn what_changes_speed_alone_is_accepted() {
        let warnings = check("spec-method", &["ngram"]).unwrap();
        assert!(warnings[0].contains("answers are the same without it"), "{warnings:?}");
    }

    #[test]
    fn other_kinds_of_models_are_refused_with_a_reason() {
        for (name, value, part) in [("tokenizer-mode", "mistral", "tekken.json"), ("task", "embed", "--runner pooling")]
        {
            let error = check(name, &[value]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--{name} {value}: ")) && error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_refused_feature_may_be_switched_off() {
        assert!(check("enable-lora-bias", &["false"]).unwrap().is_empty());
        assert!(check("enable-lora-bias", &["true"]).is_err());
    }
}
