//! Images of messages: files and URLs.

use std::fs::File;
use std::io::Read;

use anyhow::{Context, Result, anyhow, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use octavo_media::decode;
use serde_json::{Value, json};

use crate::client::session::expanded;

/// Bytes of an image file. As base64 within a request, it stays below the default of `--max-body-bytes`.
const MAX_IMAGE: u64 = 64 << 20;

/// The URL of an image in a request: a URL as it is, and a file as a `data:` URL.
///
/// # Errors
/// The file cannot be read, is larger than 64 MiB, or is not an image of a format that the server decodes.
pub(crate) fn url(source: &str) -> Result<String> {
    if is_url(source) {
        return Ok(source.to_owned());
    }
    let named = || source.to_owned();
    let mut bytes = vec![];
    let file = File::open(expanded(source)).with_context(named)?;
    file.take(MAX_IMAGE + 1).read_to_end(&mut bytes).with_context(named)?;
    ensure!(bytes.len() as u64 <= MAX_IMAGE, "{source} has more than {MAX_IMAGE} bytes");
    let header = decode::inspect(&bytes, 0)
        .map_err(|error| anyhow!("{source} is not a PNG, JPEG, WebP or GIF image: {error}"))?;
    Ok(format!("data:{};base64,{}", header.format.media_type(), STANDARD.encode(bytes)))
}

/// The URLs of several images.
///
/// # Errors
/// As [`url`].
pub(crate) fn urls(sources: &[String]) -> Result<Vec<String>> {
    sources.iter().map(|source| url(source)).collect()
}

/// The content of a message: images in front of a text, or the text alone.
pub(crate) fn content(images: &[String], text: &str) -> Value {
    if images.is_empty() {
        return text.into();
    }
    let images = images.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
    images.chain([json!({"type": "text", "text": text})]).collect()
}

/// Whether a saved message has a content as [`content`] makes it.
pub(crate) fn is_content(content: &Value) -> bool {
    let is_part = |part: &Value| match part["type"].as_str() {
        Some("text") => part["text"].is_string(),
        Some("image_url") => part["image_url"]["url"].is_string(),
        _ => false,
    };
    content.is_string() || content.as_array().is_some_and(|parts| parts.iter().all(is_part))
}

/// Whether a text is a URL, as opposed to a path.
fn is_url(source: &str) -> bool {
    let scheme = source.split_once("://").map(|(scheme, _)| scheme);
    let is_scheme = |scheme: &str| !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    scheme.is_some_and(is_scheme) || source.starts_with("data:")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A PNG of one pixel.
    const PNG: &str =
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
    /// A GIF of one pixel.
    const GIF: &str = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7";

    #[test]
    fn files_have_the_media_type_of_their_content() {
        let folder = tempfile::tempdir().unwrap();
        for (name, data, media_type) in [("a.jpg", PNG, "image/png"), ("b c", GIF, "image/gif")] {
            let path = folder.path().join(name);
            std::fs::write(&path, STANDARD.decode(data).unwrap()).unwrap();
            assert_eq!(url(path.to_str().unwrap()).unwrap(), format!("data:{media_type};base64,{data}"));
        }
    }

    #[test]
    fn urls_are_passed_on() {
        for source in ["https://host/x.png", "http://host/x", "file:///x.png", "data:image/png;base64,AAAA"] {
            assert_eq!(url(source).unwrap(), source);
        }
        assert!(!is_url("a/b://c") && !is_url("://c") && !is_url("~/x.png"));
    }

    #[test]
    fn a_file_that_is_no_image_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("notes.png"), "some notes").unwrap();
        std::fs::write(path("cut.png"), &STANDARD.decode(PNG).unwrap()[..12]).unwrap();
        File::create(path("large.png")).unwrap().set_len(MAX_IMAGE + 1).unwrap();
        for (name, part) in [
            ("notes.png", "notes.png is not a PNG, JPEG, WebP or GIF image: "),
            ("cut.png", "cut.png is not a PNG, JPEG, WebP or GIF image: "),
            ("large.png", "large.png has more than 67108864 bytes"),
            ("missing.png", "missing.png: No such file or directory"),
            (".", "Is a directory"),
        ] {
            let error = crate::report::sentence(&url(&path(name)).unwrap_err());
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn images_precede_the_text() {
        assert_eq!(content(&[], "hi"), "hi");
        let both = content(&["a".into(), "b".into()], "hi");
        let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
        assert_eq!(both, json!([image("a"), image("b"), {"type": "text", "text": "hi"}]));
        assert!(is_content(&both) && is_content(&"hi".into()));
        for other in
            [json!(null), json!([1]), json!([{"type": "text"}]), json!([{"type": "image_url", "image_url": "a"}])]
        {
            assert!(!is_content(&other), "{other}");
        }
    }
}
