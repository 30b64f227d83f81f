//! `octavo serve`: resolve, load, compose, listen.

pub(crate) mod device;
pub(crate) mod generation;
mod kv;
mod kv_events;
mod listen;
mod model;
pub(crate) mod settings;
mod stand_in;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use octavo_engine::{Engine, KvEventSink};
use octavo_kv_events::{KvEventsConfig, Publisher};
use octavo_ops::{Backend, Program};
use octavo_runner::{MemoryPlan, Runner, RunnerConfig};
use octavo_server::{KvEventSource, Server, Shutdown, serve_while_loading};
use octavo_telemetry::{BuildInfo, Telemetry, TelemetryConfig, Traces};
use tracing::{info, warn};

use crate::cli::{ComposeArgs, EngineArgs, MaxModelLen, ServeArgs};
use crate::serve::device::Computer;
use crate::serve::listen::Bound;
use crate::serve::model::ModelFiles;
use crate::serve::settings::Settings;
use crate::system::{self, human_bytes};

/// By how much the threads of HTTP are nicer than those that compute: a third of the weight, enough to answer a probe in
/// milliseconds on a machine that is fully used.
#[cfg(target_os = "linux")]
const HTTP_NICENESS: i32 = 5;

pub(crate) fn run(args: ServeArgs) -> Result<()> {
    octavo_telemetry::init_logging(&settings::log_config(&args.compose.observe, None))?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.enable_all().thread_name("octavo-http").on_thread_start(make_way).build()?;
    let result = runtime.block_on(serve(args));
    // Tasks that are still running serve nobody any more.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Lets the threads that compute go first where processors are short: a step that is late delays every request, an answer
/// that is late one. Tokens that have piled up meanwhile leave in one write.
fn make_way() {
    // Linux counts niceness by thread; elsewhere it would be the whole process that waits.
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::nice(HTTP_NICENESS) {
        tracing::debug!(%error, "the threads of HTTP have no lower priority");
    }
}

async fn serve(args: ServeArgs) -> Result<()> {
    let begun = Instant::now();
    let settings = Settings::of_server(&args, &|name| std::env::var(name).ok())?;
    check(&args.compose)?;
    // Before the model is loaded, so that a taken port fails at once and probes get an answer.
    let Bound { listener, place, curl } = listen::bind(&args.network, &settings).await?;
    info!("loading; probes answer on {place}");
    let shutdown = Shutdown::new();
    spawn_signals(&shutdown)?;

    let (limits, log_stats) = (settings.connection, settings.log_stats);
    // A thread of its own: those that compute begin there, and inherit its priority.
    let (loaded, load) = tokio::sync::oneshot::channel();
    let loader = std::thread::Builder::new().name("octavo-load".into());
    loader.spawn(move || {
        // Nobody is there to take it if the server ended before.
        let _ = loaded.send(compose(&args.compose, &settings));
    })?;
    let composed = tokio::select! {
        loaded = serve_while_loading(&listener, limits, load) => {
            loaded?.context("the thread that loads the model has died")??
        }
        () = shutdown.draining() => {
            info!("ended before the model was loaded");
            return Ok(());
        }
    };
    let Composed { engine, server, telemetry, model_name, traces, .. } = composed;

    info!("ready after {:.2} s, {} resident", begun.elapsed().as_secs_f64(), resident());
    info!("try: {}", curl_line(&curl, &model_name));
    info!("for scripts that wait for vLLM's words: Uvicorn running on {place}");
    info!("listening on {place}");
    let upkeep = log_stats.then(|| telemetry.spawn_upkeep());
    let served = server.serve(listener, shutdown).await;
    drop(upkeep);
    let end = move || {
        engine.join();
        // Every request has ended: what is still to be told of them leaves now.
        drop(traces);
    };
    tokio::task::spawn_blocking(end).await?;
    info!("bye");
    Ok(served?)
}

/// Everything that runs, not yet reachable.
pub(crate) struct Composed {
    pub(crate) engine: Engine,
    pub(crate) server: Server,
    telemetry: Telemetry,
    /// Sends the last traces when dropped, which blocks.
    traces: Option<Traces>,
    /// Lives as long as there is anything to publish.
    _publisher: Option<Publisher>,
    /// The first served name.
    pub(crate) model_name: String,
    /// Token ids are below it.
    pub(crate) vocab_size: usize,
    /// Tokens of a prompt and its answer together.
    pub(crate) max_model_len: usize,
}

/// A model whose server is asked in this process, without a socket. Blocking, as [`compose`] is.
///
/// # Errors
/// Flags that are refused, or whatever keeps the model from being loaded.
pub(crate) fn compose_in_process(args: &ComposeArgs) -> Result<Composed> {
    let settings = Settings::in_process(args, &|name| std::env::var(name).ok())?;
    check(args)?;
    compose(args, &settings)
}

/// A model on its device, without an engine; its KV cache is not yet allocated.
pub(crate) struct BareModel {
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) program: Arc<Program>,
    /// As it was asked for.
    pub(crate) name: String,
    /// For people.
    pub(crate) device: String,
    /// Whether the processor computes.
    pub(crate) on_host: bool,
    /// Tokens of a KV block.
    pub(crate) block_size: usize,
    /// Blocks that there is memory for, the null block included.
    pub(crate) blocks: usize,
}

/// Loads a model for sequences of at most `--max-model-len` tokens. Blocking, as [`compose`] is.
///
/// # Errors
/// Flags that are refused, or whatever keeps the model from being loaded.
pub(crate) fn load_model(args: &ComposeArgs) -> Result<BareModel> {
    check(args)?;
    let choice = device::choose(args)?;
    let files = ModelFiles::open(args)?;
    let trained = files.checkpoint.config().max_position_embeddings;
    if let Some(MaxModelLen::Tokens(tokens)) = args.engine.max_model_len
        && tokens > trained
    {
        bail!("the model was made for at most {trained} tokens, not for {tokens}");
    }
    let (model, computer) = device::load(&choice, args, files)?;
    let Computer { backend, kv_bytes, name: device, .. } = computer;
    let block_size = block_size(&args.engine, backend.as_ref())?;
    let (_, blocks) = kv::blocks(&args.engine, &model.program, backend.as_ref(), kv_bytes, block_size);
    let name = args.model.reference().to_owned();
    let on_host = kv_bytes.is_none();
    Ok(BareModel { backend, program: model.program, name, device, on_host, block_size, blocks })
}

/// Loads the model and puts the parts together. Blocking: minutes where a model is downloaded.
fn compose(args: &ComposeArgs, settings: &Settings) -> Result<Composed> {
    let limits = &args.engine;
    let choice = device::choose(args)?;
    let files = ModelFiles::open(args)?;
    let (model, Computer { backend, device, budget, kv_bytes, .. }) = device::load(&choice, args, files)?;
    let backend_name = backend.name();
    let block_size = block_size(limits, backend.as_ref())?;
    let plan = kv::plan(limits, &model, backend.as_ref(), kv_bytes, block_size)?;
    let budget = limits.max_num_batched_tokens.unwrap_or(budget);
    let runner_config = RunnerConfig {
        block_size,
        max_num_seqs: limits.max_num_seqs,
        max_num_batched_tokens: budget,
        max_model_len: plan.max_model_len,
        kv: plan.budget,
        async_scheduling: limits.async_scheduling,
    };
    let mut server_config = settings::server_config(args, settings, &model, plan.max_model_len);
    let model_name = server_config.served_model_names[0].clone();
    let telemetry = Telemetry::new(TelemetryConfig {
        model_name: model_name.clone(),
        engine: 0,
        max_model_len: plan.max_model_len,
    });
    let runner = Runner::observed(backend, model.program.clone(), runner_config, |known| telemetry.device(known))?;
    let memory = runner.memory_plan().clone();
    log_memory(&memory);

    let traces = settings.traces.as_ref().map(|config| telemetry.start_traces(config)).transpose()?;
    if let Some(config) = &settings.traces {
        info!("traces are sent to {}", config.endpoint());
    }
    let engine_config = settings::engine_config(limits, settings, plan.max_model_len, budget);
    telemetry.set_cache_config(&[
        ("block_size", block_size.to_string()),
        ("num_gpu_blocks", memory.blocks.to_string()),
        ("cache_dtype", args.model.kv_cache_dtype.clone()),
        ("enable_prefix_caching", if engine_config.enable_prefix_caching { "True" } else { "False" }.to_owned()),
        ("kv_cache_size_tokens", memory.kv_tokens().to_string()),
    ]);
    telemetry.set_build_info(&BuildInfo {
        version: env!("CARGO_PKG_VERSION"),
        revision: env!("VCS_REVISION"),
        backend: backend_name,
        device: &device,
    });
    let (publisher, sink) = settings.kv_events.as_ref().map(publish).transpose()?.unzip();
    server_config.kv_event_sources.extend(settings.kv_events.as_ref().map(|config| event_source(config, block_size)));
    let engine = Engine::spawn_with_events(Box::new(runner), engine_config, telemetry.engine(), sink)?;
    let server = Server::new(engine.handle(), model.text, telemetry.clone(), server_config);
    let (vocab_size, max_model_len) = (model.program.vocab_size, plan.max_model_len);
    Ok(Composed { engine, server, telemetry, traces, _publisher: publisher, model_name, vocab_size, max_model_len })
}

/// What the KV cache holds, in vLLM's words where it has them.
fn log_memory(memory: &MemoryPlan) {
    let &MemoryPlan { blocks, block_size, max_model_len, .. } = memory;
    let (blocks, tokens) = (blocks.saturating_sub(1), memory.kv_tokens());
    info!(
        "memory: weights {}, KV cache {} in {blocks} blocks of {block_size} tokens",
        human_bytes(memory.weight_bytes),
        human_bytes(memory.kv_bytes),
    );
    info!("KV cache size: {tokens} tokens");
    let concurrency = tokens as f64 / max_model_len as f64;
    info!("Maximum concurrency for {max_model_len} tokens per request: {concurrency:.2}x");
}

/// Begins to publish KV events: the publisher, and where the engine puts them.
fn publish(config: &KvEventsConfig) -> Result<(Publisher, Box<dyn KvEventSink>)> {
    let (publisher, sink) = Publisher::start(config.clone())?;
    info!("KV events are published at {}", config.endpoint);
    Ok((publisher, Box::new(sink)))
}

/// What subscribers are told of them.
fn event_source(config: &KvEventsConfig, block_size: usize) -> KvEventSource {
    KvEventSource {
        rank: 0,
        endpoint: config.endpoint.clone(),
        replay_endpoint: config.replay_endpoint.clone(),
        topic: config.topic.clone(),
        block_size,
    }
}

/// Says what the flags come to, before anything is loaded.
fn check(args: &ComposeArgs) -> Result<()> {
    for warning in args.compat.check()? {
        warn!("{warning}");
    }
    Ok(())
}

fn block_size(args: &EngineArgs, backend: &dyn Backend) -> Result<usize> {
    let sizes = backend.block_sizes();
    let default = *sizes.first().context("the backend has no block size")?;
    match args.block_size {
        None => Ok(default),
        Some(size) if sizes.contains(&size) => Ok(size),
        Some(size) => {
            let known: Vec<_> = sizes.iter().map(usize::to_string).collect();
            bail!("--block-size {size}: the {} backend has blocks of {} tokens", backend.name(), known.join(", "))
        }
    }
}

/// SIGTERM and SIGINT: the first begins the graceful shutdown, the second ends it.
fn spawn_signals(shutdown: &Shutdown) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let shutdown = shutdown.clone();
    tokio::spawn(async move {
        for count in 1.. {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if count > 1 {
                // The graceful way was given up: whatever still loads or runs ends with the process.
                warn!("second signal: ending now");
                std::process::exit(1);
            }
            info!("signal received: shutting down");
            shutdown.signal();
        }
    });
    Ok(())
}

fn resident() -> String {
    system::resident_memory().map_or_else(|| "unknown memory".into(), human_bytes)
}

fn curl_line(target: &str, model: &str) -> String {
    // Bounded: a small model that draws at temperature 1 may ramble to the end of its context.
    let body = serde_json::json!({
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 64,
    });
    format!("curl {target}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
}
