//! Flags of `octavo bench serve`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use octavo_bench::load::Goodput;

use crate::cli::values;

/// How requests look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LoadBackend {
    /// To /v1/completions.
    #[value(alias = "vllm")]
    Openai,
    /// To /v1/chat/completions.
    OpenaiChat,
}

/// Arrivals a second; `inf` is all at once.
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
    pub(crate) metric: Metric,
    pub(crate) most: Duration,
}

/// What can be bounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Metric {
    Ttft,
    Tpot,
    E2el,
}

impl Metric {
    /// Its bound.
    pub(crate) fn of(self, goodput: &mut Goodput) -> &mut Option<Duration> {
        match self {
            Self::Ttft => &mut goodput.ttft,
            Self::Tpot => &mut goodput.tpot,
            Self::E2el => &mut goodput.e2el,
        }
    }
}

impl FromStr for Bound {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || format!("'{text}' is not METRIC:MILLISECONDS with ttft, tpot or e2el");
        let (name, most) = text.split_once(':').ok_or_else(wanted)?;
        let metric = match name {
            "ttft" => Metric::Ttft,
            "tpot" => Metric::Tpot,
            "e2el" => Metric::E2el,
            _ => return Err(wanted()),
        };
        let most: f64 = most.parse().map_err(|_| wanted())?;
        let most = Duration::try_from_secs_f64(most / 1e3).map_err(|_| wanted())?;
        Ok(Self { metric, most })
    }
}

#[derive(Debug, Args)]
pub(crate) struct BenchServeArgs {
    /// The server, in place of --host and --port; may have a path before /v1.
    #[arg(long, value_name = "URL")]
    pub(crate) base_url: Option<String>,

    /// Where the server is.
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,

    /// Its port.
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,

    /// How requests look.
    #[arg(long, value_enum, default_value = "openai")]
    pub(crate) backend: LoadBackend,

    /// Name of the model in requests; the server's first by default.
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,

    /// Key for the server.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,

    /// Requests in all.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    pub(crate) num_prompts: usize,

    /// Random words of a prompt, about a token each.
    #[arg(long, alias = "input-len", default_value_t = 1024, value_name = "WORDS")]
    pub(crate) random_input_len: usize,

    /// Tokens of an answer, no fewer.
    #[arg(long, alias = "output-len", default_value_t = 128, value_name = "TOKENS")]
    pub(crate) random_output_len: u32,

    /// Mean arrivals a second, at random moments; inf: all at once.
    #[arg(long, default_value = "inf", value_name = "RATE")]
    pub(crate) request_rate: Rate,

    /// Most requests at a time.
    #[arg(long, value_name = "N")]
    pub(crate) max_concurrency: Option<usize>,

    /// Requests that are sent first, one after the other, and not measured.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) num_warmups: usize,

    /// Of prompts and arrivals.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,

    /// 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f32,

    /// Ask for whole answers: only their latency is measured.
    #[arg(long)]
    pub(crate) no_stream: bool,

    /// Percentiles to report.
    #[arg(long, default_value = "99", value_delimiter = ',', value_name = "P,...")]
    pub(crate) metric_percentiles: Vec<f64>,

    /// Bounds that a good request meets: ttft:MS, tpot:MS, e2el:MS.
    #[arg(long, num_args = 1.., value_name = "METRIC:MS")]
    pub(crate) goodput: Vec<Bound>,

    /// Write the figures to a JSON file.
    #[arg(long)]
    pub(crate) save_result: bool,

    /// And those of every request.
    #[arg(long)]
    pub(crate) save_detailed: bool,

    /// Folder of that file.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) result_dir: PathBuf,

    /// Name of that file [default: bench-MODEL-SECONDS.json].
    #[arg(long, value_name = "FILE")]
    pub(crate) result_filename: Option<String>,

    /// Plot how TTFT, ITL and end-to-end latency are distributed.
    #[arg(long, value_parser = values::svg, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
}
