//! POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter

use std::path::Path;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};

use crate::adapters::{Adapters, UpdateError};
use crate::api::shared::fields::{JsonFields, request_fields};
use crate::api::shared::run::{blocking, receive};
use crate::app::AppState;
use crate::error::ApiError;

request_fields! {
    /// The body of POST /v1/load_lora_adapter.
    pub(crate) struct LoadAdapterRequest |fields| {
        LoadAdapterRequest {
            /// Name of the adapter, which requests name as their model.
            lora_name: Option<String>,
            /// Folder of the adapter, as the server sees it.
            lora_path: Option<String>,
            /// Replaces an adapter of this name.
            load_inplace: bool = false,
        }
    }
}

request_fields! {
    /// The body of POST /v1/unload_lora_adapter.
    pub(crate) struct UnloadAdapterRequest |fields| {
        UnloadAdapterRequest {
            /// Name of the adapter.
            lora_name: Option<String>,
        }
    }
}

/// Loads an adapter.
pub(crate) async fn load(State(state): State<AppState>, request: Request) -> Response {
    update(&state, request, |adapters, body| {
        let mut fields = JsonFields::parse(body)?;
        let LoadAdapterRequest { lora_name, lora_path, load_inplace } = LoadAdapterRequest::read(&mut fields);
        fields.finish()?;
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        let (Some(name), Some(path)) = (given(lora_name), given(lora_path)) else {
            return Err(ApiError::user_input("Both 'lora_name' and 'lora_path' must be provided."));
        };
        adapters.update(&name, Path::new(&path), None, load_inplace).map_err(refused)?;
        Ok(format!("Success: LoRA adapter '{name}' added successfully."))
    })
    .await
}

/// Unloads an adapter.
pub(crate) async fn unload(State(state): State<AppState>, request: Request) -> Response {
    update(&state, request, |adapters, body| {
        let mut fields = JsonFields::parse(body)?;
        let UnloadAdapterRequest { lora_name } = UnloadAdapterRequest::read(&mut fields);
        fields.finish()?;
        let Some(name) = lora_name.filter(|name| !name.is_empty()) else {
            return Err(ApiError::user_input("'lora_name' needs to be provided to unload a LoRA adapter."));
        };
        adapters.remove(&name).map_err(refused)?;
        Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
    })
    .await
}

/// Changes the adapters on the blocking pool.
async fn update(
    state: &AppState,
    request: Request,
    change: fn(&Adapters, &[u8]) -> Result<String, ApiError>,
) -> Response {
    let changed = async {
        let body = receive(state, request).await?.body;
        blocking(state, body, move |state, body| {
            // There are no such routes without adapters.
            let adapters = state.adapters.as_ref().ok_or_else(ApiError::internal)?;
            change(adapters, body)
        })
        .await
    };
    changed.await.map_or_else(ApiError::into_response, IntoResponse::into_response)
}

fn refused(error: UpdateError) -> ApiError {
    match error {
        UpdateError::Invalid(message) => ApiError::user_input(message),
        UpdateError::NotFound(message) => ApiError::adapter_not_found(message),
        UpdateError::Failed(message) => ApiError::adapter_refused(message),
    }
}
