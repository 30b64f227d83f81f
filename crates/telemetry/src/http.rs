//! The metrics of the HTTP server.

use std::sync::Arc;
use std::time::Duration;

use metrics::Counter;

use crate::buckets;
use crate::cells::{Histogram, Unit};
use crate::registry::Registry;

/// The handler label for requests without a route, and the method label for methods outside of `METHODS`.
const UNMATCHED: &str = "none";
const OTHER_METHOD: &str = "OTHER";
const METHODS: [&str; 5] = ["GET", "POST", "PUT", "DELETE", OTHER_METHOD];
const STATUS_CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// The reason why a full queue refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// Too many requests.
    Requests,
    /// Too many prompt tokens.
    Tokens,
}

/// One answered request.
#[derive(Clone, Copy, Debug)]
pub struct HttpExchange<'a> {
    /// Request method.
    pub method: &'a str,
    /// The route's pattern; `None` if no route matched.
    pub handler: Option<&'a str>,
    /// Status code.
    pub status: u16,
    /// Time from the first byte of the request to the last byte of the response.
    pub duration: Duration,
    /// Size of the request's body in bytes.
    pub request_bytes: u64,
    /// Size of the response's body in bytes.
    pub response_bytes: u64,
}

/// The server's handle on its metrics; clones share the series. Labels come from a fixed set, independent of what clients
/// send.
#[derive(Clone, Debug)]
pub struct HttpMetrics {
    series: Arc<HttpSeries>,
}

#[derive(Debug)]
struct HttpSeries {
    routes: Vec<Route>,
    /// In the order of `METHODS`.
    unmatched: [Route; METHODS.len()],
    duration: Histogram,
    rejected_requests: Counter,
    rejected_tokens: Counter,
}

#[derive(Debug)]
struct Route {
    method: &'static str,
    handler: &'static str,
    requests: [Counter; STATUS_CLASSES.len()],
    duration: Histogram,
    request_bytes: Histogram,
    response_bytes: Histogram,
}

impl HttpMetrics {
    pub(crate) fn register(registry: &Registry, model: &str, routes: &[(&'static str, &'static str)]) -> Self {
        let rejected = |reason| {
            let help = "Requests refused because too much was waiting, by the limit they met.";
            let labels = [("model_name", model), ("reason", reason)];
            registry.counter("vllm:admission_rejections_total", help, &labels)
        };
        let series = HttpSeries {
            routes: routes.iter().map(|&(method, handler)| Route::register(registry, method, handler)).collect(),
            unmatched: METHODS.map(|method| Route::register(registry, method, UNMATCHED)),
            duration: registry.histogram(
                "http_request_duration_highr_seconds",
                "Duration of requests over all handlers.",
                &[],
                (Unit::Seconds, buckets::HTTP_FINE),
            ),
            rejected_requests: rejected("max_num_queued_reqs"),
            rejected_tokens: rejected("max_num_queued_tokens"),
        };
        Self { series: Arc::new(series) }
    }

    /// Observes a request once its response has ended.
    pub fn observe(&self, exchange: &HttpExchange<'_>) {
        let route = self.series.route(exchange.method, exchange.handler);
        let class = usize::from(exchange.status / 100).clamp(1, STATUS_CLASSES.len()) - 1;
        route.requests[class].increment(1);
        route.duration.observe_duration(exchange.duration);
        route.request_bytes.observe(exchange.request_bytes);
        route.response_bytes.observe(exchange.response_bytes);
        self.series.duration.observe_duration(exchange.duration);
    }

    /// Counts a request that was refused because of the queue's length.
    pub fn rejected(&self, rejection: Rejection) {
        match rejection {
            Rejection::Requests => self.series.rejected_requests.increment(1),
            Rejection::Tokens => self.series.rejected_tokens.increment(1),
        }
    }
}

impl HttpSeries {
    fn route(&self, method: &str, handler: Option<&str>) -> &Route {
        let matched =
            handler.and_then(|handler| self.routes.iter().find(|r| r.handler == handler && r.method == method));
        matched.unwrap_or_else(|| {
            let index = METHODS.iter().position(|&m| m == method).unwrap_or(METHODS.len() - 1);
            &self.unmatched[index]
        })
    }
}

impl Route {
    fn register(registry: &Registry, method: &'static str, handler: &'static str) -> Self {
        let requests = STATUS_CLASSES.map(|status| {
            let labels = [("handler", handler), ("method", method), ("status", status)];
            registry.counter("http_requests_total", "Requests, by handler, method and status class.", &labels)
        });
        Self {
            method,
            handler,
            requests,
            duration: registry.histogram(
                "http_request_duration_seconds",
                "Duration of requests, by handler and method.",
                &[("handler", handler), ("method", method)],
                (Unit::Seconds, buckets::HTTP),
            ),
            request_bytes: registry.summary(
                "http_request_size_bytes",
                "Bytes of request bodies, by handler.",
                &[("handler", handler)],
                Unit::Items,
            ),
            response_bytes: registry.summary(
                "http_response_size_bytes",
                "Bytes of response bodies, by handler.",
                &[("handler", handler)],
                Unit::Items,
            ),
        }
    }
}
