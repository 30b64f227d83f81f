//! The development routes of vLLM: POST /pause, /resume, /sleep, /wake_up and /reset_prefix_cache, GET /is_paused and
//! /is_sleeping.

use std::sync::atomic::{AtomicU8, Ordering};

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use octavo_engine::EngineHandle;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::api::shared::query::{Parameters, flag, parameter};
use crate::app::AppState;
use crate::error::ApiError;

/// Whether the engine plans steps for new requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activity {
    Running,
    Paused,
    Asleep,
}

/// The state that the development routes set.
#[derive(Debug, Default)]
pub(crate) struct Pause(AtomicU8);

impl Pause {
    fn switch_to(&self, activity: Activity) {
        self.0.store(activity as u8, Ordering::Relaxed);
    }

    fn is(&self, activity: Activity) -> bool {
        self.0.load(Ordering::Relaxed) == activity as u8
    }
}

/// The treatment of requests that the engine has when it is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// They are aborted.
    Abort,
    /// They complete first.
    Wait,
    /// They stop where they are, new ones queue, and all continue when the engine is resumed.
    Keep,
}

impl Mode {
    fn read(parameters: &Parameters) -> Result<Self, ApiError> {
        match parameter(parameters, "mode") {
            None | Some("abort") => Ok(Self::Abort),
            Some("wait") => Ok(Self::Wait),
            Some("keep") => Ok(Self::Keep),
            Some(_) => Err(ApiError::bad_request("Input should be 'abort', 'wait' or 'keep'").with_param("mode")),
        }
    }
}

/// Pauses the engine, and returns when no step is in flight. Unless requests are kept, the prefix cache is forgotten.
pub(crate) async fn pause(State(state): State<AppState>, parameters: Parameters) -> Response {
    let paused = async {
        let mut mode = Mode::read(&parameters)?;
        if flag(&parameters, "wait_for_inflight_requests", false)? {
            mode = Mode::Wait;
        }
        let clear = flag(&parameters, "clear_cache", true)?;
        halt(&state, Activity::Paused, mode, clear).await?;
        Ok(json!({"status": "paused"}))
    };
    answer(paused.await)
}

/// Ends a pause, also that of a sleep.
pub(crate) async fn resume(State(state): State<AppState>) -> Response {
    go_on(&state);
    answer(Ok(json!({"status": "resumed"})))
}

/// Whether the engine is paused or asleep.
pub(crate) async fn is_paused(State(state): State<AppState>) -> Response {
    answer(Ok(json!({"is_paused": !state.pause.is(Activity::Running)})))
}

/// Pauses the engine at level 0. The levels 1 and 2 free memory of the device in vLLM and are refused.
pub(crate) async fn sleep(State(state): State<AppState>, parameters: Parameters) -> Response {
    let asleep = async {
        let level = parameter(&parameters, "level").unwrap_or("1");
        match level {
            "0" => {}
            "1" | "2" => {
                return Err(ApiError::not_implemented(format!(
                    "Sleep level {level} is not supported, since this server cannot release the memory of its weights \
                     and its KV cache. Level 0 pauses the engine."
                ))
                .with_param("level"));
            }
            _ => return Err(ApiError::bad_request("Input should be 0, 1 or 2").with_param("level")),
        }
        halt(&state, Activity::Asleep, Mode::read(&parameters)?, false).await?;
        Ok(json!({"status": "sleeping", "level": 0}))
    };
    answer(asleep.await)
}

/// Ends a sleep. Tags limit what wakes up; the engine is resumed if they are absent or name its scheduling.
pub(crate) async fn wake_up(State(state): State<AppState>, parameters: Parameters) -> Response {
    const TAGS: [&str; 3] = ["weights", "kv_cache", "scheduling"];
    let tags: Vec<&str> =
        parameters.iter().filter(|(name, _)| name == "tags").map(|(_, value)| value.as_str()).collect();
    if tags.iter().any(|tag| !TAGS.contains(tag)) {
        let message = "Input should be 'weights', 'kv_cache' or 'scheduling'";
        return ApiError::bad_request(message).with_param("tags").into_response();
    }
    if tags.is_empty() || tags.contains(&"scheduling") {
        go_on(&state);
    }
    answer(Ok(json!({"status": "awake", "tags": (!tags.is_empty()).then_some(tags)})))
}

/// Whether the engine sleeps.
pub(crate) async fn is_sleeping(State(state): State<AppState>) -> Response {
    answer(Ok(json!({"is_sleeping": state.pause.is(Activity::Asleep)})))
}

/// Forgets the prefix cache. It is kept while running requests hold blocks, unless they are to be recomputed, and
/// `success` is then false. There is no external cache that could be reset.
pub(crate) async fn reset_prefix_cache(State(state): State<AppState>, parameters: Parameters) -> Response {
    let reset = async {
        let preempt = flag(&parameters, "reset_running_requests", false)?;
        let external = flag(&parameters, "reset_external", false)?;
        let success = forget(&state.engine, preempt).await?;
        tracing::info!(success, "the prefix cache was reset");
        Ok(json!({"success": success && !external}))
    };
    answer(reset.await)
}

fn switch_to(state: &AppState, activity: Activity) {
    state.pause.switch_to(activity);
    state.engine_metrics.awake(activity != Activity::Asleep);
}

/// Pauses the engine and waits until no step is in flight.
async fn halt(state: &AppState, activity: Activity, mode: Mode, clear: bool) -> Result<(), ApiError> {
    switch_to(state, activity);
    match mode {
        Mode::Abort => state.engine.pause(true),
        Mode::Wait => state.engine.pause(false),
        Mode::Keep => state.engine.freeze(),
    }
    reply(|done| state.engine.when_idle(done)).await?;
    if clear && mode != Mode::Keep {
        forget(&state.engine, false).await?;
    }
    tracing::info!(?activity, ?mode, "the engine is paused");
    Ok(())
}

fn go_on(state: &AppState) {
    switch_to(state, Activity::Running);
    state.engine.resume();
    tracing::info!("the engine is resumed");
}

async fn forget(engine: &EngineHandle, preempt: bool) -> Result<bool, ApiError> {
    reply(|done| engine.reset_prefix_cache(preempt, done)).await
}

/// Sends a command and waits for its result.
async fn reply(command: impl FnOnce(Box<dyn FnOnce(bool) + Send>)) -> Result<bool, ApiError> {
    let (sender, receiver) = oneshot::channel();
    // The client may have left in the meantime.
    command(Box::new(move |result| {
        let _ = sender.send(result);
    }));
    receiver.await.map_err(|_| ApiError::unavailable("The engine is not running."))
}

fn answer(result: Result<Value, ApiError>) -> Response {
    match result {
        Ok(body) => Json(body).into_response(),
        Err(error) => error.into_response(),
    }
}
