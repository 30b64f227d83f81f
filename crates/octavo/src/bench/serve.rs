//! `octavo bench serve`: a load of random prompts against a running server.

use std::time::SystemTime;

use anyhow::{Result, bail};
use octavo_bench::load::{Endpoint, Goodput, LoadConfig, Report, run_watched};

use super::bar::watched;
use super::{write_json, write_plot};
use crate::cli::{BenchServeArgs, LoadBackend};
use crate::client::Client;

pub(super) fn run(args: &BenchServeArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (report, model) = runtime.block_on(serve(args))?;
    print!("{report}");
    if args.save_result || args.save_detailed {
        let seconds = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        let name = args.result_filename.clone().unwrap_or_else(|| result_filename(&model, seconds));
        write_json(&args.result_dir.join(name), &report.to_json(args.save_detailed))?;
    }
    if let Some(path) = &args.plot {
        write_plot(path, &report.chart(format!("{model}: {} requests", report.completed)))?;
    }
    if let Some(error) = report.records.iter().find_map(|record| record.error.as_ref()) {
        bail!("{} of {} requests failed; the first: {error}", report.failed, report.records.len());
    }
    Ok(())
}

/// The name of a result that was given none.
fn result_filename(model: &str, seconds: u64) -> String {
    format!("bench-{}-{seconds}.json", model.trim_matches('/').replace('/', "-"))
}

/// The report, and the model's name in the requests.
async fn serve(args: &BenchServeArgs) -> Result<(Report, String)> {
    let base_url = args.base_url.clone().unwrap_or_else(|| format!("http://{}:{}", args.host, args.port));
    let base_url = base_url.trim_end_matches('/').to_owned();
    let model = match &args.model {
        Some(model) => model.clone(),
        None => Client::connect(&format!("{base_url}/v1"), args.api_key.as_deref(), None).await?.model().to_owned(),
    };
    let config = config(args, base_url, model);
    let report = watched("requests", config.requests, async |done| run_watched(&config, done).await).await?;
    Ok((report, config.model))
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cli::{self, BenchArgs, BenchCommand, Command};

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
    fn a_result_carries_the_models_name() {
        assert_eq!(result_filename("org/name", 7), "bench-org-name-7.json");
        assert_eq!(result_filename("/models/m", 7), "bench-models-m-7.json");
    }
}
