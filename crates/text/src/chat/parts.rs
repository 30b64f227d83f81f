//! Pieces of a message's content.

use serde_json::Value;

/// A piece of a message's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// Text.
    Text(&'a str),
    /// An image.
    Image(ImagePart<'a>),
}

/// An image of a message. At least one of its fields is present.
///
/// `detail` is accepted and has no effect, as in vLLM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePart<'a> {
    /// An `http:`, `https:`, `data:` or `file:` URL, which is not checked here.
    pub url: Option<&'a str>,
    /// The client's name of the image.
    pub uuid: Option<&'a str>,
}

/// A kind of content other than text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Modality {
    /// Images.
    Image,
    /// Videos.
    Video,
    /// Sound.
    Audio,
}

impl Modality {
    /// Returns the name in requests and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Video => "video",
            Self::Audio => "audio",
        }
    }
}

/// Reason why a part cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PartError {
    /// A field of the part, which starts with a dot or is empty, and its defect.
    Field(String, String),
    /// No model takes such parts.
    Modality(Modality),
}

fn field(name: &str, reason: &str) -> PartError {
    PartError::Field(format!(".{name}"), reason.to_owned())
}

impl<'a> Part<'a> {
    /// Reads a part of any API: chat completions, responses, or messages after their conversion. A string is text.
    pub(super) fn read(part: &'a Value) -> Result<Self, PartError> {
        if let Some(text) = part.as_str() {
            return Ok(Self::Text(text));
        }
        let kind = part.get("type").and_then(Value::as_str);
        let key = match kind.ok_or_else(|| field("type", "a content part must have a type"))? {
            "text" | "input_text" | "output_text" => "text",
            "refusal" => "refusal",
            "thinking" => "thinking",
            "image_url" | "input_image" => return ImagePart::read(part).map(Self::Image),
            "video_url" | "input_video" => return Err(PartError::Modality(Modality::Video)),
            "audio_url" | "input_audio" => return Err(PartError::Modality(Modality::Audio)),
            kind => {
                let reason = format!("a part of type \"{kind}\" is not supported");
                return Err(PartError::Field(String::new(), reason));
            }
        };
        part.get(key).and_then(Value::as_str).map(Self::Text).ok_or_else(|| field(key, "must be a string"))
    }
}

impl<'a> ImagePart<'a> {
    fn read(part: &'a Value) -> Result<Self, PartError> {
        let uuid = match part.get("uuid") {
            None | Some(Value::Null) => None,
            Some(uuid) => Some(uuid.as_str().ok_or_else(|| field("uuid", "must be a string"))?),
        };
        let url = match part.get("image_url") {
            None | Some(Value::Null) => None,
            Some(Value::String(url)) => Some(url.as_str()),
            Some(image) => {
                let url = image.get("url").and_then(Value::as_str);
                Some(url.ok_or_else(|| field("image_url.url", "must be a string"))?)
            }
        };
        if url.is_none() && part.get("file_id").is_some_and(|id| !id.is_null()) {
            return Err(field("file_id", "files are not supported; give the image as a URL"));
        }
        if url.is_none() && uuid.is_none() {
            return Err(field("image_url", "an image needs a URL or a uuid"));
        }
        Ok(Self { url, uuid })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn image<'a>(url: impl Into<Option<&'a str>>, uuid: impl Into<Option<&'a str>>) -> Part<'a> {
        Part::Image(ImagePart { url: url.into(), uuid: uuid.into() })
    }

    #[test]
    fn images_of_every_api_are_read() {
        let url = "https://host/x.png";
        for (part, expected) in [
            (json!({"type": "image_url", "image_url": {"url": url, "detail": "low"}}), image(url, None)),
            (json!({"type": "image_url", "image_url": url}), image(url, None)),
            (json!({"type": "image_url", "image_url": {"url": url}, "uuid": "logo"}), image(url, "logo")),
            (json!({"type": "image_url", "image_url": null, "uuid": "logo"}), image(None, "logo")),
            (json!({"type": "input_image", "image_url": url, "detail": "auto", "file_id": null}), image(url, None)),
        ] {
            assert_eq!(Part::read(&part), Ok(expected), "{part}");
        }
    }

    #[test]
    fn broken_parts_are_named() {
        for (part, place) in [
            (json!({"text": "a"}), ".type"),
            (json!(7), ".type"),
            (json!({"type": "text", "text": 7}), ".text"),
            (json!({"type": "image_url"}), ".image_url"),
            (json!({"type": "image_url", "image_url": {"detail": "low"}}), ".image_url.url"),
            (json!({"type": "image_url", "image_url": 7}), ".image_url.url"),
            (json!({"type": "image_url", "image_url": "x", "uuid": 7}), ".uuid"),
            (json!({"type": "input_image", "file_id": "file-1"}), ".file_id"),
            (json!({"type": "input_file", "file_id": "file-1"}), ""),
        ] {
            let Err(PartError::Field(field, _)) = Part::read(&part) else { panic!("{part}") };
            assert_eq!(field, place, "{part}");
        }
    }

    #[test]
    fn video_and_sound_are_refused_by_their_kind() {
        for (kind, modality) in [
            ("video_url", Modality::Video),
            ("input_video", Modality::Video),
            ("audio_url", Modality::Audio),
            ("input_audio", Modality::Audio),
        ] {
            assert_eq!(Part::read(&json!({"type": kind})), Err(PartError::Modality(modality)));
        }
    }
}
