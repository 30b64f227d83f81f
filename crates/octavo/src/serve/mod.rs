//! `octavo serve`: resolve, load, compose, listen.

mod kv;
mod model;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use octavo_backend_candle::CandleBackend;
use octavo_engine::{Engine, EngineConfig, SchedulingPolicy};
use octavo_ops::Backend;
use octavo_runner::{Runner, RunnerConfig};
use octavo_server::{ConnectionLimits, Server, ServerConfig, Shutdown, serve_while_loading};
use octavo_telemetry::{LogConfig, Telemetry, TelemetryConfig};
use tokio::net::{TcpListener, TcpSocket};
use tracing::{info, warn};

use crate::cli::{Device, Dtype, Policy, ServeArgs};
use crate::serve::model::LoadedModel;
use crate::system::{self, human_bytes};

/// Connections that wait to be accepted: a burst of clients must not see a refusal.
const BACKLOG: u32 = 4096;

/// Token budget of a step on the candle backend. Smaller than vLLM's 2048: a step of that many tokens takes this
/// backend seconds, and every running request would wait for it.
const CANDLE_BUDGET: usize = 512;

pub(crate) fn run(args: ServeArgs) -> Result<()> {
    octavo_telemetry::init_logging(&LogConfig::default())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("octavo-http").build()?;
    let result = runtime.block_on(serve(args));
    // Tasks that are still running serve nobody any more.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn serve(args: ServeArgs) -> Result<()> {
    let begun = Instant::now();
    check_device(&args)?;
    // Before the model is loaded, so that a taken port fails at once and probes get an answer.
    let listener = listen(&args).await?;
    let address = listener.local_addr()?;
    info!("loading; probes answer on http://{address}");
    let shutdown = Shutdown::new();
    spawn_signals(&shutdown)?;

    let reference = args.model_positional.clone().unwrap_or_else(|| args.model.clone());
    let load = tokio::task::spawn_blocking(move || compose(&args, &reference));
    let composed = tokio::select! {
        loaded = serve_while_loading(&listener, ConnectionLimits::default(), load) => loaded???,
        () = shutdown.draining() => {
            info!("ended before the model was loaded");
            return Ok(());
        }
    };
    let Composed { engine, server, telemetry, model_name } = composed;

    info!("ready after {:.2} s, {} resident", begun.elapsed().as_secs_f64(), resident());
    info!("try: {}", curl_line(address, &model_name));
    info!("listening on http://{address}");
    let upkeep = telemetry.spawn_upkeep();
    let served = server.serve(listener, shutdown).await;
    drop(upkeep);
    tokio::task::spawn_blocking(move || engine.join()).await?;
    info!("bye");
    Ok(served?)
}

/// Everything that runs, not yet reachable.
struct Composed {
    engine: Engine,
    server: Server,
    telemetry: Telemetry,
    model_name: String,
}

/// Loads the model and puts the parts together. Blocking: minutes where a model is downloaded.
fn compose(args: &ServeArgs, reference: &str) -> Result<Composed> {
    let model = LoadedModel::load(args, reference)?;
    let mut backend = CandleBackend::new();
    model.load_into(&mut backend)?;
    let block_size = block_size(args, &backend)?;
    let plan = kv::plan(args, &model, &backend, block_size)?;
    let budget = args.max_num_batched_tokens.unwrap_or(CANDLE_BUDGET);
    let runner_config = RunnerConfig {
        block_size,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: budget,
        max_model_len: plan.max_model_len,
        kv: plan.budget,
    };
    let runner = Runner::new(Box::new(backend), model.program.clone(), runner_config)?;
    let memory = runner.memory_plan().clone();
    let tokens = (memory.blocks - 1) * block_size;
    info!(
        "memory: weights {}, KV cache {} in {} blocks of {block_size} tokens",
        human_bytes(memory.weight_bytes),
        human_bytes(memory.kv_bytes),
        memory.blocks - 1
    );
    info!("KV cache size: {tokens} tokens");
    info!(
        "Maximum concurrency for {} tokens per request: {:.2}x",
        plan.max_model_len,
        tokens as f64 / plan.max_model_len as f64
    );

    let model_name = args.served_model_name.first().cloned().unwrap_or_else(|| reference.to_owned());
    let telemetry = Telemetry::new(TelemetryConfig {
        model_name: model_name.clone(),
        engine: 0,
        max_model_len: plan.max_model_len,
    });
    let engine_config = engine_config(args, plan.max_model_len, budget);
    telemetry.set_cache_config(&[
        ("block_size", block_size.to_string()),
        ("num_gpu_blocks", memory.blocks.to_string()),
        ("cache_dtype", "auto".to_owned()),
        ("enable_prefix_caching", if engine_config.enable_prefix_caching { "True" } else { "False" }.to_owned()),
        ("kv_cache_size_tokens", tokens.to_string()),
    ]);
    let engine = Engine::spawn(Box::new(runner), engine_config, telemetry.engine())?;
    let server_config = server_config(args, reference, &model, plan.max_model_len);
    let server = Server::new(engine.handle(), model.text, telemetry.clone(), server_config);
    Ok(Composed { engine, server, telemetry, model_name })
}

fn engine_config(args: &ServeArgs, max_model_len: usize, budget: usize) -> EngineConfig {
    let defaults = EngineConfig::default();
    EngineConfig {
        max_model_len,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: budget,
        policy: match args.scheduling_policy {
            Policy::Fcfs => SchedulingPolicy::Fcfs,
            Policy::Priority => SchedulingPolicy::Priority,
        },
        enable_prefix_caching: !args.no_enable_prefix_caching,
        max_queued_requests: args.max_num_queued_reqs.unwrap_or(defaults.max_queued_requests),
        max_queued_tokens: args.max_num_queued_tokens.unwrap_or(defaults.max_queued_tokens),
        ..defaults
    }
}

fn server_config(args: &ServeArgs, reference: &str, model: &LoadedModel, max_model_len: usize) -> ServerConfig {
    let names = &args.served_model_name;
    ServerConfig {
        served_model_names: if names.is_empty() { vec![reference.to_owned()] } else { names.clone() },
        model_root: reference.to_owned(),
        max_model_len,
        vocab_size: model.program.vocab_size,
        eos_token_ids: model.eos_token_ids.clone(),
        sampling_defaults: model.sampling_defaults,
        seed: args.seed,
        api_keys: args.api_key.clone(),
        max_logprobs: args.max_logprobs,
        shutdown_timeout: Duration::from_secs_f64(args.shutdown_timeout),
        shutdown_lag: Duration::from_secs_f64(args.shutdown_lag),
        ..ServerConfig::default()
    }
}

fn check_device(args: &ServeArgs) -> Result<()> {
    match args.device {
        Device::Cuda => bail!("--device cuda: this build has no CUDA backend yet; use --device cpu"),
        Device::Auto => info!("device: cpu (this build has no GPU backend yet), candle backend"),
        Device::Cpu => info!("device: cpu, candle backend"),
    }
    if matches!(args.dtype, Dtype::Bfloat16 | Dtype::Float16) {
        warn!("--dtype: the candle backend computes in float32, which is at least as precise as what was asked for");
    }
    Ok(())
}

fn block_size(args: &ServeArgs, backend: &dyn Backend) -> Result<usize> {
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

async fn listen(args: &ServeArgs) -> Result<TcpListener> {
    let target = format!("{}:{}", args.host, args.port);
    let address = tokio::net::lookup_host((args.host.as_str(), args.port))
        .await
        .with_context(|| format!("--host {}: no such address", args.host))?
        .next()
        .with_context(|| format!("--host {}: no such address", args.host))?;
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address).and_then(|()| socket.listen(BACKLOG)).map_err(|error| listen_error(&target, &error))
}

fn listen_error(target: &str, error: &std::io::Error) -> anyhow::Error {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            anyhow::anyhow!("{target} is in use by another process: choose another --port, or 0 for a free one")
        }
        _ => anyhow::anyhow!("cannot listen on {target}: {error}"),
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

fn curl_line(address: SocketAddr, model: &str) -> String {
    let host = if address.ip().is_unspecified() { "127.0.0.1".to_owned() } else { address.ip().to_string() };
    // Bounded: a small model that draws at temperature 1 may ramble to the end of its context.
    let body = serde_json::json!({
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 64,
    });
    format!("curl http://{host}:{}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", address.port())
}
