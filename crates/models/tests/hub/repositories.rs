//! Tests of well-formed repositories.

use std::path::Path;

use octavo_models::progress::Silent;
use octavo_models::{Checkpoint, resolve};

use crate::server::Hub;
use crate::support::*;

#[test]
fn a_directory_is_fetched_into_the_layout_of_the_python_clients() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(5000));
    let machine = Machine::with(&hub);
    let model = machine.resolve(REPO).unwrap();

    let folder = machine.repo_folder();
    assert_eq!(model.path, folder.join("snapshots").join(COMMIT));
    assert_eq!((model.name.as_str(), model.commit.as_deref()), (REPO, Some(COMMIT)));
    assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(5000));
    assert_eq!(std::fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    let link = std::fs::read_link(model.path.join("model.safetensors")).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(crate::server::sha256(&content(5000))));
    assert!(!model.path.join("pytorch_model.bin").exists());
    assert!(folder.join(".no_exist").join(COMMIT).join("chat_template.jinja").exists());
    assert_eq!(leftovers(&machine.options.hub.cache_dir), [""; 0]);
    // The etag of a small file is git's and not a SHA-256 of the content, so only the size is checked.
    assert_eq!(hub.count("GET", "/config.json"), 1);
}

#[test]
fn an_architecture_that_is_not_served_is_refused_before_its_weights_are_fetched() {
    let hub = Hub::start();
    let mut files = small_model(5000);
    files[0].1 = br#"{"model_type": "t5"}"#.to_vec();
    publish(&hub, COMMIT, &files);
    let mut machine = Machine::with(&hub);
    machine.options.require_served = true;
    let error = machine.error(REPO);
    assert!(error.starts_with("org/name cannot be served yet: the architecture 't5'"), "{error}");
    assert_eq!(hub.count("GET", "/model.safetensors"), 0);
    machine.options.require_served = false;
    assert!(machine.resolve(REPO).unwrap().path.join("model.safetensors").exists());
}

#[test]
fn modules_of_sentence_transformers_come_with_their_model() {
    let hub = Hub::start();
    let mut files = small_model(5000);
    for name in ["modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"] {
        files.push((name, b"{}".to_vec()));
    }
    publish(&hub, COMMIT, &files);
    let mut machine = Machine::with(&hub);
    let model = machine.resolve(REPO).unwrap();
    for name in ["modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"] {
        assert!(model.path.join(name).exists(), "{name}");
    }
    machine.options.offline = true;
    assert_eq!(machine.resolve(REPO).unwrap().path, model.path);
}

#[test]
fn weights_that_are_to_be_made_up_are_not_fetched() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(5000));
    let mut machine = Machine::with(&hub);
    machine.options.without_weights = true;
    let model = machine.resolve(REPO).unwrap();
    assert!(model.path.join("config.json").exists() && !model.path.join("model.safetensors").exists());
    let requests = hub.seen().len();
    assert_eq!(machine.resolve(REPO).unwrap(), model);
    assert_eq!(hub.seen().len(), requests, "what is there is enough");
    // A caller that wants the weights gets them.
    machine.options.without_weights = false;
    assert_eq!(machine.resolve(REPO).unwrap(), model);
    assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(5000));
}

#[test]
fn a_second_resolve_asks_nobody() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(5000));
    let machine = Machine::with(&hub);
    let first = machine.resolve(REPO).unwrap();
    let requests = hub.seen().len();
    publish(&hub, NEWER, &small_model(6000));
    assert_eq!(machine.resolve(REPO).unwrap(), first);
    assert_eq!(hub.seen().len(), requests);
}

#[test]
fn a_refresh_finds_the_newer_commit_and_fetches_only_what_changed() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(5000));
    let mut machine = Machine::with(&hub);
    machine.resolve(REPO).unwrap();
    publish(&hub, NEWER, &small_model(6000));
    machine.options.refresh = true;
    let model = machine.resolve(REPO).unwrap();
    assert_eq!(model.commit.as_deref(), Some(NEWER));
    assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(6000));
    assert_eq!(hub.count("GET", "/config.json"), 1, "the same content is not fetched twice");
    assert_eq!(std::fs::read_to_string(machine.repo_folder().join("refs/main")).unwrap(), NEWER);
}

#[test]
fn a_sharded_directory_is_its_index_and_the_shards_it_names() {
    let hub = Hub::start();
    let index =
        br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    publish(
        &hub,
        COMMIT,
        &[
            ("config.json", b"{}".to_vec()),
            ("model.safetensors.index.json", index.to_vec()),
            ("model-00001-of-00002.safetensors", content(3000)),
            ("model-00002-of-00002.safetensors", content(2000)),
            ("consolidated.safetensors", content(5000)),
        ],
    );
    let machine = Machine::with(&hub);
    let model = machine.resolve(REPO).unwrap();
    assert_eq!(
        files_below(&model.path),
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
    );
    assert_eq!(hub.count("GET", "/consolidated.safetensors"), 0);
}

#[test]
fn a_gguf_file_is_named_by_path_or_by_quantisation() {
    let hub = Hub::start();
    publish(
        &hub,
        COMMIT,
        &[
            ("m-Q4_K_M.gguf", content(3000)),
            ("m-Q4_K_S.gguf", content(2000)),
            ("sub/m-Q8_0.gguf", content(4000)),
            ("mmproj-Q8_0.gguf", content(10)),
        ],
    );
    let machine = Machine::with(&hub);
    for (reference, name, size) in [
        ("org/name:m-Q4_K_M.gguf", "m-Q4_K_M.gguf", 3000),
        ("org/name/m-Q4_K_S.gguf", "m-Q4_K_S.gguf", 2000),
        ("org/name:Q4_K_M", "m-Q4_K_M.gguf", 3000),
        ("org/name:q8_0", "sub/m-Q8_0.gguf", 4000),
        ("org/name/sub/m-Q8_0.gguf", "sub/m-Q8_0.gguf", 4000),
    ] {
        let model = machine.resolve(reference).unwrap();
        assert_eq!(model.path, machine.repo_folder().join("snapshots").join(COMMIT).join(name), "{reference}");
        assert_eq!(std::fs::read(&model.path).unwrap(), content(size), "{reference}");
    }
    assert_eq!(hub.count("GET", ".gguf"), 3, "each file once");
    let several = machine.error(REPO);
    assert!(several.contains("org/name:m-Q4_K_M.gguf"), "{several}");
    let none = machine.error("org/name:Q5_K_M");
    assert!(none.contains("no GGUF file of Q5_K_M") && none.contains("org/name:m-Q4_K_S.gguf"), "{none}");
}

#[test]
fn the_pieces_of_a_gguf_file_are_fetched_together() {
    let pieces = ["q8/model-00001-of-00003.gguf", "q8/model-00002-of-00003.gguf", "q8/model-00003-of-00003.gguf"];
    let split = |name: &str| {
        let file = name.rsplit('/').next().unwrap();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata/llama-gguf-split");
        std::fs::read(folder.join(file)).unwrap()
    };
    let hub = Hub::start();
    publish(&hub, COMMIT, &pieces.map(|name| (name, split(name))));
    let mut machine = Machine::with(&hub);
    let first = machine.repo_folder().join("snapshots").join(COMMIT).join(pieces[0]);
    for reference in [REPO, "org/name/q8/model-00001-of-00003.gguf", "org/name:q8/model-00003-of-00003.gguf"] {
        let model = machine.resolve(reference).unwrap();
        assert_eq!(model.path, first, "{reference}");
        assert!(Checkpoint::open(&model.path).is_ok());
    }
    assert_eq!(hub.count("GET", ".gguf"), 3, "each piece once");
    machine.options.offline = true;
    assert_eq!(machine.resolve("org/name:q8/model-00002-of-00003.gguf").unwrap().path, first);
    let installed = octavo_models::installed(&machine.options);
    let bytes: usize = pieces.iter().map(|name| split(name).len()).sum();
    assert_eq!(installed.iter().map(|model| model.bytes).collect::<Vec<_>>(), [bytes as u64]);
    // Without one of them, the others are no model.
    std::fs::remove_file(first.with_file_name("model-00002-of-00003.gguf")).unwrap();
    assert!(machine.resolve("org/name:q8/model-00001-of-00003.gguf").is_err());
    assert_eq!(octavo_models::installed(&machine.options), []);
}

#[test]
fn a_repository_with_one_gguf_file_needs_no_file_name() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &[("README.md", b"".to_vec()), ("m.gguf", content(3000))]);
    let machine = Machine::with(&hub);
    let model = machine.resolve(REPO).unwrap();
    assert!(model.path.ends_with("m.gguf"));
    drop(hub);
    let again = machine.resolve(REPO).unwrap();
    assert_eq!(again, model, "the cache is enough when the hub is gone");
}

/// Returns a file of the tiny Qwen3-VL as GGUF.
fn qwen3_vl(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata/qwen3-vl-gguf").join(name)).unwrap()
}

#[test]
fn the_encoder_of_a_gguf_model_is_fetched_with_it() {
    let hub = Hub::start();
    let files = [
        ("q8/vl-Q8_0.gguf", qwen3_vl("model.gguf")),
        ("q8/mmproj-BF16.gguf", qwen3_vl("mmproj-BF16.gguf")),
        ("q8/mmproj-F32.gguf", content(10)),
        ("text-Q4_0.gguf", content(3000)),
        ("mmproj-text.gguf", content(10)),
    ];
    publish(&hub, COMMIT, &files);
    let machine = Machine::with(&hub);
    let model = machine.resolve("org/name:Q8_0").unwrap();
    let vision = octavo_models::Checkpoint::open(&model.path).unwrap().config().vision.clone();
    assert!(vision.is_some(), "the model takes images");
    machine.resolve("org/name:Q4_0").unwrap();
    assert_eq!(hub.count("GET", "mmproj-BF16.gguf"), 1);
    assert_eq!(hub.count("GET", "mmproj-text.gguf") + hub.count("GET", "mmproj-F32.gguf"), 0, "no other is fetched");
    drop(hub);
    assert_eq!(machine.resolve("org/name:Q8_0").unwrap(), model, "the cache is enough when the hub is gone");
}

#[test]
fn an_encoder_that_the_cache_lacks_is_looked_for_once() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &[("vl-Q8_0.gguf", qwen3_vl("model.gguf"))]);
    let machine = Machine::with(&hub);
    let model = machine.resolve(REPO).unwrap();
    let asked = hub.count("GET", "/revision/main");
    assert_eq!(machine.resolve("org/name:Q8_0").unwrap().path, model.path);
    assert_eq!(hub.count("GET", "/revision/main"), asked, "there is none, which is known");
    // As a client leaves it that fetches single files.
    std::fs::remove_dir_all(machine.repo_folder().join(".no_exist")).unwrap();
    machine.resolve("org/name:Q8_0").unwrap();
    assert_eq!(hub.count("GET", "/revision/main"), asked + 1);
    std::fs::remove_dir_all(machine.repo_folder().join(".no_exist")).unwrap();
    drop(hub);
    assert_eq!(machine.resolve("org/name:Q8_0").unwrap().path, model.path, "the model is usable without");
}

#[test]
fn a_revision_pins_the_commit() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(5000));
    publish(&hub, NEWER, &small_model(6000));
    {
        let mut state = hub.state.lock().unwrap();
        let revisions = &mut state.repos.get_mut(REPO).unwrap().revisions;
        revisions.insert("v1.0".to_owned(), COMMIT.to_owned());
        revisions.insert("refs/pr/7".to_owned(), COMMIT.to_owned());
    }
    for revision in ["v1.0", COMMIT, "refs/pr/7"] {
        let mut machine = Machine::with(&hub);
        machine.options.revision = Some(revision.to_owned());
        let model = machine.resolve(REPO).unwrap();
        assert_eq!(model.commit.as_deref(), Some(COMMIT), "{revision}");
        assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap().len(), 5000);
        machine.options.offline = true;
        assert_eq!(machine.resolve(REPO).unwrap(), model, "{revision} offline");
    }
    let mut machine = Machine::with(&hub);
    assert_eq!(machine.resolve(REPO).unwrap().commit.as_deref(), Some(NEWER));
    machine.options.revision = Some("../../etc".to_owned());
    assert!(machine.error(REPO).contains("no branch, tag or commit ../../etc"));
}

#[test]
fn large_files_come_from_the_cdn_which_never_sees_the_token() {
    let cdn = Hub::start();
    publish(&cdn, COMMIT, &small_model(5000));
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(5000));
    {
        let mut state = hub.state.lock().unwrap();
        state.cdn = true;
        state.cdn_origin = Some(cdn.origin());
    }
    let mut machine = Machine::with(&hub);
    machine.options.hub.token = Some("secret".to_owned());
    let model = machine.resolve(REPO).unwrap();
    assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(5000));
    assert!(hub.seen().iter().all(|seen| seen.headers.get("authorization").is_some_and(|a| a == "Bearer secret")));
    assert_eq!(cdn.seen().len(), 1);
    assert!(cdn.seen().iter().all(|seen| !seen.headers.contains_key("authorization")));
}

#[test]
fn a_redirect_within_the_hub_is_followed() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(5000));
    hub.state.lock().unwrap().cdn = true;
    let machine = Machine::with(&hub);
    let model = machine.resolve(REPO).unwrap();
    assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(5000));
    assert!(hub.seen().iter().any(|seen| seen.path.starts_with("/cdn/") && seen.method == "GET"));
}

#[test]
fn an_endpoint_may_have_a_path() {
    let hub = Hub::behind("/mirrors/hf");
    publish(&hub, COMMIT, &small_model(5000));
    let machine = Machine::with(&hub);
    assert!(machine.resolve(REPO).is_ok());
    assert!(hub.seen().iter().all(|seen| seen.path.starts_with("/mirrors/hf/")));
}

#[test]
fn a_catalog_alias_goes_to_its_repository() {
    let hub = Hub::start();
    let files = small_model(5000);
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, content)| (*name, content.as_slice())).collect();
    hub.publish("Qwen/Qwen3-0.6B", COMMIT, &files);
    let machine = Machine::with(&hub);
    for reference in ["qwen3-0.6b", "Qwen/Qwen3-0.6B"] {
        let model = machine.resolve(reference).unwrap();
        assert_eq!(model.name, reference);
        assert_eq!(model.entry.unwrap().id, "qwen3-0.6b");
    }
}

#[test]
fn ten_at_once_fetch_once() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(300_000));
    let machine = Machine::with(&hub);
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..10).map(|_| scope.spawn(|| resolve(REPO, &machine.options, &Silent).unwrap())).collect();
        for thread in threads {
            let model = thread.join().unwrap();
            assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(300_000));
        }
    });
    assert_eq!(hub.count("GET", "/model.safetensors"), 1);
    assert_eq!(leftovers(&machine.options.hub.cache_dir), [""; 0]);
}
