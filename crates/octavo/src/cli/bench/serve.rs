//! Flags of `octavo bench serve`: those of `vllm bench serve`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use http::{HeaderName, HeaderValue};
use octavo_bench::load::{Endpoint, Goodput, Metric, RampUpStrategy};

use super::unsupported::BenchServeFlags;
use crate::cli::compat::Unsupported;
use crate::cli::values::{self, JsonObject};

/// The form of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LoadBackend {
    /// Completions, /v1/completions.
    #[value(aliases = ["vllm", "sglang", "lmdeploy", "scalellm", "llama.cpp"])]
    Openai,
    /// Chat completions, /v1/chat/completions.
    OpenaiChat,
}

/// Where prompts come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dataset {
    /// Random words, or random tokens of --tokenizer.
    Random,
    /// The first two turns of the conversations in a ShareGPT file.
    ShareGpt,
    /// JSON lines with a prompt each.
    Custom,
}

impl FromStr for Dataset {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "random" => Ok(Self::Random),
            "sharegpt" => Ok(Self::ShareGpt),
            "custom" => Ok(Self::Custom),
            _ => Err(
                "supported datasets are random, sharegpt and custom; write the prompts of others to a file for custom"
                    .into(),
            ),
        }
    }
}

/// Arrivals per second; `inf` is all at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rate(pub(crate) Option<f64>);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rate: f64 = text.parse().map_err(|_| format!("'{text}' is neither a number nor inf"))?;
        match rate {
            rate if rate == f64::INFINITY => Ok(Self(None)),
            rate if rate > 0.0 => Ok(Self(Some(rate))),
            _ => Err("it must be above 0".to_owned()),
        }
    }
}

/// A bound of `--goodput`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bound {
    metric: Metric,
    most: Duration,
}

impl Bound {
    /// Sets the bound in `goodput`.
    pub(crate) fn apply(self, goodput: &mut Goodput) {
        match self.metric {
            Metric::Ttft => goodput.ttft = Some(self.most),
            Metric::Tpot => goodput.tpot = Some(self.most),
            // The only other metric that is parsed.
            Metric::E2el | Metric::Itl => goodput.e2el = Some(self.most),
        }
    }
}

impl FromStr for Bound {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || format!("'{text}' is not METRIC:MILLISECONDS with ttft, tpot or e2el");
        let (name, most) = text.split_once(':').ok_or_else(wanted)?;
        let metric = metric(name).ok().filter(|metric| *metric != Metric::Itl).ok_or_else(wanted)?;
        let most: f64 = most.parse().map_err(|_| wanted())?;
        let most = Duration::try_from_secs_f64(most / 1e3).map_err(|_| wanted())?;
        Ok(Self { metric, most })
    }
}

fn metric(text: &str) -> Result<Metric, String> {
    let known = Metric::ALL.into_iter().find(|metric| metric.name() == text.trim());
    known.ok_or_else(|| format!("'{text}' is not measured; known metrics are ttft, tpot, itl and e2el"))
}

fn strategy(text: &str) -> Result<RampUpStrategy, String> {
    match text {
        "linear" => Ok(RampUpStrategy::Linear),
        "exponential" => Ok(RampUpStrategy::Exponential),
        _ => Err("linear or exponential is expected".into()),
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("'{text}' is not KEY=VALUE"))?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = pair(text)?;
    let name = HeaderName::try_from(&name).map_err(|_| format!("'{name}' is not the name of a header"))?;
    let value = HeaderValue::try_from(&value).map_err(|_| format!("'{value}' is not the value of a header"))?;
    Ok((name, value))
}

#[derive(Debug, Args)]
pub(crate) struct BenchServeArgs {
    #[command(flatten)]
    pub(crate) target: TargetArgs,
    #[command(flatten)]
    pub(crate) dataset: DatasetArgs,
    #[command(flatten)]
    pub(crate) traffic: TrafficArgs,
    #[command(flatten)]
    pub(crate) request: BodyArgs,
    #[command(flatten)]
    pub(crate) result: ResultArgs,
    #[command(flatten)]
    pub(crate) unsupported: Unsupported<BenchServeFlags>,
}

/// The server that is measured.
#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct TargetArgs {
    /// Address of the server, in place of --host and --port; may have a path before /v1.
    #[arg(long, value_name = "URL")]
    pub(crate) base_url: Option<String>,

    /// Host of the server.
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,

    /// Port of the server.
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,

    /// Form of requests: openai for completions, openai-chat for chat completions [default: as --endpoint says, else
    /// openai].
    #[arg(long, visible_alias = "endpoint-type", value_enum, hide_possible_values = true, value_name = "NAME")]
    pub(crate) backend: Option<LoadBackend>,

    /// Path that requests are sent to [default: /v1/completions or /v1/chat/completions, as --backend says].
    #[arg(long, value_name = "PATH")]
    pub(crate) endpoint: Option<String>,

    /// Name of the model in requests [default: the first model of the server].
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,

    /// Name of the model in requests, in place of --model.
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,

    /// API key of the server.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,

    /// Accept any certificate of an https:// server.
    ///
    /// Without it, the certificate must be one of a public authority, or of an authority in the PEM file that the variable
    /// SSL_CERT_FILE names.
    #[arg(long)]
    pub(crate) insecure: bool,

    /// Further headers of every request.
    #[arg(long, num_args = 1.., value_parser = header, value_name = "KEY=VALUE")]
    pub(crate) header: Vec<(HeaderName, HeaderValue)>,

    /// Wait up to this time for the server to become ready.
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    pub(crate) ready_check_timeout_sec: u64,
}

impl TargetArgs {
    /// The route that decides the form of requests.
    pub(crate) fn endpoint(&self) -> Endpoint {
        match (self.backend, &self.endpoint) {
            (Some(LoadBackend::OpenaiChat), _) => Endpoint::Chat,
            (None, Some(path)) if path.ends_with("/chat/completions") => Endpoint::Chat,
            _ => Endpoint::Completions,
        }
    }
}

/// The prompts.
#[derive(Debug, Args)]
#[command(next_help_heading = "Prompts")]
pub(crate) struct DatasetArgs {
    /// Dataset that prompts come from: random, sharegpt (a JSON file of conversations) or custom (JSON lines with a
    /// \"prompt\" each).
    #[arg(long, default_value = "random", value_name = "NAME")]
    pub(crate) dataset_name: Dataset,

    /// File of the dataset.
    #[arg(long, value_name = "FILE")]
    pub(crate) dataset_path: Option<PathBuf>,

    /// Tokenizer of the model (catalog name, hub id or path) that measures prompts. Without it, the server's /tokenize
    /// does, and random prompts are words of about a token each.
    #[arg(long, value_name = "MODEL")]
    pub(crate) tokenizer: Option<String>,

    /// Number of requests.
    #[arg(long, value_parser = values::count, default_value = "1000", value_name = "N")]
    pub(crate) num_prompts: usize,

    /// Tokens of a prompt, in place of --random-input-len.
    #[arg(long, value_parser = values::count, value_name = "TOKENS")]
    pub(crate) input_len: Option<usize>,

    /// Tokens of an answer, for any dataset.
    #[arg(long, value_parser = values::small_count, value_name = "TOKENS")]
    pub(crate) output_len: Option<u32>,

    /// Tokens of a random prompt after its prefix.
    #[arg(long, value_parser = values::amount, default_value = "1024", value_name = "TOKENS")]
    pub(crate) random_input_len: usize,

    /// Tokens of the answer to a random prompt.
    #[arg(long, value_parser = values::small_count, default_value = "128", value_name = "TOKENS")]
    pub(crate) random_output_len: u32,

    /// Vary both lengths uniformly between length * (1 - RATIO) and length * (1 + RATIO); at least 0 and below 1.
    #[arg(long, default_value_t = 0.0, value_name = "RATIO")]
    pub(crate) random_range_ratio: f64,

    /// Tokens of a prefix that all random prompts share.
    #[arg(long, value_parser = values::amount, default_value = "0", value_name = "TOKENS")]
    pub(crate) random_prefix_len: usize,

    /// Tokens of each answer of the sharegpt dataset [default: those of the answer in the file].
    #[arg(long, value_parser = values::small_count, value_name = "TOKENS")]
    pub(crate) sharegpt_output_len: Option<u32>,

    /// Tokens of each answer of the custom dataset.
    #[arg(long, value_parser = values::small_count, default_value = "256", value_name = "TOKENS")]
    pub(crate) custom_output_len: u32,

    /// Send the prompts of the custom dataset to the completions endpoint as they are, without the chat template.
    #[arg(long)]
    pub(crate) skip_chat_template: bool,

    /// Keep the order of the file.
    #[arg(long)]
    pub(crate) disable_shuffle: bool,

    /// Send fewer requests if the file has fewer prompts, in place of repeating some.
    #[arg(long)]
    pub(crate) no_oversample: bool,

    /// Random seed for prompts and arrival times.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

/// When requests are sent.
#[derive(Debug, Args)]
#[command(next_help_heading = "Traffic")]
pub(crate) struct TrafficArgs {
    /// Mean requests per second, at random times; inf sends all at once.
    #[arg(long, default_value = "inf", value_name = "RATE")]
    pub(crate) request_rate: Rate,

    /// Burstiness of arrivals with --request-rate: 1 is a Poisson process, lower values are burstier, higher ones more
    /// regular.
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    pub(crate) burstiness: f64,

    /// Maximum number of requests at a time.
    #[arg(long, value_name = "N")]
    pub(crate) max_concurrency: Option<usize>,

    /// Raise the request rate during the run, in place of --request-rate: linear or exponential.
    #[arg(long, value_parser = strategy, value_name = "STRATEGY", requires_all = ["ramp_up_start_rps", "ramp_up_end_rps"])]
    pub(crate) ramp_up_strategy: Option<RampUpStrategy>,

    /// Requests per second at the start of a ramp-up.
    #[arg(long, value_name = "RATE")]
    pub(crate) ramp_up_start_rps: Option<f64>,

    /// Requests per second at the end of a ramp-up.
    #[arg(long, value_name = "RATE")]
    pub(crate) ramp_up_end_rps: Option<f64>,

    /// Requests that are sent one after the other before the measurement.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) num_warmups: usize,
}

/// The fields of requests.
#[derive(Debug, Args)]
#[command(next_help_heading = "Requests")]
pub(crate) struct BodyArgs {
    /// Generate all tokens that are asked for, past an end-of-sequence token; always on for the random dataset.
    #[arg(long)]
    pub(crate) ignore_eos: bool,

    /// Sampling temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f32,

    /// Share of the probability that is sampled from.
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f64>,

    /// Number of most likely tokens that are sampled from.
    #[arg(long, value_name = "N")]
    pub(crate) top_k: Option<i64>,

    /// Least probability of a token, relative to the most likely one.
    #[arg(long, value_name = "P")]
    pub(crate) min_p: Option<f64>,

    /// Penalty on tokens by their number so far.
    #[arg(long, value_name = "PENALTY", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f64>,

    /// Penalty on tokens that were generated before.
    #[arg(long, value_name = "PENALTY", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f64>,

    /// Factor against tokens of the prompt and of the answer so far.
    #[arg(long, value_name = "FACTOR")]
    pub(crate) repetition_penalty: Option<f64>,

    /// Number of log-probabilities per token.
    #[arg(long, value_name = "N")]
    pub(crate) logprobs: Option<u32>,

    /// Further fields of every request, as a JSON object.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) extra_body: Option<JsonObject>,

    /// Prefix of the X-Request-Id of requests, before their number [default: no such header].
    #[arg(long, value_name = "TEXT")]
    pub(crate) request_id_prefix: Option<String>,

    /// Do not stream answers; only end-to-end latencies are measured.
    #[arg(long)]
    pub(crate) no_stream: bool,
}

/// The figures.
#[derive(Debug, Args)]
#[command(next_help_heading = "Results")]
pub(crate) struct ResultArgs {
    /// Metrics to report.
    #[arg(long, default_value = "ttft,tpot,itl,e2el", value_delimiter = ',', value_parser = metric, value_name = "NAME,...")]
    pub(crate) percentile_metrics: Vec<Metric>,

    /// Percentiles to report.
    #[arg(long, default_value = "99", value_delimiter = ',', value_name = "P,...")]
    pub(crate) metric_percentiles: Vec<f64>,

    /// Service level objectives: report the rate of requests that meet all of them (ttft:MS, tpot:MS, e2el:MS).
    #[arg(long, num_args = 1.., value_name = "METRIC:MS")]
    pub(crate) goodput: Vec<Bound>,

    /// Write the figures to a JSON file.
    #[arg(long)]
    pub(crate) save_result: bool,

    /// Write the figures and those of every request to a JSON file.
    #[arg(long)]
    pub(crate) save_detailed: bool,

    /// Append the figures to the JSON file, on a line of their own.
    #[arg(long)]
    pub(crate) append_result: bool,

    /// Directory of the JSON file; created if missing.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) result_dir: PathBuf,

    /// Name of the JSON file [default: LABEL-MODEL-SECONDS.json].
    #[arg(long, value_name = "FILE")]
    pub(crate) result_filename: Option<String>,

    /// Label of the figures, and the beginning of the file's name.
    #[arg(long, default_value = "bench", value_name = "TEXT")]
    pub(crate) label: String,

    /// Further entries of the JSON file.
    #[arg(long, num_args = 1.., value_parser = pair, value_name = "KEY=VALUE")]
    pub(crate) metadata: Vec<(String, String)>,

    /// Plot the distributions of TTFT, ITL and end-to-end latency.
    #[arg(long, value_parser = values::svg, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
}
