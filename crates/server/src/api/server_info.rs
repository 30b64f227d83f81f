//! GET /server_info

use axum::Json;
use axum::extract::{Query, State};
use octavo_text::{ReasoningSyntax, ToolSyntax};
use serde_json::{Value, json};

use crate::app::AppState;

/// The configuration and the environment of the server, without secrets.
#[derive(serde::Deserialize)]
pub(crate) struct Options {
    config_format: Option<String>,
}

/// The configuration, as text or as JSON.
pub(crate) async fn handle(State(state): State<AppState>, Query(options): Query<Options>) -> Json<Value> {
    let config = &state.config;
    let info = json!({
        "version": config.version,
        "model": config.model_root,
        "served_model_name": config.served_model_names,
        "max_model_len": config.max_model_len,
        "vocab_size": config.vocab_size,
        "max_logprobs": config.max_logprobs,
        "max_sequences": config.max_sequences,
        // Only images are limited by a number; other media are never taken.
        "limit_mm_per_prompt": {"image": state.max_images()},
        "sampling_defaults": config.sampling_defaults.to_map(),
        "stream_interval": config.api.stream_interval,
        "tool_call_parser": config.api.tools.map(ToolSyntax::name),
        "reasoning_parser": config.api.reasoning.map(ReasoningSyntax::name),
        "shutdown_timeout": config.shutdown_timeout.as_secs_f64(),
        "shutdown_lag": config.shutdown_lag.as_secs_f64(),
    });
    match options.config_format.as_deref() {
        Some("json") => Json(json!({"vllm_config": info})),
        _ => Json(json!({"vllm_config": info.to_string()})),
    }
}
