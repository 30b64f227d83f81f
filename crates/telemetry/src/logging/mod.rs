//! Log lines on standard error: time, level, message, and from `debug` on the module.

mod escape;
mod json;
mod text;
mod time;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal};
use std::panic::{self, PanicHookInfo};
use std::thread;

use tracing_subscriber::EnvFilter;

use json::{JsonFields, JsonLines};
use text::TextFields;
use time::Milliseconds;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// A JSON object per line, for programs.
    Json,
}

/// The configuration of logging.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogConfig {
    /// A level (`debug`, `info`, `warning`, `error`, ..., in any case) that overrides the environment.
    pub level: Option<String>,
    /// The format of log lines.
    pub format: LogFormat,
}

/// The reason why logging cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The level does not exist.
    #[error("'{0}' is not a log level: use trace, debug, info, warning, error or off")]
    Level(String),
    /// `RUST_LOG` does not parse.
    #[error("RUST_LOG='{directives}' does not parse: {reason}")]
    Directives {
        /// The value of the variable.
        directives: String,
        /// The reason.
        reason: String,
    },
    /// A subscriber is installed already.
    #[error("logging was set up twice in this process")]
    AlreadySet,
}

/// Installs the process's log on standard error: lines like `2026-01-02T03:04:05.678Z  INFO listening on ...`, in colour
/// on a terminal unless `NO_COLOR` is set, or JSON objects. The level is [`LogConfig::level`], else the directives of
/// `RUST_LOG`, else `VLLM_LOGGING_LEVEL`, else `info`. Libraries log warnings only, except under `RUST_LOG`. Lines name
/// the module that logs them at the levels `debug` and `trace` and under `RUST_LOG`; JSON objects always do. A panic is a
/// line of the log as well; in text, a captured backtrace follows it.
///
/// An event is one line without control characters, whatever its values are: line breaks, escape sequences and marks of
/// direction are escaped, a string of more than 64 KiB is cut, and so is any other value of more than 8 KiB.
///
/// # Errors
/// The level or the directives do not parse, or logging is set up already.
pub fn init_logging(config: &LogConfig) -> Result<(), LogError> {
    let environment = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
    let directives = directives(config.level.as_deref(), environment("RUST_LOG"), environment("VLLM_LOGGING_LEVEL"))?;
    let with_module = names_modules(&directives);
    let filter = EnvFilter::try_new(&directives)
        .map_err(|error| LogError::Directives { directives, reason: error.to_string() })?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_timer(Milliseconds)
        .with_target(with_module);
    let set = match config.format {
        LogFormat::Text => {
            let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            lines.with_ansi(colour).fmt_fields(TextFields).try_init()
        }
        LogFormat::Json => lines.with_ansi(false).fmt_fields(JsonFields).event_format(JsonLines).try_init(),
    };
    set.map_err(|_| LogError::AlreadySet)?;
    panic::set_hook(match config.format {
        LogFormat::Text => Box::new(|panic| {
            // Lines of its own: it is for people to read, and nothing in it comes from a client.
            if let Some(backtrace) = log_panic(panic, false) {
                eprintln!("{backtrace}");
            }
        }),
        LogFormat::Json => Box::new(|panic| {
            log_panic(panic, true);
        }),
    });
    Ok(())
}

/// Logs a panic as a single line. The standard library would print the message, which may quote a client, as it is.
/// Returns the backtrace if one was captured and is not to be a field of the line.
fn log_panic(panic: &PanicHookInfo<'_>, with_backtrace: bool) -> Option<String> {
    let backtrace = Backtrace::capture();
    let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
    let payload = panic.payload();
    let message =
        payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let (field, rest) = if with_backtrace { (backtrace, None) } else { (None, backtrace) };
    tracing::error!(
        target: "octavo::panic",
        thread = thread::current().name(),
        location = panic.location().map(ToString::to_string),
        backtrace = field,
        "panicked: {}",
        message.unwrap_or("no message")
    );
    rest
}

fn directives(
    explicit: Option<&str>,
    rust_log: Option<String>,
    vllm_level: Option<String>,
) -> Result<String, LogError> {
    let level = match (explicit, rust_log, vllm_level) {
        (Some(level), _, _) => level.to_owned(),
        (None, Some(directives), _) => return Ok(directives),
        (None, None, level) => level.unwrap_or_else(|| "info".into()),
    };
    let own = match level.to_ascii_lowercase().as_str() {
        "trace" => "trace",
        "debug" => "debug",
        "info" => "info",
        "warn" | "warning" => "warn",
        "error" | "critical" | "fatal" => "error",
        "off" => "off",
        _ => return Err(LogError::Level(level)),
    };
    let libraries = if matches!(own, "error" | "off") { own } else { "warn" };
    Ok(format!("{libraries},octavo={own}"))
}

/// Whether lines name the module that logs them: unless `directives` are those of a level above `debug`.
fn names_modules(directives: &str) -> bool {
    !["info", "warn", "error", "off"].iter().any(|level| directives.ends_with(&format!(",octavo={level}")))
}

#[cfg(test)]
mod one_line;
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_named_from_debug_on_and_under_rust_log() {
        for (level, expected) in
            [("info", false), ("WARNING", false), ("error", false), ("debug", true), ("trace", true)]
        {
            let directives = directives(Some(level), None, None).unwrap();
            assert_eq!(names_modules(&directives), expected, "{level}");
        }
        assert!(names_modules("info"), "a directive of RUST_LOG");
    }

    #[test]
    fn the_explicit_level_wins_over_the_environment() {
        let some = |text: &str| Some(text.to_owned());
        let cases = [
            (None, None, None, "warn,octavo=info"),
            (None, None, some("DEBUG"), "warn,octavo=debug"),
            (None, None, some("WARNING"), "warn,octavo=warn"),
            (None, None, some("CRITICAL"), "error,octavo=error"),
            (None, some("hyper=trace"), some("DEBUG"), "hyper=trace"),
            (Some("error"), some("hyper=trace"), some("DEBUG"), "error,octavo=error"),
        ];
        for (explicit, rust_log, vllm, expected) in cases {
            assert_eq!(directives(explicit, rust_log, vllm).unwrap(), expected);
            assert!(EnvFilter::try_new(expected).is_ok());
        }
        let error = directives(Some("loud"), None, None).unwrap_err().to_string();
        assert!(error.contains("'loud'") && error.contains("warning"), "{error}");
    }
}
