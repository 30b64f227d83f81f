//! GET /health, GET and POST /ping, GET /live, GET /version

use axum::Json;
use axum::extract::State;
use http::StatusCode;
use octavo_engine::EngineState;
use serde_json::{Value, json};

use crate::app::AppState;

/// Whether requests should be sent here: 503 while shutting down, and when the engine has failed or is stuck.
pub(crate) async fn ready(State(state): State<AppState>) -> StatusCode {
    let status = state.engine.status();
    let working = status.state == EngineState::Running && !status.stuck();
    if working && !state.drain.is_draining() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// Whether the process is there.
pub(crate) async fn live() -> StatusCode {
    StatusCode::OK
}

/// The server's version.
pub(crate) async fn version(State(state): State<AppState>) -> Json<Value> {
    Json(json!({"version": state.config.version}))
}
