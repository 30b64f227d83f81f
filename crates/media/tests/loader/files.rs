//! Images in the request itself and in a folder.

use std::fs;

use octavo_media::{MediaLoader, SettingsError};

use super::common::{Lookups, data_url, load, loader, png, refused, settings};

#[tokio::test]
async fn a_data_url_holds_the_image() {
    let loader = loader(settings());
    let file = png(9, 9, 1);
    let image = load(&loader, &data_url(&file)).await.unwrap();
    let other_type = data_url(&file).replacen("data:image/png", "DATA:text/plain;charset=x", 1);
    assert_eq!(load(&loader, &other_type).await.unwrap().identity, image.identity, "the type does not matter");
}

#[tokio::test]
async fn a_broken_data_url_is_refused() {
    let loader = loader(settings());
    let without_comma = refused(&loader, "data:image/png;base64AAAAAAAAAAAAAAAAAAAAAAA").await;
    let message = "Invalid data URL 'data:image/png;base64AAAAAAAAAAA': missing ',' separator.";
    assert_eq!(without_comma, (400, message.to_owned()));
    for source in ["data:image/png,AAAA", "data:,AAAA", "data:image/png;base65,AAAA"] {
        assert_eq!(refused(&loader, source).await, (400, "Only base64 data URLs are supported for now.".to_owned()));
    }
    for source in ["data:;base64,%%%", "data:;base64,AAA", "data:;base64,", "data:;base64,AAAA"] {
        let (status, message) = refused(&loader, source).await;
        assert_eq!(status, 400);
        assert!(message.starts_with("Failed to load image: "), "{message}");
    }
    let mut small = settings();
    small.fetch.max_bytes = 30;
    let error = refused(&super::common::loader(small), &data_url(&png(50, 50, 1))).await;
    assert_eq!(error, (422, "Failed to fetch media from URL: the file exceeds the maximum of 30 bytes".to_owned()));
}

#[tokio::test]
async fn local_files_need_a_folder() {
    let error = refused(&loader(settings()), "file:///etc/hostname").await;
    assert_eq!(error, (400, "Cannot load local files without `--allowed-local-media-path`.".to_owned()));
    let mut missing = settings();
    missing.fetch.folder = Some("/no/such/folder".into());
    let error = MediaLoader::new(missing, Lookups::default()).unwrap_err();
    assert!(matches!(error, SettingsError::Folder { .. }), "{error}");
}

#[tokio::test]
async fn only_regular_files_below_the_folder_are_read() {
    let root = tempfile::tempdir().unwrap();
    let [folder, outside] = ["in", "out"].map(|name| root.path().join(name));
    fs::create_dir_all(folder.join("sub")).unwrap();
    fs::create_dir(&outside).unwrap();
    for path in [folder.join("sub/a b.png"), outside.join("x.png"), root.path().join("in.png")] {
        fs::write(path, png(9, 9, 1)).unwrap();
    }
    std::os::unix::fs::symlink(folder.join("sub/a b.png"), folder.join("link.png")).unwrap();
    std::os::unix::fs::symlink(outside.join("x.png"), folder.join("escape.png")).unwrap();
    std::os::unix::fs::symlink(&outside, folder.join("escape")).unwrap();
    let mut settings = settings();
    settings.fetch.folder = Some(folder.clone());
    let loader = loader(settings);
    let folder = folder.display();
    for path in ["sub/a%20b.png", "link.png", "sub/../link.png", "./sub/%2e/a%20b.png"] {
        assert!(load(&loader, &format!("file://{folder}/{path}")).await.is_ok(), "{path}");
    }
    for path in
        ["../out/x.png", "escape.png", "escape/x.png", "..%2fout%2fx.png", "../in.png", "../out/none", "/etc/passwd"]
    {
        let (status, message) = refused(&loader, &format!("file://{folder}/{path}")).await;
        assert_eq!(status, 400);
        let contained = message.contains("must be a subpath of `--allowed-local-media-path");
        assert!(contained || message == "Failed to load image: the file cannot be read", "{path}: {message}");
    }
    for path in ["sub", "none.png", "sub/a%20b.png/x", ""] {
        let (status, message) = refused(&loader, &format!("file://{folder}/{path}")).await;
        assert!(status == 400 && message.starts_with("Failed to load image: "), "{path}: {message}");
    }
}
