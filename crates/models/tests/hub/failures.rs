//! Tests of failures of the hub.

use octavo_models::resolve;

use crate::server::{Fault, Hub, sha256};
use crate::support::*;

const WEIGHTS: &str = "/model.safetensors";

fn model_hub(size: usize) -> (Hub, Machine) {
    let hub = Hub::start();
    publish(&hub, COMMIT, &small_model(size));
    let machine = Machine::with(&hub);
    (hub, machine)
}

fn ranges(hub: &Hub) -> Vec<Option<String>> {
    let gets = hub.seen().into_iter().filter(|seen| seen.method == "GET" && seen.path.ends_with(WEIGHTS));
    gets.map(|seen| seen.headers.get("range").cloned()).collect()
}

#[test]
fn a_cut_connection_is_continued_where_it_was_cut() {
    let (hub, machine) = model_hub(5000);
    hub.fault(WEIGHTS, Fault::Cut(2000));
    hub.fault(WEIGHTS, Fault::Cut(1500));
    let model = machine.resolve(REPO).unwrap();
    assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(5000));
    assert_eq!(ranges(&hub), [None, Some("bytes=2000-".to_owned()), Some("bytes=3500-".to_owned())]);
}

#[test]
fn a_later_process_continues_what_an_earlier_one_left() {
    let (hub, mut machine) = model_hub(5000);
    machine.options.hub.retry.attempts = 1;
    hub.fault(WEIGHTS, Fault::Cut(2000));
    let error = machine.error(REPO);
    assert!(error.contains("ended after 2000 of 5000 bytes") && error.contains("pull again"), "{error}");
    let blobs = machine.repo_folder().join("blobs");
    let digest = sha256(&content(5000));
    assert_eq!(std::fs::read(blobs.join(format!("{digest}.incomplete"))).unwrap().len(), 2000);
    assert!(!blobs.join(&digest).exists(), "a part is never taken for the whole");
    assert!(!machine.repo_folder().join("refs/main").exists());

    let model = machine.resolve(REPO).unwrap();
    assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(5000));
    assert_eq!(ranges(&hub)[1], Some("bytes=2000-".to_owned()));
    assert_eq!(leftovers(&machine.options.hub.cache_dir), [""; 0]);
}

#[test]
fn a_part_of_something_else_is_dropped() {
    let (hub, machine) = model_hub(5000);
    let blobs = machine.repo_folder().join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let digest = sha256(&content(5000));
    // The partial file has a plausible length, is too long, or is complete but wrong.
    for wrong in [vec![7; 2000], vec![7; 6000], vec![7; 5000]] {
        std::fs::write(blobs.join(format!("{digest}.incomplete")), wrong).unwrap();
        let model = machine.resolve(REPO).unwrap();
        assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(5000));
        std::fs::remove_dir_all(model.path).unwrap();
        std::fs::remove_file(blobs.join(&digest)).unwrap();
    }
    assert_eq!(ranges(&hub).len(), 4, "the first needed two");
}

#[test]
fn a_server_without_ranges_sends_it_all_again() {
    let (hub, machine) = model_hub(5000);
    hub.fault(WEIGHTS, Fault::Cut(2000));
    hub.fault(WEIGHTS, Fault::NoRanges);
    let model = machine.resolve(REPO).unwrap();
    assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(5000));
}

#[test]
fn a_range_that_cannot_be_continued_starts_again() {
    let (hub, machine) = model_hub(5000);
    hub.fault(WEIGHTS, Fault::Cut(2000));
    hub.fault(WEIGHTS, Fault::RefuseRange);
    let model = machine.resolve(REPO).unwrap();
    assert_eq!(std::fs::read(model.path.join("model.safetensors")).unwrap(), content(5000));
    assert_eq!(ranges(&hub), [None, Some("bytes=2000-".to_owned()), None]);
}

#[test]
fn a_file_that_stays_truncated_is_an_error_and_no_model() {
    let (hub, machine) = model_hub(5000);
    for _ in 0..3 {
        hub.fault(WEIGHTS, Fault::Cut(0));
    }
    let error = machine.error(REPO);
    assert!(error.contains("model.safetensors of org/name ended after 0 of 5000 bytes"), "{error}");
    // Small files have no checksum: they are downloaded from the start, with the same limit of attempts.
    for _ in 0..3 {
        hub.fault("/config.json", Fault::Cut(5));
    }
    std::fs::remove_dir_all(machine.repo_folder()).unwrap();
    let error = machine.error(REPO);
    assert!(error.contains("config.json of org/name ended after 5 of 23 bytes"), "{error}");
    assert_eq!(machine.resolve(REPO).unwrap().commit.as_deref(), Some(COMMIT));
}

#[test]
fn a_wrong_checksum_is_refused_and_dropped() {
    let (hub, machine) = model_hub(5000);
    hub.state.lock().unwrap().lies.push("model.safetensors".to_owned());
    let error = machine.error(REPO);
    assert!(error.contains(&sha256(&content(5000))) && error.contains(&sha256(b"something else")), "{error}");
    assert_eq!(leftovers(&machine.options.hub.cache_dir), [""; 0]);
    assert!(!machine.repo_folder().join("blobs").join(sha256(b"something else")).exists());
}

#[test]
fn a_gated_model_says_where_access_is_requested() {
    let (hub, mut machine) = model_hub(5000);
    let gated =
        || Fault::Status(401, vec![("x-error-code", "GatedRepo"), ("x-error-message", "Access is restricted.")]);
    hub.fault("/config.json", gated());
    let error = machine.error(REPO);
    let page = format!("request access at {}/org/name", hub.endpoint());
    assert!(error.contains("gated") && error.contains("HTTP 401, Access is restricted."), "{error}");
    assert!(error.contains(&page) && error.contains("set HF_TOKEN"), "{error}");
    machine.options.hub.token = Some("weak".to_owned());
    hub.fault("/config.json", Fault::Status(403, vec![("x-error-code", "GatedRepo")]));
    let error = machine.error(REPO);
    assert!(error.contains("HTTP 403") && error.contains("with the account of HF_TOKEN"), "{error}");
    assert!(!error.contains("weak"), "a token is never printed: {error}");
}

#[test]
fn an_unknown_or_private_repository_is_401_without_a_token() {
    let (hub, machine) = model_hub(5000);
    hub.fault("/revision/main", Fault::Status(401, vec![("x-error-code", "RepoNotFound")]));
    let error = machine.error(REPO);
    assert!(error.contains("gated or private, or does not exist"), "{error}");
    assert_eq!(hub.seen().len(), 1, "no retry helps");
}

#[test]
fn what_is_not_there_is_named() {
    let (_hub, mut machine) = model_hub(5000);
    let error = machine.error("org/other");
    assert!(error.contains("no model org/other"), "{error}");
    let error = machine.error("org/name:none.gguf");
    assert!(error.contains("org/name has no file none.gguf"), "{error}");
    let error = machine.error("org/name:Q8_0");
    assert!(error.contains("no GGUF file"), "{error}");
    machine.options.revision = Some("v9".to_owned());
    let error = machine.error(REPO);
    assert!(error.contains("org/name has no branch, tag or commit v9"), "{error}");
}

#[test]
fn a_file_that_vanishes_between_listing_and_download_is_named() {
    let (hub, machine) = model_hub(5000);
    hub.fault(WEIGHTS, Fault::Status(404, vec![("x-error-code", "EntryNotFound")]));
    let error = machine.error(REPO);
    assert!(error.contains("org/name has no file model.safetensors"), "{error}");
}

#[test]
fn server_errors_pass() {
    let (hub, machine) = model_hub(5000);
    hub.fault("/revision/main", Fault::Status(500, vec![]));
    hub.fault("/revision/main", Fault::Status(429, vec![("retry-after", "0")]));
    hub.fault(WEIGHTS, Fault::Status(503, vec![]));
    assert!(machine.resolve(REPO).is_ok());
    assert_eq!(hub.count("GET", "/revision/main"), 3);
}

#[test]
fn server_errors_that_do_not_pass_are_reported() {
    let (hub, machine) = model_hub(5000);
    for _ in 0..3 {
        hub.fault("/revision/main", Fault::Status(502, vec![("x-error-message", "the backend sleeps")]));
    }
    let error = machine.error(REPO);
    assert!(error.contains("HTTP 502 (the backend sleeps)"), "{error}");
    assert_eq!(hub.seen().len(), 3);
}

#[test]
fn names_that_leave_their_folder_are_refused() {
    for name in ["../../evil.json", "/etc/cron.d/x", "a/../../b", "..\\evil", "C:evil"] {
        let (hub, machine) = model_hub(5000);
        hub.state.lock().unwrap().repos.get_mut(REPO).unwrap().claimed.push(name.to_owned());
        let error = machine.error(REPO);
        assert!(error.contains("unsafe name") && error.contains("nothing of it is used"), "{error}");
        assert!(!machine.repo_folder().exists());
    }
}

#[test]
fn an_index_that_names_what_is_not_there_is_refused() {
    for shard in ["missing.safetensors", "../../evil.safetensors"] {
        let hub = Hub::start();
        let index = format!(r#"{{"weight_map": {{"a": "{shard}"}}}}"#);
        publish(&hub, COMMIT, &[("config.json", b"{}".to_vec()), ("model.safetensors.index.json", index.into_bytes())]);
        let machine = Machine::with(&hub);
        let error = machine.error(REPO);
        assert!(error.contains("model.safetensors.index.json cannot be used") && error.contains(shard), "{error}");
    }
}

#[test]
fn a_hostile_etag_or_commit_names_no_file() {
    let (hub, machine) = model_hub(5000);
    hub.fault("/config.json", Fault::Status(200, vec![("etag", "\"../../evil\"")]));
    let error = machine.error(REPO);
    assert!(error.contains("cannot name a file"), "{error}");

    let hub = Hub::start();
    publish(&hub, "../evil", &small_model(5000));
    let machine = Machine::with(&hub);
    let error = machine.error(REPO);
    assert!(error.contains("is no commit"), "{error}");
}

#[test]
fn an_answer_that_is_not_json_is_reported() {
    let (hub, machine) = model_hub(5000);
    hub.fault("/revision/main", Fault::Status(200, vec![]));
    let error = machine.error(REPO);
    assert!(error.contains("an answer that is not the hub's"), "{error}");
}

#[test]
fn redirects_without_end_are_given_up() {
    let (hub, machine) = model_hub(5000);
    for _ in 0..10 {
        hub.fault("/revision/main", Fault::Status(307, vec![("location", "/api/models/org/name/revision/main")]));
    }
    let error = machine.error(REPO);
    assert!(error.contains("redirects too often"), "{error}");
}

#[test]
fn pickled_weights_and_ggufs_with_missing_pieces_are_refused_with_the_reason() {
    let hub = Hub::start();
    publish(&hub, COMMIT, &[("config.json", b"{}".to_vec()), ("pytorch_model.bin", content(10))]);
    let machine = Machine::with(&hub);
    assert!(machine.error(REPO).contains("they can run code"));

    publish(&hub, NEWER, &[("m-Q8_0-00001-of-00002.gguf", content(10)), ("m-Q4_0.gguf", content(10))]);
    let error = machine.error("org/name:Q8_0");
    assert!(error.contains("m-Q8_0-00002-of-00002.gguf is missing among its files"), "{error}");
}

#[test]
fn a_cache_that_cannot_be_made_is_named() {
    let (_hub, mut machine) = model_hub(5000);
    // Not even root can create a folder there.
    machine.options.hub.cache_dir = "/proc/octavo/hub".into();
    let error = machine.error(REPO);
    assert!(error.contains("/proc/octavo/hub"), "{error}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_reported_with_the_folder() {
    let (_hub, machine) = model_hub(5000);
    let blobs = machine.repo_folder().join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let staged = blobs.join(format!("{}.incomplete", sha256(&content(5000))));
    std::os::unix::fs::symlink("/dev/full", &staged).unwrap();
    let error = machine.error(REPO);
    assert!(error.contains("no space is left for 4.88 KiB more in") && error.contains("HF_HUB_CACHE"), "{error}");
    assert!(error.contains(blobs.to_str().unwrap()), "{error}");
}

#[test]
fn progress_tells_of_every_file() {
    let (_hub, machine) = model_hub(5000);
    let recorder = Recorder::default();
    resolve(REPO, &machine.options, &recorder).unwrap();
    assert_eq!(*recorder.tasks.lock().unwrap(), ["config.json", "tokenizer.json", "model.safetensors"]);
}
