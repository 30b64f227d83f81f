//! A run: workers send the next request until none is left.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use octavo_http_client::{Connection, EventReader, Target};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::arrivals::arrivals;
use super::dataset::{Prompt, Sample};
use super::prompt;
use super::report::{Report, RequestRecord};
use super::{Endpoint, LoadConfig, LoadError};
use crate::ProcessUsage;

/// Maximum length of a quoted error body.
const QUOTED: usize = 300;

/// Sends the load and measures the answers. Runs on the caller's tokio runtime.
pub async fn run(config: &LoadConfig) -> Result<Report, LoadError> {
    run_watched(config, Arc::default()).await
}

/// Does the same as [`run`] and counts completed requests in `done`.
pub async fn run_watched(config: &LoadConfig, done: Arc<AtomicUsize>) -> Result<Report, LoadError> {
    check(config)?;
    let target = Target::new(&config.base_url, config.api_key.as_deref(), &config.certificates)?;
    let call = Call {
        path: config.path.clone().unwrap_or_else(|| config.endpoint.path().to_owned()),
        headers: config.headers.clone(),
        request_id_prefix: config.request_id_prefix.clone(),
        timeout: config.timeout,
    };
    let mut warm = Connection::new(target.clone());
    for index in config.requests..config.requests + config.warmups {
        let body = Bytes::from(prompt::body(config, index));
        let record = call.exchange(&mut warm, index, body, Instant::now()).await;
        if config.reconnect {
            warm.close();
        }
        if let Some(error) = record.error {
            return Err(LoadError::WarmUp(error));
        }
    }
    drop(warm);

    let plan = Arc::new(Plan {
        bodies: (0..config.requests).map(|index| Bytes::from(prompt::body(config, index))).collect(),
        arrivals: arrivals(config),
        next: AtomicUsize::new(0),
        done,
        reconnect: config.reconnect,
        call,
    });
    let cpu_before = ProcessUsage::own();
    let start = Instant::now();
    let workers = config.max_concurrency.unwrap_or(config.requests).min(config.requests);
    let tasks: Vec<_> =
        (0..workers).map(|_| tokio::spawn(work(Arc::clone(&plan), Connection::new(target.clone()), start))).collect();
    let mut records = Vec::with_capacity(config.requests);
    for task in tasks {
        // Workers do not panic and are not cancelled; if one were, its requests would be missing from the report.
        if let Ok(mut done) = task.await {
            records.append(&mut done);
        }
    }
    let duration = start.elapsed();
    let client_cpu = cpu_before.zip(ProcessUsage::own()).map(|(before, after)| after.cpu.saturating_sub(before.cpu));
    records.sort_by(|a, b| a.start.total_cmp(&b.start));
    Ok(Report::new(config, records, duration, client_cpu))
}

fn check(config: &LoadConfig) -> Result<(), LoadError> {
    let error = if config.requests == 0 {
        "there must be at least one request"
    } else if config.max_concurrency == Some(0) {
        "the concurrency must be at least 1"
    } else if config.request_rate.is_some_and(|rate| !(rate > 0.0 && rate.is_finite())) {
        "the request rate must be above 0"
    } else if !(config.burstiness > 0.0 && config.burstiness.is_finite()) {
        "the burstiness must be above 0"
    } else if config.ramp_up.is_some_and(|ramp_up| !(ramp_up.start > 0.0 && ramp_up.end >= ramp_up.start)) {
        "a ramp-up begins above 0 requests per second and ends at no lower rate"
    } else if config.endpoint == Endpoint::Chat && config.samples.iter().any(is_tokens) {
        "token ids cannot be sent to the chat endpoint"
    } else if config.percentiles.iter().any(|p| !(0.0..=100.0).contains(p)) {
        "percentiles lie between 0 and 100"
    } else {
        return Ok(());
    };
    Err(LoadError::Config(error))
}

fn is_tokens(sample: &Sample) -> bool {
    matches!(sample.prompt, Prompt::Tokens(_))
}

/// The state that workers share.
struct Plan {
    bodies: Vec<Bytes>,
    arrivals: Vec<Duration>,
    next: AtomicUsize,
    done: Arc<AtomicUsize>,
    reconnect: bool,
    call: Call,
}

/// How every request is sent.
struct Call {
    path: String,
    headers: HeaderMap,
    request_id_prefix: Option<String>,
    timeout: Duration,
}

async fn work(plan: Arc<Plan>, mut connection: Connection, start: Instant) -> Vec<RequestRecord> {
    let mut records = Vec::new();
    loop {
        let index = plan.next.fetch_add(1, Relaxed);
        let Some(body) = plan.bodies.get(index) else { return records };
        let at = start + plan.arrivals[index];
        if at > Instant::now() {
            tokio::time::sleep_until(at.into()).await;
        }
        records.push(plan.call.exchange(&mut connection, index, body.clone(), start).await);
        plan.done.fetch_add(1, Relaxed);
        if plan.reconnect {
            connection.close();
        }
    }
}

impl Call {
    /// Sends request `index` and reads its answer to the end.
    async fn exchange(
        &self,
        connection: &mut Connection,
        index: usize,
        body: Bytes,
        run_start: Instant,
    ) -> RequestRecord {
        let sent = Instant::now();
        let mut answer = Answer::new(sent);
        let result = match self.request(connection, index, body) {
            Ok(request) => tokio::time::timeout(self.timeout, answer.fetch(connection, request)).await,
            Err(error) => Ok(Err(error)),
        };
        let error = match result {
            Ok(Ok(())) => answer.defect(),
            Ok(Err(error)) => Some(error),
            Err(_) => Some(format!("no answer within {} s", self.timeout.as_secs_f64())),
        };
        if error.is_some() {
            connection.close();
        }
        RequestRecord {
            start: (sent - run_start).as_secs_f64(),
            latency: answer.last.duration_since(sent).as_secs_f64(),
            ttft: answer.first.map(|first| (first - sent).as_secs_f64()),
            itl: answer.gaps,
            input_tokens: answer.usage.map_or(0, |u| u.prompt_tokens),
            output_tokens: answer.usage.map_or(0, |u| u.completion_tokens),
            error,
        }
    }

    fn request(&self, connection: &Connection, index: usize, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
        let request = connection.target().request(Method::POST, &self.path, body);
        let mut request = request.map_err(|error| error.to_string())?;
        for (name, value) in &self.headers {
            request.headers_mut().insert(name, value.clone());
        }
        if let Some(prefix) = &self.request_id_prefix {
            let id = HeaderValue::try_from(format!("{prefix}{index}")).map_err(|error| error.to_string())?;
            request.headers_mut().insert("x-request-id", id);
        }
        Ok(request)
    }
}

/// The state of an answer.
struct Answer {
    first: Option<Instant>,
    last: Instant,
    gaps: Vec<f64>,
    usage: Option<Usage>,
    done: bool,
    streamed: bool,
    failure: Option<String>,
}

#[derive(Clone, Copy, Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

/// The measured fields of an event or a whole answer.
#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    choices: Vec<IgnoredAny>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

impl Answer {
    fn new(sent: Instant) -> Self {
        Self { first: None, last: sent, gaps: Vec::new(), usage: None, done: false, streamed: false, failure: None }
    }

    async fn fetch(&mut self, connection: &mut Connection, request: Request<Full<Bytes>>) -> Result<(), String> {
        let response = connection.send(request).await.map_err(|e| e.to_string())?;
        let status = response.status();
        let content_type = response.headers().get(http::header::CONTENT_TYPE);
        self.streamed = content_type.is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
        if status.is_success() && self.streamed {
            return self.read_events(response.into_body()).await;
        }
        let body = response.into_body().collect().await.map_err(|e| e.to_string())?.to_bytes();
        self.last = Instant::now();
        if !status.is_success() {
            let text = String::from_utf8_lossy(&body[..body.len().min(QUOTED)]).into_owned();
            return Err(format!("status {status}: {text}"));
        }
        let body: Body = serde_json::from_slice(&body).map_err(|e| format!("the answer is not JSON: {e}"))?;
        self.usage = body.usage;
        Ok(())
    }

    async fn read_events(&mut self, mut body: Incoming) -> Result<(), String> {
        let mut reader = EventReader::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|e| e.to_string())?;
            let Some(bytes) = frame.data_ref() else { continue };
            let now = Instant::now();
            reader.push(bytes, |payload| self.event(payload, now));
        }
        Ok(())
    }

    fn event(&mut self, payload: &[u8], now: Instant) {
        if payload == b"[DONE]" {
            self.done = true;
            return;
        }
        let event: Body = match serde_json::from_slice(payload) {
            Ok(event) => event,
            Err(error) => {
                self.failure.get_or_insert_with(|| format!("an event is not JSON: {error}"));
                return;
            }
        };
        if let Some(error) = event.error {
            self.failure.get_or_insert_with(|| format!("error event: {error}"));
        }
        self.usage = event.usage.or(self.usage);
        if event.choices.is_empty() {
            return;
        }
        match self.first {
            None => self.first = Some(now),
            Some(_) => self.gaps.push((now - self.last).as_secs_f64()),
        }
        self.last = now;
    }

    /// The defect of a complete answer, if any.
    fn defect(&mut self) -> Option<String> {
        let failure = self.failure.take();
        failure.or_else(|| {
            let what = if self.streamed && !self.done {
                "the stream ended without [DONE]"
            } else if self.streamed && self.first.is_none() {
                "the stream had no choices"
            } else if self.usage.is_none() {
                "the answer had no usage"
            } else {
                return None;
            };
            Some(what.to_owned())
        })
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
