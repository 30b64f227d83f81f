//! What a scrape shows, read back by a strict parser.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod parser;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use octavo_telemetry::{
    BuildInfo, DeviceConfig, DeviceMemory, DeviceStep, EngineMetrics, FinishedRequest, HttpExchange, HttpMetrics,
    Rejection, StepStats, Telemetry, TelemetryConfig,
};
use parser::{Family, parse};
use proptest::prelude::*;

const ROUTES: &[(&str, &str)] = &[("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models")];

const LATENCY: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const TOKEN: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const LENGTH: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0];
const ITERATION: &[f64] = &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// Name and buckets of every engine histogram.
const HISTOGRAMS: &[(&str, &[f64])] = &[
    ("vllm:time_to_first_token_seconds", TTFT),
    ("vllm:inter_token_latency_seconds", TOKEN),
    ("vllm:request_time_per_output_token_seconds", TOKEN),
    ("vllm:e2e_request_latency_seconds", LATENCY),
    ("vllm:request_queue_time_seconds", LATENCY),
    ("vllm:request_prefill_time_seconds", LATENCY),
    ("vllm:request_decode_time_seconds", LATENCY),
    ("vllm:request_inference_time_seconds", LATENCY),
    ("vllm:request_prompt_tokens", LENGTH),
    ("vllm:request_generation_tokens", LENGTH),
    ("vllm:request_prefill_kv_computed_tokens", LENGTH),
    ("vllm:request_max_num_generation_tokens", LENGTH),
    ("vllm:request_params_max_tokens", LENGTH),
    ("vllm:request_params_n", &[1.0, 2.0, 5.0, 10.0, 20.0]),
    ("vllm:request_num_preemptions", &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0]),
    ("vllm:iteration_tokens_total", ITERATION),
];

/// Name, kind and the extra label with its values of every other engine family.
const SIMPLE: &[(&str, &str, &str, &[&str])] = &[
    ("vllm:num_requests_running", "gauge", "", &[]),
    ("vllm:num_requests_waiting", "gauge", "", &[]),
    ("vllm:num_requests_waiting_by_reason", "gauge", "reason", &["capacity", "deferred"]),
    ("vllm:kv_cache_usage_perc", "gauge", "", &[]),
    ("vllm:request_success_total", "counter", "finished_reason", &["stop", "length", "abort", "error", "repetition"]),
    ("vllm:prompt_tokens_total", "counter", "", &[]),
    (
        "vllm:prompt_tokens_by_source_total",
        "counter",
        "source",
        &["local_compute", "local_cache_hit", "external_kv_transfer"],
    ),
    ("vllm:prompt_tokens_cached_total", "counter", "", &[]),
    (
        "vllm:prompt_tokens_cached_by_source_total",
        "counter",
        "source",
        &["device", "host", "p2p", "disk", "external_unspecified"],
    ),
    ("vllm:generation_tokens_total", "counter", "", &[]),
    ("vllm:prefix_cache_queries_total", "counter", "", &[]),
    ("vllm:prefix_cache_hits_total", "counter", "", &[]),
    ("vllm:engine_sleep_state", "gauge", "sleep_state", &["awake", "weights_offloaded", "discard_all"]),
    ("vllm:external_prefix_cache_queries_total", "counter", "", &[]),
    ("vllm:external_prefix_cache_hits_total", "counter", "", &[]),
    ("vllm:mm_cache_queries_total", "counter", "", &[]),
    ("vllm:mm_cache_hits_total", "counter", "", &[]),
    ("octavo_encoder_cache_queries_total", "counter", "", &[]),
    ("octavo_encoder_cache_hits_total", "counter", "", &[]),
    ("vllm:num_preemptions_total", "counter", "", &[]),
];

fn telemetry(model_name: &str) -> Telemetry {
    Telemetry::new(TelemetryConfig { model_name: model_name.into(), engine: 0, max_model_len: 8192 })
}

fn scrape(telemetry: &Telemetry) -> Vec<Family> {
    parse(&telemetry.render()).unwrap_or_else(|defect| panic!("{defect}"))
}

fn family<'a>(families: &'a [Family], name: &str) -> &'a Family {
    families.iter().find(|f| f.name == name).unwrap_or_else(|| panic!("{name} is missing"))
}

#[test]
fn every_engine_series_is_there_at_zero_from_the_start() {
    let families = scrape(&telemetry("m"));
    for &(name, kind, label, values) in SIMPLE {
        let family = family(&families, name);
        assert_eq!(family.kind, kind, "{name}");
        if label.is_empty() {
            assert_eq!(family.samples.len(), 1, "{name}");
        } else {
            let mut values = values.to_vec();
            values.sort_unstable();
            assert_eq!(family.label_values(label), values, "{name}");
        }
    }
    for (name, _) in HISTOGRAMS {
        assert_eq!(family(&families, name).kind, "histogram", "{name}");
    }
    let lora = "vllm:lora_requests_info";
    for family in families.iter().filter(|f| f.name.starts_with("vllm:") && f.name != lora) {
        for sample in &family.samples {
            let awake = sample.labels.get("sleep_state").is_some_and(|state| state == "awake");
            assert_eq!(sample.value, f64::from(u8::from(awake)), "{sample:?}");
            assert_eq!(sample.labels.get("model_name").map(String::as_str), Some("m"), "{sample:?}");
            assert_eq!(sample.labels.get("engine").map(String::as_str), Some("0"), "{sample:?}");
        }
    }
    let listed = |f: &&Family| f.name.starts_with("vllm:") || f.name.starts_with("octavo_encoder_");
    let engine = families.iter().filter(listed).filter(|f| f.name != lora).count();
    assert_eq!(engine, SIMPLE.len() + HISTOGRAMS.len(), "a family that no list here names");
}

/// As vLLM has it, with its labels and no others; there is room for no adapter.
#[test]
fn no_lora_adapter_is_there_from_the_start() {
    let telemetry = telemetry("m");
    let families = scrape(&telemetry);
    let info = family(&families, "vllm:lora_requests_info");
    assert_eq!((info.kind.as_str(), info.samples.len()), ("gauge", 1));
    let labels: Vec<(&str, &str)> = info.samples[0].labels.iter().map(|(name, value)| (&**name, &**value)).collect();
    assert_eq!(labels, [("max_lora", "0"), ("running_lora_adapters", ""), ("waiting_lora_adapters", "")]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((now - 60.0..=now).contains(&info.samples[0].value), "{}", info.samples[0].value);
    telemetry.engine().adapters(4, &["a".into(), "b".into()], &["c\"".into()]);
    let families = scrape(&telemetry);
    let info = family(&families, "vllm:lora_requests_info");
    let labels: Vec<(&str, &str)> = info.samples[0].labels.iter().map(|(name, value)| (&**name, &**value)).collect();
    assert_eq!(labels, [("max_lora", "4"), ("running_lora_adapters", "a,b"), ("waiting_lora_adapters", "c\"")]);
    assert_eq!(info.samples.len(), 1, "the latest replaces the one before");
}

#[test]
fn the_build_is_told_by_labels() {
    let telemetry = telemetry("m");
    let cuda = BuildInfo { version: "1.2.3", revision: "0a1b2c", backend: "cuda", device: "NVIDIA H200" };
    telemetry.set_build_info(&BuildInfo { backend: "cpu", device: "avx2", ..cuda });
    telemetry.set_build_info(&cuda);
    let families = scrape(&telemetry);
    let info = family(&families, "octavo_build_info");
    assert_eq!((info.kind.as_str(), info.samples.len()), ("gauge", 1));
    let labels = [("version", "1.2.3"), ("revision", "0a1b2c"), ("backend", "cuda"), ("device", "NVIDIA H200")];
    assert_eq!(info.value("", &labels), 1.0);
}

#[test]
fn what_is_registered_after_a_scrape_is_shown_by_the_next() {
    let telemetry = telemetry("m");
    telemetry.engine().generated(7);
    let names = |telemetry: &Telemetry| scrape(telemetry).into_iter().map(|f| f.name).collect::<Vec<_>>();
    assert!(!names(&telemetry).iter().any(|name| name == "http_requests_total"));
    let http = telemetry.http(ROUTES);
    exchange(&http, "GET", Some("/v1/models"), 200);
    let families = scrape(&telemetry);
    assert_eq!(family(&families, "vllm:generation_tokens_total").value("", &[]), 7.0);
    let labels = [("handler", "/v1/models"), ("method", "GET"), ("status", "2xx")];
    assert_eq!(family(&families, "http_requests_total").value("", &labels), 1.0);
    assert_eq!(names(&telemetry), names(&telemetry), "the order of the families changes");
}

#[test]
fn buckets_are_vllms_spelled_as_the_python_client_does() {
    let text = telemetry("m").render();
    for (name, bounds) in HISTOGRAMS {
        let prefix = format!("{name}_bucket{{engine=\"0\",le=\"");
        let found: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix(&prefix)?.split_once('"').map(|(le, _)| le)).collect();
        let expected: Vec<String> =
            bounds.iter().map(|bound| format!("{bound:?}")).chain(["+Inf".to_owned()]).collect();
        assert_eq!(found, expected, "{name}");
    }
    assert!(text.contains("vllm:time_to_first_token_seconds_bucket{engine=\"0\",le=\"1.0\",model_name=\"m\"} 0.0\n"));
}

#[test]
fn lengths_of_a_million_tokens_are_spelled_with_an_exponent() {
    let config = TelemetryConfig { model_name: "m".into(), engine: 3, max_model_len: 1_048_576 };
    let text = Telemetry::new(config).render();
    assert!(text.contains("vllm:request_prompt_tokens_bucket{engine=\"3\",le=\"500000.0\",model_name=\"m\"} 0.0\n"));
    assert!(text.contains("vllm:request_prompt_tokens_bucket{engine=\"3\",le=\"1e+06\",model_name=\"m\"} 0.0\n"));
    assert!(!text.contains("le=\"2e+06\""));
}

fn finish(engine: &EngineMetrics, prompt: u64, generated: u64) {
    engine.finished(&FinishedRequest {
        reason: "length",
        e2e: Duration::from_millis(900),
        queue: Some(Duration::from_millis(100)),
        prefill: Some(Duration::from_millis(200)),
        decode: Some(Duration::from_millis(450)),
        prompt_tokens: prompt,
        generated_tokens: generated,
        cached_tokens: 16,
        max_tokens: generated,
        n: Some(1),
        preemptions: 0,
    });
}

/// vLLM's own test of its counts: ten requests of ten tokens each, one by one, end of sequence ignored.
#[test]
fn ten_requests_of_ten_tokens_count_as_in_vllm() {
    const PROMPT: u64 = 40;
    let telemetry = telemetry("m");
    let engine = telemetry.engine();
    for _ in 0..10 {
        engine.prefix_lookup(PROMPT, 16);
        for token in 0..10 {
            engine.generated(1);
            if token == 0 {
                engine.first_token(Duration::from_millis(300), PROMPT, 16);
            } else {
                engine.next_token(Duration::from_millis(50));
            }
            let prompt_tokens = if token == 0 { PROMPT } else { 0 };
            engine.step(&StepStats { running: 1, prompt_tokens, generated_tokens: 1, ..StepStats::default() });
        }
        finish(&engine, PROMPT, 10);
        engine.step(&StepStats::default());
    }
    let families = scrape(&telemetry);
    let value = |name: &str, suffix: &str, labels: &[(&str, &str)]| family(&families, name).value(suffix, labels);
    assert_eq!(value("vllm:time_to_first_token_seconds", "_count", &[]), 10.0);
    assert_eq!(value("vllm:time_to_first_token_seconds", "_sum", &[]), 3.0);
    assert_eq!(value("vllm:inter_token_latency_seconds", "_count", &[]), 90.0);
    assert_eq!(value("vllm:inter_token_latency_seconds", "_bucket", &[("le", "0.05")]), 90.0);
    assert_eq!(value("vllm:inter_token_latency_seconds", "_bucket", &[("le", "0.025")]), 0.0);
    for stage in ["e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"] {
        assert_eq!(value(&format!("vllm:{stage}_seconds"), "_count", &[]), 10.0, "{stage}");
    }
    assert_eq!(value("vllm:request_inference_time_seconds", "_sum", &[]), 6.5);
    assert_eq!(value("vllm:request_time_per_output_token_seconds", "_sum", &[]), 0.5);
    assert_eq!(value("vllm:request_prompt_tokens", "_sum", &[]), 400.0);
    assert_eq!(value("vllm:request_prefill_kv_computed_tokens", "_sum", &[]), 240.0);
    assert_eq!(value("vllm:iteration_tokens_total", "_sum", &[]), 500.0);
    assert_eq!(value("vllm:iteration_tokens_total", "_count", &[]), 100.0);
    assert_eq!(value("vllm:request_success_total", "", &[("finished_reason", "length")]), 10.0);
    assert_eq!(value("vllm:request_params_n", "_bucket", &[("le", "1.0")]), 10.0);
    assert_eq!(value("vllm:request_max_num_generation_tokens", "_sum", &[]), 100.0);
    assert_eq!(value("vllm:prompt_tokens_total", "", &[]), 400.0);
    assert_eq!(value("vllm:prompt_tokens_cached_total", "", &[]), 160.0);
    assert_eq!(value("vllm:prompt_tokens_by_source_total", "", &[("source", "local_compute")]), 240.0);
    assert_eq!(value("vllm:prompt_tokens_by_source_total", "", &[("source", "local_cache_hit")]), 160.0);
    assert_eq!(value("vllm:prompt_tokens_cached_by_source_total", "", &[("source", "device")]), 160.0);
    assert_eq!(value("vllm:generation_tokens_total", "", &[]), 100.0);
    assert_eq!(value("vllm:prefix_cache_queries_total", "", &[]), 400.0);
    assert_eq!(value("vllm:prefix_cache_hits_total", "", &[]), 160.0);
}

#[test]
fn lookups_of_images_are_counted() {
    let telemetry = telemetry("m");
    telemetry.engine().media_lookup(5, 2);
    telemetry.engine().encoder_lookup(4, 1);
    EngineMetrics::disabled().media_lookup(1, 1);
    let page = telemetry.render();
    for (name, expected) in [("vllm:mm_cache", ["5", "2"]), ("octavo_encoder_cache", ["4", "1"])] {
        for (kind, expected) in ["queries", "hits"].into_iter().zip(expected) {
            let line = format!("{name}_{kind}_total{{engine=\"0\",model_name=\"m\"}} {expected}");
            assert!(page.lines().any(|found| found == line), "{line}");
        }
    }
}

#[test]
fn gauges_show_the_last_step() {
    let telemetry = telemetry("m");
    let stats = StepStats { running: 3, waiting: 4, deferred: 2, kv_usage: 0.25, preempted: 1, ..StepStats::default() };
    telemetry.engine().step(&stats);
    let families = scrape(&telemetry);
    let value = |name: &str, labels: &[(&str, &str)]| family(&families, name).value("", labels);
    assert_eq!(value("vllm:num_requests_running", &[]), 3.0);
    assert_eq!(value("vllm:num_requests_waiting", &[]), 6.0);
    assert_eq!(value("vllm:num_requests_waiting_by_reason", &[("reason", "capacity")]), 4.0);
    assert_eq!(value("vllm:num_requests_waiting_by_reason", &[("reason", "deferred")]), 2.0);
    assert_eq!(value("vllm:kv_cache_usage_perc", &[]), 0.25);
    assert_eq!(value("vllm:num_preemptions_total", &[]), 1.0);
}

#[test]
fn a_request_without_a_token_has_no_stage_times() {
    let telemetry = telemetry("m");
    let engine = telemetry.engine();
    engine.finished(&FinishedRequest { reason: "surprise", n: Some(4), ..FinishedRequest::default() });
    engine.parent_finished(12);
    let families = scrape(&telemetry);
    let count = |name: &str| family(&families, name).value("_count", &[]);
    assert_eq!(count("vllm:e2e_request_latency_seconds"), 1.0);
    assert_eq!(count("vllm:request_queue_time_seconds"), 0.0);
    assert_eq!(count("vllm:request_decode_time_seconds"), 0.0);
    assert_eq!(count("vllm:request_params_n"), 1.0);
    assert_eq!(family(&families, "vllm:request_max_num_generation_tokens").value("_sum", &[]), 12.0);
    let success = family(&families, "vllm:request_success_total");
    assert_eq!(success.value("", &[("finished_reason", "error")]), 1.0);
}

/// As in vLLM, which forgets an aborted request without an observation.
#[test]
fn an_aborted_request_is_counted_and_enters_no_histogram() {
    let telemetry = telemetry("m");
    let time = Some(Duration::from_secs(1));
    telemetry.engine().finished(&FinishedRequest {
        reason: "abort",
        queue: time,
        prefill: time,
        decode: time,
        prompt_tokens: 7,
        n: Some(1),
        ..FinishedRequest::default()
    });
    let families = scrape(&telemetry);
    for (name, _) in HISTOGRAMS {
        assert_eq!(family(&families, name).value("_count", &[]), 0.0, "{name}");
    }
    assert_eq!(family(&families, "vllm:request_success_total").value("", &[("finished_reason", "abort")]), 1.0);
}

/// As in vLLM, where a failed request ends like others. It has no times of stages that it has not reached.
#[test]
fn a_failed_request_enters_the_histograms_of_what_it_has_reached() {
    const SIZES: [&str; 8] = [
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_prefill_kv_computed_tokens",
        "request_max_num_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
        "request_num_preemptions",
    ];
    const TIMES: [&str; 4] = [
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
    ];
    let time = Some(Duration::from_secs(1));
    let waiting = FinishedRequest { reason: "error", n: Some(1), ..FinishedRequest::default() };
    let scheduled = FinishedRequest { queue: time, ..waiting.clone() };
    let generating = FinishedRequest { prefill: time, decode: time, ..scheduled.clone() };
    for (failed, reached) in [(waiting, 0), (scheduled, 1), (generating, 2)] {
        let telemetry = telemetry("m");
        telemetry.engine().finished(&failed);
        let families = scrape(&telemetry);
        for (name, _) in HISTOGRAMS {
            let short = name.trim_start_matches("vllm:");
            let enters = SIZES.contains(&short)
                || (reached > 0 && short == "request_queue_time_seconds")
                || (reached > 1 && TIMES.contains(&short));
            let count = family(&families, name).value("_count", &[]);
            assert_eq!(count, f64::from(u8::from(enters)), "{name} of {failed:?}");
        }
    }
}

#[test]
fn a_sleeping_engine_is_not_awake() {
    let telemetry = telemetry("m");
    let engine = telemetry.engine();
    for (awake, expected) in [(false, 0.0), (true, 1.0)] {
        engine.awake(awake);
        let families = scrape(&telemetry);
        let state = family(&families, "vllm:engine_sleep_state");
        assert_eq!(state.value("", &[("sleep_state", "awake")]), expected);
        assert_eq!(state.value("", &[("sleep_state", "discard_all")]), 0.0);
    }
}

#[test]
fn a_disabled_handle_observes_nothing() {
    let telemetry = telemetry("m");
    let samples = || scrape(&telemetry).into_iter().filter(|f| f.name.starts_with("vllm:")).map(|f| f.samples);
    let values = || samples().flatten().filter(|s| !s.labels.contains_key("max_lora")).map(|s| s.value);
    let before: Vec<f64> = values().collect();
    for (engine, observes) in [(EngineMetrics::disabled(), false), (telemetry.engine(), true)] {
        engine.step(&StepStats { generated_tokens: 1, ..StepStats::default() });
        finish(&engine, 1, 1);
        assert_eq!(values().ne(before.iter().copied()), observes);
    }
}

fn exchange(http: &HttpMetrics, method: &str, handler: Option<&str>, status: u16) {
    let duration = Duration::from_millis(200);
    http.observe(&HttpExchange { method, handler, status, duration, request_bytes: 100, response_bytes: 1000 });
}

#[test]
fn http_series_are_fixed_whatever_clients_send() {
    let telemetry = telemetry("m");
    let http = telemetry.http(ROUTES);
    let before = telemetry.render().lines().filter(|l| l.starts_with("http_")).count();
    exchange(&http, "POST", Some("/v1/chat/completions"), 200);
    exchange(&http, "POST", Some("/v1/chat/completions"), 404);
    exchange(&http, "PROPFIND", None, 404);
    exchange(&http, "GET", Some("/v1/surprise"), 700);
    http.rejected(Rejection::Requests);
    http.rejected(Rejection::Tokens);
    http.rejected(Rejection::Tokens);

    let families = scrape(&telemetry);
    let requests = family(&families, "http_requests_total");
    let count = |handler: &str, method: &str, status: &str| {
        requests.value("", &[("handler", handler), ("method", method), ("status", status)])
    };
    assert_eq!(count("/v1/chat/completions", "POST", "2xx"), 1.0);
    assert_eq!(count("/v1/chat/completions", "POST", "4xx"), 1.0);
    assert_eq!(count("/v1/models", "GET", "2xx"), 0.0);
    assert_eq!(count("none", "OTHER", "4xx"), 1.0);
    assert_eq!(count("none", "GET", "5xx"), 1.0);

    let chat = [("handler", "/v1/chat/completions")];
    let duration = family(&families, "http_request_duration_seconds");
    assert_eq!(duration.value("_bucket", &[chat[0], ("le", "0.1")]), 0.0);
    assert_eq!(duration.value("_bucket", &[chat[0], ("le", "0.5")]), 2.0);
    assert_eq!(family(&families, "http_request_duration_highr_seconds").value("_count", &[]), 4.0);
    assert_eq!(family(&families, "http_request_size_bytes").value("_sum", &chat), 200.0);
    assert_eq!(family(&families, "http_response_size_bytes").value("_sum", &chat), 2000.0);
    let rejections = family(&families, "vllm:admission_rejections_total");
    assert_eq!(rejections.value("", &[("reason", "max_num_queued_reqs"), ("model_name", "m")]), 1.0);
    assert_eq!(rejections.value("", &[("reason", "max_num_queued_tokens"), ("model_name", "m")]), 2.0);
    assert_eq!(telemetry.render().lines().filter(|l| l.starts_with("http_")).count(), before);
}

#[test]
fn asking_for_the_http_handle_twice_shares_its_series() {
    let telemetry = telemetry("m");
    exchange(&telemetry.http(ROUTES), "GET", Some("/v1/models"), 200);
    exchange(&telemetry.http(ROUTES), "GET", Some("/v1/models"), 200);
    let families = scrape(&telemetry);
    let labels = [("handler", "/v1/models"), ("method", "GET"), ("status", "2xx")];
    assert_eq!(family(&families, "http_requests_total").value("", &labels), 2.0);
}

#[test]
fn the_cache_configuration_is_replaced_not_added() {
    let telemetry = telemetry("m");
    telemetry.set_cache_config(&[("block_size", "16".into()), ("num_gpu_blocks", "100".into())]);
    telemetry.set_cache_config(&[("block_size", "16".into()), ("num_gpu_blocks", "200".into())]);
    let families = scrape(&telemetry);
    let info = family(&families, "vllm:cache_config_info");
    assert_eq!(info.kind, "gauge");
    assert_eq!(info.samples.len(), 1);
    assert_eq!(info.value("", &[("num_gpu_blocks", "200"), ("engine", "0")]), 1.0);
    assert!(!info.samples[0].labels.contains_key("model_name"));
}

#[test]
fn servers_in_one_process_share_nothing() {
    let (one, other) = (telemetry("one"), telemetry("other"));
    one.engine().generated(5);
    assert_eq!(family(&scrape(&one), "vllm:generation_tokens_total").value("", &[]), 5.0);
    assert_eq!(family(&scrape(&other), "vllm:generation_tokens_total").value("", &[]), 0.0);
}

#[test]
fn the_text_does_not_grow_with_what_was_observed() {
    let telemetry = telemetry("m");
    let lines = |t: &Telemetry| t.render().lines().count();
    let before = lines(&telemetry);
    let engine = telemetry.engine();
    (0..100_000).for_each(|i| engine.next_token(Duration::from_micros(i)));
    assert_eq!(lines(&telemetry), before);
}

#[test]
fn the_parser_rejects_what_is_not_the_format() {
    let head = "# HELP a_total A.\n# TYPE a_total counter\n";
    assert!(parse(&format!("{head}a_total{{x=\"\\\\\\\"\\n\"}} 1.0\n")).is_ok());
    for bad in [
        "a_total 1.0\n",
        "# HELP a_total A.\n# TYPE a_total gouge\na_total 1.0\n",
        &format!("{head}a_total 1.0"),
        &format!("{head}a_total 1.0\na_total 2.0\n"),
        &format!("{head}a_total inf\n"),
        &format!("{head}a_total{{x=\"\"y\"}} 1.0\n"),
        &format!("{head}a_total{{x=\"\\t\"}} 1.0\n"),
        &format!("{head}b_total 1.0\n"),
        "# HELP a A.\n# TYPE a counter\na 1.0\n",
        "# HELP h A.\n# TYPE h histogram\nh_bucket{le=\"1.0\"} 2.0\nh_bucket{le=\"+Inf\"} 1.0\nh_sum 1.0\nh_count 1.0\n",
        "# HELP h A.\n# TYPE h histogram\nh_bucket{le=\"+Inf\"} 1.0\nh_sum 1.0\nh_count 2.0\n",
    ] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}

proptest! {
    #[test]
    fn any_model_name_survives_the_format(name in "[ -~\\n\\\\\"{}=,é漢]{0,24}") {
        let families = scrape(&telemetry(&name));
        let sample = &family(&families, "vllm:num_requests_running").samples[0];
        prop_assert_eq!(sample.labels.get("model_name"), Some(&name));
    }

    #[test]
    fn histograms_agree_with_a_plain_count(gaps in prop::collection::vec(0u64..100_000_000_000, 0..50)) {
        let telemetry = telemetry("m");
        let engine = telemetry.engine();
        gaps.iter().for_each(|&ns| engine.next_token(Duration::from_nanos(ns)));
        let families = scrape(&telemetry);
        let family = family(&families, "vllm:inter_token_latency_seconds");
        for bound in TOKEN {
            let expected = gaps.iter().filter(|&&ns| ns as f64 <= bound * 1e9).count() as f64;
            prop_assert_eq!(family.value("_bucket", &[("le", &format!("{bound:?}"))]), expected);
        }
        let sum = gaps.iter().sum::<u64>() as f64 / 1e9;
        prop_assert_eq!(family.value("_sum", &[]), sum);
    }
}

#[test]
fn steps_of_the_device_are_counted_and_held_against_its_limits() {
    let telemetry = telemetry("m");
    let memory = DeviceMemory { total: 100, weights: 40, kv_cache: 30, workspace: 20 };
    let config = DeviceConfig { memory: Some(memory), peaks: Some((1000.0, 4000.0)), records_steps: true };
    let device = telemetry.device(&config);
    let at_rest = scrape(&telemetry);
    for name in ["flops", "read_bytes", "write_bytes"] {
        assert_eq!(family(&at_rest, &format!("vllm:estimated_{name}_per_gpu_total")).value("", &[]), 0.0);
    }
    assert_eq!(family(&at_rest, "octavo_cuda_graph_steps_total").label_values("mode"), ["launched", "replayed"]);
    assert_eq!(family(&at_rest, "octavo_step_flops_utilization").value("", &[]), 0.0);
    let step = DeviceStep { flops: 1000, read_bytes: 300, written_bytes: 100, busy: Duration::from_millis(500) };
    for _ in 0..2 {
        device.step(&step);
    }
    device.steps(5, 1);
    device.utilization(&step);
    let families = scrape(&telemetry);
    let value = |name: &str, labels: &[(&str, &str)]| family(&families, name).value("", labels);
    assert_eq!(value("vllm:estimated_flops_per_gpu_total", &[]), 2000.0);
    assert_eq!(value("vllm:estimated_read_bytes_per_gpu_total", &[]), 600.0);
    assert_eq!(value("vllm:estimated_write_bytes_per_gpu_total", &[]), 200.0);
    assert_eq!(family(&families, "octavo_step_busy_seconds").value("_sum", &[]), 1.0);
    assert_eq!(family(&families, "octavo_step_busy_seconds").value("_count", &[]), 2.0);
    assert_eq!(value("octavo_cuda_graph_steps_total", &[("mode", "replayed")]), 5.0);
    assert_eq!(value("octavo_device_memory_bytes", &[("kind", "kv_cache")]), 30.0);
    assert_eq!(value("octavo_step_bandwidth_utilization", &[]), 0.8);
    assert_eq!(value("octavo_step_flops_utilization", &[]), 0.5);
    assert_eq!(value("octavo_device_peak_bytes_per_second", &[]), 1000.0);
}

#[test]
fn of_a_device_that_states_nothing_no_shares_are_told() {
    let telemetry = telemetry("m");
    let device = telemetry.device(&DeviceConfig::default());
    device.step(&DeviceStep { flops: 1, read_bytes: 1, written_bytes: 1, busy: Duration::from_millis(1) });
    device.utilization(&DeviceStep::default());
    device.steps(1, 1);
    let families = scrape(&telemetry);
    let named = |part: &str| families.iter().any(|family| family.name.contains(part));
    assert!(named("estimated_flops") && named("step_busy_seconds"));
    assert!(!named("utilization") && !named("peak") && !named("device_memory") && !named("cuda_graph"));
}
