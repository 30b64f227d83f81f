//! The memory of files that arrive, and of images that are kept.

use futures::future::join_all;
use octavo_media::MediaSettings;

use super::Heap;
use super::common::server::{Reply, Server, file, part};
use super::common::{data_url, load, loader, narrow, png, settings, start_loads};

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn servers_that_stall_lose_their_memory_to_others() {
    let mut heap = Heap::alone().await;
    let large = part(4 * MIB, 3 << 20);
    let server = Server::start(move |path, _| match path {
        "/small.png" => file(&png(9, 9, 1)),
        _ => Reply::Silence(large.clone()),
    })
    .await;
    let loader = loader(narrow());
    heap.start();
    // Together they have sent more than there is room for.
    let stalled = start_loads(&loader, &server, 20);
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
    // The shared memory, that of one more file, and the buffers of the connections.
    assert!(heap.peak() < 8 * MIB + 4 * MIB + 8 * MIB, "{} bytes", heap.peak());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_images_take_bounded_memory() {
    let heap = Heap::alone().await;
    let small = MediaSettings { cache_bytes: 1 << 20, file_bytes: 1 << 20, decoding_bytes: 8 << 20, ..settings() };
    let loader = loader(small);
    for batch in 0..100 {
        let sources: Vec<_> = (0..100).map(|i| data_url(&png(40, 30, batch * 100 + i))).collect();
        for image in join_all(sources.iter().map(|source| load(&loader, source))).await {
            image.unwrap();
        }
        assert!(loader.cached_bytes() <= 1 << 20);
    }
    assert!(heap.kept() < 8 * MIB, "{} bytes", heap.kept());
}
