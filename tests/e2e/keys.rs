//! The file of API keys: `octavo key` writes it, `octavo serve` reads it, and a Kubernetes Secret replaces it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use octavo_tests::Server;

use crate::OCTAVO;

/// A Llama of random weights.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/testdata/llama");

/// Arguments of a server with little memory.
const SMALL: [&str; 4] = ["--cpu-threads", "1", "--num-gpu-blocks-override", "64"];

fn octavo(args: &[&str]) -> Output {
    Command::new(OCTAVO).args(args).output().unwrap()
}

/// Writes the file `keys.yaml` of a mounted Secret: the folder is a link, and a new folder replaces its target at once.
fn mount(secret: &Path, version: &str, text: &str) {
    fs::create_dir(secret.join(version)).unwrap();
    fs::write(secret.join(version).join("keys.yaml"), text).unwrap();
    symlink(version, secret.join("next")).unwrap();
    fs::rename(secret.join("next"), secret.join("..data")).unwrap();
}

async fn status(server: &Server, key: &str) -> u16 {
    let request = server.client().get(server.url("/v1/models")).bearer_auth(key);
    request.send().await.unwrap().status().as_u16()
}

/// Waits until a key has this status.
async fn until(server: &Server, key: &str, expected: u16) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while status(server, key).await != expected {
        assert!(Instant::now() < deadline, "the key is not {expected}: {:?}", server.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_secret_replaces_the_keys_and_a_broken_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path();
    mount(secret, "..1", "- name: a\n  key: one\n");
    symlink("..data/keys.yaml", secret.join("keys.yaml")).unwrap();
    let file = secret.join("keys.yaml");
    let args = [&SMALL[..], &["--api-keys-file", file.to_str().unwrap()]].concat();
    let server = Server::start(Path::new(OCTAVO), Path::new(TINY), &args);
    assert_eq!((status(&server, "one").await, status(&server, "two").await), (200, 401));

    mount(secret, "..2", "- name: a\n  key: two\n- name: b\n  key: three\n");
    until(&server, "two", 200).await;
    assert_eq!((status(&server, "one").await, status(&server, "three").await), (401, 200));

    mount(secret, "..3", "- name: a\n  key: four\n- name: b\n  requests-per-minute: many\n");
    let log = server.logs("were not replaced").await;
    let line = log.last().unwrap();
    assert!(line.contains("--api-keys-file /") && line.contains("line 4, entry 'b'"), "{line}");
    assert!(log.iter().any(|line| line.contains("were replaced") && line.contains("entries=2")), "{log:?}");
    assert_eq!((status(&server, "two").await, status(&server, "four").await), (200, 401));

    mount(secret, "..4", "- name: a\n  key: four\n");
    until(&server, "four", 200).await;
    assert_eq!(status(&server, "two").await, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_created_key_opens_the_server() {
    let created = octavo(&["key", "team-a", "--requests-per-minute", "60"]);
    assert!(created.status.success());
    let shown = String::from_utf8(created.stderr).unwrap();
    let key = shown.trim().rsplit(' ').next().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.yaml");
    fs::write(&file, &created.stdout).unwrap();
    let args = [&SMALL[..], &["--api-keys-file", file.to_str().unwrap()]].concat();
    let server = Server::start(Path::new(OCTAVO), Path::new(TINY), &args);
    assert_eq!((status(&server, key).await, status(&server, "sk-").await), (200, 401));
    let entry = String::from_utf8(created.stdout).unwrap();
    assert!(!entry.contains(key) && entry.contains("requests-per-minute: 60"), "{entry}");
    let request = server.client().post(server.url("/tokenize")).bearer_auth(key);
    let response = request.json(&serde_json::json!({"prompt": "x"})).send().await.unwrap();
    assert_eq!(response.headers()["x-ratelimit-limit-requests"], "60");
}

#[test]
fn a_broken_file_is_an_error_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.yaml");
    for (text, part) in [
        ("- name: a\n  key: one\n- name: b\n  sha256: two\n", "line 4, entry 'b': 'sha256' has 64 hexadecimal digits"),
        ("", "there is no entry"),
    ] {
        fs::write(&file, text).unwrap();
        let ended =
            octavo(&["serve", TINY, "--host", "127.0.0.1", "--port", "0", "--api-keys-file", file.to_str().unwrap()]);
        let error = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success() && error.contains("--api-keys-file /") && error.contains(part), "{error}");
    }
    let ended = octavo(&["serve", TINY, "--port", "0", "--api-keys-file", "/no/such/file"]);
    assert!(String::from_utf8(ended.stderr).unwrap().contains("--api-keys-file /no/such/file: No such file"));
    let ended = octavo(&["serve", TINY, "--port", "0", "--api-key", ""]);
    assert!(String::from_utf8(ended.stderr).unwrap().contains("the key is empty"));
}
