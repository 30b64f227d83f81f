//! The table of flags that are not supported.

use super::Outcome::{NoEffect, Only, Refused};
use super::Takes::{Json, Switch, Value, Values};
use super::{Flag, Outcome, Takes};

/// A row of a table.
pub(crate) const fn flag(name: &'static str, takes: Takes, outcome: Outcome) -> Flag {
    Flag { name, takes, outcome }
}

const GRAPHS: Outcome = NoEffect("compilation and CUDA graphs are not configurable, except for --enforce-eager");
const ONE_RANK: Outcome = NoEffect("one process serves one copy of the model");
const ONE: Outcome = Only(&["1"], "a server computes on one device; run one server per device behind a load balancer");
const FIRST: Outcome =
    Only(&["0"], "a server computes on one device; run one server per device behind a load balancer");
const LORA: Outcome = Refused("this kind of LoRA adapters is not supported");
const LORA_WHOLE: Outcome = NoEffect("one device computes the whole model");
const SPECULATION: Outcome =
    NoEffect("--speculative-config configures speculative decoding; answers are the same without it, but slower");
const SCALE_OUT: Outcome = Refused("the render routes are always on, and the other scale-out routes are not supported");
const PLUGIN: Outcome = Refused("Python plug-ins cannot be loaded into this server");
const MEDIA: Outcome =
    NoEffect("there is one loader and one encoder of images, and audio and video inputs are not supported");
const CONTEXT: Outcome =
    Refused("it changes what the model computes, and only the model's own configuration is supported");
const TRANSFER: Outcome = Refused("transferring the KV cache between servers is not supported");
const ACCESS_LOG: Outcome = NoEffect("no access log is written; --enable-log-requests logs requests");
const REMOVED: Outcome = NoEffect("vLLM has removed it together with its old scheduler");
const EXPERTS: Outcome = NoEffect("one device holds all experts");
const TOKENIZER: &str =
    "tokenizers are read from tokenizer.json or a GGUF file; tekken.json and vLLM's own tokenizers are not supported";
const TASK: &str = "vLLM has replaced this flag; use --runner pooling for embeddings and scores";
const ONE_IMPLEMENTATION: Outcome = NoEffect("attention has one implementation for each device");
const LLGUIDANCE: Outcome = NoEffect("llguidance compiles all grammars");

/// vLLM's flags that are not supported, by subject. A flag that is neither here nor in the argument structs is unknown.
pub(crate) const FLAGS: &[Flag] = &[
    // Model and files.
    flag("trust-remote-code", Switch, NoEffect("a model's own code is never run")),
    flag("tokenizer-mode", Value, Only(&["auto", "hf", "slow"], TOKENIZER)),
    flag("skip-tokenizer-init", Switch, Refused("the server needs the tokenizer: requests and answers are text")),
    flag("tokenizer-revision", Value, Refused("the tokenizer comes with the model; use --revision for both")),
    flag("code-revision", Value, NoEffect("a model's own code is never run")),
    flag("hf-config-path", Value, CONTEXT),
    flag("rope-scaling", Json, CONTEXT),
    flag("rope-theta", Value, CONTEXT),
    flag("disable-sliding-window", Switch, CONTEXT),
    flag(
        "config-format",
        Value,
        Only(&["auto", "hf"], "only the configuration of a Hugging Face directory or of a GGUF file is read"),
    ),
    flag(
        "model-loader-extra-config",
        Json,
        NoEffect("weights are always memory-mapped, and the loader has no options"),
    ),
    flag("safetensors-load-strategy", Value, NoEffect("weight files are memory-mapped")),
    flag("ignore-patterns", Values, NoEffect("only the files that the model needs are downloaded")),
    flag("use-tqdm-on-load", Switch, NoEffect("progress is shown on a terminal and logged elsewhere")),
    flag("pt-load-map-location", Value, NoEffect("PyTorch files are not read")),
    flag("model-impl", Value, NoEffect("each architecture has one implementation")),
    flag("task", Value, Only(&["auto", "generate"], TASK)),
    flag("enable-prompt-embeds", Switch, Refused("prompts are text or token ids")),
    flag("logits-processors", Values, PLUGIN),
    flag("logits-processor-pattern", Value, PLUGIN),
    flag("io-processor-plugin", Value, PLUGIN),
    flag("enable-return-routed-experts", Switch, Refused("routed experts are not reported")),
    flag("override-attention-dtype", Value, NoEffect("attention always accumulates in float32")),
    flag("disable-cascade-attn", Switch, ONE_IMPLEMENTATION),
    flag("enable-sleep-mode", Switch, NoEffect("/sleep releases no memory; scale the deployment to zero instead")),
    // Compilation and graphs.
    flag("optimization-level", Value, GRAPHS),
    flag("compilation-config", Json, GRAPHS),
    flag("cudagraph-capture-sizes", Values, GRAPHS),
    flag("max-cudagraph-capture-size", Value, GRAPHS),
    flag("cuda-graph-sizes", Values, GRAPHS),
    flag("cudagraph-metrics", Switch, GRAPHS),
    flag("max-seq-len-to-capture", Value, GRAPHS),
    flag("attention-backend", Value, ONE_IMPLEMENTATION),
    flag("attention-config", Json, ONE_IMPLEMENTATION),
    flag("kernel-config", Json, NoEffect("kernels are chosen by the device")),
    flag("moe-backend", Value, NoEffect("kernels are chosen by the device")),
    flag("performance-mode", Value, NoEffect("set --max-num-seqs and --max-num-batched-tokens instead")),
    // Memory.
    flag("swap-space", Value, NoEffect("a preempted request is recomputed, never swapped")),
    flag("cpu-offload-gb", Value, NoEffect("weights are never offloaded; on a GPU they must fit its memory")),
    flag("kv-offloading-size", Value, NoEffect("the KV cache is never offloaded")),
    flag("kv-offloading-backend", Value, NoEffect("the KV cache is never offloaded")),
    flag("calculate-kv-scales", Switch, NoEffect("an 8-bit KV cache has a scale for each token and head")),
    flag("kv-sharing-fast-prefill", Switch, NoEffect("no supported model shares KV between layers")),
    flag(
        "prefix-caching-hash-algo",
        Value,
        NoEffect("blocks are always keyed by sha256_cbor, and their tokens are compared on a hit"),
    ),
    flag("kv-cache-metrics", Switch, NoEffect("the ages of blocks are not measured")),
    flag("kv-cache-metrics-sample", Value, NoEffect("the ages of blocks are not measured")),
    flag(
        "disable-hybrid-kv-cache-manager",
        Switch,
        NoEffect("layers with a sliding window always have KV blocks of their own"),
    ),
    flag("mamba-cache-dtype", Value, NoEffect("no supported model has state-space layers")),
    flag("mamba-ssm-cache-dtype", Value, NoEffect("no supported model has state-space layers")),
    flag("mamba-block-size", Value, NoEffect("no supported model has state-space layers")),
    flag("mamba-cache-mode", Value, NoEffect("no supported model has state-space layers")),
    // Scheduler.
    flag(
        "scheduler-reserve-full-isl",
        Switch,
        NoEffect("a prompt is admitted only if there are blocks for all of it, and they are reserved"),
    ),
    flag("max-num-partial-prefills", Value, NoEffect("prompts share the step's token budget in order of arrival")),
    flag("max-long-partial-prefills", Value, NoEffect("prompts share the step's token budget in order of arrival")),
    flag("disable-chunked-mm-input", Switch, MEDIA),
    flag("scheduler-cls", Value, PLUGIN),
    flag("num-scheduler-steps", Value, REMOVED),
    flag("multi-step-stream-outputs", Switch, REMOVED),
    flag("num-lookahead-slots", Value, REMOVED),
    flag("scheduler-delay-factor", Value, REMOVED),
    flag("preemption-mode", Value, REMOVED),
    flag("use-v2-block-manager", Switch, REMOVED),
    flag("disable-async-output-proc", Switch, REMOVED),
    flag("max-parallel-loading-workers", Value, REMOVED),
    flag("tokenizer-pool-size", Value, NoEffect("tokenising is spread over the processor's cores")),
    flag("tokenizer-pool-type", Value, NoEffect("tokenising is spread over the processor's cores")),
    flag("renderer-num-workers", Value, NoEffect("rendering is spread over the processor's cores")),
    flag("api-server-count", Value, NoEffect("one process answers on all the processor's cores")),
    flag("disable-frontend-multiprocessing", Switch, NoEffect("the server is a single process")),
    // Devices and ranks.
    flag("tensor-parallel-size", Value, ONE),
    flag("pipeline-parallel-size", Value, ONE),
    flag("data-parallel-size", Value, ONE),
    flag("data-parallel-size-local", Value, ONE),
    flag("prefill-context-parallel-size", Value, ONE),
    flag("decode-context-parallel-size", Value, ONE),
    flag("nnodes", Value, ONE),
    flag("node-rank", Value, FIRST),
    flag("data-parallel-rank", Value, FIRST),
    flag("data-parallel-start-rank", Value, FIRST),
    flag("data-parallel-address", Value, ONE_RANK),
    flag("data-parallel-rpc-port", Value, ONE_RANK),
    flag("data-parallel-backend", Value, ONE_RANK),
    flag("data-parallel-hybrid-lb", Switch, ONE_RANK),
    flag("data-parallel-external-lb", Switch, ONE_RANK),
    flag("master-addr", Value, ONE_RANK),
    flag("master-port", Value, ONE_RANK),
    flag("headless", Switch, Refused("the engine cannot run without its server")),
    flag("distributed-executor-backend", Value, ONE_RANK),
    flag("engine-use-ray", Switch, ONE_RANK),
    flag("worker-use-ray", Switch, ONE_RANK),
    flag("ray-workers-use-nsight", Switch, ONE_RANK),
    flag("disable-custom-all-reduce", Switch, ONE_RANK),
    flag("worker-cls", Value, PLUGIN),
    flag("worker-extension-cls", Value, PLUGIN),
    flag("enable-expert-parallel", Switch, EXPERTS),
    flag("all2all-backend", Value, EXPERTS),
    flag("enable-eplb", Switch, EXPERTS),
    flag("eplb-config", Json, EXPERTS),
    flag("expert-placement-strategy", Value, EXPERTS),
    flag("enable-dbo", Switch, EXPERTS),
    flag("device-ids", Value, Refused("the server uses the first visible GPU; select it with CUDA_VISIBLE_DEVICES")),
    // LoRA and speculation.
    flag("default-mm-loras", Json, LORA),
    flag("enable-lora-bias", Switch, LORA),
    flag("fully-sharded-loras", Switch, LORA_WHOLE),
    flag("lora-extra-vocab-size", Value, LORA),
    flag("lora-dtype", Value, NoEffect("the numbers of an adapter are kept as they are")),
    flag("speculative-model", Value, SPECULATION),
    flag("num-speculative-tokens", Value, SPECULATION),
    flag("spec-method", Value, SPECULATION),
    flag("spec-model", Value, SPECULATION),
    flag("spec-tokens", Value, SPECULATION),
    // Images, sound, video.
    flag("media-io-kwargs", Json, MEDIA),
    flag("trust-request-mm-kwargs", Switch, NoEffect("requests with mm_processor_kwargs are refused")),
    flag("mm-processor-cache-type", Value, MEDIA),
    flag("disable-mm-preprocessor-cache", Switch, NoEffect("set --mm-processor-cache-gb 0 instead")),
    flag("mm-shm-cache-max-object-size-mb", Value, MEDIA),
    flag("mm-encoder-tp-mode", Value, MEDIA),
    flag("mm-encoder-attn-backend", Value, MEDIA),
    flag("enable-multimodal-encoder-data-parallel", Switch, MEDIA),
    flag("enable-mm-embeds", Switch, MEDIA),
    flag("interleave-mm-strings", Switch, MEDIA),
    flag("skip-mm-profiling", Switch, MEDIA),
    flag("video-pruning-rate", Value, MEDIA),
    // Structured output and parsers.
    flag(
        "logprobs-mode",
        Value,
        Only(&["raw_logprobs"], "log-probabilities are those of the model, before temperature and penalties"),
    ),
    flag("guided-decoding-backend", Value, LLGUIDANCE),
    flag("guided-decoding-disable-fallback", Switch, LLGUIDANCE),
    flag(
        "guided-decoding-disable-any-whitespace",
        Switch,
        Refused("use --structured-outputs-config.disable_any_whitespace true"),
    ),
    flag(
        "guided-decoding-disable-additional-properties",
        Switch,
        Refused("use --structured-outputs-config.disable_additional_properties true"),
    ),
    flag("reasoning-config", Json, Refused("use --reasoning-parser to set the syntax of reasoning")),
    flag("tool-parser-plugin", Value, PLUGIN),
    flag("reasoning-parser-plugin", Value, PLUGIN),
    flag("tool-server", Value, Refused("the server runs no tools itself")),
    flag(
        "exclude-tools-when-tool-choice-none",
        Switch,
        Refused("chat templates always receive the tools of a request"),
    ),
    flag("return-tokens-as-token-ids", Switch, Refused("set return_tokens_as_token_ids in the request instead")),
    // HTTP.
    flag("middleware", Values, PLUGIN),
    flag("ssl-ciphers", Value, Refused("the cipher suites are fixed to the safe ones of TLS 1.2 and 1.3")),
    flag("enable-offline-docs", Switch, NoEffect("the pages that describe the API need no network")),
    flag("enable-scale-out", Switch, SCALE_OUT),
    flag("tokens-only", Switch, SCALE_OUT),
    // Logs, metrics, traces.
    flag("uvicorn-log-level", Value, ACCESS_LOG),
    flag("disable-uvicorn-access-log", Switch, ACCESS_LOG),
    flag("disable-access-log-for-endpoints", Values, ACCESS_LOG),
    flag("disable-log-requests", Switch, NoEffect("requests are logged only with --enable-log-requests")),
    flag(
        "enable-log-deltas",
        Switch,
        NoEffect("streamed deltas are not logged; --enable-log-outputs logs whole answers"),
    ),
    flag("log-error-stack", Switch, NoEffect("errors are logged as sentences")),
    flag("log-config-file", Value, NoEffect("logging is configured by VLLM_LOGGING_LEVEL, RUST_LOG and --log-format")),
    flag("show-hidden-metrics-for-version", Value, NoEffect("no metric is hidden")),
    flag("enable-layerwise-nvtx-tracing", Switch, NoEffect("steps carry no NVTX ranges")),
    flag("enable-mfu-metrics", Switch, NoEffect("the FLOPs and bytes of steps are always counted")),
    flag("enable-logging-iteration-details", Switch, NoEffect("steps are not logged")),
    flag("profiler-config", Json, NoEffect("/start_profile is not supported; use perf or nsys")),
    flag("custom-histogram-buckets", Json, Refused("histograms have vLLM's default buckets only")),
    // Other systems.
    flag("kv-transfer-config", Json, TRANSFER),
    flag("ec-transfer-config", Json, TRANSFER),
    flag("weight-transfer-config", Json, TRANSFER),
    flag("additional-config", Json, NoEffect("it configures vLLM's platform plug-ins, which are not used here")),
];
