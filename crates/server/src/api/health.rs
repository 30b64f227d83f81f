//! GET /health, GET and POST /ping, GET /live, GET /version

use axum::Json;
use axum::extract::State;
use http::StatusCode;
use octavo_engine::EngineState;
use serde_json::{Value, json};

use crate::app::AppState;

/// Readiness: 503 during shutdown and when the engine has failed or is stuck.
pub(crate) async fn ready(State(state): State<AppState>) -> StatusCode {
    let status = state.engine.status();
    code(status.state == EngineState::Running && !status.stuck() && !state.drain.is_draining())
}

/// Liveness: 503 when the engine has failed or is stuck, otherwise 200, also during shutdown.
pub(crate) async fn live(State(state): State<AppState>) -> StatusCode {
    let status = state.engine.status();
    code(status.state != EngineState::Failed && !status.stuck())
}

fn code(good: bool) -> StatusCode {
    if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// The server's version.
pub(crate) async fn version(State(state): State<AppState>) -> Json<Value> {
    Json(json!({"version": state.config.version}))
}
