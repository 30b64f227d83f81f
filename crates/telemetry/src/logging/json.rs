//! Log lines as JSON objects: one per line, with all fields at the top level, including those of the enclosing spans.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use super::escape::{MAX_STRING_BYTES, MAX_VALUE_BYTES, Spelling, write_value};
use super::time::Milliseconds;

/// Writes an event: `timestamp`, `level`, `target`, the event's fields, including `message`, and the fields of the
/// enclosing spans, such as `request_id` and `trace_id`.
pub(super) struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let (metadata, mut time) = (event.metadata(), String::new());
        Milliseconds.format_time(&mut Writer::new(&mut time))?;
        write!(writer, "{{\"timestamp\":{}", quoted(&time))?;
        write!(writer, ",\"level\":\"{}\",\"target\":{}", metadata.level(), quoted(metadata.target()))?;
        write_fields(&mut writer, event)?;
        for span in context.event_scope().into_iter().flatten() {
            if let Some(fields) = span.extensions().get::<FormattedFields<N>>() {
                writer.write_str(&fields.fields)?;
            }
        }
        writer.write_str("}\n")
    }
}

/// Formats the fields of a span for later output, each with a comma before it.
pub(super) struct JsonFields;

impl<'a> FormatFields<'a> for JsonFields {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'a>, fields: R) -> fmt::Result {
        write_fields(&mut writer, fields)
    }

    fn add_fields(&self, current: &'a mut FormattedFields<Self>, fields: &tracing::span::Record<'_>) -> fmt::Result {
        write_fields(&mut current.as_writer(), fields)
    }
}

fn write_fields(writer: &mut Writer<'_>, fields: impl RecordFields) -> fmt::Result {
    let mut visitor = Members { writer, result: Ok(()) };
    fields.record(&mut visitor);
    visitor.result
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Writes each field as a member of an object.
struct Members<'a, 'w> {
    writer: &'a mut Writer<'w>,
    result: fmt::Result,
}

impl Members<'_, '_> {
    fn member(&mut self, field: &Field, value: &serde_json::Value) {
        if self.result.is_ok() {
            self.result = write!(self.writer, ",{}:{value}", quoted(field.name()));
        }
    }

    fn text(&mut self, field: &Field, value: (impl fmt::Display, usize)) {
        if self.result.is_ok() {
            self.result = self.write_text(field, value);
        }
    }

    fn write_text(&mut self, field: &Field, value: (impl fmt::Display, usize)) -> fmt::Result {
        write!(self.writer, ",{}:\"", quoted(field.name()))?;
        write_value(self.writer, Spelling::Json, value)?;
        self.writer.write_char('"')
    }
}

impl Visit for Members<'_, '_> {
    /// NaN and infinity become null, since JSON cannot represent them.
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.member(field, &value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.member(field, &value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.member(field, &value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.member(field, &value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.text(field, (value, MAX_STRING_BYTES));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.text(field, (format_args!("{value:?}"), MAX_VALUE_BYTES));
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use serde_json::{Value, json};

    use crate::logging::LogFormat;
    use crate::logging::one_line::written;

    /// What `log` logs, line by line.
    fn logged(log: impl FnOnce()) -> Vec<Value> {
        let text = written(LogFormat::Json, log);
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn a_panic_is_one_line() {
        let lines = logged(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(|panic| {
                crate::logging::log_panic(panic, true);
            }));
            let caught = std::panic::catch_unwind(|| panic!("no \"luck\"\n{}", 7));
            std::panic::set_hook(before);
            assert!(caught.is_err());
        });
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!((&line["level"], &line["message"]), (&json!("ERROR"), &json!("panicked: no \"luck\"\n7")));
        let place = line["location"].as_str().unwrap();
        assert!(place.contains("logging/json.rs:"), "{place}");
    }

    #[test]
    fn a_line_is_an_object_with_the_fields_of_its_event() {
        let lines = logged(|| {
            let (text, error) = ("a \"b\"\n\u{1}", io::Error::other("no"));
            tracing::warn!(%error, text, n = 3, half = 0.5, yes = true, nan = f64::NAN, "it {} happened", 1);
        });
        let [line] = &lines[..] else { panic!("{lines:?}") };
        let time = line["timestamp"].as_str().unwrap();
        assert!(time.len() == 24 && time.ends_with('Z'), "{time}");
        assert_eq!((&line["level"], &line["message"]), (&json!("WARN"), &json!("it 1 happened")));
        assert!(line["target"].as_str().unwrap().starts_with("octavo_telemetry"));
        let fields = json!({"error": "no", "text": "a \"b\"\n\u{1}", "n": 3, "half": 0.5, "yes": true, "nan": null});
        for (name, value) in fields.as_object().unwrap() {
            assert_eq!(&line[name], value, "{name}");
        }
    }

    #[test]
    fn a_line_has_what_the_spans_around_it_know_by_then() {
        use tracing::field::Empty;
        let lines = logged(|| {
            let span = tracing::info_span!("request", request_id = Empty, trace_id = "t", tokens = Empty);
            let _entered = span.enter();
            tracing::info!("first");
            span.record("request_id", tracing::field::display("r-1"));
            span.record("tokens", 7);
            tracing::info_span!("inner", step = 2).in_scope(|| tracing::info!("second"));
        });
        assert_eq!((&lines[0]["trace_id"], lines[0].get("request_id")), (&json!("t"), None));
        let second = &lines[1];
        assert_eq!((&second["request_id"], &second["tokens"], &second["step"]), (&json!("r-1"), &json!(7), &json!(2)));
    }
}
