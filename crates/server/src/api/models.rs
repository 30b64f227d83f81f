//! GET /v1/models and GET /v1/models/{model}

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use uuid::Uuid;

use crate::adapters::{Adapters, ServedAdapter};
use crate::api::shared::response::Null;
use crate::app::{App, AppState};
use crate::error::ApiError;
use serde::Serialize;

/// GET /v1/models.
#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: Vec<ModelCard<'a>>,
}

#[derive(Serialize)]
struct ModelCard<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    parent: Option<&'a str>,
    max_model_len: Option<usize>,
    permission: [ModelPermission; 1],
}

#[derive(Serialize)]
struct ModelPermission {
    id: String,
    object: &'static str,
    created: u64,
    allow_create_engine: bool,
    allow_sampling: bool,
    allow_logprobs: bool,
    allow_search_indices: bool,
    allow_view: bool,
    allow_fine_tuning: bool,
    organization: &'static str,
    group: Null,
    is_blocking: bool,
}

/// One card for each served name, and one for each adapter.
pub(crate) async fn handle(State(state): State<AppState>) -> Response {
    let adapters = adapters(&state);
    let base = state.config.served_model_names.iter().map(|id| card(id, &state));
    let data = base.chain(adapters.iter().map(|served| adapter_card(served, &state))).collect();
    Json(ModelList { object: "list", data }).into_response()
}

/// The card of one served name. A slash in it may be written as `%2F`.
pub(crate) async fn one(State(state): State<AppState>, Path(model): Path<String>) -> Response {
    if let Some(name) = state.config.served_model_names.iter().find(|name| **name == model) {
        return Json(card(name, &state)).into_response();
    }
    match adapters(&state).iter().find(|served| *served.name == *model) {
        Some(served) => Json(adapter_card(served, &state)).into_response(),
        None => ApiError::model_not_found(&model, &state.model_names()).into_response(),
    }
}

fn adapters(state: &App) -> Vec<ServedAdapter> {
    state.adapters.as_ref().map(Adapters::list).unwrap_or_default()
}

fn adapter_card<'a>(served: &'a ServedAdapter, state: &'a App) -> ModelCard<'a> {
    ModelCard { root: &served.path, parent: Some(&served.parent), max_model_len: None, ..card(&served.name, state) }
}

fn card<'a>(id: &'a str, state: &'a App) -> ModelCard<'a> {
    ModelCard {
        id,
        object: "model",
        created: state.started,
        owned_by: "vllm",
        root: &state.config.model_root,
        parent: None,
        max_model_len: Some(state.config.max_model_len),
        permission: [permission(state.started)],
    }
}

fn permission(created: u64) -> ModelPermission {
    ModelPermission {
        id: format!("modelperm-{}", Uuid::new_v4().simple()),
        object: "model_permission",
        created,
        allow_create_engine: false,
        allow_sampling: true,
        allow_logprobs: true,
        allow_search_indices: false,
        allow_view: true,
        allow_fine_tuning: false,
        organization: "*",
        group: Null,
        is_blocking: false,
    }
}
