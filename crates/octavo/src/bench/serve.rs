//! `octavo bench`: a load of random prompts against a running server, in vLLM's terms.

use std::io::{IsTerminal, Write, stderr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};
use octavo_bench::load::{Endpoint, Goodput, LoadConfig, Report, run_watched};

use crate::cli::{BenchArgs, BenchCommand, BenchServeArgs, LoadBackend};
use crate::client::Client;

/// Between two looks at how far it has come.
const TICK: Duration = Duration::from_millis(200);

/// Characters of the bar.
const BAR: usize = 30;

pub(crate) fn run(args: BenchArgs) -> Result<()> {
    let BenchCommand::Serve(args) = args.command;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(serve(&args))?;
    print!("{report}");
    if args.save_result || args.save_detailed {
        save(&args, &report)?;
    }
    if let Some(error) = report.records.iter().find_map(|record| record.error.as_ref()) {
        bail!("{} of {} requests failed; the first: {error}", report.failed, report.records.len());
    }
    Ok(())
}

async fn serve(args: &BenchServeArgs) -> Result<Report> {
    let base_url = args.base_url.clone().unwrap_or_else(|| format!("http://{}:{}", args.host, args.port));
    let base_url = base_url.trim_end_matches('/').to_owned();
    let model = match &args.model {
        Some(model) => model.clone(),
        None => Client::connect(&format!("{base_url}/v1"), args.api_key.as_deref(), None).await?.model().to_owned(),
    };
    let config = config(args, base_url, model);
    let done = Arc::new(AtomicUsize::new(0));
    let bar = stderr().is_terminal().then(|| tokio::spawn(bar(Arc::clone(&done), config.requests)));
    let report = run_watched(&config, done).await;
    if let Some(bar) = bar {
        bar.abort();
        // Wipes the line; a terminal that is gone need not be told.
        let _ = write!(stderr(), "\r{:80}\r", "");
    }
    Ok(report?)
}

fn config(args: &BenchServeArgs, base_url: String, model: String) -> LoadConfig {
    let mut goodput = Goodput::default();
    for bound in &args.goodput {
        *bound.metric.of(&mut goodput) = Some(bound.most);
    }
    LoadConfig {
        base_url,
        endpoint: match args.backend {
            LoadBackend::Openai => Endpoint::Completions,
            LoadBackend::OpenaiChat => Endpoint::Chat,
        },
        model,
        api_key: args.api_key.clone(),
        requests: args.num_prompts,
        max_concurrency: args.max_concurrency,
        request_rate: args.request_rate.0,
        stream: !args.no_stream,
        input_len: args.random_input_len,
        output_len: args.random_output_len,
        temperature: args.temperature,
        warmups: args.num_warmups,
        seed: args.seed,
        percentiles: args.metric_percentiles.clone(),
        goodput,
        ..LoadConfig::default()
    }
}

/// Shows how many of the requests have ended, until it is stopped.
async fn bar(done: Arc<AtomicUsize>, requests: usize) {
    let begun = Instant::now();
    loop {
        tokio::time::sleep(TICK).await;
        let line = line(done.load(Ordering::Relaxed), requests, begun.elapsed());
        let _ = write!(stderr(), "\r{line}").and_then(|()| stderr().flush());
    }
}

fn line(done: usize, requests: usize, elapsed: Duration) -> String {
    let filled = BAR * done.min(requests) / requests.max(1);
    let rate = done as f64 / elapsed.as_secs_f64().max(1e-3);
    format!("[{:<BAR$}] {done} of {requests}, {rate:.1} a second", "#".repeat(filled))
}

fn save(args: &BenchServeArgs, report: &Report) -> Result<()> {
    let name = args.result_filename.clone().unwrap_or_else(|| {
        let seconds = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        let model = args.model.as_deref().unwrap_or("model").replace('/', "-");
        format!("bench-{model}-{seconds}.json")
    });
    let path: PathBuf = args.result_dir.join(name);
    let json = serde_json::to_vec_pretty(&report.to_json(args.save_detailed))?;
    std::fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))?;
    println!("saved to {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, Command};

    fn parsed(line: &str) -> Result<LoadConfig, String> {
        let args = line.split_whitespace().map(Into::into).collect();
        let cli = cli::parse(args, &|_| None).map_err(|failure| failure.to_string())?;
        let Command::Bench(BenchArgs { command: BenchCommand::Serve(args) }) = cli.command else {
            return Err("another command".to_owned());
        };
        Ok(config(&args, "http://x".into(), "m".into()))
    }

    #[test]
    fn defaults_are_vllms() {
        let config = parsed("bench serve").unwrap();
        let expected = LoadConfig { base_url: "http://x".into(), model: "m".into(), ..LoadConfig::default() };
        assert_eq!(config, expected);
    }

    #[test]
    fn flags_of_vllm_are_understood() {
        let config = parsed(
            "bench serve --backend openai-chat --num_prompts 20 --request-rate 2.5 --max-concurrency=4 \
             --random-input-len 9 --metric-percentiles 50,99.9 --goodput ttft:250 e2el:1000 --no-stream",
        )
        .unwrap();
        assert_eq!((config.endpoint, config.requests, config.request_rate), (Endpoint::Chat, 20, Some(2.5)));
        assert_eq!((config.max_concurrency, config.input_len, config.stream), (Some(4), 9, false));
        assert_eq!(config.percentiles, [50.0, 99.9]);
        assert_eq!(config.goodput.ttft, Some(Duration::from_millis(250)));
        assert_eq!((config.goodput.tpot, config.goodput.e2el), (None, Some(Duration::from_secs(1))));
    }

    #[test]
    fn wrong_values_are_named() {
        for (line, expected) in [
            ("bench serve --request-rate 0", "--request-rate"),
            ("bench serve --goodput itl:3", "METRIC:MILLISECONDS"),
            ("bench serve --goodput ttft:-3", "METRIC:MILLISECONDS"),
            ("bench serve --num-prompt 3", "--num-prompts"),
        ] {
            let error = parsed(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn the_bar_tells_how_far_it_is() {
        let half = line(50, 100, Duration::from_secs(10));
        assert_eq!(half, "[###############               ] 50 of 100, 5.0 a second");
        assert!(line(0, 0, Duration::ZERO).starts_with("[ "));
    }
}
