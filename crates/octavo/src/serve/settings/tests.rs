use std::ffi::OsString;

use octavo_engine::{SchedulingPolicy, Speculation};
use octavo_server::FingerprintMode;
use octavo_telemetry::LogFormat;
use octavo_text::{ReasoningSyntax, ToolSyntax};

use super::*;
use crate::cli::{self, Command};

fn args(line: &[&str]) -> ServeArgs {
    let line = ["serve"].iter().chain(line).map(OsString::from).collect();
    match cli::parse(line, &|_| None).unwrap().command {
        Command::Serve(args) => *args,
        other => panic!("not serve: {other:?}"),
    }
}

fn settings(line: &[&str]) -> Result<Settings> {
    Settings::of_server(&args(line), &|_| None)
}

#[test]
fn what_is_told_of_requests_arrives() {
    let line = ["--enable-per-request-metrics", "--fingerprint-mode", "hash", "--enable-tokenizer-info-endpoint"];
    let given = settings(&line).unwrap();
    assert_eq!((given.server.api.request_metrics, given.server.api.fingerprint), (true, FingerprintMode::Hash));
    assert!(given.server.tokenizer_info);
    assert_eq!(given.server.log, RequestLog::default());
    let line = ["--enable-log-requests", "--enable-log-outputs", "--max-log-len", "10"];
    let log = RequestLog { requests: true, outputs: true, max_len: Some(10) };
    assert_eq!(settings(&line).unwrap().server.log, log);
    assert!(settings(&["--enable-log-outputs"]).unwrap_err().to_string().contains("--enable-log-requests"));
}

#[test]
fn traces_go_where_the_flag_or_a_variable_says_and_nowhere_else() {
    let traces = |line: &[&str], variable: Option<&str>| {
        let environment = |name: &str| variable.filter(|_| name == "OTEL_EXPORTER_OTLP_ENDPOINT").map(str::to_owned);
        Settings::of_server(&args(line), &environment).map(|settings| settings.traces)
    };
    let endpoint = |line: &[&str], variable| traces(line, variable).unwrap().map(|config| config.endpoint().to_owned());
    assert_eq!(endpoint(&[], None), None);
    assert_eq!(endpoint(&["--otlp-traces-endpoint", "http://a:1"], Some("http://b:1")).unwrap(), "http://a:1");
    assert_eq!(endpoint(&["--collect-detailed-traces", "model,worker"], Some("http://b:1")).unwrap(), "http://b:1");
    for (line, part) in [
        (&["--otlp-traces-endpoint", "nowhere://"][..], "--otlp-traces-endpoint"),
        (&["--collect-detailed-traces", "all"], "needs --otlp-traces-endpoint"),
    ] {
        let error = format!("{:#}", traces(line, None).unwrap_err());
        assert!(error.contains(part), "{error}");
    }
    let in_process = Settings::in_process(&args(&["--otlp-traces-endpoint", "http://a:1"]).compose, &|_| None);
    assert_eq!(in_process.unwrap().traces.unwrap().endpoint(), "http://a:1");
}

#[test]
fn lines_are_written_as_asked_for() {
    let format = |line: &[&str]| log_config(&args(line).compose.observe, None).format;
    assert_eq!((format(&[]), format(&["--log-format", "json"])), (LogFormat::Text, LogFormat::Json));
}

#[test]
fn parsers_are_vllms_by_name() {
    let parsers = |line: &[&str]| settings(line).map(|settings| settings.parsers);
    assert_eq!(parsers(&[]).unwrap(), ParserFlags::default());
    let tools = parsers(&["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]).unwrap();
    assert_eq!((tools.tools, tools.tools_are_needed), (Choice::Named(ToolSyntax::Hermes), true));
    assert_eq!(parsers(&["--tool-call-parser", "none"]).unwrap().tools, Choice::Disabled);
    let reasoning = |line: &[&str]| parsers(line).unwrap().reasoning;
    assert_eq!(reasoning(&["--reasoning-parser", "deepseek_r1"]), Choice::Named(ReasoningSyntax::DeepSeekR1));
    assert_eq!(reasoning(&["--reasoning-parser", ""]), Choice::Auto);
    let nested = reasoning(&["--structured-outputs-config.reasoning_parser", "qwen3"]);
    assert_eq!(nested, Choice::Named(ReasoningSyntax::Qwen3));
    for (line, flag) in [
        (&["--enable-auto-tool-choice", "--tool-call-parser", "none"][..], "--enable-auto-tool-choice contradicts"),
        (&["--enable-auto-tool-choice", "--tool-call-parser", "nobodys"], "--tool-call-parser"),
        (&["--reasoning-parser", "nobodys"], "--reasoning-parser"),
    ] {
        let error = format!("{:#}", parsers(line).unwrap_err());
        assert!(error.starts_with(flag), "{error}");
    }
}

#[test]
fn values_arrive_in_their_units() {
    let line = [
        "--ssl-keyfile=k.pem",
        "--ssl-certfile=c.pem",
        "--ssl-cert-reqs=2",
        "--enable-ssl-refresh",
        "--root-path=llm/",
        "--allowed-origins=[\"http://a\",\"http://b\"]",
        "--sse-keep-alive-interval=2.5",
        "--shutdown-timeout=3",
        "--h11-max-incomplete-event-size=1M",
        "--disable-log-stats",
        "--api-key",
        "a",
        "b",
    ];
    let settings = settings(&line).unwrap();
    let tls = TlsConfig {
        key_file: Some("k.pem".into()),
        cert_file: "c.pem".into(),
        ca_certs: None,
        client_auth: ClientAuth::Required,
        refresh: Some(CERTIFICATE_REFRESH),
    };
    assert_eq!(settings.tls, Some(tls));
    assert_eq!(settings.server.root_path, "/llm");
    assert_eq!(settings.server.cors.allowed_origins, ["http://a", "http://b"]);
    assert_eq!(
        (settings.server.cors.allowed_methods, settings.server.cors.allowed_headers),
        (vec!["*".into()], vec!["*".into()])
    );
    assert_eq!(settings.server.sse_keep_alive, Some(Duration::from_millis(2500)));
    assert_eq!(settings.server.shutdown_timeout, Duration::from_secs(3));
    assert_eq!(settings.server.connection.max_head_bytes, 1 << 20);
    assert!(!settings.log_stats);
    assert_eq!(settings.server.api_keys, ["a", "b"]);
}

#[test]
fn the_keep_alive_time_is_a_variable() {
    let with = |value: &'static str| {
        Settings::of_server(&args(&[]), &move |name: &str| (name == KEEP_ALIVE).then(|| value.to_owned()))
    };
    assert_eq!(with("5").unwrap().server.connection.head_timeout, Duration::from_secs(5));
    assert_eq!(with("").unwrap().server.connection, ConnectionLimits::default());
    let error = with("soon").unwrap_err().to_string();
    assert!(error.contains("VLLM_HTTP_TIMEOUT_KEEP_ALIVE='soon'"), "{error}");
}

#[test]
fn development_routes_and_stored_responses_are_enabled_by_variables() {
    for variable in [DEVELOPMENT, STORE] {
        let with = |value: &'static str| {
            Settings::of_server(&args(&[]), &move |name: &str| (name == variable).then(|| value.to_owned()))
        };
        for (value, enabled) in [("1", true), ("0", false), ("", false)] {
            let settings = with(value).unwrap();
            let expected = if variable == STORE { (false, enabled) } else { (enabled, false) };
            assert_eq!(
                (settings.server.development, settings.server.response_store.is_some()),
                expected,
                "{variable}={value}"
            );
        }
        let error = with("on").unwrap_err().to_string();
        assert!(error.contains(&format!("{variable}='on' is neither 0 nor 1")), "{error}");
    }
}

#[test]
fn an_empty_secret_opens_no_server() {
    for value in ["", " ", "\n"] {
        for variable in ["OCTAVO_API_KEY", "OCTAVO_API_KEYS_FILE"] {
            let set = move |name: &str| (name == variable).then(|| value.to_owned());
            let error = Settings::of_server(&args(&[]), &set).unwrap_err().to_string();
            assert!(error.contains(&format!("{variable} is set but empty")), "{error}");
        }
        let set = move |name: &str| (name == "OCTAVO_API_KEY").then(|| value.to_owned());
        assert!(Settings::of_server(&args(&["--api-key", "k"]), &set).is_ok());
        let vllms = move |name: &str| (name == "VLLM_API_KEY").then(|| value.to_owned());
        assert_eq!(Settings::of_server(&args(&[]), &vllms).unwrap().server.api_keys, [""; 0]);
    }
}

#[test]
fn vllms_variable_sets_a_key_unless_a_flag_does() {
    let set = |name: &str| (name == "VLLM_API_KEY").then(|| "v".to_owned());
    assert_eq!(Settings::of_server(&args(&[]), &set).unwrap().server.api_keys, ["v"]);
    assert_eq!(Settings::of_server(&args(&["--api-key", "k", "l"]), &set).unwrap().server.api_keys, ["k", "l"]);
}

#[test]
fn bodies_as_large_as_allowed_have_room() {
    let connection = |line: &[&str]| Settings::of_server(&args(line), &|_: &str| None).unwrap().server.connection;
    assert_eq!(connection(&[]), ConnectionLimits::default());
    assert_eq!(ConnectionLimits::default().max_body_bytes, 100 << 20);
    let small = connection(&["--max-body-bytes", "1000"]);
    assert_eq!(
        (small.max_body_bytes, small.max_buffered_bytes),
        (1000, ConnectionLimits::default().max_buffered_bytes)
    );
    assert_eq!(connection(&["--max-response-bytes", "1000"]).max_response_bytes, 1000);
    assert_eq!(connection(&["--max-connections", "10"]).max_connections, 10);
    let large = connection(&["--max-body-bytes", "1000000000"]);
    assert_eq!((large.max_body_bytes, large.max_buffered_bytes), (1_000_000_000, 4_000_000_000));
}

#[test]
fn contradictions_are_sentences() {
    for (line, part) in [
        (vec!["--structured-outputs-config.backnd", "x"], "unknown key 'backnd'"),
        (vec!["--structured-outputs-config.disable_any_whitespace", "1"], "must be true or false"),
        (vec!["--structured-outputs-config.reasoning_parser", "1"], "must be a name"),
    ] {
        let error = format!("{:#}", settings(&line).unwrap_err());
        assert!(error.contains(part), "{line:?}: {error}");
    }
    let known = [r#"--structured-outputs-config={"backend":"xgrammar","reasoning_parser":"qwen3"}"#];
    assert_eq!(settings(&known).unwrap().parsers.reasoning, Choice::Named(ReasoningSyntax::Qwen3));
}

#[test]
fn the_engine_gets_its_limits() {
    let line = [
        "--max-num-seqs=8",
        "--no-enable-prefix-caching",
        "--no-enable-chunked-prefill",
        "--long-prefill-token-threshold=1k",
        "--watermark=0.05",
        "--scheduling-policy=priority",
        "--max-num-queued-reqs=7",
        r#"--speculative-config={"method":"ngram","num_speculative_tokens":3}"#,
    ];
    let config = engine_config(&args(&line).compose.engine, &settings(&line).unwrap(), 100, STEPS, 7);
    let expected = EngineConfig {
        max_model_len: 100,
        stuck_after: Duration::from_secs(30),
        max_num_seqs: 8,
        max_num_batched_tokens: 200,
        max_num_encoder_tokens: 7,
        max_step: STEPS.time,
        policy: SchedulingPolicy::Priority,
        enable_prefix_caching: false,
        enable_chunked_prefill: false,
        long_prefill_token_threshold: 1000,
        watermark: 0.05,
        speculation: Some(Speculation { tokens: 3, lookup_min: 5, lookup_max: 5 }),
        max_queued_requests: 7,
        ..EngineConfig::default()
    };
    assert_eq!(config, expected);
}

const STEPS: StepLimits =
    StepLimits { tokens: 200, time: Some(Duration::from_millis(70)), stuck_after: Duration::from_secs(30) };

#[test]
fn the_time_of_a_step_has_the_limit_of_the_device_unless_a_flag_sets_one() {
    for (line, expected) in [
        (&[][..], STEPS.time),
        (&["--max-step-ms=0"], None),
        (&["--max-step-ms=30", "--scheduling-policy=fair"], Some(Duration::from_millis(30))),
    ] {
        let config = engine_config(&args(line).compose.engine, &Settings::default(), 100, STEPS, 7);
        assert_eq!(config.max_step, expected, "{line:?}");
    }
}
