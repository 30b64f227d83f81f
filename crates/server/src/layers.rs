//! The middleware of all routes.

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state, map_request_with_state};

use crate::app::App;
use crate::auth;
use crate::cors;
use crate::cors::Cors;
use crate::observe::observe;
use crate::root_path;
use crate::root_path::RootPath;
use crate::{keep_alive, load, orca, request_id, trace};

/// Adds the layers to the routes. A request passes them in this order: root path, request id, trace, metrics, CORS
/// (before the keys, so that a page can read that its key is wrong), keys and their limits, load, load
/// report, comments. Disabled layers are left out.
pub(crate) fn around(routes: Router, app: &App) -> Router {
    let config = &app.config;
    let mut router = routes;
    if let Some(interval) = config.keep_alive() {
        router = router.layer(from_fn_with_state(interval, keep_alive::comment));
    }
    router = router.layer(from_fn_with_state(app.engine.clone(), orca::report));
    if config.track_load {
        router = router.layer(from_fn_with_state(app.load.clone(), load::track));
    }
    router = router
        .layer(from_fn_with_state(app.keys.clone(), auth::guard))
        .layer(from_fn_with_state(Cors::new(&config.cors), cors::share))
        .layer(from_fn_with_state(app.http_metrics.clone(), observe))
        .layer(from_fn_with_state(app.telemetry.tracer(), trace::follow));
    if config.request_id_headers {
        router = router.layer(from_fn(request_id::identify));
    }
    match RootPath::new(&config.root_path) {
        // Outside the router, since layers inside it run after the path is matched.
        Some(root) => Router::new().fallback_service(router).layer(map_request_with_state(root, root_path::strip)),
        None => router,
    }
}
