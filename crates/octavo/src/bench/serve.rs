//! `octavo bench serve`: measures a running server.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};
use octavo_bench::load::{Endpoint, Goodput, LoadConfig, RampUp, Report, run_watched};
use octavo_http_client::Target;
use serde_json::{Map, Value, json};
use tracing::{info, warn};

use super::bar::watched;
use super::{dataset, write_json, write_plot};
use crate::cli::{BenchServeArgs, BodyArgs, Dataset, TrafficArgs};
use crate::client::{Client, certificates};

/// Interval of attempts to reach a server that is not ready.
const READY_INTERVAL: Duration = Duration::from_millis(200);

pub(super) fn run(args: &BenchServeArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    for warning in args.unsupported.check()? {
        warn!("{warning}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (report, config) = runtime.block_on(serve(args))?;
    print!("{report}");
    save(args, &report, &config)?;
    if let Some(path) = &args.result.plot {
        write_plot(path, &report.chart(format!("{}: {} requests", config.model, report.completed)))?;
    }
    if let Some(error) = report.records.iter().find_map(|record| record.error.as_ref()) {
        bail!("{} of {} requests failed; the first: {error}", report.failed, report.records.len());
    }
    Ok(())
}

/// Writes the JSON file, if requested.
fn save(args: &BenchServeArgs, report: &Report, config: &LoadConfig) -> Result<()> {
    let result = &args.result;
    if !(result.save_result || result.save_detailed || result.append_result) {
        return Ok(());
    }
    let seconds = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    let folder = &result.result_dir;
    std::fs::create_dir_all(folder).with_context(|| format!("--result-dir {}", folder.display()))?;
    let name = result.result_filename.clone();
    let path = folder.join(name.unwrap_or_else(|| result_filename(&result.label, &config.model, seconds)));
    let figures = figures(args, report, config);
    if result.append_result { append_json(&path, &figures) } else { write_json(&path, &figures) }
}

/// The figures together with the settings that vLLM adds to them.
fn figures(args: &BenchServeArgs, report: &Report, config: &LoadConfig) -> Value {
    let rate = config.request_rate.map_or_else(|| json!("inf"), |rate| json!(rate));
    let mut figures = json!({
        "backend": match config.endpoint {
            Endpoint::Completions => "openai",
            Endpoint::Chat => "openai-chat",
        },
        "label": args.result.label,
        "model_id": config.model,
        "tokenizer_id": args.dataset.tokenizer,
        "num_prompts": config.requests,
        "request_rate": rate,
        "burstiness": config.burstiness,
    });
    if let Some(object) = figures.as_object_mut() {
        object.extend(args.result.metadata.iter().map(|(key, value)| (key.clone(), json!(value))));
        if let Value::Object(measured) = report.to_json(args.result.save_detailed) {
            object.extend(measured);
        }
    }
    figures
}

/// Appends the figures to a file of JSON lines.
fn append_json(path: &Path, figures: &Value) -> Result<()> {
    let named = || format!("cannot write {}", path.display());
    let mut file = OpenOptions::new().create(true).append(true).open(path).with_context(named)?;
    writeln!(file, "{figures}").with_context(named)?;
    println!("appended to {}", path.display());
    Ok(())
}

/// Default name of the result file.
fn result_filename(label: &str, model: &str, seconds: u64) -> String {
    format!("{label}-{}-{seconds}.json", model.trim_matches('/').replace('/', "-"))
}

/// Runs the benchmark. Returns the report and the configuration of the load.
async fn serve(args: &BenchServeArgs) -> Result<(Report, LoadConfig)> {
    let target = &args.target;
    let base_url = target.base_url.clone().unwrap_or_else(|| format!("http://{}:{}", target.host, target.port));
    let base_url = base_url.trim_end_matches('/').to_owned();
    let given = target.served_model_name.as_ref().or(target.model.as_ref());
    let model = match given {
        Some(model) if target.ready_check_timeout_sec == 0 => model.clone(),
        _ => {
            let found = first_model(args, &base_url).await?;
            given.cloned().unwrap_or(found)
        }
    };
    let mut config = config(args, base_url, model)?;
    let server = Target::new(&config.base_url, config.api_key.as_deref(), &config.certificates)?;
    let samples = dataset::samples(&args.dataset, &server, &config.model, config.endpoint).await?;
    (config.requests, config.samples) = (samples.len(), samples.into());
    info!("sending {} requests to {}", config.requests, config.base_url);
    let report = watched("requests", config.requests, async |done| run_watched(&config, done).await).await?;
    Ok((report, config))
}

/// The first model of the server, which is awaited until it is ready.
async fn first_model(args: &BenchServeArgs, base_url: &str) -> Result<String> {
    let (url, certificates) = (format!("{base_url}/v1"), certificates(args.target.insecure));
    let deadline = Instant::now() + Duration::from_secs(args.target.ready_check_timeout_sec);
    loop {
        match Client::connect(&url, args.target.api_key.as_deref(), &certificates, None).await {
            Ok(client) => return Ok(client.model().to_owned()),
            Err(error) if Instant::now() >= deadline => return Err(error),
            Err(_) => tokio::time::sleep(READY_INTERVAL).await,
        }
    }
}

fn config(args: &BenchServeArgs, base_url: String, model: String) -> Result<LoadConfig> {
    let BenchServeArgs { target, dataset, traffic, request, result, .. } = args;
    let mut goodput = Goodput::default();
    for bound in &result.goodput {
        bound.apply(&mut goodput);
    }
    Ok(LoadConfig {
        base_url,
        certificates: certificates(target.insecure),
        endpoint: target.endpoint(),
        path: target.endpoint.clone(),
        model,
        api_key: target.api_key.clone(),
        headers: target.header.iter().cloned().collect(),
        requests: dataset.num_prompts,
        max_concurrency: traffic.max_concurrency,
        request_rate: traffic.request_rate.0,
        burstiness: traffic.burstiness,
        ramp_up: ramp_up(traffic)?,
        stream: !request.no_stream,
        ignore_eos: request.ignore_eos || dataset.dataset_name == Dataset::Random,
        temperature: request.temperature,
        extra_body: extra_body(request),
        request_id_prefix: request.request_id_prefix.clone(),
        warmups: traffic.num_warmups,
        seed: dataset.seed,
        metrics: result.percentile_metrics.clone(),
        percentiles: result.metric_percentiles.clone(),
        goodput,
        ..LoadConfig::default()
    })
}

fn ramp_up(traffic: &TrafficArgs) -> Result<Option<RampUp>> {
    let (Some(strategy), Some(start), Some(end)) =
        (traffic.ramp_up_strategy, traffic.ramp_up_start_rps, traffic.ramp_up_end_rps)
    else {
        return Ok(None);
    };
    if traffic.request_rate.0.is_some() {
        bail!("--ramp-up-strategy sets the request rate: remove --request-rate");
    }
    Ok(Some(RampUp { strategy, start, end }))
}

/// The optional fields of every request.
fn extra_body(request: &BodyArgs) -> Map<String, Value> {
    let given = [
        ("top_p", request.top_p.map(Value::from)),
        ("top_k", request.top_k.map(Value::from)),
        ("min_p", request.min_p.map(Value::from)),
        ("frequency_penalty", request.frequency_penalty.map(Value::from)),
        ("presence_penalty", request.presence_penalty.map(Value::from)),
        ("repetition_penalty", request.repetition_penalty.map(Value::from)),
        ("logprobs", request.logprobs.map(Value::from)),
    ];
    let given = given.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
    given.chain(request.extra_body.iter().flat_map(|object| object.0.clone())).collect()
}

#[cfg(test)]
mod tests {
    use octavo_bench::load::Metric;

    use super::*;
    use crate::cli::{self, BenchArgs, BenchCommand, Command};

    fn parsed(line: &str) -> Result<LoadConfig, String> {
        let args = line.split_whitespace().map(Into::into).collect();
        let cli = cli::parse(args, &|_| None).map_err(|failure| failure.to_string())?;
        let Command::Bench(BenchArgs { command: BenchCommand::Serve(args) }) = cli.command else {
            return Err("another command".to_owned());
        };
        config(&args, "http://x".into(), "m".into()).map_err(|error| error.to_string())
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
             --random-input-len 9 --metric-percentiles 50,99.9 --goodput ttft:250 e2el:1000 --no-stream \
             --percentile-metrics ttft,e2el --burstiness 0.5 --top-p 0.9 --extra-body.seed 7",
        )
        .unwrap();
        assert_eq!((config.endpoint, config.requests, config.request_rate), (Endpoint::Chat, 20, Some(2.5)));
        assert_eq!((config.max_concurrency, config.burstiness, config.stream), (Some(4), 0.5, false));
        assert_eq!(config.metrics, [Metric::Ttft, Metric::E2el]);
        assert_eq!(Value::Object(config.extra_body), json!({"top_p": 0.9, "seed": 7}));
        assert_eq!(config.percentiles, [50.0, 99.9]);
        assert_eq!(config.goodput.ttft, Some(Duration::from_millis(250)));
        assert_eq!((config.goodput.tpot, config.goodput.e2el), (None, Some(Duration::from_secs(1))));
    }

    /// The flags of `vllm bench serve`, with a value where they take one.
    const VLLM: &str = "--seed 1|--num-prompts 5|--dataset-name random|--no-stream|--dataset-path f|--no-oversample|\
        --skip-chat-template|--disable-shuffle|--custom-output-len 9|--spec-bench-output-len 9|--spec-bench-category x|\
        --sonnet-input-len 9|--sonnet-output-len 9|--sonnet-prefix-len 9|--sharegpt-output-len 9|--blazedit-min-distance 0|\
        --blazedit-max-distance 1|--random-input-len 9|--random-output-len 9|--random-range-ratio 0.5|--random-prefix-len 9|\
        --random-batch-size 1|--no-reranker|--random-mm-base-items-per-request 1|--random-mm-num-mm-items-range-ratio 0|\
        --random-mm-limit-mm-per-prompt {}|--random-mm-bucket-config {}|--hf-subset x|--hf-split x|--hf-name x|\
        --hf-output-len 9|--prefix-repetition-prefix-len 9|--prefix-repetition-suffix-len 9|\
        --prefix-repetition-num-prefixes 9|--prefix-repetition-output-len 9|--label x|--backend vllm|--endpoint-type openai|\
        --base-url http://x|--host x|--port 9|--endpoint /v1/completions|--header a=b|--max-concurrency 9|--model m|\
        --input-len 9|--output-len 9|--tokenizer t|--tokenizer-mode auto|--use-beam-search|--logprobs 3|--request-rate inf|\
        --burstiness 2|--probe-request-rate 0.0|--trust-remote-code|--disable-tqdm|--num-warmups 2|--profile|--save-result|\
        --save-detailed|--append-result|--metadata a=b|--result-dir d|--result-filename f|--ignore-eos|--self-timed|\
        --no-self-timed|--percentile-metrics ttft,tpot,itl|--metric-percentiles 25,99|--goodput ttft:9|\
        --request-id-prefix x|--top-p 0.9|--top-k 9|--min-p 0.1|--temperature 0|--frequency-penalty -1|\
        --presence-penalty -1|--repetition-penalty 1|--served-model-name m|--lora-modules a|--lora-assignment random|\
        --ramp-up-start-rps 1|--ramp-up-end-rps 9|--ready-check-timeout-sec 0|--chat-template-kwargs {}|--extra-body {}|\
        --skip-tokenizer-init|--insecure|--plot-timeline|--timeline-itl-thresholds 25,50|--plot-dataset-stats";

    #[test]
    fn every_flag_of_vllm_is_understood() {
        for flag in VLLM.split('|') {
            let line = format!("bench serve {} --seed 7", flag.trim());
            let seed = parsed(&line).unwrap_or_else(|error| panic!("{line}: {error}")).seed;
            assert_eq!(seed, 7, "{line}");
        }
    }

    #[test]
    fn the_endpoint_decides_the_form_of_requests() {
        let endpoint = |line: &str| parsed(&format!("bench serve {line}")).map(|config| (config.endpoint, config.path));
        assert_eq!(endpoint("--endpoint-type openai-chat").unwrap(), (Endpoint::Chat, None));
        let chat = Some("/v1/chat/completions".to_owned());
        assert_eq!(endpoint("--endpoint /v1/chat/completions").unwrap(), (Endpoint::Chat, chat));
        assert_eq!(endpoint("--backend vllm --endpoint /x").unwrap(), (Endpoint::Completions, Some("/x".to_owned())));
    }

    #[test]
    fn answers_to_random_prompts_ignore_the_end_of_sequence() {
        assert!(parsed("bench serve").unwrap().ignore_eos);
        assert!(!parsed("bench serve --dataset-name sharegpt --dataset-path f").unwrap().ignore_eos);
        assert!(parsed("bench serve --dataset-name sharegpt --dataset-path f --ignore-eos").unwrap().ignore_eos);
    }

    #[test]
    fn other_flags_of_vllm_warn_or_are_refused() {
        let check = |line: &str| {
            let line = ["bench", "serve"].into_iter().chain(line.split_whitespace()).map(Into::into).collect();
            let Command::Bench(BenchArgs { command: BenchCommand::Serve(args) }) =
                cli::parse(line, &|_| None).unwrap().command
            else {
                panic!("another command")
            };
            args.unsupported.check()
        };
        assert_eq!(
            check("--trust-remote-code --disable-tqdm --hf-split train --tokenizer-mode auto").unwrap().len(),
            3
        );
        for line in ["--use-beam-search", "--lora-modules a b", "--profile", "--probe-request-rate 1"] {
            let error = check(line).unwrap_err().to_string();
            assert!(error.starts_with("--") && error.contains(": "), "{line}: {error}");
        }
    }

    #[test]
    fn figures_carry_settings_and_metadata() {
        let line = "bench serve --metadata version=1 tp=2 --label mine --request-rate 3";
        let line = line.split_whitespace().map(Into::into).collect();
        let Command::Bench(BenchArgs { command: BenchCommand::Serve(args) }) =
            cli::parse(line, &|_| None).unwrap().command
        else {
            panic!("another command")
        };
        let config = config(&args, "http://x".into(), "m".into()).unwrap();
        let report = tokio::runtime::Runtime::new().unwrap().block_on(run_watched(
            &LoadConfig { base_url: "http://127.0.0.1:1".into(), requests: 1, ..config.clone() },
            Default::default(),
        ));
        let json = figures(&args, &report.unwrap(), &config);
        assert_eq!((&json["version"], &json["tp"], &json["label"]), (&json!("1"), &json!("2"), &json!("mine")));
        assert_eq!((&json["request_rate"], &json["model_id"], &json["failed"]), (&json!(3.0), &json!("m"), &json!(1)));
    }

    #[test]
    fn results_can_be_appended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.json");
        for number in [1, 2] {
            append_json(&path, &json!({"n": number})).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), "{\"n\":1}\n{\"n\":2}\n");
    }

    #[test]
    fn wrong_values_are_named() {
        for (line, expected) in [
            ("bench serve --request-rate 0", "--request-rate"),
            ("bench serve --goodput itl:3", "METRIC:MILLISECONDS"),
            ("bench serve --goodput ttft:-3", "METRIC:MILLISECONDS"),
            ("bench serve --num-prompt 3", "--num-prompts"),
            ("bench serve --dataset-name sonnet", "random, sharegpt and custom"),
            ("bench serve --percentile-metrics ttft,x", "ttft, tpot, itl and e2el"),
            ("bench serve --header x", "KEY=VALUE"),
            ("bench serve --ramp-up-strategy linear", "--ramp-up-start-rps"),
            (
                "bench serve --request-rate 1 --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2",
                "remove --request-rate",
            ),
        ] {
            let error = parsed(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn a_result_carries_the_models_name() {
        assert_eq!(result_filename("bench", "org/name", 7), "bench-org-name-7.json");
        assert_eq!(result_filename("a", "/models/m", 7), "a-models-m-7.json");
    }
}
