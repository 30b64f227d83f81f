//! Tests without a network, and of caches filled by other programs.

use std::net::TcpListener;
use std::sync::mpsc;
use std::time::Duration;

use octavo_models::progress::Silent;
use octavo_models::{Progress, ProgressTask, installed, resolve};

use crate::server::Hub;
use crate::support::*;

#[test]
fn offline_uses_the_cache_and_asks_nobody() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(5000));
    let mut machine = Machine::with(&hub);
    let model = machine.resolve(REPO).unwrap();
    let requests = hub.seen().len();
    machine.options.offline = true;
    machine.options.refresh = true;
    assert_eq!(machine.resolve(REPO).unwrap(), model);
    assert_eq!(hub.seen().len(), requests);
}

#[test]
fn offline_without_the_cache_says_so() {
    let hub = Hub::start();
    let mut machine = Machine::with(&hub);
    machine.options.offline = true;
    let error = machine.error(REPO);
    assert!(error.contains("org/name at main is not in the cache"), "{error}");
    assert!(error.contains(machine.options.hub.cache_dir.to_str().unwrap()), "{error}");
    assert!(machine.error("org/name:Q4_K_M").contains("not in the cache"));
    assert!(machine.error("smollm2-135m-instruct").contains("octavo pull smollm2-135m-instruct"));
    assert_eq!(hub.seen().len(), 0);
}

/// Creates the files that `snapshot_download` of the Python client writes.
fn filled_by_python(machine: &Machine, files: &[(&str, &[u8])]) {
    let repo = machine.repo_folder();
    let snapshot = repo.join("snapshots").join(COMMIT);
    for folder in [&snapshot, &repo.join("refs"), &repo.join("blobs")] {
        std::fs::create_dir_all(folder).unwrap();
    }
    std::fs::write(repo.join("refs/main"), COMMIT).unwrap();
    for (at, (name, content)) in files.iter().enumerate() {
        std::fs::write(repo.join(format!("blobs/{at}")), content).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{at}"), snapshot.join(name)).unwrap();
    }
}

#[test]
fn a_model_downloaded_by_python_is_used_without_a_network() {
    let mut machine = Machine::alone();
    filled_by_python(&machine, &[("config.json", b"{}"), ("model.safetensors", b"weights"), ("tokenizer.json", b"{}")]);
    // The cache does not record that there is no generation_config.json, so the hub is asked once.
    let recorder = Recorder::default();
    let model = resolve(REPO, &machine.options, &recorder).unwrap();
    assert_eq!(model.path, machine.repo_folder().join("snapshots").join(COMMIT));
    let messages = recorder.messages.lock().unwrap().join("\n");
    assert!(messages.contains("using org/name as it is in the cache"), "{messages}");
    machine.options.offline = true;
    let recorder = Recorder::default();
    assert_eq!(resolve(REPO, &machine.options, &recorder).unwrap(), model);
    assert!(recorder.messages.lock().unwrap().is_empty());
}

#[test]
fn what_python_left_out_is_fetched_once() {
    let hub = Hub::start();
    publish(
        &hub,
        COMMIT,
        &[
            ("config.json", b"{}".to_vec()),
            ("model.safetensors", b"weights".to_vec()),
            ("generation_config.json", b"{}".to_vec()),
        ],
    );
    let machine = Machine::with(&hub);
    filled_by_python(&machine, &[("config.json", b"{}"), ("model.safetensors", b"weights")]);
    let model = machine.resolve(REPO).unwrap();
    assert!(model.path.join("generation_config.json").is_file());
    assert_eq!(hub.count("GET", "/model.safetensors"), 0);
    let requests = hub.seen().len();
    machine.resolve(REPO).unwrap();
    assert_eq!(hub.seen().len(), requests);
}

#[test]
fn a_download_that_was_broken_off_is_no_model() {
    let index: &[u8] = br#"{"weight_map": {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}}"#;
    type Files<'a> = &'a [(&'a str, &'a [u8])];
    let cases: [(Files<'_>, &str); 4] = [
        (&[("model.safetensors", b"w")], "config.json is missing"),
        (&[("config.json", b"{}")], "model.safetensors is missing"),
        (
            &[("config.json", b"{}"), ("model.safetensors.index.json", index), ("m-00001-of-00002.safetensors", b"w")],
            "m-00002-of-00002.safetensors is missing",
        ),
        (&[("config.json", b"{}"), ("m-00001-of-00002.safetensors", b"w")], "model.safetensors.index.json is missing"),
    ];
    for (files, missing) in cases {
        let mut machine = Machine::alone();
        filled_by_python(&machine, files);
        machine.options.offline = true;
        let error = machine.error(REPO);
        assert!(error.contains(missing) && error.contains("offline"), "{error}");
        machine.options.offline = false;
        let error = machine.error(REPO);
        assert!(error.contains("could not be reached") && error.contains("HF_ENDPOINT"), "{error}");
    }
}

/// Keeps what it is told.
struct Told(mpsc::Sender<String>);

impl Progress for Told {
    fn begin(&self, label: &str, total: Option<u64>) -> Box<dyn ProgressTask> {
        Silent.begin(label, total)
    }

    fn message(&self, text: &str) {
        self.0.send(text.to_owned()).unwrap();
    }
}

#[test]
fn a_hub_that_never_answers_is_announced_and_asked_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut machine = Machine::alone();
    machine.options.hub.endpoint = format!("http://{}", listener.local_addr().unwrap());
    machine.options.hub.retry.read_timeout = Duration::from_secs(3);
    let (send, told) = mpsc::channel();
    let options = machine.options.clone();
    let resolving = std::thread::spawn(move || resolve(REPO, &options, &Told(send)).unwrap_err().to_string());
    let message = told.recv_timeout(Duration::from_secs(2)).unwrap();
    assert!(message.starts_with("still waiting for http://127.0.0.1:"), "{message}");
    let error = resolving.join().unwrap();
    assert!(error.contains("could not be reached"), "{error}");
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.incoming().take_while(Result::is_ok).count(), 1, "no second attempt");
}

#[test]
fn what_is_in_the_caches_is_listed() {
    let machine = Machine::alone();
    assert_eq!(installed(&machine.options), []);
    let files: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("model.safetensors", b"weights"), ("m-Q4_0.gguf", b"gguf")];
    filled_by_python(&machine, &files);
    let mut models = installed(&machine.options);
    models.sort_by(|a, b| a.name.cmp(&b.name));
    let found: Vec<_> = models.iter().map(|model| (model.name.as_str(), model.bytes)).collect();
    assert_eq!(found, [("org/name", 9), ("org/name:m-Q4_0.gguf", 4)]);
    assert!(models.iter().all(|model| model.modified.is_some() && model.entry.is_none()));

    // A file of the wrong size is not the model of the catalog.
    let folder = machine.options.cache_dir.join("models/smollm2-135m-instruct");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("SmolLM2-135M-Instruct.Q4_1.gguf"), b"half").unwrap();
    assert_eq!(installed(&machine.options).len(), 2);
    let file = std::fs::File::create(folder.join("SmolLM2-135M-Instruct.Q4_1.gguf")).unwrap();
    file.set_len(98_362_432).unwrap();
    let models = installed(&machine.options);
    let packaged = models.iter().find(|model| model.name == "smollm2-135m-instruct").unwrap();
    assert_eq!(packaged.entry.map(|entry| entry.id.as_str()), Some("smollm2-135m-instruct"));
}

#[test]
fn a_link_to_a_blob_that_is_gone_is_no_file() {
    let mut machine = Machine::alone();
    filled_by_python(&machine, &[("config.json", b"{}"), ("model.safetensors", b"weights")]);
    std::fs::remove_file(machine.repo_folder().join("blobs/1")).unwrap();
    machine.options.offline = true;
    assert!(machine.error(REPO).contains("model.safetensors is missing"));
}

#[test]
fn a_complete_cache_may_be_read_only() {
    use std::os::unix::fs::PermissionsExt;
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(5000));
    let machine = Machine::with(&hub);
    let model = machine.resolve(REPO).unwrap();
    drop(hub);
    let cache = &machine.options.hub.cache_dir;
    let before = files_below(cache);
    let mut folders = vec![cache.clone()];
    let mut all = Vec::new();
    while let Some(folder) = folders.pop() {
        let below = std::fs::read_dir(&folder).unwrap().flatten().map(|entry| entry.path());
        folders.extend(below.filter(|path| path.is_dir() && !path.is_symlink()));
        all.push(folder);
    }
    let set = |mode| {
        for folder in &all {
            std::fs::set_permissions(folder, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    set(0o555);
    let again = machine.resolve(REPO);
    set(0o755);
    assert_eq!(again.unwrap(), model);
    // Root could write anyway, so this shows that no write was attempted.
    assert_eq!(files_below(cache), before);
}

#[test]
fn a_folder_with_a_gguf_file_and_its_encoder_is_one_model() {
    let hub = Hub::start();
    let (machine, folder) = (Machine::with(&hub), tempfile::tempdir().unwrap());
    for name in ["model.gguf", "mmproj-F16.gguf", "Model.MMPROJ.gguf"] {
        std::fs::write(folder.path().join(name), b"GGUF").unwrap();
    }
    let reference = folder.path().to_str().unwrap();
    assert_eq!(machine.resolve(reference).unwrap().path, folder.path().join("model.gguf"));
    std::fs::write(folder.path().join("another.gguf"), b"GGUF").unwrap();
    assert!(machine.error(reference).contains("nor a single .gguf file"));
}
