//! What answers before there is an engine: probes and clients get a status at once instead of a connection that hangs.

use std::future::Future;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use http::StatusCode;
use tokio::time::Instant;

use crate::app::ServerError;
use crate::config::ConnectionLimits;
use crate::error::ApiError;
use crate::listener::Connections;
use crate::sockets::Listener;

/// How long answers given during the load have to be taken.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Answers on `listener` while `load` runs: GET /live is 200, everything else 503 with the error body of the API. Ends
/// with the load; connections that come after it wait for the caller's next reader of the listener.
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

async fn loading() -> ApiError {
    ApiError::unavailable("The model is still being loaded.")
}
