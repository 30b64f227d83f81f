//! Log lines on standard error: time, level, where, message.

mod json;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal};
use std::panic::{self, PanicHookInfo};
use std::thread;

use tracing_subscriber::EnvFilter;

use json::{JsonFields, JsonLines};

/// How lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// An object each, for programs.
    Json,
}

/// What is logged, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogConfig {
    /// A level (`debug`, `info`, `warning`, `error`, ..., in any case) that overrules the environment.
    pub level: Option<String>,
    /// How lines are written.
    pub format: LogFormat,
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// No such level.
    #[error("'{0}' is no log level: use trace, debug, info, warning, error or off")]
    Level(String),
    /// `RUST_LOG` does not parse.
    #[error("RUST_LOG='{directives}' is not understood: {reason}")]
    Directives {
        /// Its value.
        directives: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A subscriber is installed already.
    #[error("logging was set up twice in this process")]
    AlreadySet,
}

/// Installs the process's log: lines like `2026-01-02T03:04:05.678Z  INFO octavo_server: listening ...` on standard
/// error, in colour on a terminal unless `NO_COLOR` is set, or JSON objects. The level is [`LogConfig::level`], else the
/// directives of `RUST_LOG`, else `VLLM_LOGGING_LEVEL`, else `info`; libraries log warnings only, except under `RUST_LOG`.
/// With JSON, panics are lines of the log too.
pub fn init_logging(config: &LogConfig) -> Result<(), LogError> {
    let environment = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
    let directives = directives(config.level.as_deref(), environment("RUST_LOG"), environment("VLLM_LOGGING_LEVEL"))?;
    let filter = EnvFilter::try_new(&directives)
        .map_err(|error| LogError::Directives { directives, reason: error.to_string() })?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    let set = match config.format {
        LogFormat::Text => {
            let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            lines.with_ansi(colour).try_init()
        }
        LogFormat::Json => lines.with_ansi(false).fmt_fields(JsonFields).event_format(JsonLines).try_init(),
    };
    set.map_err(|_| LogError::AlreadySet)?;
    if config.format == LogFormat::Json {
        panic::set_hook(Box::new(log_panic));
    }
    Ok(())
}

/// Tells of a panic in a single line, where the standard library would print several that are no JSON.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let backtrace = Backtrace::capture();
    let backtrace = (backtrace.status() == BacktraceStatus::Captured).then(|| backtrace.to_string());
    let payload = panic.payload();
    let message =
        payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    tracing::error!(
        target: "octavo::panic",
        thread = thread::current().name(),
        location = panic.location().map(ToString::to_string),
        backtrace,
        "panicked: {}",
        message.unwrap_or("no message")
    );
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

#[cfg(test)]
mod tests {
    use super::*;

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
