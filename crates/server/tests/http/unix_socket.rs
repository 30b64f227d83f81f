//! A Unix domain socket instead of a port.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use octavo_server::{ConnectionLimits, serve_while_loading};
use octavo_sockets::{Listener, UnixSocketError};
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::sync::oneshot;

use crate::support::Setup;
use crate::wire::{Answer, exchange, serve_on};

async fn ask(path: &Path, line: &str, body: &str) -> Answer {
    exchange(UnixStream::connect(path).await.unwrap(), line, &[], body).await.unwrap()
}

#[tokio::test]
async fn it_serves_like_a_port_and_leaves_nothing_behind() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("octavo.sock");
    let listener = Listener::unix(&path).unwrap();
    assert_eq!(listener.to_string(), format!("unix:{}", path.display()));
    let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    assert!(mode & 0o111 == 0 && mode & 0o600 == 0o600, "{mode:o}");

    let (loaded, load) = oneshot::channel::<()>();
    let loading = tokio::spawn(async move {
        serve_while_loading(&listener, ConnectionLimits::default(), load).await.unwrap().unwrap();
        listener
    });
    assert_eq!(ask(&path, "GET /live", "").await.status, 200);
    assert_eq!(ask(&path, "GET /health", "").await.status, 503);
    loaded.send(()).unwrap();
    let server = serve_on(Setup::default(), loading.await.unwrap());

    assert_eq!(ask(&path, "GET /health", "").await.status, 200);
    let answer = ask(&path, "POST /v1/completions", r#"{"prompt": "hi", "stream": true}"#).await;
    assert!(answer.status == 200 && answer.body.contains(r#""text":"Hello""#), "{}", answer.body);
    server.shutdown.signal();
    let mut server = server;
    (&mut server.task).await.unwrap().unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn a_second_signal_removes_it_too() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("s");
    let mut setup = Setup::default();
    setup.config.shutdown_lag = Duration::from_secs(600);
    let mut server = serve_on(setup, Listener::unix(&path).unwrap());
    assert_eq!(ask(&path, "GET /health", "").await.status, 200);
    server.shutdown.signal();
    server.shutdown.signal();
    (&mut server.task).await.unwrap().unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn one_that_was_left_behind_is_replaced_and_one_that_answers_is_not() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("s");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "left behind");
    let first = Listener::unix(&path).unwrap();
    let refused = Listener::unix(&path).err().unwrap();
    assert!(matches!(refused, UnixSocketError::InUse(_)));
    assert_eq!(
        refused.to_string(),
        format!("--uds {}: another process listens there: choose another path", path.display())
    );
    // Taken over by somebody else, it is not ours to remove.
    fs::remove_file(&path).unwrap();
    let second = Listener::unix(&path).unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);
    assert!(!path.exists());
}

#[tokio::test]
async fn what_is_no_socket_stays() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("precious");
    fs::write(&file, "data").unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    for path in [&file, &link] {
        let refused = Listener::unix(path).err().unwrap();
        assert!(matches!(refused, UnixSocketError::NotASocket(_)), "{refused}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "data");
    for path in [folder.path().join("no/such/folder"), folder.path().join("x".repeat(200))] {
        let refused = Listener::unix(&path).err().unwrap().to_string();
        assert!(refused.starts_with(&format!("--uds {}: ", path.display())), "{refused}");
    }
}
