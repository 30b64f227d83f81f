//! The memory of files: hosts that are silent, slow or many.

use std::time::Duration;

use futures::future::join_all;
use octavo_media::MediaSettings;

use super::server::{Reply, Server, file, status};
use super::{HEAP, MEASURED, load, loader, png, settings};

const MIB: u64 = 1 << 20;

/// The head of a response that announces a file of so many bytes.
fn announce(bytes: u64) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\n\r\n").into_bytes()
}

/// Room for two files of 4 MiB beside the one that is always possible.
fn narrow() -> MediaSettings {
    let mut settings = MediaSettings { file_bytes: 8 * MIB, ..settings() };
    (settings.fetch.max_bytes, settings.fetch.patience) = (4 * MIB, Duration::from_millis(50));
    settings
}

#[tokio::test]
async fn silent_servers_that_announce_much_delay_nobody() {
    let server = Server::start(|path, _| match path {
        "/small.png" => file(&png(9, 9, 1)),
        _ => Reply::Silence([announce(256 * MIB), vec![1; 1000]].concat()),
    })
    .await;
    let loader = loader(settings());
    let silent: Vec<_> = (0..50)
        .map(|number| {
            let (loader, url) = (loader.clone(), server.url(&format!("/{number}")));
            tokio::spawn(async move { load(&loader, &url).await })
        })
        .collect();
    while server.requests() < silent.len() {
        tokio::task::yield_now().await;
    }
    assert!(load(&loader, &server.url("/small.png")).await.is_ok());
    assert_eq!(server.requests(), silent.len() + 1, "the first attempt succeeds");
    assert!(silent.iter().all(|client| !client.is_finished()));
    silent.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn servers_that_stall_lose_their_memory_to_others() {
    let _measured = MEASURED.lock().await;
    let server = Server::start(|path, _| match path {
        "/small.png" => file(&png(9, 9, 1)),
        _ => Reply::Silence([announce(4 * MIB), vec![1; 3 << 20]].concat()),
    })
    .await;
    let loader = loader(narrow());
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    // Together they have sent more than there is room for.
    let stalled: Vec<_> = (0..20)
        .map(|number| {
            let (loader, url) = (loader.clone(), server.url(&format!("/{number}")));
            tokio::spawn(async move { load(&loader, &url).await })
        })
        .collect();
    while server.requests() < stalled.len() {
        tokio::task::yield_now().await;
    }
    for _ in 0..10 {
        assert!(load(&loader, &server.url("/small.png")).await.is_ok());
    }
    let slow = "Failed to fetch media from URL: the host sends too slowly while other images wait for memory";
    let mut open = 0;
    for client in stalled {
        if client.is_finished() {
            let error = client.await.unwrap().unwrap_err();
            assert_eq!((error.status(), error.to_string().as_str()), (422, slow));
        } else {
            client.abort();
            open += 1;
        }
    }
    assert!((1..20).contains(&open), "only the memory that is needed is taken: {open} connections are left");
    // The server keeps its 20 replies of 3 MiB.
    let peak = (HEAP.peak_usage() - before) as u64;
    assert!(peak < 60 * MIB + 12 * MIB + 20 * MIB, "{} MiB", peak / MIB);
}

#[tokio::test]
async fn large_files_that_arrive_together_are_all_answered() {
    let _measured = MEASURED.lock().await;
    let server = Server::start(|path, _| {
        // What follows the image counts as a part of the file.
        let name = path.trim_start_matches('/').parse().unwrap();
        file(&[png(9, 9, name), vec![0; 3 << 20]].concat())
    })
    .await;
    let mut settings = narrow();
    settings.fetch.patience = Duration::from_secs(60);
    let loader = loader(settings);
    let urls: Vec<_> = (0..24).map(|number| server.url(&format!("/{number}"))).collect();
    for image in join_all(urls.iter().map(|url| load(&loader, url))).await {
        image.unwrap();
    }
    assert_eq!(server.requests(), urls.len(), "each at the first attempt");
}

#[tokio::test]
async fn the_time_limit_of_a_host_does_not_run_while_its_file_waits_for_memory() {
    let _measured = MEASURED.lock().await;
    let server = Server::start(|path, before| match path {
        "/image.png" => file(&[png(9, 9, 1), vec![0; 2 << 20]].concat()),
        _ if before < 4 => status(503),
        // The second attempt has more time than the first one of the image.
        _ => Reply::Silence([announce(4 * MIB), vec![1; 3 << 20]].concat()),
    })
    .await;
    let mut patient = narrow();
    (patient.fetch.patience, patient.fetch.timeout) = (Duration::from_secs(6), Duration::from_secs(4));
    let loader = loader(patient);
    let slow: Vec<_> = (0..4)
        .map(|number| {
            let (loader, url) = (loader.clone(), server.url(&format!("/{number}")));
            tokio::spawn(async move { load(&loader, &url).await })
        })
        .collect();
    while server.requests() < 2 * slow.len() {
        tokio::task::yield_now().await;
    }
    assert!(load(&loader, &server.url("/image.png")).await.is_ok());
    assert_eq!(server.requests(), 2 * slow.len() + 1, "the first attempt succeeds");
    slow.iter().for_each(tokio::task::JoinHandle::abort);
}
