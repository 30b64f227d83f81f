//! `octavo serve`: resolves and loads a model, composes the server and listens.

mod adapters;
pub(crate) mod device;
pub(crate) mod generation;
mod granted;
pub(crate) mod images;
pub(crate) mod keys;
mod kv;
mod kv_events;
mod listen;
pub(crate) mod model;
mod parsers;
mod quantised;
pub(crate) mod settings;
mod speculation;
mod stand_in;
mod vectors;
mod watchdog;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use octavo_engine::{Engine, KvEventSink};
use octavo_kv_events::{KvEventsConfig, Publisher};
use octavo_media::MediaSettings;
use octavo_ops::{Backend, Program};
use octavo_runner::{MemoryPlan, Runner, RunnerConfig};
use octavo_server::{KvEventSource, Server, Shutdown, serve_while_loading};
use octavo_telemetry::{BuildInfo, Telemetry, TelemetryConfig, Traces};
use tracing::{info, warn};

use crate::cli::{self, ComposeArgs, EngineArgs, MaxModelLen, ServeArgs};
use crate::serve::device::Computer;
use crate::serve::listen::Bound;
use crate::serve::model::ModelFiles;
use crate::serve::settings::Settings;
use crate::system::{self, human_bytes};

/// Niceness of HTTP threads relative to compute threads: a third of the weight, which still answers a probe within
/// milliseconds on a busy machine.
#[cfg(target_os = "linux")]
const HTTP_NICENESS: i32 = 5;

pub(crate) fn run(args: ServeArgs) -> Result<()> {
    octavo_telemetry::init_logging(&settings::log_config(&args.compose.observe, None))?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.enable_all().thread_name("octavo-http").on_thread_start(make_way).build()?;
    let result = runtime.block_on(serve(args));
    // Tasks that still run have no clients any more.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Runs HTTP threads at lower priority than compute threads, since a delayed step delays every request, but a delayed
/// answer only one. Tokens that accumulate meanwhile are sent in one write.
fn make_way() {
    // On Linux, niceness is per thread; elsewhere it would apply to the whole process.
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::nice(HTTP_NICENESS) {
        tracing::debug!(%error, "cannot lower the priority of the HTTP threads");
    }
}

async fn serve(args: ServeArgs) -> Result<()> {
    let begun = Instant::now();
    let settings = Settings::of_server(&args, &|name| std::env::var(name).ok())?;
    check(&args.compose)?;
    // Before the model is loaded, so that a taken port fails at once and probes get an answer.
    let Bound { listener, place, page, curl } = listen::bind(&args.network, &settings).await?;
    info!("loading; probes answer on {place}");
    let shutdown = Shutdown::new();
    spawn_signals(&shutdown)?;

    let (limits, log_stats, keys_file) = (settings.server.connection, settings.log_stats, settings.keys_file.clone());
    let with_key = !settings.server.api_keys.is_empty() || keys_file.is_some();
    // A separate thread, whose priority the compute threads inherit.
    let (loaded, load) = tokio::sync::oneshot::channel();
    let loader = std::thread::Builder::new().name("octavo-load".into());
    loader.spawn(move || {
        // The receiver is gone if the server has ended before.
        let _ = loaded.send(compose(&args.compose, &settings));
    })?;
    let composed = tokio::select! {
        loaded = serve_while_loading(&listener, limits, load) => {
            loaded?.context("the thread that loads the model panicked")??
        }
        () = shutdown.draining() => {
            info!("stopped before the model was loaded");
            return Ok(());
        }
    };
    let Composed { engine, server, telemetry, model_name, generates, on_gpu, traces, .. } = composed;

    info!("ready after {:.3} s, {} resident", begun.elapsed().as_secs_f64(), resident());
    info!("Uvicorn running on {place} (for scripts that wait for vLLM's message)");
    info!("listening on {place}");
    if let Some(page) = page.filter(|_| generates) {
        info!("chat page: {page}/");
    }
    info!("try: {}", curl_line(&curl, &model_name, generates, with_key));
    if let Some(file) = keys_file {
        // The task ends with the runtime.
        tokio::spawn(file.follow(server.keys()));
    }
    let upkeep = log_stats.then(|| telemetry.spawn_upkeep(on_gpu));
    let handle = engine.handle();
    let served = async {
        let served = server.serve(listener, shutdown).await;
        drop(upkeep);
        let end = move || {
            engine.join();
            // Every request has ended: the remaining traces are sent now.
            drop(traces);
        };
        tokio::task::spawn_blocking(end).await?;
        info!("stopped");
        Ok(served?)
    };
    tokio::select! {
        result = served => result,
        // Neither the rest of the requests nor the engine is waited for.
        age = watchdog::hung(handle) => {
            bail!("the device hangs: no step has ended for {:.0} s; the server ends without its requests", age.as_secs_f64())
        }
    }
}

/// The composed server before it listens.
pub(crate) struct Composed {
    pub(crate) engine: Engine,
    pub(crate) server: Server,
    telemetry: Telemetry,
    /// The trace exporter, which blocks on drop to send the last traces.
    traces: Option<Traces>,
    /// The publisher, which must live as long as the engine.
    _publisher: Option<Publisher>,
    /// Whether the KV cache is in a GPU's memory.
    on_gpu: bool,
    /// The first served name.
    pub(crate) model_name: String,
    /// Whether the model generates text, and does not return vectors.
    pub(crate) generates: bool,
    /// Exclusive upper bound of token ids.
    pub(crate) vocab_size: usize,
    /// Maximum number of tokens of a prompt and its answer together.
    pub(crate) max_model_len: usize,
}

/// Composes a server for use in this process, without a socket. It blocks, as [`compose`] does.
///
/// # Errors
/// A flag is refused, or the model cannot be loaded.
pub(crate) fn compose_in_process(args: &ComposeArgs) -> Result<Composed> {
    let settings = Settings::in_process(args, &|name| std::env::var(name).ok())?;
    check(args)?;
    compose(args, &settings)
}

/// A model on its device, without an engine. Its KV cache is not allocated yet.
pub(crate) struct BareModel {
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) program: Arc<Program>,
    /// The name as given.
    pub(crate) name: String,
    /// Description of the device.
    pub(crate) device: String,
    /// Whether the model runs on the processor.
    pub(crate) on_host: bool,
    /// Tokens per KV block.
    pub(crate) block_size: usize,
    /// Number of blocks that fit the memory, including the null block.
    pub(crate) blocks: usize,
}

/// Loads a model for sequences of at most `--max-model-len` tokens. It blocks, as [`compose`] does.
///
/// # Errors
/// A flag is refused, or the model cannot be loaded.
pub(crate) fn load_model(args: &ComposeArgs) -> Result<BareModel> {
    check(args)?;
    let choice = device::choose(args)?;
    let files = ModelFiles::open(args)?;
    let trained = files.checkpoint.config().max_position_embeddings;
    if let Some(MaxModelLen::Tokens(tokens)) = args.engine.max_model_len
        && tokens > trained
    {
        bail!("--max-model-len {tokens}: the model supports at most {trained} tokens");
    }
    let (model, computer) = device::load(&choice, args, files)?;
    let Computer { backend, kv_bytes, name: device, .. } = computer;
    let block_size = block_size(&args.engine, backend.as_ref())?;
    let (_, blocks) = kv::blocks(&args.engine, &model.program, backend.as_ref(), kv_bytes, block_size, 0);
    let name = args.model.reference().to_owned();
    let on_host = kv_bytes.is_none();
    Ok(BareModel { backend, program: model.program, name, device, on_host, block_size, blocks })
}

/// Loads the model, composes the server and returns the memory that only this took. It blocks, for minutes if the model is
/// downloaded.
fn compose(args: &ComposeArgs, settings: &Settings) -> Result<Composed> {
    let composed = compose_from_files(args, settings);
    octavo_backend_cpu::return_free_pages();
    composed
}

/// Does what [`compose`] does, and leaves the memory to the allocator.
fn compose_from_files(args: &ComposeArgs, settings: &Settings) -> Result<Composed> {
    let limits = &args.engine;
    let choice = device::choose(args)?;
    let adapter_limits = adapters::limits(&args.adapters)?;
    let files = ModelFiles::open(args)?;
    let (mut model, computer) = device::load(&choice, args, files)?;
    let (backend_name, on_gpu) = (computer.backend.name(), computer.kv_bytes.is_some());
    let block_size = block_size(limits, computer.backend.as_ref())?;
    let longest = limits.longest_context(model.checkpoint.config().max_position_embeddings);
    let image_tokens = model.vision.as_ref().map_or(0, |vision| vision.tokens_at_once(longest));
    let plan = kv::plan(limits, &model, &computer, block_size, image_tokens)?;
    let Computer { backend, device, mut steps, kv_cache_dtype, .. } = computer;
    let vision = model.vision.as_ref();
    steps.tokens = device::step_tokens(limits, steps.tokens, &model.program, vision, plan.max_model_len)?;
    let runner_config = RunnerConfig {
        block_size,
        max_num_seqs: limits.max_num_seqs,
        max_num_batched_tokens: steps.tokens,
        max_model_len: plan.max_model_len,
        kv: plan.budget,
        async_scheduling: limits.async_scheduling,
        adapters: adapter_limits,
    };
    let mut server_config = settings::server_config(args, settings, &model, plan.max_model_len)?;
    let model_name = server_config.served_model_names[0].clone();
    let telemetry = Telemetry::new(TelemetryConfig {
        model_name: model_name.clone(),
        engine: 0,
        max_model_len: plan.max_model_len,
    });
    let images = model.vision.as_ref().map(|vision| vision.config(image_tokens));
    if let Some(vision) = &model.vision {
        let settings =
            images::within_memory(MediaSettings { model: args.model.reference().to_owned(), ..settings.media.clone() });
        model.text.images = Some(vision.model(&model.text.tokenizer, settings, telemetry.engine())?);
    }
    let runner = Runner::observed(backend, model.program.clone(), runner_config, images.as_ref(), |known| {
        telemetry.device(known)
    })?;
    let memory = runner.memory_plan().clone();
    log_memory(&memory);

    let traces = settings.traces.as_ref().map(|config| telemetry.start_traces(config)).transpose()?;
    if let Some(config) = &settings.traces {
        info!("exporting traces to {}", config.endpoint());
    }
    let mut engine_config = settings::engine_config(limits, settings, plan.max_model_len, steps, image_tokens);
    vectors::schedule_whole(&model.program, &mut engine_config);
    telemetry.set_cache_config(&[
        ("block_size", block_size.to_string()),
        ("num_gpu_blocks", memory.kv.blocks.to_string()),
        ("cache_dtype", kv_cache_dtype),
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
    let adapters = adapters::start(&args.adapters, adapter_limits, settings, &model)?;
    let drafts = engine_config.speculation.map(|speculation| speculation.tokens);
    let engine_metrics = drafts.map_or_else(|| telemetry.engine(), |drafts| telemetry.speculating_engine(drafts));
    let engine = Engine::spawn_with_events(Box::new(runner), engine_config, engine_metrics, sink)?;
    let server = Server::new(engine.handle(), model.text, telemetry.clone(), server_config, adapters);
    let (vocab_size, max_model_len) = (model.program.vocab_size, plan.max_model_len);
    Ok(Composed {
        engine,
        server,
        telemetry,
        traces,
        _publisher: publisher,
        on_gpu,
        generates: model.checkpoint.config().vectors.is_none(),
        model_name,
        vocab_size,
        max_model_len,
    })
}

/// Logs the capacity of the KV cache, in vLLM's words where it has them.
fn log_memory(memory: &MemoryPlan) {
    let (block_size, max_model_len) = (memory.kv.block_size, memory.max_model_len);
    let (blocks, tokens) = (memory.kv.blocks.saturating_sub(1), memory.kv_tokens());
    info!(
        "memory: weights {}, KV cache {} in {blocks} blocks of {block_size} tokens",
        human_bytes(memory.weight_bytes),
        human_bytes(memory.kv_bytes),
    );
    if memory.media_bytes > 0 {
        info!("encoder cache: {}", human_bytes(memory.media_bytes));
    }
    if memory.kv.blocks == 0 {
        return;
    }
    info!("KV cache size: {tokens} tokens");
    let concurrency = memory.max_concurrency();
    info!("Maximum concurrency for {max_model_len} tokens per request: {concurrency:.2}x");
}

/// Starts publishing KV events. Returns the publisher and the sink for the engine.
fn publish(config: &KvEventsConfig) -> Result<(Publisher, Box<dyn KvEventSink>)> {
    let (publisher, sink) = Publisher::start(config.clone())?;
    info!("publishing KV events at {}", config.endpoint);
    Ok((publisher, Box::new(sink)))
}

/// The description of the publisher for subscribers.
fn event_source(config: &KvEventsConfig, block_size: usize) -> KvEventSource {
    KvEventSource {
        rank: 0,
        endpoint: config.endpoint.clone(),
        replay_endpoint: config.replay_endpoint.clone(),
        topic: config.topic.clone(),
        block_size,
    }
}

/// Warns of flags and variables without an effect and refuses unsupported flags, before anything is loaded.
fn check(args: &ComposeArgs) -> Result<()> {
    for warning in cli::unknown_variables(environment()) {
        warn!("{warning}");
    }
    for warning in args.compat.check()? {
        warn!("{warning}");
    }
    Ok(())
}

/// The environment variables that are valid Unicode.
fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

fn block_size(args: &EngineArgs, backend: &dyn Backend) -> Result<usize> {
    let sizes = backend.block_sizes();
    let default = *sizes.first().context("the backend has no block size")?;
    match args.block_size {
        None => Ok(default),
        Some(size) if sizes.contains(&size) => Ok(size),
        Some(size) => {
            let known: Vec<_> = sizes.iter().map(usize::to_string).collect();
            bail!(
                "--block-size {size}: the {} backend supports block sizes of {} tokens",
                backend.name(),
                known.join(", ")
            )
        }
    }
}

/// Signals that arrive within this time of the first are the same signal: a supervisor often signals the process and its
/// whole group.
const SAME_SIGNAL: Duration = Duration::from_secs(1);

/// SIGTERM and SIGINT: the first begins the graceful shutdown, a later one ends the process at once. Of two that are one
/// signal, the SIGINT counts, whichever is seen first: they reach a process that waits for a processor in any order.
fn spawn_signals(shutdown: &Shutdown) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let shutdown = shutdown.clone();
    tokio::spawn(async move {
        let mut first: Option<Instant> = None;
        loop {
            let interrupted = tokio::select! {
                _ = interrupt.recv() => true,
                _ = terminate.recv() => false,
            };
            let name = if interrupted { "SIGINT" } else { "SIGTERM" };
            match first {
                None => {
                    first = Some(Instant::now());
                    info!("{name} received: shutting down");
                    if interrupted { shutdown.interrupt() } else { shutdown.signal() }
                }
                Some(first) if first.elapsed() < SAME_SIGNAL => {
                    if interrupted {
                        shutdown.skip_lag();
                    }
                }
                Some(_) => {
                    // The graceful shutdown was given up: whatever still loads or runs ends with the process.
                    warn!("{name} received again: ending now");
                    std::process::exit(1);
                }
            }
        }
    });
    Ok(())
}

fn resident() -> String {
    system::resident_memory().map_or_else(|| "unknown memory".into(), human_bytes)
}

fn curl_line(target: &str, model: &str, generates: bool, with_key: bool) -> String {
    let (route, body) = match generates {
        // Bounded: a small model at temperature 1 may not end before its context is full.
        true => (
            "v1/chat/completions",
            serde_json::json!({
                "model": model,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
                "max_tokens": 64,
            }),
        ),
        false => ("pooling", serde_json::json!({"model": model, "input": "What is the capital of France?"})),
    };
    // The key itself is not logged.
    let key = if with_key { " -H \"Authorization: Bearer $OCTAVO_API_KEY\"" } else { "" };
    format!("curl {target}/{route} -H 'Content-Type: application/json'{key} -d '{body}'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curl_line_names_a_key_where_one_is_needed() {
        let open = curl_line("http://127.0.0.1:8000", "m", true, false);
        assert!(open.starts_with("curl http://127.0.0.1:8000/v1/chat/completions -H ") && !open.contains("Bearer"));
        assert!(curl_line("http://x", "m", true, true).contains(" -H \"Authorization: Bearer $OCTAVO_API_KEY\" -d "));
    }
}
