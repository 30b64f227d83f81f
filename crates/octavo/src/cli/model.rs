//! Flags of the model and of its engine: what `serve`, `run-batch` and `chat` with a model share.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use clap::builder::BoolishValueParser;
use octavo_backend_cpu::Isa;

use crate::cli::DEFAULT_MODEL;
use crate::cli::compat::CompatArgs;
use crate::cli::values::{
    self, Bound, ContentFormat, Device, Dtype, GenerationSource, JsonObject, LoadFormat, LogFormat, MaxModelLen,
    Policy, TracedModule,
};

/// Where a model comes from.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct SourceArgs {
    /// Branch, tag or commit of a hub repository.
    #[arg(long)]
    pub(crate) revision: Option<String>,

    /// Use only what is in the cache already.
    #[arg(long, env = "HF_HUB_OFFLINE", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) offline: bool,

    /// Token of the hub, in place of HF_TOKEN and of the file that `hf auth login` writes.
    #[arg(long, value_name = "TOKEN")]
    pub(crate) hf_token: Option<String>,

    /// Cache of hub downloads, in place of HF_HUB_CACHE.
    #[arg(long, value_name = "DIR")]
    pub(crate) download_dir: Option<PathBuf>,
}

/// Everything from a model to an engine that answers requests, without a socket.
#[derive(Debug, Args)]
pub(crate) struct ComposeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) chat: ChatFormatArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) observe: ObserveArgs,
    #[command(flatten)]
    pub(crate) compat: CompatArgs,

    /// YAML file of flags: names without the dashes, lists, and maps for JSON flags. The command line wins over the
    /// file, the file over the environment (OCTAVO_<FLAG>).
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub(crate) config: Option<PathBuf>,
}

/// Which model, and how it is loaded.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Catalog name, hub id (`org/name`, `org/name:file.gguf`) or path; overrides --model.
    #[arg(value_name = "MODEL")]
    pub(crate) positional: Option<String>,

    /// Catalog name, hub id or path [default: smollm2-135m-instruct].
    #[arg(long = "model", value_name = "MODEL")]
    pub(crate) named: Option<String>,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    /// Where weights come from: the model's files, or nowhere. dummy makes them up, for measuring: a folder with a config.json is
    /// enough, and of a hub's model no weights are fetched.
    #[arg(long, value_parser = values::load_format, default_value = "auto", value_name = "FORMAT")]
    pub(crate) load_format: LoadFormat,

    /// Names the API answers to; the first is the label of the metrics. Default: the model as given.
    #[arg(long, num_args = 1.., value_name = "NAME")]
    pub(crate) served_model_name: Vec<String>,

    /// Where to compute. A GPU's driver, NVRTC and cuBLASLt are looked for in the folders of OCTAVO_CUDA_LIBS (separated by
    /// colons), then in the usual places.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    pub(crate) device: Device,

    /// Folder of kernels compiled ahead of time (`octavo kernels build`), for which no NVRTC is needed [default:
    /// ../share/octavo/kernels from a binary in a folder `bin`, if it is there].
    #[arg(long, value_name = "DIR")]
    pub(crate) kernel_pack: Option<PathBuf>,

    /// Precision of weights, activations and KV cache on a GPU; auto is bfloat16, or float16 on Volta and Turing.
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    pub(crate) dtype: Dtype,

    /// What keys and values are kept as: auto (bfloat16), or int8_per_token_head, in about half the memory.
    #[arg(long, default_value = "auto", value_name = "DTYPE")]
    pub(crate) kv_cache_dtype: String,

    /// Threads that compute [default: the processors that this process may use].
    #[arg(long, value_name = "N")]
    pub(crate) cpu_threads: Option<NonZeroUsize>,

    /// Bits of activations that meet quantised weights, 12 or 8 [default: 12]. With 8 large steps are up to 1.4 times as fast, and
    /// answers about as far from those of the same weights in float32 as llama.cpp's.
    #[arg(long, value_name = "BITS", value_parser = clap::builder::PossibleValuesParser::new(["8", "12"]))]
    pub(crate) cpu_activation_bits: Option<String>,

    /// Instruction set of the processor's kernels: portable, avx2, avx512, avx512-bf16 or amx [default: the best there is].
    #[arg(long, value_name = "ISA")]
    pub(crate) cpu_isa: Option<Isa>,

    /// Only the model's own tokenizer is served: this must name the model.
    #[arg(long, value_name = "MODEL")]
    pub(crate) tokenizer: Option<String>,
}

impl ModelArgs {
    /// The model that was asked for, if one was.
    pub(crate) fn given(&self) -> Option<&str> {
        self.positional.as_deref().or(self.named.as_deref())
    }

    /// The model as given, or the default one.
    pub(crate) fn reference(&self) -> &str {
        self.given().unwrap_or(DEFAULT_MODEL)
    }
}

/// Limits of the engine.
#[derive(Debug, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    /// Context length: prompt and output together (1k = 1000, 1K = 1024; auto or -1 = the largest that fits).
    #[arg(long, value_parser = values::max_model_len, allow_hyphen_values = true, value_name = "TOKENS")]
    pub(crate) max_model_len: Option<MaxModelLen>,

    /// Requests that run at once.
    #[arg(long, value_parser = values::count, default_value = "256", value_name = "N")]
    pub(crate) max_num_seqs: usize,

    /// Token budget of a step, for prompts and outputs together.
    #[arg(long, value_parser = values::count, value_name = "TOKENS")]
    pub(crate) max_num_batched_tokens: Option<usize>,

    /// Prefill a prompt in several steps when it does not fit the budget.
    #[arg(long, default_value_t = true)]
    pub(crate) enable_chunked_prefill: bool,

    /// Most tokens of one prompt in a step while there are other requests; 0 is no bound.
    #[arg(long, value_parser = values::amount, default_value = "0", value_name = "TOKENS")]
    pub(crate) long_prefill_token_threshold: usize,

    /// Reuse the KV of prompts that begin alike; --no-enable-prefix-caching computes every prompt anew.
    #[arg(long, default_value_t = true)]
    pub(crate) enable_prefix_caching: bool,

    /// Publish what the prefix cache holds over ZeroMQ, for routers that look for prefixes: enable_kv_cache_events, endpoint,
    /// replay_endpoint, topic, ...; encoding is map, or array for readers of older releases.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) kv_events_config: Option<JsonObject>,

    /// Tokens of a KV-cache block.
    #[arg(long, value_parser = values::count, value_name = "TOKENS")]
    pub(crate) block_size: Option<usize>,

    /// Share of a GPU's memory for this instance; the processor's memory is set by --kv-cache-memory-bytes.
    #[arg(long, value_parser = values::share, value_name = "SHARE")]
    pub(crate) gpu_memory_utilization: Option<f64>,

    /// Bytes of the KV cache, in place of a share of the memory.
    #[arg(long, value_parser = values::count, value_name = "BYTES")]
    pub(crate) kv_cache_memory_bytes: Option<usize>,

    /// KV-cache blocks, in place of what fits in memory.
    #[arg(long, value_parser = values::count, value_name = "BLOCKS")]
    pub(crate) num_gpu_blocks_override: Option<usize>,

    /// On a GPU, a request's tokens do not depend on the others in its batch: slower, as kernels are not chosen by the batch.
    #[arg(long)]
    pub(crate) batch_invariant: bool,

    /// On a GPU, launch every kernel of a step instead of replaying recorded graphs: for debugging.
    #[arg(long)]
    pub(crate) enforce_eager: bool,

    /// Plan and submit a step before the tokens of the one before are known [default: on a GPU]. On the processor that gains
    /// little, and a new request waits for one step more.
    #[arg(
        long,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_parser = BoolishValueParser::new(),
        value_name = "BOOL",
        hide_possible_values = true
    )]
    pub(crate) async_scheduling: Option<bool>,

    /// Which waiting request is next.
    #[arg(long, value_enum, default_value_t = Policy::Fcfs)]
    pub(crate) scheduling_policy: Policy,

    /// Requests that may wait; more are answered with 429.
    #[arg(long, value_parser = values::count, value_name = "N")]
    pub(crate) max_num_queued_reqs: Option<usize>,

    /// Prompt tokens that may wait; more are answered with 429.
    #[arg(long, value_parser = values::count, value_name = "TOKENS")]
    pub(crate) max_num_queued_tokens: Option<usize>,
}

/// How messages become a prompt, and an output becomes a message.
#[derive(Debug, Args)]
#[command(next_help_heading = "Chat, tools and structured output")]
pub(crate) struct ChatFormatArgs {
    /// Chat template in place of the model's: a file, or the Jinja source itself.
    #[arg(long, value_name = "FILE|JINJA")]
    pub(crate) chat_template: Option<String>,

    /// What the template expects as the content of a message.
    #[arg(long, value_enum, default_value_t = ContentFormat::Auto)]
    pub(crate) chat_template_content_format: ContentFormat,

    /// Variables for the chat template, under a request's own `chat_template_kwargs`.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) default_chat_template_kwargs: Option<JsonObject>,

    /// Let requests bring a `chat_template` of their own.
    #[arg(long)]
    pub(crate) trust_request_chat_template: bool,

    /// Role of the answers.
    #[arg(long, default_value = "assistant", value_name = "ROLE")]
    pub(crate) response_role: String,

    /// Let the model decide to call tools (`tool_choice: auto`); needs --tool-call-parser.
    #[arg(long)]
    pub(crate) enable_auto_tool_choice: bool,

    /// How the model writes tool calls: hermes, llama3_json, mistral, qwen3_coder, ...
    #[arg(long, value_name = "NAME")]
    pub(crate) tool_call_parser: Option<String>,

    /// How the model writes its reasoning: qwen3, deepseek_r1, ...
    #[arg(long, value_name = "NAME")]
    pub(crate) reasoning_parser: Option<String>,

    /// Defaults of structured output: `backend`, `disable_any_whitespace`, `disable_additional_properties`.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) structured_outputs_config: Option<JsonObject>,
}

/// What requests may ask for, and what they get when they leave it open.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling and answers")]
pub(crate) struct SamplingArgs {
    /// Start of the seeds of requests that bring none: the same requests in the same order then draw the same tokens.
    #[arg(long)]
    pub(crate) seed: Option<u64>,

    /// Where sampling defaults come from: the model (auto), the API alone (vllm), or a generation_config.json (path).
    #[arg(long, value_parser = values::generation_source, default_value = "auto", value_name = "auto|vllm|PATH")]
    pub(crate) generation_config: GenerationSource,

    /// Sampling defaults that overrule those.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) override_generation_config: Option<JsonObject>,

    /// Most log-probabilities a request may ask for at a position; -1 is no bound.
    #[arg(long, value_parser = values::bound, default_value = "20", allow_hyphen_values = true, value_name = "N")]
    pub(crate) max_logprobs: Bound,
}

/// What is told of requests beyond their answers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(crate) struct ObserveArgs {
    /// How lines are written; a line about a request carries its id and its trace's.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,

    /// Send a span for each request to this OTLP collector [default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or
    /// OTEL_EXPORTER_OTLP_ENDPOINT; without one, nothing is sent]. OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is grpc, the
    /// default, or http/protobuf; OpenTelemetry's other variables are honoured too.
    #[arg(long, value_name = "URL")]
    pub(crate) otlp_traces_endpoint: Option<String>,

    /// Add spans for the stages of each sequence: queue, prefill and decode, whichever module is named.
    #[arg(long, num_args = 1.., value_enum, value_delimiter = ',', value_name = "model|worker|all", hide_possible_values = true)]
    pub(crate) collect_detailed_traces: Vec<TracedModule>,
}
