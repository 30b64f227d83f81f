//! The memory of files: hosts that are silent, slow or many.

use std::time::Duration;

use futures::future::join_all;

use super::common::server::{Reply, Server, file, part, status};
use super::common::{load, loader, narrow, png, settings, start_loads};

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn silent_servers_that_announce_much_delay_nobody() {
    let server = Server::start(|path, _| match path {
        "/small.png" => file(&png(9, 9, 1)),
        _ => Reply::Silence(part(256 * MIB, 1000)),
    })
    .await;
    let loader = loader(settings());
    let silent = start_loads(&loader, &server, 50);
    while server.requests() < silent.len() {
        tokio::task::yield_now().await;
    }
    assert!(load(&loader, &server.url("/small.png")).await.is_ok());
    assert_eq!(server.requests(), silent.len() + 1, "the first attempt succeeds");
    assert!(silent.iter().all(|client| !client.is_finished()));
    silent.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn large_files_that_arrive_together_are_all_answered() {
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
    let server = Server::start(|path, before| match path {
        "/image.png" => file(&[png(9, 9, 1), vec![0; 2 << 20]].concat()),
        _ if before < 4 => status(503),
        // The second attempt has more time than the first one of the image.
        _ => Reply::Silence(part(4 * MIB, 3 << 20)),
    })
    .await;
    let mut patient = narrow();
    (patient.fetch.patience, patient.fetch.timeout) = (Duration::from_secs(6), Duration::from_secs(4));
    let loader = loader(patient);
    let slow = start_loads(&loader, &server, 4);
    while server.requests() < 2 * slow.len() {
        tokio::task::yield_now().await;
    }
    assert!(load(&loader, &server.url("/image.png")).await.is_ok());
    assert_eq!(server.requests(), 2 * slow.len() + 1, "the first attempt succeeds");
    slow.iter().for_each(tokio::task::JoinHandle::abort);
}
