//! The data of a request's headers.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::Request;
use uuid::Uuid;

use crate::api::shared::common::MAX_REQUEST_ID;
use crate::app::AppState;
use crate::caller::{Caller, Origin};
use crate::error::ApiError;
use crate::request_id::RequestId;
use crate::trace::RequestTrace;

/// The data of a request's headers.
#[derive(Clone, Debug)]
pub(crate) struct RequestHeaders {
    request_id: Option<String>,
    /// The id of the response's header, if it has one.
    assigned: Option<String>,
    priority: Option<i64>,
    pub(crate) caller: Caller,
    arrival: Instant,
    trace: RequestTrace,
}

impl RequestHeaders {
    /// Reads the headers of a request that has just arrived.
    pub(crate) fn read(request: &Request) -> Result<Self, ApiError> {
        let text = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
        let priority = text("x-vllm-priority").map(|value| {
            let message = "The X-Vllm-Priority header must be an integer.";
            value.trim().parse().map_err(|_| ApiError::bad_request(message).with_param("priority"))
        });
        // Every chunk of a stream repeats it.
        let usable = |id: &&str| (1..=MAX_REQUEST_ID).contains(&id.len());
        let request_id = text("x-request-id").filter(usable).map(str::to_owned);
        let assigned = request.extensions().get::<RequestId>().map(|id| id.as_str().to_owned());
        let trace = RequestTrace::from_request(request);
        trace.begin();
        let caller = Caller::from_headers(request.headers(), request.extensions());
        Ok(Self { request_id, assigned, priority: priority.transpose()?, caller, arrival: Instant::now(), trace })
    }

    /// The priority of a request: the header's or the body's, but no smaller than the server and the key allow.
    pub(crate) fn priority(&self, state: &AppState, body: i64) -> i64 {
        let least = self.caller.min_priority().unwrap_or(i64::MIN);
        clamped(self.priority, body, least.max(state.config.min_priority))
    }

    /// The salt of a request's entries in the prefix cache; `own` is the body's.
    pub(crate) fn salt(&self, state: &AppState, own: Option<&str>) -> Option<Arc<str>> {
        self.caller.salt(own, state.config.share_prefix_cache)
    }

    /// Where a request comes from; `priority` and `salt` are the body's.
    pub(crate) fn origin(&self, state: &AppState, priority: i64, salt: Option<&str>) -> Origin {
        Origin {
            priority: self.priority(state, priority),
            client: self.caller.id(),
            meter: self.caller.meter().clone(),
            cache_salt: self.salt(state, salt),
            arrival: self.arrival,
            trace: self.trace.clone(),
        }
    }

    /// These headers with a request id, for requests that share one.
    pub(crate) fn with_id(&self, id: &str) -> Self {
        Self { request_id: Some(id.to_owned()), ..self.clone() }
    }

    /// The id of a request: the header's, the body's, or a new one.
    pub(crate) fn id(&self, body: Option<&String>) -> String {
        let given = self.request_id.as_ref().or(body).or(self.assigned.as_ref());
        let id = given.cloned().unwrap_or_else(|| Uuid::new_v4().simple().to_string());
        self.trace.identify(&id);
        id
    }
}

/// The header's priority or the body's, raised to `least` if it is smaller.
fn clamped(header: Option<i64>, body: i64, least: i64) -> i64 {
    header.unwrap_or(body).max(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_priority_is_raised_to_the_smallest_that_is_allowed() {
        assert_eq!(clamped(None, -7, -3), -3);
        assert_eq!(clamped(Some(-7), 5, 0), 0);
        assert_eq!(clamped(Some(4), -7, 0), 4);
        assert_eq!(clamped(None, i64::MIN, i64::MIN), i64::MIN);
    }
}
