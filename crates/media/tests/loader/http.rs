//! Fetching over HTTP.

use std::time::Duration;

use bytes::Bytes;
use octavo_media::MediaSettings;
use octavo_media::fetch::FetchSettings;

use super::common::server::{Reply, Server, file, redirect, status};
use super::common::{load, loader, png, refused, settings};

const PREFIX: &str = "Failed to fetch media from URL: ";

fn unprocessable(reason: &str) -> (u16, String) {
    (422, format!("{PREFIX}{reason}"))
}

fn with(change: impl FnOnce(&mut FetchSettings)) -> MediaSettings {
    let mut settings = settings();
    change(&mut settings.fetch);
    settings
}

#[tokio::test]
async fn an_image_is_fetched_with_its_query() {
    let server =
        Server::start(|path, _| if path == "/a/b.png?x=1&y" { file(&png(9, 9, 1)) } else { status(404) }).await;
    let image = load(&loader(settings()), &server.url("/a/b.png?x=1&y#part")).await.unwrap();
    assert_eq!(image.views.tokens(), 1);
    assert_eq!(server.requests(), 1);
}

#[tokio::test]
async fn a_refusal_of_the_host_is_final_and_a_failure_is_tried_again() {
    for (code, attempts) in [(400, 1), (404, 1), (410, 1), (429, 1), (500, 3), (503, 3)] {
        let server = Server::start(move |_, _| status(code)).await;
        let error = refused(&loader(settings()), &server.url("/x.png")).await;
        assert_eq!(error, unprocessable(&format!("HTTP {code} error")));
        assert_eq!(server.requests(), attempts, "{code}");
    }
    let server = Server::start(|_, before| if before < 2 { status(502) } else { file(&png(9, 9, 1)) }).await;
    assert!(load(&loader(settings()), &server.url("/x.png")).await.is_ok());
    assert_eq!(server.requests(), 3);
}

#[tokio::test]
async fn a_slow_server_costs_the_limits_of_all_attempts_and_no_more() {
    let heads: [&[u8]; 3] =
        [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nab"];
    for head in heads {
        let server = Server::start(move |_, _| Reply::Silence(Bytes::from_static(head))).await;
        let settings = with(|fetch| (fetch.timeout, fetch.attempts) = (Duration::from_millis(20), 2));
        let error = refused(&loader(settings), &server.url("/x.png")).await;
        assert_eq!(error, unprocessable("no complete response within 0.08 seconds"));
    }
}

#[tokio::test]
async fn a_body_is_bounded_whether_or_not_its_size_is_announced() {
    let limited = || loader(with(|fetch| (fetch.max_bytes, fetch.attempts) = (100_000, 1)));
    let too_large = unprocessable("the file exceeds the maximum of 100000 bytes");
    let announced = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n";
    for head in [announced.as_slice(), b"HTTP/1.1 200 OK\r\n\r\n"] {
        let server = Server::start(move |_, _| Reply::Endless(head.to_vec())).await;
        assert_eq!(refused(&limited(), &server.url("/x.png")).await, too_large);
        server.connection_ended().await;
    }
    let short = b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nshort";
    let server = Server::start(move |_, _| Reply::Bytes(short.to_vec())).await;
    assert_eq!(refused(&limited(), &server.url("/x.png")).await.0, 422, "a body that is shorter than announced");
    let endless_head = b"HTTP/1.1 200 OK\r\nX: ";
    let server = Server::start(move |_, _| Reply::Endless(endless_head.to_vec())).await;
    assert_eq!(refused(&limited(), &server.url("/x.png")).await.0, 422, "a head without an end");
}

#[tokio::test]
async fn redirects_are_followed_a_number_of_times() {
    let server = Server::start(|path, _| match path {
        "/1" => redirect("/2"),
        "/2" => redirect("3?x"),
        "/3?x" => file(&png(9, 9, 1)),
        _ => redirect("/loop"),
    })
    .await;
    assert!(load(&loader(settings()), &server.url("/1")).await.is_ok());
    assert_eq!(refused(&loader(settings()), &server.url("/loop")).await, unprocessable("more than 10 redirects"));
    let settings = with(|fetch| fetch.redirects = false);
    assert_eq!(refused(&loader(settings), &server.url("/1")).await, unprocessable("redirects are not allowed"));
}

#[tokio::test]
async fn every_hop_is_checked() {
    for target in [
        "http://169.254.169.254/latest/meta-data",
        "http://127.0.0.2/",
        "http://2130706434/",
        "http://0x7f.2/",
        "http://0177.0.0.2/",
        "http://[::ffff:10.0.0.1]/",
        "http://[64:ff9b::a9fe:a9fe]/",
    ] {
        let server = Server::start(move |_, _| redirect(target)).await;
        let (status, message) = refused(&loader(settings()), &server.url("/x.png")).await;
        assert_eq!(status, 422, "{target}");
        assert!(message.ends_with("has an address that is not public"), "{target}: {message}");
        assert_eq!(server.requests(), 1);
    }
    for target in ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:image/png;base64,AAAA"] {
        let server = Server::start(move |_, _| redirect(target)).await;
        let error = refused(&loader(settings()), &server.url("/x.png")).await;
        assert_eq!(error, unprocessable("a redirect leads to a URL that is not HTTP"), "{target}");
    }
}

#[tokio::test]
async fn addresses_that_are_not_public_are_refused() {
    let server = Server::start(|_, _| file(&png(9, 9, 1))).await;
    let strict = loader(with(|fetch| fetch.private_networks = vec![]));
    for host in [
        "127.0.0.1",
        "127.0.0.1.",
        "localhost",
        "LOCALHOST",
        "127.1",
        "127.0.1",
        "0177.0.0.1",
        "0177.1",
        "017700000001",
        "0x7f.1",
        "0x7F.0x0.0x0.0x1",
        "0x7f000001",
        "2130706433",
        "127.0.0%2e1",
        "\u{ff11}\u{ff12}\u{ff17}.0.0.1",
        "127\u{3002}0\u{3002}0\u{3002}1",
        "0",
        "0.0.0.0",
        "3232235521",
        "0xa9fea9fe",
        "[::]",
        "[::1]",
        "[::127.0.0.1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[64:ff9b:1::7f00:1]",
        "[2002:7f00:1::]",
        "[fe80::1]",
        "[fd00::1]",
    ] {
        let (status, message) = refused(&strict, &format!("http://{host}:{}/x.png", server.port())).await;
        assert_eq!(status, 422, "{host}");
        assert!(message.ends_with("has an address that is not public"), "{host}: {message}");
    }
    assert_eq!(server.requests(), 0);
}

#[tokio::test]
async fn domains_are_checked_at_every_hop() {
    let server = Server::start(|path, _| match path.strip_prefix("/to/") {
        Some(port) => redirect(&format!("http://127.0.0.1:{port}/x.png")),
        None => file(&png(9, 9, 1)),
    })
    .await;
    let limited = loader(with(|fetch| fetch.domains = vec!["localhost".to_owned(), "images.example".to_owned()]));
    let port = server.port();
    assert!(load(&limited, &format!("http://LOCALHOST:{port}/x.png")).await.is_ok());
    let expected = "The URL must be from one of the allowed domains: ['localhost', 'images.example']. \
                    Input URL domain: 127.0.0.1";
    for url in [format!("http://127.0.0.1:{port}/x.png"), format!("http://localhost:{port}/to/{port}")] {
        assert_eq!(refused(&limited, &url).await, (400, expected.to_owned()));
    }
}

#[tokio::test]
async fn an_unusable_url_is_refused() {
    let loader = loader(with(|fetch| fetch.attempts = 1));
    let scheme = (400, "The URL must be either a HTTP, data or file URL.".to_owned());
    for source in ["", "x.png", "ftp://host/x.png", "javascript:alert(1)", "://"] {
        assert_eq!(refused(&loader, source).await, scheme, "{source}");
    }
    for source in ["http://", "https://[::1", "http://host:99999/", "http:// host/"] {
        assert_eq!(refused(&loader, source).await, unprocessable("Invalid URL format"), "{source}");
    }
    let secret = refused(&loader, "http://user:secret@127.0.0.1/").await;
    assert_eq!(secret, unprocessable("credentials in the URL are not supported"));
    let unknown = refused(&loader, "http://name.invalid/x.png").await;
    assert_eq!(unknown, unprocessable("the host name.invalid has no address"));
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_connection() {
    let server =
        Server::start(|_, _| Reply::Silence(Bytes::from_static(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")))
            .await;
    let loader = loader(settings());
    let url = server.url("/x.png");
    let client = tokio::spawn(async move { load(&loader, &url).await });
    while server.requests() == 0 {
        tokio::task::yield_now().await;
    }
    client.abort();
    server.connection_ended().await;
}
