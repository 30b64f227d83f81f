//! Files that are made to break a decoder.

use futures::future::join_all;
use octavo_media::MediaError;

use super::common::server::{Server, file};
use super::common::{data_url, load, loader, png, refused, settings};

/// A checksum-free container that claims a size: the canvas of a GIF file.
fn huge_gif() -> Vec<u8> {
    let mut file = b"GIF89a\xff\xff\xff\xff\0\0\0".to_vec();
    file.extend_from_slice(b",\0\0\0\0\xff\xff\xff\xff\0\x08\x01\0\0;");
    file
}

#[tokio::test]
async fn a_file_is_judged_by_its_content() {
    let server = Server::start(|path, _| match path {
        "/text.png" => file(b"not an image"),
        "/page.png" => file(b"<html><body>404</body></html>"),
        "/empty.png" => file(b""),
        "/short.png" => file(&png(30, 20, 1)[..60]),
        _ => file(&png(30, 20, 1)),
    })
    .await;
    let loader = loader(settings());
    for path in ["/text.png", "/page.png", "/empty.png", "/short.png"] {
        let (status, message) = refused(&loader, &server.url(path)).await;
        assert!(status == 400 && message.starts_with("Failed to load image: "), "{path}: {message}");
    }
    assert!(load(&loader, &server.url("/image.txt")).await.is_ok());
}

#[tokio::test]
async fn a_huge_image_is_refused_by_its_header() {
    let error = refused(&loader(settings()), &data_url(&huge_gif())).await;
    let expected = "Image dimensions 65535x65535 (4294836225 pixels) exceed the maximum of 178956970 pixels. \
                    Set VLLM_MAX_IMAGE_PIXELS to increase this limit.";
    assert_eq!(error, (400, expected.to_owned()));
}

#[tokio::test]
async fn one_broken_image_does_not_spoil_another() {
    let loader = loader(settings());
    let (bad, good) = (data_url(&png(30, 20, 1)[..70]), data_url(&png(30, 20, 2)));
    let images = join_all([&bad, &good, &bad, &good].map(|source| load(&loader, source))).await;
    let broken = |image: &Result<_, MediaError>| matches!(image, Err(MediaError::Image(_)));
    assert_eq!(images.iter().map(broken).collect::<Vec<_>>(), [true, false, true, false]);
}
