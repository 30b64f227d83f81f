//! A load generator for OpenAI-compatible servers that reports in vLLM's terms.
//!
//! The client is cheap, so that it measures the server rather than itself: a worker is one task with one kept-alive
//! HTTP/1.1 connection, event lines are split in place, and only the measured fields of an event are parsed. The report
//! states the client's own CPU time as well.

mod arrivals;
mod dataset;
mod prompt;
mod report;
mod run;

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use octavo_http_client::{Certificates, TargetError};
use serde_json::{Map, Value};

pub use arrivals::{RampUp, RampUpStrategy};
pub use dataset::{
    Exchange, Lengths, Prompt, Sample, custom, oversample, random_lengths, sharegpt, sharegpt_keeps, text_of_length,
};
pub use prompt::{WORDS, random_words};
pub use report::{Goodput, Metric, Report, RequestRecord};
pub use run::{run, run_watched};

/// The route that receives the load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Endpoint {
    /// `POST /v1/completions`.
    #[default]
    Completions,
    /// `POST /v1/chat/completions`.
    Chat,
}

impl Endpoint {
    /// The path of the route.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// The requests and their timing.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadConfig {
    /// `http://host:port` or `https://host:port`, with an optional path before `/v1`.
    pub base_url: String,
    /// The certificates that an encrypted server may have.
    pub certificates: Certificates,
    /// The route, which decides the form of requests.
    pub endpoint: Endpoint,
    /// The path of the route; `None` for the endpoint's own.
    pub path: Option<String>,
    /// Model name.
    pub model: String,
    /// API key, sent as a bearer token.
    pub api_key: Option<String>,
    /// Number of requests.
    pub requests: usize,
    /// Maximum number of requests at a time; `None` for no limit.
    pub max_concurrency: Option<usize>,
    /// Mean arrivals per second; `None` sends all requests at once.
    pub request_rate: Option<f64>,
    /// Shape of the gamma distribution of the gaps between arrivals: 1 is a Poisson process, lower values are burstier.
    pub burstiness: f64,
    /// A rate that grows during the run, in place of `request_rate`.
    pub ramp_up: Option<RampUp>,
    /// The requests in the order they are sent; if empty, random words of `input_len` and `output_len`.
    pub samples: Arc<[Sample]>,
    /// Whether answers are streamed. Otherwise, only end-to-end latencies are measured.
    pub stream: bool,
    /// Random words of a prompt, about a token each.
    pub input_len: usize,
    /// The words to choose from; by default, a few common words. Words that are one token each in the model's tokenizer make
    /// prompts of an exact length.
    pub words: Arc<[String]>,
    /// The beginning of every prompt, before its own words.
    pub prefix: Arc<str>,
    /// Number of tokens to generate.
    pub output_len: u32,
    /// Whether answers continue after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Sampling temperature; 0 is greedy.
    pub temperature: f32,
    /// Further fields of every body; they replace fields of the same name.
    pub extra_body: Map<String, Value>,
    /// Further headers of every request.
    pub headers: HeaderMap,
    /// Requests carry an `X-Request-Id` of this prefix and their number.
    pub request_id_prefix: Option<String>,
    /// Number of requests that are sent one after the other before the measurement.
    pub warmups: usize,
    /// Random seed for prompts and arrival times.
    pub seed: u64,
    /// Whether every request has its own connection, for servers that close kept connections without notice.
    pub reconnect: bool,
    /// Time after which a request fails.
    pub timeout: Duration,
    /// Metrics to report.
    pub metrics: Vec<Metric>,
    /// Percentiles to report, in percent.
    pub percentiles: Vec<f64>,
    /// Service level objectives of the goodput.
    pub goodput: Goodput,
}

impl Default for LoadConfig {
    /// The defaults of `vllm bench serve`: 1000 streamed completions of 1024 words and 128 tokens each, sent to port 8000 at
    /// once.
    fn default() -> Self {
        Self {
            base_url: "http://127.0.0.1:8000".into(),
            certificates: Certificates::Trusted,
            endpoint: Endpoint::Completions,
            path: None,
            model: String::new(),
            api_key: None,
            requests: 1000,
            max_concurrency: None,
            request_rate: None,
            burstiness: 1.0,
            ramp_up: None,
            samples: Arc::default(),
            stream: true,
            input_len: 1024,
            words: Arc::default(),
            prefix: Arc::default(),
            output_len: 128,
            ignore_eos: true,
            temperature: 0.0,
            extra_body: Map::new(),
            headers: HeaderMap::new(),
            request_id_prefix: None,
            warmups: 0,
            seed: 0,
            reconnect: false,
            timeout: Duration::from_secs(6 * 60 * 60),
            metrics: Metric::ALL.to_vec(),
            percentiles: vec![99.0],
            goodput: Goodput::default(),
        }
    }
}

/// The reason why a run is impossible. Failed requests are part of the report instead.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The server cannot be reached by its URL, its key or its certificates.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// A setting out of range.
    #[error("{0}")]
    Config(&'static str),
    /// A dataset cannot be used.
    #[error("the dataset cannot be used: {0}")]
    Dataset(String),
    /// A warm-up request failed: the server is not ready for a measurement.
    #[error("a warm-up request failed: {0}")]
    WarmUp(String),
}
