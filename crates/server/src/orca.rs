//! The load report in response headers that gateways ask for: Open Request Cost Aggregation (ORCA).

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue};
use octavo_engine::{EngineHandle, EngineStatus};
use serde_json::json;

use crate::route_table::Route;

/// The request header with the format of the report.
const FORMAT: HeaderName = HeaderName::from_static("endpoint-load-metrics-format");

/// The response header with the report.
const REPORT: HeaderName = HeaderName::from_static("endpoint-load-metrics");

/// The format of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    Json,
}

impl Format {
    /// The format that a request asks for; `None` if it asks for no report or for an unknown format.
    fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let name = headers.get(FORMAT)?.as_bytes();
        [(&b"text"[..], Self::Text), (b"json", Self::Json)]
            .into_iter()
            .find_map(|(known, format)| name.eq_ignore_ascii_case(known).then_some(format))
    }

    /// The report under the names that vLLM gives its metrics.
    fn write(self, status: &EngineStatus) -> String {
        let usage = status.blocks_used as f64 / status.blocks_total.max(1) as f64;
        let waiting = status.waiting as f64;
        match self {
            Self::Text => format!(
                "TEXT named_metrics.kv_cache_usage_perc={usage:?}, named_metrics.num_requests_waiting={waiting:?}"
            ),
            Self::Json => {
                let metrics = json!({"kv_cache_usage_perc": usage, "num_requests_waiting": waiting});
                format!("JSON {}", json!({"named_metrics": metrics}))
            }
        }
    }
}

/// Adds the load of the engine to successful responses of generation routes, if the request asks for it. The report
/// describes the time at which the response begins.
pub(crate) async fn report(State(engine): State<EngineHandle>, request: Request, next: Next) -> Response {
    let generates = Route::generates(&request);
    let Some(format) = Format::from_headers(request.headers()).filter(|_| generates) else {
        return next.run(request).await;
    };
    let mut response = next.run(request).await;
    if response.status().is_success()
        && let Ok(report) = HeaderValue::from_str(&format.write(&engine.status()))
    {
        response.headers_mut().insert(REPORT, report);
    }
    response
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use octavo_engine::EngineState;

    use super::*;

    #[test]
    fn formats_are_known_in_any_case() {
        for (value, format) in
            [("TEXT", Some(Format::Text)), ("json", Some(Format::Json)), ("BIN", None), ("", None), ("text,json", None)]
        {
            let headers = HeaderMap::from_iter([(FORMAT, HeaderValue::from_static(value))]);
            assert_eq!(Format::from_headers(&headers), format, "{value}");
        }
        assert_eq!(Format::from_headers(&HeaderMap::new()), None);
    }

    #[test]
    fn a_report_has_the_usage_and_the_queue_as_floats() {
        let mut status = EngineStatus {
            state: EngineState::Running,
            running: 2,
            waiting: 3,
            blocks_used: 1,
            blocks_total: 4,
            last_step_age: Duration::ZERO,
            stuck_after: Duration::ZERO,
        };
        assert_eq!(
            Format::Text.write(&status),
            "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
        );
        assert_eq!(
            Format::Json.write(&status),
            r#"JSON {"named_metrics":{"kv_cache_usage_perc":0.25,"num_requests_waiting":3.0}}"#
        );
        (status.blocks_used, status.blocks_total) = (0, 0);
        assert!(Format::Text.write(&status).contains("kv_cache_usage_perc=0.0"), "a model without KV blocks");
    }
}
