mod origins;

use std::collections::HashSet;
use std::io::Write;

use super::*;

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

fn parse_with(line: &[&str], variables: &[(&str, &str)]) -> Result<ServeArgs, Failure> {
    let environment = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    match parse(words(line), &environment)?.command {
        Command::Serve(args) => Ok(*args),
        other => panic!("not serve: {other:?}"),
    }
}

fn serve(args: &[&str]) -> Result<ServeArgs, Failure> {
    parse_with(&[&["serve"], args].concat(), &[])
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn with_file(text: &str, args: &[&str], variables: &[(&str, &str)]) -> Result<ServeArgs, Failure> {
    let file = file(text);
    parse_with(&[&["serve", "--config", file.path().to_str().unwrap()], args].concat(), variables)
}

/// Every flag that section 3.2 of the wire reference names (and 1.10), with a value where it takes one.
const VLLM: &[&[&str]] = &[
    &["--model", "m"],
    &["--served-model-name", "a", "b"],
    &["--host", "::"],
    &["--port", "80"],
    &["--uds", "/s"],
    &["--tokenizer", "m"],
    &["--tokenizer-mode", "auto"],
    &["--skip-tokenizer-init"],
    &["--revision", "main"],
    &["--tokenizer-revision", "main"],
    &["--hf-token", "t"],
    &["--download-dir", "/d"],
    &["--hf-overrides", "{}"],
    &["--trust-remote-code"],
    &["--dtype", "bfloat16"],
    &["--max-model-len", "-1"],
    &["--quantization", "fp8"],
    &["-q", "awq"],
    &["--load-format", "dummy"],
    &["--gpu-memory-utilization", "0.92"],
    &["--kv-cache-memory-bytes", "4G"],
    &["--num-gpu-blocks-override", "64"],
    &["--block-size", "16"],
    &["--kv-cache-dtype", "fp8"],
    &["--enable-prefix-caching"],
    &["--prefix-caching-hash-algo", "sha256"],
    &["--max-num-seqs", "256"],
    &["--max-num-batched-tokens", "8k"],
    &["--performance-mode", "throughput"],
    &["--enable-chunked-prefill"],
    &["--long-prefill-token-threshold", "0"],
    &["--max-num-queued-reqs", "10"],
    &["--max-num-queued-tokens", "10k"],
    &["--scheduling-policy", "priority"],
    &["--watermark", "0.0"],
    &["--scheduler-reserve-full-isl"],
    &["--async-scheduling"],
    &["--stream-interval", "1"],
    &["-tp", "1"],
    &["--tensor-parallel-size", "2"],
    &["-pp", "1"],
    &["--pipeline-parallel-size", "1"],
    &["-dp", "1"],
    &["--data-parallel-size", "1"],
    &["-ep"],
    &["-dpl", "1"],
    &["-dpa", "host"],
    &["-dpp", "29550"],
    &["-dph"],
    &["-dpe"],
    &["--api-server-count", "2"],
    &["--distributed-executor-backend", "mp"],
    &["--seed", "0"],
    &["--enforce-eager"],
    &["-O", "2"],
    &["-O3"],
    &["--optimization-level", "2"],
    &["--compilation-config", "{}"],
    &["--compilation-config.cudagraph_mode", "FULL"],
    &["-cc", "{}"],
    &["--cudagraph-capture-sizes", "1", "2", "4"],
    &["--max-cudagraph-capture-size", "8"],
    &["--attention-backend", "FLASHINFER"],
    &["--cpu-offload-gb", "0"],
    &["--kv-offloading-size", "4"],
    &["--kv-offloading-backend", "native"],
    &["--swap-space", "4"],
    &["--num-scheduler-steps", "8"],
    &["--disable-log-requests"],
    &["--use-v2-block-manager"],
    &["--guided-decoding-backend", "outlines"],
    &["--max-logprobs", "-1"],
    &["--logprobs-mode", "raw_logprobs"],
    &["--generation-config", "vllm"],
    &["--override-generation-config", "{}"],
    &["--override-generation-config.temperature", "0.5"],
    &["--chat-template", "t.jinja"],
    &["--chat-template-content-format", "openai"],
    &["--default-chat-template-kwargs", "{}"],
    &["--trust-request-chat-template"],
    &["--response-role", "assistant"],
    &["--enable-auto-tool-choice"],
    &["--tool-call-parser", "hermes"],
    &["--tool-parser-plugin", "p.py"],
    &["--reasoning-parser", "qwen3"],
    &["--structured-outputs-config", r#"{"backend":"auto"}"#],
    &["--structured-outputs-config.backend", "guidance"],
    &["--enable-lora"],
    &["--lora-modules", "a=/a", "b=/b"],
    &["--max-loras", "1"],
    &["--max-lora-rank", "16"],
    &["--max-cpu-loras", "1"],
    &["--limit-mm-per-prompt", r#"{"image":2}"#],
    &["--limit-mm-per-prompt.image", "2"],
    &["--mm-processor-kwargs", "{}"],
    &["--media-io-kwargs", "{}"],
    &["--trust-request-mm-kwargs"],
    &["--mm-processor-cache-gb", "4"],
    &["--mm-encoder-tp-mode", "data"],
    &["--skip-mm-profiling"],
    &["--language-model-only"],
    &["--allowed-local-media-path", "/"],
    &["--allowed-media-domains", "a.org", "b.org"],
    &["--api-key", "a", "b"],
    &["--ssl-keyfile", "k", "--ssl-certfile", "c"],
    &["--ssl-keyfile", "k", "--ssl-certfile", "c", "--ssl-ca-certs", "a"],
    &["--ssl-cert-reqs", "0"],
    &["--ssl-ciphers", "x"],
    &["--enable-ssl-refresh"],
    &["--allowed-origins", r#"["*"]"#],
    &["--allowed-methods", "GET", "POST"],
    &["--allowed-headers", "*"],
    &["--allow-credentials"],
    &["--root-path", "/x"],
    &["--middleware", "a.b"],
    &["--enable-request-id-headers"],
    &["--disable-fastapi-docs"],
    &["--enable-tokenizer-info-endpoint"],
    &["--enable-prompt-embeds"],
    &["--enable-scale-out"],
    &["--tokens-only"],
    &["--h11-max-incomplete-event-size", "4M"],
    &["--h11-max-header-count", "256"],
    &["--uvicorn-log-level", "info"],
    &["--disable-uvicorn-access-log"],
    &["--disable-access-log-for-endpoints", "/health,/metrics"],
    &["--enable-log-requests"],
    &["--enable-log-outputs"],
    &["--max-log-len", "100"],
    &["--enable-prompt-tokens-details"],
    &["--enable-per-request-metrics"],
    &["--enable-server-load-tracking"],
    &["--enable-force-include-usage"],
    &["--sse-keep-alive-interval", "0"],
    &["--fingerprint-mode", "full"],
    &["--shutdown-timeout", "0"],
    &["--otlp-traces-endpoint", "http://o:4317"],
    &["--collect-detailed-traces", "all"],
    &["--disable-log-stats"],
    &["--show-hidden-metrics-for-version", "0.32"],
    &["--kv-cache-metrics"],
    &["--custom-histogram-buckets", "{}"],
    &["--profiler-config.profiler", "torch"],
    &["--kv-events-config", "{}"],
    &["--kv-transfer-config", "{}"],
    &["--ec-transfer-config", "{}"],
    &["--speculative-config", "{}"],
    &["-sc", "{}"],
    &["--spec-method", "ngram"],
    &["--spec-model", "m"],
    &["--spec-tokens", "3"],
    &["--enable-sleep-mode"],
    &["--headless"],
    &["--device-ids", "0"],
    &["--renderer-num-workers", "1"],
];

#[test]
fn the_definition_is_sound() {
    command().debug_assert();
}

#[test]
fn every_flag_of_the_reference_is_understood_and_eats_nothing() {
    for flag in VLLM {
        // In front of another flag, at the end, and spelled with underscores.
        let underscored = flag[0].replacen("--", "  ", 1).replace('-', "_").replacen("  ", "--", 1);
        for line in [[flag, &["--port", "81"][..]].concat(), [&["--port", "81"], *flag].concat()] {
            let mut other = line.clone();
            for word in &mut other {
                if *word == flag[0] && word.starts_with("--") {
                    *word = &underscored;
                }
            }
            for line in [line, other] {
                let args = serve(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
                let port =
                    if flag[0] == "--port" { [80, 81].contains(&args.network.port) } else { args.network.port == 81 };
                assert!(port, "{line:?}");
            }
        }
    }
}

#[test]
fn every_flag_is_in_one_class() {
    let command = command();
    let serve = command.find_subcommand("serve").unwrap();
    let unserved: HashSet<_> = compat::FLAGS.iter().map(|flag| flag.name).collect();
    let mut seen = HashSet::new();
    for arg in serve.get_arguments() {
        let Some(name) = arg.get_long() else { continue };
        assert!(seen.insert(name), "--{name} is defined twice");
        assert_eq!(arg.is_hide_set(), unserved.contains(name), "--{name}: hidden if and only if unserved");
        if !arg.is_hide_set() {
            assert!(arg.get_help().is_some_and(|help| !help.to_string().is_empty()), "--{name} has no help");
        }
    }
}

#[test]
fn unserved_flags_warn_or_refuse() {
    let check = |line: &[&str]| serve(line).unwrap().compose.compat.check();
    for line in [
        vec!["--trust-remote-code"],
        vec!["--swap-space", "4"],
        vec!["--swap-space", "4", "--swap_space=8"],
        vec!["--disable-log-requests"],
        vec!["--compilation-config.level", "3"],
        vec!["-O3"],
        vec!["--cudagraph-capture-sizes", "1", "2"],
        vec!["--guided-decoding-backend", "xgrammar"],
        vec!["--distributed-executor-backend", "ray"],
        vec!["--spec-method", "ngram"],
    ] {
        assert_eq!(check(&line).unwrap().len(), 1, "{line:?}");
    }
    for line in [
        vec![],
        vec!["-tp", "1"],
        vec!["--no-enable-lora"],
        vec!["--enable-lora", "--lora-modules", "a=/a", "--max-loras", "2"],
        vec!["-q", "gguf"],
        vec!["-q", "mxfp4"],
        vec!["-q", "awq_marlin"],
        vec!["--load-format", "auto"],
    ] {
        assert!(check(&line).unwrap().is_empty(), "{line:?}");
    }
    for line in [
        vec!["--tensor-parallel-size", "2"],
        vec!["-pp", "2"],
        vec!["-dp", "4"],
        vec!["--enable-lora-bias"],
        vec!["--default-mm-loras", r#"{"image":"/a"}"#],
        vec!["--kv-transfer-config", r#"{"kv_connector":"x"}"#],
        vec!["--rope-scaling.x", "1"],
        vec!["--logprobs-mode", "processed_logits"],
    ] {
        let error = check(&line).unwrap_err().to_string();
        assert!(error.starts_with("--") && error.contains(": "), "{line:?}: {error}");
    }
    let both = check(&["-tp", "2", "--enable-lora-bias"]).unwrap_err().to_string();
    assert_eq!(both.lines().count(), 2, "all of them are told: {both}");
}

#[test]
fn the_manifest_of_a_vllm_deployment_works_unchanged() {
    let line = "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-VL-8B-Instruct --served-model-name \
                qwen3-vl-8b --tensor-parallel-size 1 --gpu-memory-utilization 0.90 --dtype bfloat16 --max-model-len \
                8192 --max-num-seqs 128 --port 8000 --host 0.0.0.0 --trust-remote-code --enable-prefix-caching";
    let line: Vec<_> = line.split_whitespace().collect();
    for skipped in 0..=3 {
        // With the whole command, without python3, and as bare arguments; `-m` alone would be a flag of serve.
        if skipped == 2 {
            continue;
        }
        let args = parse_with(&line[skipped..], &[]).unwrap();
        let (model, engine) = (&args.compose.model, &args.compose.engine);
        assert_eq!(model.reference(), "Qwen/Qwen3-VL-8B-Instruct");
        assert_eq!(model.served_model_name, ["qwen3-vl-8b"]);
        assert_eq!(model.dtype, Dtype::Bfloat16);
        assert_eq!((engine.max_model_len, engine.max_num_seqs), (Some(MaxModelLen::Tokens(8192)), 128));
        assert_eq!(engine.gpu_memory_utilization, Some(0.9));
        assert!(engine.enable_prefix_caching);
        assert_eq!((args.network.host.as_str(), args.network.port), ("0.0.0.0", 8000));
        let warnings = args.compose.compat.check().unwrap();
        assert_eq!(warnings, ["--trust-remote-code has no effect: a model's own code is never run"]);
    }
}

#[test]
fn both_spellings_of_a_flag_are_one() {
    let args = serve(&["m", "--max_model_len", "4k", "--served-model-name", "a_b", "c"]).unwrap().compose;
    assert_eq!(args.engine.max_model_len, Some(MaxModelLen::Tokens(4000)));
    assert_eq!(args.model.served_model_name, ["a_b", "c"]);
    assert_eq!(args.model.reference(), "m");
    assert_eq!(serve(&[]).unwrap().compose.model.reference(), DEFAULT_MODEL);
}

#[test]
fn a_switch_may_be_left_to_the_device() {
    let scheduling = |line: &[&str]| serve(line).unwrap().compose.engine.async_scheduling;
    assert_eq!(scheduling(&[]), None);
    assert_eq!(scheduling(&["--async-scheduling"]), Some(true));
    assert_eq!(scheduling(&["--no-async-scheduling"]), Some(false));
}

#[test]
fn the_later_of_two_opposite_switches_wins() {
    let caching = |line: &[&str]| serve(line).unwrap().compose.engine.enable_prefix_caching;
    assert!(caching(&[]));
    assert!(!caching(&["--no-enable-prefix-caching"]));
    assert!(caching(&["--no-enable-prefix-caching", "--enable_prefix_caching"]));
    assert!(!caching(&["--enable-prefix-caching", "--no_enable_prefix_caching"]));
    assert!(!caching(&["--enable-prefix-caching=false"]));
}

#[test]
fn an_unknown_flag_is_named_with_the_nearest_one() {
    let Err(Failure::Usage { error, .. }) = serve(&["--max-model-length", "1"]) else { panic!("accepted") };
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    assert!(text.contains("'--max-model-length'") && text.contains("'--max-model-len'"), "{text}");
}

#[test]
fn a_combined_pem_file_needs_no_key_file() {
    let tls = serve(&["m", "--ssl-certfile", "both.pem"]).unwrap().tls;
    assert_eq!((tls.ssl_certfile, tls.ssl_keyfile), (Some("both.pem".into()), None));
}

#[test]
fn bad_values_are_named() {
    for (line, part) in [
        (vec!["--port", "high"], "--port"),
        (vec!["--gpu-memory-utilization", "1.5"], "above 0 and up to 1"),
        (vec!["--max-model-len", "4kk"], "4096, 4k or 4K"),
        (vec!["--override-generation-config", "[1]"], "not an object"),
        (vec!["--ssl-keyfile", "k"], "--ssl-certfile"),
        (vec!["--ssl-cert-reqs", "3"], "3"),
        (vec!["--enable-prefix-caching=maybe"], "maybe"),
        (vec!["--fingerprint-mode", "odd"], "full"),
        (vec!["--load-format", "bitsandbytes"], "not quantized while they are loaded"),
    ] {
        let error = serve(&line).unwrap_err().to_string();
        assert!(error.contains(part), "{line:?}: {error}");
    }
}

#[test]
fn json_flags_take_both_forms() {
    for line in [
        &["--override-generation-config.temperature", "0.5"][..],
        &["--override_generation_config", r#"{"temperature":0.5}"#],
    ] {
        let object = serve(line).unwrap().compose.sampling.override_generation_config.unwrap();
        assert_eq!(serde_json::Value::Object(object.0), serde_json::json!({"temperature": 0.5}));
    }
    let kwargs = serve(&["--default-chat-template-kwargs.enable_thinking", "false"]).unwrap().compose.chat;
    assert_eq!(kwargs.default_chat_template_kwargs.unwrap().0["enable_thinking"], false);
}

#[test]
fn a_batch_shares_the_flags_of_models() {
    let line = ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "m", "--max_num_seqs", "8", "-tp", "1"];
    let Command::RunBatch(args) = parse(words(&line), &|_| None).unwrap().command else { panic!() };
    assert_eq!((args.input_file.as_path(), args.output_file.as_path()), ("in.jsonl".as_ref(), "out.jsonl".as_ref()));
    assert_eq!((args.compose.model.reference(), args.compose.engine.max_num_seqs), ("m", 8));
    let missing = parse(words(&["run-batch"]), &|_| None).unwrap_err().to_string();
    assert!(missing.contains("--input-file") && missing.contains("--output-file"), "{missing}");
}

#[test]
fn a_conversation_is_with_a_server_or_with_a_model() {
    let chat = |line: &[&str]| parse(words(&[&["chat"], line].concat()), &|_| None);
    assert!(chat(&["--url", "http://x/v1", "--model-name", "a", "--system-prompt", "s", "--max-tokens", "5"]).is_ok());
    assert!(chat(&["m", "--max-model-len", "2k"]).is_ok());
    let both = chat(&["m", "--url", "http://x/v1"]).unwrap_err().to_string();
    assert!(both.contains("cannot be used with"), "{both}");
}

#[test]
fn a_conversation_is_told_of_no_engine_flag_and_how_to_name_a_server() {
    let chat = |line: &[&str]| parse(words(line), &|_| None).unwrap_err().to_string();
    for line in [&["chat", "--port", "8001"][..], &["chat", "--host=h"], &["complete", "--port=8001"]] {
        let error = chat(line);
        assert!(error.contains("--url http://HOST:PORT") && !error.contains("gpu"), "{error}");
    }
    let error = chat(&["chat", "--temprature", "1"]);
    assert!(error.contains("'--temperature'"), "{error}");
    let error = chat(&["chat", "--temperature", "9"]);
    assert!(error.contains("from 0 to 2"), "{error}");
}

#[test]
fn sampling_flags_are_for_every_conversation() {
    let line = ["--temperature", "0.5", "--top-k=3", "--presence_penalty", "-1", "--stop", "END", "--seed", "7"];
    for command in ["chat", "complete", "run"] {
        let (request, seed) = match parse(words(&[&[command], &line[..]].concat()), &|_| None).unwrap().command {
            Command::Chat(args) => (args.request, args.compose.sampling.seed),
            Command::Complete(args) => (args.request, args.compose.sampling.seed),
            Command::Run(args) => (args.request, args.compose.sampling.seed),
            other => panic!("{other:?}"),
        };
        let given: Vec<_> = request.given().map(|(name, value)| format!("{name} {value}")).collect();
        assert_eq!(given, ["temperature 0.5", "top_k 3", "presence_penalty -1.0", "stop \"END\""]);
        assert_eq!(seed, Some(7));
    }
}

#[test]
fn a_run_takes_a_model_and_the_words_of_a_prompt() {
    let run = |line: &[&str]| match parse(words(line), &|_| None).unwrap().command {
        Command::Run(args) => (args.compose.model.given().map(str::to_owned), args.prompt.join(" ")),
        other => panic!("{other:?}"),
    };
    assert_eq!(run(&["run"]), (None, String::new()));
    assert_eq!(run(&["run", "m"]), (Some("m".into()), String::new()));
    assert_eq!(run(&["run", "m", "what", "is", "-1"]), (Some("m".into()), "what is -1".into()));
}

/// The width for which `-h` is written.
const COLUMNS: usize = 100;

#[test]
fn short_help_fits_a_screen() {
    // Rendered for a terminal that is as wide as the widest line of it may be.
    let mut command = command().term_width(COLUMNS);
    let mut short = |name: &str| command.find_subcommand_mut(name).unwrap().render_help().to_string();
    for (name, lines) in [("serve", 45), ("run-batch", 45), ("chat", 45), ("complete", 45), ("run", 45)] {
        let help = short(name);
        assert!(help.lines().count() <= lines, "{name}: {} lines\n{help}", help.lines().count());
        assert!(help.lines().all(|line| line.chars().count() <= COLUMNS), "{help}");
    }
    let serve = short("serve");
    assert_eq!(serve.lines().filter(|line| line.trim_start().starts_with("--")).count(), 20, "{serve}");
    let chat = short("chat");
    assert!(chat.contains("--top-p") && chat.contains("--seed"), "{chat}");
    assert!(!chat.contains("--max-num-seqs") && !chat.contains("--device"), "{chat}");
}

#[test]
fn every_shell_gets_a_completion_of_every_command() {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish, Shell::Elvish, Shell::PowerShell] {
        let script = String::from_utf8(completion_script(shell)).unwrap();
        for word in ["run-batch", "completions", "max-model-len"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        assert!(!script.contains("swap-space"), "{shell}: flags that are not served are not offered");
    }
}

#[test]
fn help_is_grouped_and_hides_what_is_not_served() {
    let mut command = command();
    let help = command.find_subcommand_mut("serve").unwrap().render_long_help().to_string();
    for heading in ["Model:", "Engine:", "Chat, tools and structured output:", "Network:", "TLS:", "Logging:"] {
        assert!(help.lines().any(|line| line == heading), "no {heading}\n{help}");
    }
    assert!(help.contains("--no-enable-prefix-caching") && !help.contains("--swap-space"), "{help}");
    assert!(!help.contains("\nOptions:\n  -") || help.matches("\nOptions:").count() == 1, "{help}");
}
