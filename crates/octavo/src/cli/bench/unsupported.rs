//! The flags of `vllm bench serve` that are not supported.

use crate::cli::compat::Outcome::{NoEffect, Only, Refused};
use crate::cli::compat::Takes::{Json, Switch, Value, Values};
use crate::cli::compat::{Flag, Outcome, Table, flag};

const OTHER_DATASET: Outcome = NoEffect("it configures a dataset that is not supported");
const EMBEDDINGS: Outcome = NoEffect("only generation is measured");

/// The table of `octavo bench serve`.
#[derive(Debug)]
pub(crate) struct BenchServeFlags;

impl Table for BenchServeFlags {
    const FLAGS: &'static [Flag] = &[
        // The model and its tokenizer.
        flag("trust-remote-code", Switch, NoEffect("a model's own code is never run")),
        flag(
            "tokenizer-mode",
            Value,
            Only(&["auto", "hf", "slow"], "tokenizers are read from tokenizer.json or a GGUF file"),
        ),
        flag("skip-tokenizer-init", Switch, NoEffect("a tokenizer is only loaded for --tokenizer")),
        flag("lora-modules", Values, Refused("one model is measured at a time; name an adapter with --model")),
        flag("lora-assignment", Value, NoEffect("one model is measured at a time")),
        // The load.
        flag("probe-request-rate", Value, Only(&["0", "0.0"], "probe requests beside the load are not supported")),
        flag("use-beam-search", Switch, Refused("beam search is not supported")),
        flag("self-timed", Switch, Refused("traces with their own arrival times are not supported")),
        flag("profile", Switch, Refused("the server's profiler is not started; use perf or nsys")),
        flag("disable-tqdm", Switch, NoEffect("progress is only shown on a terminal")),
        flag(
            "chat-template-kwargs",
            Json,
            Refused("use --extra-body '{\"chat_template_kwargs\": {...}}' with the chat endpoint"),
        ),
        // Datasets.
        flag("random-batch-size", Value, EMBEDDINGS),
        flag("no-reranker", Switch, EMBEDDINGS),
        flag("sonnet-input-len", Value, OTHER_DATASET),
        flag("sonnet-output-len", Value, OTHER_DATASET),
        flag("sonnet-prefix-len", Value, OTHER_DATASET),
        flag("blazedit-min-distance", Value, OTHER_DATASET),
        flag("blazedit-max-distance", Value, OTHER_DATASET),
        flag("spec-bench-output-len", Value, OTHER_DATASET),
        flag("spec-bench-category", Value, OTHER_DATASET),
        flag("prefix-repetition-prefix-len", Value, OTHER_DATASET),
        flag("prefix-repetition-suffix-len", Value, OTHER_DATASET),
        flag("prefix-repetition-num-prefixes", Value, OTHER_DATASET),
        flag("prefix-repetition-output-len", Value, OTHER_DATASET),
        flag("random-mm-base-items-per-request", Value, OTHER_DATASET),
        flag("random-mm-num-mm-items-range-ratio", Value, OTHER_DATASET),
        flag("random-mm-limit-mm-per-prompt", Json, OTHER_DATASET),
        flag("random-mm-bucket-config", Value, OTHER_DATASET),
        flag("enable-multimodal-chat", Switch, OTHER_DATASET),
        flag("hf-subset", Value, OTHER_DATASET),
        flag("hf-split", Value, OTHER_DATASET),
        flag("hf-name", Value, OTHER_DATASET),
        flag("hf-output-len", Value, OTHER_DATASET),
        // Results.
        flag("plot-timeline", Switch, NoEffect("--plot FILE.svg plots the distributions of latencies instead")),
        flag("timeline-itl-thresholds", Value, NoEffect("no timeline is plotted")),
        flag("plot-dataset-stats", Switch, NoEffect("--save-detailed writes the lengths of all requests")),
    ];
}
