//! The command line. Names, spellings and defaults are vLLM's where it has the flag.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// An OpenAI-compatible inference server.
#[derive(Debug, Parser)]
#[command(name = "octavo", version, about, max_term_width = 100, args_override_self = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model over HTTP.
    Serve(Box<ServeArgs>),
    /// Download a model into the cache and print where it lies.
    Pull(PullArgs),
    /// Print a model's program: ops, shapes, bytes and FLOPs.
    Inspect(InspectArgs),
    /// Say what this machine offers and what is missing.
    Doctor(DoctorArgs),
}

/// The model that `octavo serve` takes when none is named.
pub(crate) const DEFAULT_MODEL: &str = "smollm2-135m-instruct";

/// Where a model comes from.
#[derive(Debug, Clone, Args)]
pub(crate) struct SourceArgs {
    /// Branch, tag or commit of a hub repository.
    #[arg(long)]
    pub(crate) revision: Option<String>,

    /// Use only what is in the cache already.
    #[arg(long, env = "HF_HUB_OFFLINE", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) offline: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// Catalog name, hub id (`org/name`, `org/name:file.gguf`) or path.
    #[arg(default_value = DEFAULT_MODEL)]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    /// List the catalog and what each model needs.
    #[arg(long, conflicts_with = "model")]
    pub(crate) list: bool,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Catalog name, hub id or path.
    #[arg(default_value = DEFAULT_MODEL)]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Model whose presence in the cache is checked.
    #[arg(default_value = DEFAULT_MODEL)]
    pub(crate) model: String,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Catalog name, hub id or path; overrides --model.
    #[arg(value_name = "MODEL")]
    pub(crate) model_positional: Option<String>,

    /// Catalog name, hub id or path.
    #[arg(long, default_value = DEFAULT_MODEL)]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    /// Names the API answers to; the first is the label of the metrics. Default: the model as given.
    #[arg(long, num_args = 1.., value_name = "NAME")]
    pub(crate) served_model_name: Vec<String>,

    /// Address to listen on.
    #[arg(long, default_value = "0.0.0.0")]
    pub(crate) host: String,

    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,

    /// Keys that clients must send as `Authorization: Bearer KEY`.
    #[arg(long, num_args = 1.., env = "VLLM_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,

    /// Where to compute.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    pub(crate) device: Device,

    /// Precision of weights and arithmetic.
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    pub(crate) dtype: Dtype,

    /// Context length: prompt and output together (1k = 1000, 1K = 1024; auto = the largest that fits).
    #[arg(long, value_parser = parse_max_model_len, allow_hyphen_values = true)]
    pub(crate) max_model_len: Option<MaxModelLen>,

    /// Requests that run at once.
    #[arg(long, value_parser = parse_count, default_value = "256")]
    pub(crate) max_num_seqs: usize,

    /// Token budget of a step, for prompts and outputs together.
    #[arg(long, value_parser = parse_count)]
    pub(crate) max_num_batched_tokens: Option<usize>,

    /// Tokens of a KV-cache block.
    #[arg(long, value_parser = parse_count)]
    pub(crate) block_size: Option<usize>,

    /// KV-cache blocks, in place of what fits in memory.
    #[arg(long, value_parser = parse_count)]
    pub(crate) num_gpu_blocks_override: Option<usize>,

    /// Bytes of the KV cache, in place of a share of the memory.
    #[arg(long, value_parser = parse_count)]
    pub(crate) kv_cache_memory_bytes: Option<usize>,

    /// Reuse the KV of prompts that begin alike (on by default).
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    pub(crate) enable_prefix_caching: bool,

    /// Compute every prompt anew.
    #[arg(long)]
    pub(crate) no_enable_prefix_caching: bool,

    /// Which waiting request is next.
    #[arg(long, value_enum, default_value_t = Policy::Fcfs)]
    pub(crate) scheduling_policy: Policy,

    /// Requests that may wait; more are answered with 429.
    #[arg(long, value_parser = parse_count)]
    pub(crate) max_num_queued_reqs: Option<usize>,

    /// Prompt tokens that may wait; more are answered with 429.
    #[arg(long, value_parser = parse_count)]
    pub(crate) max_num_queued_tokens: Option<usize>,

    /// Start of the seeds of requests that bring none: the same requests in the same order then draw the same tokens.
    #[arg(long)]
    pub(crate) seed: Option<u64>,

    /// Chat template file, in place of the model's.
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,

    /// Most log-probabilities a request may ask for at a position.
    #[arg(long, default_value_t = 20)]
    pub(crate) max_logprobs: u32,

    /// Seconds that running requests get after SIGTERM, the lag included; 0 ends them at once.
    #[arg(long, default_value_t = 25.0, value_parser = parse_seconds)]
    pub(crate) shutdown_timeout: f64,

    /// Seconds after SIGTERM in which new requests are still served, while load balancers notice.
    #[arg(long, default_value_t = 5.0, value_parser = parse_seconds)]
    pub(crate) shutdown_lag: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The best there is.
    Auto,
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    Auto,
    #[value(alias = "float")]
    Float32,
    Bfloat16,
    #[value(alias = "half")]
    Float16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Policy {
    /// First come, first served.
    Fcfs,
    /// Lower `priority` first.
    Priority,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MaxModelLen {
    /// As much as the model has and the memory holds.
    Auto,
    Tokens(usize),
}

/// A count with vLLM's suffixes: `1k` = 1000, `1K` = 1024, and so on for m/M and g/G.
pub(crate) fn parse_count(text: &str) -> Result<usize, String> {
    let (digits, factor): (&str, f64) = match text.char_indices().last() {
        Some((at, suffix)) => match suffix {
            'k' => (&text[..at], 1e3),
            'K' => (&text[..at], 1024.0),
            'm' => (&text[..at], 1e6),
            'M' => (&text[..at], 1024.0 * 1024.0),
            'g' => (&text[..at], 1e9),
            'G' => (&text[..at], 1024.0 * 1024.0 * 1024.0),
            _ => (text, 1.0),
        },
        None => return Err("a number is expected".into()),
    };
    let value: f64 = digits.parse().map_err(|_| format!("'{text}' is not a number such as 4096, 4k or 4K"))?;
    let value = value * factor;
    if value < 1.0 || value.fract() != 0.0 || value > (1u64 << 53) as f64 {
        return Err(format!("'{text}' is not a whole number of at least 1"));
    }
    Ok(value as usize)
}

fn parse_max_model_len(text: &str) -> Result<MaxModelLen, String> {
    match text {
        "auto" | "-1" => Ok(MaxModelLen::Auto),
        _ => parse_count(text).map(MaxModelLen::Tokens),
    }
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("'{text}' is not a number of seconds between 0 and 86400")),
    }
}

/// Accepts `_` for `-` in the names of long flags, as vLLM does; values are left alone.
pub(crate) fn normalise_flags(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut only_values = false;
    args.map(move |arg| {
        only_values |= arg == "--";
        match arg.to_str() {
            Some(text) if !only_values && text.starts_with("--") => {
                let (name, value) = text.split_at(text.find('=').unwrap_or(text.len()));
                format!("{}{value}", name.replace('_', "-")).into()
            }
            _ => arg,
        }
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn serve(args: &[&str]) -> Result<ServeArgs, clap::Error> {
        let args = ["octavo", "serve"].iter().chain(args).map(OsString::from);
        Cli::try_parse_from(normalise_flags(args)).map(|cli| match cli.command {
            Command::Serve(args) => *args,
            other => panic!("not serve: {other:?}"),
        })
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn both_spellings_of_a_flag_are_one() {
        let args = serve(&["m", "--max_model_len", "4k", "--served-model-name", "a_b", "c"]).unwrap();
        assert_eq!(args.max_model_len, Some(MaxModelLen::Tokens(4000)));
        assert_eq!(args.served_model_name, ["a_b", "c"]);
        assert_eq!(args.model_positional.as_deref(), Some("m"));
    }

    #[test]
    fn counts_take_suffixes() {
        assert_eq!(parse_count("1k"), Ok(1000));
        assert_eq!(parse_count("1.5K"), Ok(1536));
        assert_eq!(parse_count("2M"), Ok(2 << 20));
        for bad in ["", "k", "0", "-4", "1.5", "nan", "inf", "1e300", "4kk"] {
            assert!(parse_count(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn max_model_len_may_be_automatic() {
        for spelling in [["--max-model-len", "-1"], ["--max-model-len", "auto"]] {
            assert_eq!(serve(&spelling).unwrap().max_model_len, Some(MaxModelLen::Auto));
        }
    }

    #[test]
    fn an_unknown_flag_is_named() {
        let error = serve(&["--no-such-flag"]).unwrap_err().to_string();
        assert!(error.contains("--no-such-flag"), "{error}");
    }

    #[test]
    fn dtype_half_is_float16() {
        assert_eq!(serve(&["--dtype", "half"]).unwrap().dtype, Dtype::Float16);
    }

    #[test]
    fn the_later_of_two_prefix_caching_flags_wins() {
        let args = serve(&["--no-enable-prefix-caching", "--enable-prefix-caching"]).unwrap();
        assert!(args.enable_prefix_caching && !args.no_enable_prefix_caching);
    }
}
