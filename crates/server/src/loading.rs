//! Answers while the model loads: probes and clients receive a status at once rather than wait on a silent connection.

use std::future::Future;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::routing::get;
use http::StatusCode;
use octavo_sockets::Listener;
use tokio::time::Instant;

use crate::app::ServerError;
use crate::body;
use crate::config::ConnectionLimits;
use crate::error::ApiError;
use crate::listener::Connections;

/// Time in which clients can read answers that are given during the load.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Answers on `listener` while `load` runs: GET /live with 200, everything else with 503 and the error body of the API.
/// It returns when the load ends; later connections wait until the caller accepts them.
///
/// # Errors
/// The listening socket is unusable.
pub async fn serve_while_loading<T>(
    listener: &Listener,
    limits: ConnectionLimits,
    load: impl Future<Output = T>,
) -> Result<T, ServerError> {
    let router = Router::new().route("/live", get(async || StatusCode::OK)).fallback(loading);
    let mut connections = Connections::new(limits);
    let loaded = tokio::select! {
        error = connections.accept(listener, &router) => return Err(error.into()),
        loaded = load => loaded,
    };
    connections.close();
    connections.closed(Instant::now() + LAST_WORDS).await;
    Ok(loaded)
}

async fn loading(request: Request) -> ApiError {
    let (head, body) = request.into_parts();
    body::discard(&head.headers, body).await;
    ApiError::unavailable("The model is still being loaded.")
}
