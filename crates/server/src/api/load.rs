//! GET /load

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::app::AppState;

/// The number of running generation requests; 0 unless they are counted.
pub(crate) async fn handle(State(state): State<AppState>) -> Json<Value> {
    Json(json!({"server_load": state.load.current()}))
}
