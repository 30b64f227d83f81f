//! `data:` URLs.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::too_large;
use crate::error::MediaError;

/// Characters of a URL that an error repeats.
const SHOWN: usize = 32;

/// Upper bound of the size of the decoded file in bytes.
pub(super) fn size(source: &str) -> u64 {
    source.len() as u64 / 4 * 3 + 3
}

/// Decodes a URL `data:[<type>][;<parameter>]*;base64,<data>`. The type is not looked at.
pub(super) fn decode(source: &str, max_bytes: u64) -> Result<Vec<u8>, MediaError> {
    let start = || source.chars().take(SHOWN).collect();
    let (head, data) = source.split_once(',').ok_or_else(|| MediaError::DataUrl { start: start() })?;
    let marked = head.rsplit_once(';').is_some_and(|(_, encoding)| encoding == "base64");
    if !marked {
        return Err(MediaError::DataEncoding);
    }
    if size(data) > max_bytes + 3 {
        return Err(too_large(max_bytes));
    }
    STANDARD.decode(data).map_err(|error| MediaError::Image(format!("the data URL is not base64: {error}")))
}
