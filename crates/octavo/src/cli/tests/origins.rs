//! Values of the command line, of a file and of the environment.

use super::*;

#[test]
fn the_command_line_wins_over_the_file_over_the_environment() {
    let text = "max-num-seqs: 2\nport: 2\nhost: file\n";
    let variables = [
        ("OCTAVO_MAX_NUM_SEQS", "3"),
        ("OCTAVO_PORT", "3"),
        ("OCTAVO_HOST", "variable"),
        ("OCTAVO_BLOCK_SIZE", "32"),
        ("OCTAVO_SEED", ""),
    ];
    let args = with_file(text, &["--port", "1"], &variables).unwrap();
    assert_eq!((args.network.port, args.network.host.as_str()), (1, "file"));
    assert_eq!((args.compose.engine.max_num_seqs, args.compose.engine.block_size), (2, Some(32)));
    assert_eq!(args.compose.sampling.seed, None);
    assert_eq!(serve(&[]).unwrap().network.port, 8000);
}

#[test]
fn a_file_has_lists_booleans_and_maps() {
    let text = r#"
model: org/name
served_model_name: [a, b]
api-key:
  - one
  - two words
enable-prefix-caching: false
no-enable-chunked-prefill: true
allow_credentials: yes
max-model-len: 4k
gpu-memory-utilization: 0.9
structured-outputs-config: {backend: guidance, disable_any_whitespace: true}
override-generation-config.temperature: 0.5
override-generation-config.top_k: 20
compilation-config: {mode: 3}
trust-remote-code: true
seed: null
"#;
    let args = with_file(text, &[], &[]).unwrap();
    let compose = &args.compose;
    assert_eq!(compose.model.reference(), "org/name");
    assert_eq!(compose.model.served_model_name, ["a", "b"]);
    assert_eq!(args.network.api_key, ["one", "two words"]);
    assert!(!compose.engine.enable_prefix_caching && !compose.engine.enable_chunked_prefill);
    assert!(args.network.allow_credentials);
    assert_eq!(compose.engine.max_model_len, Some(MaxModelLen::Tokens(4000)));
    assert_eq!(compose.engine.gpu_memory_utilization, Some(0.9));
    let structured = &compose.chat.structured_outputs_config.as_ref().unwrap().0;
    assert_eq!(structured["disable_any_whitespace"], true);
    let generation = &compose.sampling.override_generation_config.as_ref().unwrap().0;
    assert_eq!(serde_json::to_string(generation).unwrap(), r#"{"temperature":0.5,"top_k":20}"#);
    assert_eq!(compose.compat.check().unwrap().len(), 2);
}

#[test]
fn a_list_of_the_file_gives_way_as_a_whole() {
    let args = with_file("api-key: [a, b]\nmodel: of-file\n", &["mine", "--api-key", "c"], &[]).unwrap();
    assert_eq!(args.network.api_key, ["c"]);
    assert_eq!(args.compose.model.reference(), "mine");
}

#[test]
fn what_is_wrong_in_a_file_is_named() {
    for (text, parts) in [
        ("max-modl-len: 1", &["key 'max-modl-len'", "did you mean 'max-model-len'?"][..]),
        ("nonsense-here: 1", &["key 'nonsense-here'", "there is no flag"]),
        ("port: [1, 2]", &["key 'port'", "not a list"]),
        ("enable-prefix-caching: maybe", &["key 'enable-prefix-caching'", "true or false"]),
        ("port.x: 1", &["key 'port.x'", "no keys"]),
        ("host: {a: 1}", &["key 'host'", "a text or a number"]),
        ("max-num-seqs: 1\nmax_num_seqs: 2", &["key 'max_num_seqs'", "twice"]),
        ("port: 1\nport: 2", &["line 2", "twice"]),
        ("config: other.yaml", &["key 'config'", "another"]),
        ("api-key:", &["key 'api-key'", "has no value; give one, or remove the key"]),
        ("api_key: null", &["key 'api_key'", "has no value"]),
        ("api-key: []", &["key 'api-key'", "has no value"]),
        ("api-keys-file:", &["key 'api-keys-file'", "has no value"]),
        ("- a", &["a map of flags"]),
        ("a: [", &["line"]),
        ("port: 1\n---\nport: 2", &["one document"]),
    ] {
        let Err(Failure::Config(error)) = with_file(text, &[], &[]) else { panic!("accepted: {text}") };
        assert!(error.starts_with("--config /") && parts.iter().all(|part| error.contains(part)), "{text}: {error}");
    }
    assert!(with_file("", &[], &[]).is_ok());
    let missing = serve(&["--config", "/no/such/file.yaml"]).unwrap_err().to_string();
    assert!(missing.contains("/no/such/file.yaml"), "{missing}");
}

#[test]
fn a_bad_value_says_where_it_comes_from() {
    let error = with_file("port: high", &[], &[]).unwrap_err().to_string();
    assert!(error.contains("'high'") && error.contains("set by the key 'port' of /"), "{error}");
    let error = parse_with(&["serve"], &[("OCTAVO_MAX_NUM_SEQS", "many")]).unwrap_err().to_string();
    assert!(error.contains("'many'") && error.contains("set by the variable OCTAVO_MAX_NUM_SEQS"), "{error}");
}

#[test]
fn an_empty_api_key_is_refused_with_its_origin() {
    for line in [&["--api-key", ""][..], &["--api-key="], &["--api-key", "k", " "]] {
        let error = serve(line).unwrap_err().to_string();
        assert!(error.contains("--api-key") && error.contains("leave the flag out to serve without"), "{error}");
    }
    for text in ["api-key: ''", "api-key: \" \"", "api-key: [k, '']"] {
        let error = with_file(text, &[], &[]).unwrap_err().to_string();
        assert!(error.contains("the key is empty") && error.contains("set by the key 'api-key' of /"), "{error}");
    }
}

#[test]
fn every_served_flag_is_a_variable() {
    let list = [("OCTAVO_SERVED_MODEL_NAME", "a b"), ("OCTAVO_ALLOWED_ORIGINS", r#"["http://x"]"#)];
    let args = parse_with(&["serve"], &list).unwrap();
    assert_eq!(args.compose.model.served_model_name, ["a", "b"]);
    assert_eq!(TextList::flat(&args.network.allowed_origins), ["http://x"]);
    let switches = [("OCTAVO_ENABLE_PREFIX_CACHING", "false"), ("OCTAVO_ALLOW_CREDENTIALS", "1")];
    let args = parse_with(&["serve"], &switches).unwrap();
    assert!(!args.compose.engine.enable_prefix_caching && args.network.allow_credentials);
    let file = file("port: 77");
    let config = [("OCTAVO_CONFIG", file.path().to_str().unwrap())];
    assert_eq!(parse_with(&["serve"], &config).unwrap().network.port, 77);
}

#[test]
fn kubernetes_own_variables_are_not_ours() {
    // A service that is named octavo puts these into every pod of its namespace.
    let variables = [("OCTAVO_PORT", "tcp://10.0.0.7:8000"), ("OCTAVO_SERVICE_HOST", "10.0.0.7")];
    assert_eq!(parse_with(&["serve"], &variables).unwrap().network.port, 8000);
}

#[test]
fn variables_are_for_services_not_for_conversations() {
    let model = |name: &str| (name == "OCTAVO_MODEL").then(|| "m".to_owned());
    let Command::Chat(args) = parse(words(&["chat", "-q", "hello"]), &model).unwrap().command else { panic!() };
    assert_eq!((args.quick.as_deref(), args.compose.model.given()), (Some("hello"), None));
    assert_eq!(
        parse(words(&["serve"]), &model)
            .map(|cli| matches!(cli.command, Command::Serve(args) if args.compose.model.given() == Some("m")))
            .ok(),
        Some(true)
    );
}
