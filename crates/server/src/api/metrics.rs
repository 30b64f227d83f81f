//! GET /metrics

use axum::extract::State;
use axum::response::IntoResponse;
use http::header;
use octavo_telemetry::Telemetry;

use crate::app::AppState;

/// The metrics in Prometheus' text format. It takes no lock of the engine.
pub(crate) async fn handle(State(state): State<AppState>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, Telemetry::CONTENT_TYPE)], state.telemetry.render())
}
