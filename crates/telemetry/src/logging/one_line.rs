//! Whatever a client sends, one event is one line without control characters.

use std::io;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use serde_json::Value;
use tracing::field::{Empty, display};

use super::*;
use crate::logging::escape::MAX_STRING_BYTES;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns what `log` logs.
pub(super) fn written(format: LogFormat, log: impl FnOnce()) -> String {
    let lines = Lines::default();
    let shared = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || shared.clone()).with_timer(Milliseconds);
    match format {
        LogFormat::Text => {
            tracing::subscriber::with_default(subscriber.with_ansi(false).fmt_fields(TextFields).finish(), log);
        }
        LogFormat::Json => {
            let subscriber = subscriber.with_ansi(false).fmt_fields(JsonFields).event_format(JsonLines).finish();
            tracing::subscriber::with_default(subscriber, log);
        }
    }
    let bytes = lines.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

/// Logs a client's text in every way: as the message, as fields of all kinds, and as the field of a span.
fn log_everywhere(text: &str) {
    let span = tracing::error_span!("request", request_id = Empty, name = text);
    let _entered = span.enter();
    span.record("request_id", display(text));
    tracing::error!(text, shown = %text, debugged = ?[text], "refused: {text}");
}

fn is_one_line(written: &str) -> bool {
    written
        .strip_suffix('\n')
        .is_some_and(|line| !line.chars().any(|c| c.is_control() || "\u{2028}\u{2029}\u{202e}".contains(c)))
}

/// Text with more of the characters that matter than chance would give.
fn client_text() -> impl Strategy<Value = String> {
    let special = prop::sample::select(vec![
        '\n', '\r', '\u{1b}', '\0', '\u{7f}', '\u{9b}', '\u{85}', '\u{2028}', '\u{202e}', '"', '\\', '=', ' ',
    ]);
    proptest::collection::vec(prop_oneof![special, any::<char>()], 0..40).prop_map(String::from_iter)
}

proptest! {
    #[test]
    fn an_event_is_one_line_without_control_characters(text in client_text()) {
        let plain = written(LogFormat::Text, || log_everywhere(&text));
        prop_assert!(is_one_line(&plain), "{plain:?}");
        let json = written(LogFormat::Json, || log_everywhere(&text));
        prop_assert!(is_one_line(&json), "{json:?}");
        let line: Value = serde_json::from_str(&json).unwrap();
        for field in ["text", "shown", "request_id", "name"] {
            prop_assert_eq!(line[field].as_str(), Some(&*text), "{}", field);
        }
    }

    #[test]
    fn a_string_in_text_is_one_field(text in client_text()) {
        let line = written(LogFormat::Text, || tracing::error!(text, last = 1));
        let (_, value) = line.trim_end_matches('\n').split_once("text=").unwrap();
        let value = value.strip_suffix(" last=1").unwrap();
        let bare = value.trim_matches('"');
        prop_assert!(value.starts_with('"') || !bare.contains([' ', '=']), "{value}");
        let unescaped = bare.replace("\\\\", "").replace("\\\"", "");
        prop_assert!(!unescaped.contains('"'), "{value}");
    }
}

#[test]
fn a_line_has_a_bounded_length() {
    // Two strings and four shorter values, of characters that take up to seven bytes when escaped.
    let text = "\u{1b}".repeat(10 * MAX_STRING_BYTES);
    for format in [LogFormat::Text, LogFormat::Json] {
        let line = written(format, || log_everywhere(&text));
        assert!(is_one_line(&line));
        assert!(line.len() < 3 * 7 * MAX_STRING_BYTES, "{} bytes", line.len());
    }
}

#[test]
fn plain_strings_are_bare_and_others_are_quoted() {
    let line = written(LogFormat::Text, || {
        tracing::info!(id = "r-1", text = "a \"b\"\n", empty = "", n = 3, shown = %"a b", "done");
    });
    assert!(line.ends_with(" done id=r-1 text=\"a \\\"b\\\"\\n\" empty=\"\" n=3 shown=a b\n"), "{line}");
}

#[test]
fn a_forged_line_stays_inside_its_own() {
    let id = "r\n2026-01-02T03:04:05.678Z ERROR everything is lost\u{1b}[2J";
    let line = written(LogFormat::Text, || tracing::info!(%id, "received a request"));
    assert_eq!(line.lines().count(), 1);
    assert!(line.contains(r"id=r\n2026-01-02T03:04:05.678Z ERROR everything is lost\u{1b}[2J"), "{line}");
}
