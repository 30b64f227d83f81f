//! Flags of the model and of its engine: what `serve`, `run-batch` and `chat` with a model share.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use clap::builder::BoolishValueParser;
use octavo_backend_cpu::Isa;
use octavo_engine::SchedulingPolicy;
use octavo_telemetry::LogFormat;

use crate::cli::DEFAULT_MODEL;
use crate::cli::adapters::AdapterArgs;
use crate::cli::compat::CompatArgs;
use crate::cli::media::MediaArgs;
use crate::cli::values::{
    self, Bound, ContentFormatFlag, Device, Dtype, GenerationSource, JsonObject, LoadFormat, MaxModelLen, Numa,
    Quantization, TracedModule,
};
use crate::cli::vectors::VectorArgs;

/// Where a model comes from.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct SourceArgs {
    /// Branch, tag or commit of a hub repository.
    #[arg(long)]
    pub(crate) revision: Option<String>,

    /// Use only models that are in the cache.
    #[arg(long, env = "HF_HUB_OFFLINE", hide_env_values = true, value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) offline: bool,

    /// Access token for the hub.
    ///
    /// By default HF_TOKEN is used, or the file that `hf auth login` writes.
    #[arg(long, value_name = "TOKEN")]
    pub(crate) hf_token: Option<String>,

    /// Folder for downloads from the hub, instead of HF_HUB_CACHE.
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
    pub(crate) vectors: VectorArgs,
    #[command(flatten)]
    pub(crate) adapters: AdapterArgs,
    #[command(flatten)]
    pub(crate) media: MediaArgs,
    #[command(flatten)]
    pub(crate) observe: ObserveArgs,
    #[command(flatten)]
    pub(crate) compat: CompatArgs,

    /// Read flags from a YAML file.
    ///
    /// Keys are flag names without the dashes; a JSON flag takes a map. The command line overrides the file, and the
    /// file overrides the environment (OCTAVO_<FLAG>).
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub(crate) config: Option<PathBuf>,
}

/// Which model, and how it is loaded.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Catalog name, hub id (`org/name`, `org/name:file.gguf`) or path.
    ///
    /// Overrides --model. `octavo pull --list` lists the catalog.
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

    /// How the weights are quantised: the checkpoint says so itself, and another name than its own is an error.
    #[arg(long, value_parser = values::quantization, value_name = "METHOD")]
    pub(crate) quantization: Option<Quantization>,

    /// Names of the model in the API [default: the model as given].
    ///
    /// The first name is also the model's label in the metrics.
    #[arg(long, num_args = 1.., value_name = "NAME")]
    pub(crate) served_model_name: Vec<String>,

    /// Device to compute on: auto, cpu, cuda or candle.
    ///
    /// With `auto` a usable GPU is preferred to the processor. A GPU that was given to this process (NVIDIA_VISIBLE_DEVICES, a
    /// device file in a container) and cannot be used is an error. The NVIDIA driver, NVRTC and cuBLASLt are searched for
    /// in the folders of OCTAVO_CUDA_LIBS (separated by colons) and then in the usual places. `candle` is the reference backend,
    /// which is slow; a binary has it if it was built with the feature `candle`.
    #[arg(long, value_enum, default_value_t = Device::Auto, hide_possible_values = true)]
    pub(crate) device: Device,

    /// Folder of kernels from `octavo kernels build`, which need no NVRTC.
    ///
    /// By default ../share/octavo/kernels is used if it exists and the binary is in a folder `bin`.
    #[arg(long, value_name = "DIR")]
    pub(crate) kernel_pack: Option<PathBuf>,

    /// Data type: auto, bfloat16, float16 or float32.
    ///
    /// On a GPU it applies to weights and activations, and `auto` is bfloat16, or float16 on GPUs without bfloat16 (Volta,
    /// Turing). On a processor it applies to weights that are not quantised, and `auto` keeps those in float32 as bfloat16
    /// and the others as they are. Quantised weights are not affected.
    #[arg(long, value_enum, default_value_t = Dtype::Auto, hide_possible_values = true)]
    pub(crate) dtype: Dtype,

    /// Data type of the KV cache: auto, fp8 or int8_per_token_head.
    ///
    /// `auto` is bfloat16, or fp8 for a checkpoint that is made for it. `fp8` (e4m3, with the scales of the checkpoint or 1) takes
    /// half the memory, and int8_per_token_head, which is more exact without such scales, a little more. On a GPU, `auto` is
    /// the type of --dtype, or fp8 as above, and there is no int8_per_token_head.
    #[arg(long, default_value = "auto", value_name = "DTYPE")]
    pub(crate) kv_cache_dtype: String,

    /// Number of compute threads [default: the available cores; the hardware threads of a core count once].
    #[arg(long, value_name = "N")]
    pub(crate) cpu_threads: Option<NonZeroUsize>,

    /// Precision of activations that are multiplied with quantized weights [default: 8].
    ///
    /// With 8 bits, outliers and the inputs of the head have 12, and answers differ from those in float32 about half as much as
    /// llama.cpp's do. With 12 bits, they differ a quarter as much as with 8, and large steps take up to 1.3 times as long.
    #[arg(long, value_name = "BITS", value_parser = clap::builder::PossibleValuesParser::new(["8", "12"]))]
    pub(crate) cpu_activation_bits: Option<String>,

    /// Instruction set of the CPU kernels [default: the best available].
    ///
    /// On x86-64 one of portable, avx2, avx-vnni, avx512, avx512-bf16 and amx; on AArch64 one of portable, neon, dotprod,
    /// i8mm and i8mm-bf16.
    #[arg(long, value_name = "ISA")]
    pub(crate) cpu_isa: Option<Isa>,

    /// Copies of the weights on a processor with several NUMA nodes: auto or off.
    ///
    /// `auto` keeps a copy on each node if they take at most half of the available memory together, so that no thread reads the
    /// weights of another node. There is one copy if the threads are not exactly as many as the available cores, because the
    /// system then places them.
    #[arg(long, value_enum, default_value_t = Numa::Auto, hide_possible_values = true)]
    pub(crate) cpu_numa: Numa,

    /// Accepted for compatibility with vLLM; must name the model itself.
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
    /// Context length, prompt and answer together (8k, auto).
    ///
    /// 1k is 1000 and 1K is 1024. `auto` or -1 takes the largest length that fits in memory.
    #[arg(long, value_parser = values::max_model_len, allow_hyphen_values = true, value_name = "TOKENS")]
    pub(crate) max_model_len: Option<MaxModelLen>,

    /// Maximum number of running requests.
    #[arg(long, value_parser = values::count, default_value = "256", value_name = "N")]
    pub(crate) max_num_seqs: usize,

    /// Maximum number of tokens in a step.
    #[arg(long, value_parser = values::count, value_name = "TOKENS")]
    pub(crate) max_num_batched_tokens: Option<usize>,

    /// Maximum time of a step in milliseconds; 0 sets no limit [default: 100 on a processor, 0 on a GPU].
    ///
    /// A long prompt or many sequences are then spread over more steps, and short requests wait for less. The time is
    /// estimated from that of earlier steps. A step may take five times the time of reading the weights if that is more.
    #[arg(long, value_parser = values::amount, value_name = "MS")]
    pub(crate) max_step_ms: Option<usize>,

    /// Split long prompts over several steps [default: on].
    #[arg(long, default_value_t = true)]
    pub(crate) enable_chunked_prefill: bool,

    /// Maximum tokens of one prompt in a step while other requests run; 0 sets no limit.
    #[arg(long, value_parser = values::amount, default_value = "0", value_name = "TOKENS")]
    pub(crate) long_prefill_token_threshold: usize,

    /// Share of the KV cache that stays free for the output of running requests when another is admitted.
    #[arg(long, value_parser = values::part, default_value = "0.01", value_name = "SHARE")]
    pub(crate) watermark: f64,

    /// Reuse the KV cache of common prefixes [default: on].
    ///
    /// With --no-enable-prefix-caching every prompt is computed from its first token.
    #[arg(long, default_value_t = true)]
    pub(crate) enable_prefix_caching: bool,

    /// Publish the contents of the prefix cache over ZeroMQ, for prefix-aware routers.
    ///
    /// Keys: enable_kv_cache_events, endpoint, replay_endpoint, topic and others. `encoding` is map, or array for
    /// readers of older releases.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) kv_events_config: Option<JsonObject>,

    /// Draft tokens and verify several of them in one step, where that pays. Answers stay the same.
    ///
    /// Keys: method (ngram), num_speculative_tokens, prompt_lookup_min and prompt_lookup_max, the lengths of the n-grams
    /// that are looked up in the prompt and the output.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) speculative_config: Option<JsonObject>,

    /// Number of tokens in a KV-cache block.
    #[arg(long, value_parser = values::count, value_name = "TOKENS")]
    pub(crate) block_size: Option<usize>,

    /// Share of a GPU's memory to use, from 0 to 1.
    ///
    /// Use --kv-cache-memory-bytes to limit the memory on the processor.
    #[arg(long, value_parser = values::share, value_name = "SHARE")]
    pub(crate) gpu_memory_utilization: Option<f64>,

    /// Size of the KV cache in bytes (4G is 4 GiB).
    #[arg(long, value_parser = values::count, value_name = "BYTES")]
    pub(crate) kv_cache_memory_bytes: Option<usize>,

    /// Number of KV-cache blocks, instead of as many as fit in memory.
    #[arg(long, value_parser = values::count, value_name = "BLOCKS")]
    pub(crate) num_gpu_blocks_override: Option<usize>,

    /// On a GPU, give the same tokens in any batch, at the cost of speed.
    #[arg(long)]
    pub(crate) batch_invariant: bool,

    /// On a GPU, launch every kernel separately instead of replaying recorded graphs, for debugging.
    #[arg(long)]
    pub(crate) enforce_eager: bool,

    /// Schedule a step before the previous one has ended [default: on for GPUs].
    ///
    /// On the processor this gains little, and a new request waits for one more step.
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

    /// Order of requests: fcfs (first come, first served), priority or fair.
    ///
    /// `fair` serves the client first that has received the least service. All sequences with the same API key are one
    /// client; without keys, those from the same address. A client with more than its part of the running requests
    /// makes way for others.
    #[arg(long, value_parser = values::scheduling_policy(), default_value = "fcfs", hide_possible_values = true)]
    pub(crate) scheduling_policy: SchedulingPolicy,

    /// Smallest `priority` that a request may have; smaller ones, which are more urgent, are raised to it.
    #[arg(long, allow_hyphen_values = true, value_name = "N")]
    pub(crate) min_priority: Option<i64>,

    /// Maximum number of waiting requests; further ones get status 429.
    #[arg(long, value_parser = values::count, value_name = "N")]
    pub(crate) max_num_queued_reqs: Option<usize>,

    /// Maximum number of waiting prompt tokens; further requests get status 429.
    #[arg(long, value_parser = values::count, value_name = "TOKENS")]
    pub(crate) max_num_queued_tokens: Option<usize>,
}

impl EngineArgs {
    /// The longest context that the flags allow a model with a context of `trained` tokens. The sizing of the KV cache
    /// refuses what exceeds the model's limit.
    pub(crate) fn longest_context(&self, trained: usize) -> usize {
        match self.max_model_len {
            Some(MaxModelLen::Tokens(tokens)) => tokens.min(trained),
            Some(MaxModelLen::Auto) | None => trained,
        }
    }
}

/// How messages become a prompt, and an output becomes a message.
#[derive(Debug, Args)]
#[command(next_help_heading = "Chat, tools and structured output")]
pub(crate) struct ChatFormatArgs {
    /// Chat template, as a file or Jinja source.
    ///
    /// By default the model's own template is used.
    #[arg(long, value_name = "FILE|JINJA")]
    pub(crate) chat_template: Option<String>,

    /// Type of message content that the chat template expects.
    #[arg(long, value_parser = values::content_format(), default_value = "auto")]
    pub(crate) chat_template_content_format: ContentFormatFlag,

    /// Default variables for the chat template.
    ///
    /// A request's `chat_template_kwargs` override them.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) default_chat_template_kwargs: Option<JsonObject>,

    /// Allow requests to bring their own `chat_template`.
    ///
    /// Each is rendered by a process of its own with 512 MiB of memory and two seconds of a processor.
    #[arg(long)]
    pub(crate) trust_request_chat_template: bool,

    /// Role of the answers.
    #[arg(long, default_value = "assistant", value_name = "ROLE")]
    pub(crate) response_role: String,

    /// Let the model decide when to call tools.
    ///
    /// It may whenever a parser of tool calls is known. With this flag, the server does not start without one.
    #[arg(long)]
    pub(crate) enable_auto_tool_choice: bool,

    /// Syntax of tool calls: auto, none, hermes, ...
    ///
    /// `auto` takes the syntax that the chat template shows; `none` refuses requests that let the model decide.
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub(crate) tool_call_parser: String,

    /// Syntax of reasoning: auto, none, qwen3, ...
    ///
    /// `auto` takes the syntax that the chat template shows; with `none`, reasoning is part of the content.
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub(crate) reasoning_parser: String,

    /// Defaults of structured output.
    ///
    /// Keys: `backend`, `disable_any_whitespace` and `disable_additional_properties`.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) structured_outputs_config: Option<JsonObject>,
}

/// What requests may ask for, and what they get when they leave it open.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling and answers")]
pub(crate) struct SamplingArgs {
    /// Random seed for requests that bring none.
    ///
    /// The same requests in the same order then get the same tokens.
    #[arg(long)]
    pub(crate) seed: Option<u64>,

    /// Sampling defaults: auto, vllm or a file.
    ///
    /// `auto` takes what the model recommends: its generation_config.json, or else its entry in the catalog. `vllm`
    /// takes the API's own defaults.
    #[arg(long, value_parser = values::generation_source, default_value = "auto", value_name = "SOURCE")]
    pub(crate) generation_config: GenerationSource,

    /// Sampling defaults that override those of --generation-config.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) override_generation_config: Option<JsonObject>,

    /// Maximum number of log-probabilities that a request may ask for; -1 sets no limit.
    #[arg(long, value_parser = values::bound, default_value = "20", allow_hyphen_values = true, value_name = "N")]
    pub(crate) max_logprobs: Bound,
}

/// What is told of requests beyond their answers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(crate) struct ObserveArgs {
    /// Format of log lines.
    ///
    /// A line about a request carries the ids of the request and of its trace.
    #[arg(long, value_parser = values::log_format(), default_value = "text")]
    pub(crate) log_format: LogFormat,

    /// Send a span for each request to this OTLP collector.
    ///
    /// By default OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT is used; without them nothing is
    /// sent. OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is grpc (the default) or http/protobuf. OpenTelemetry's other variables
    /// apply too.
    #[arg(long, value_name = "URL")]
    pub(crate) otlp_traces_endpoint: Option<String>,

    /// Add spans for queueing, prefill and decode of each sequence, for any value.
    #[arg(long, num_args = 1.., value_enum, value_delimiter = ',', value_name = "model|worker|all", hide_possible_values = true)]
    pub(crate) collect_detailed_traces: Vec<TracedModule>,
}
