//! From a file to 8-bit RGB.
//!
//! The format is recognised by the first bytes, whatever the sender calls it. PNG, JPEG, WebP and GIF are accepted; of an
//! animation, the first frame. [`inspect`] reads only the header, so that the size is known before any pixel has memory.
//! Pixels become RGB as in Pillow, with one difference: 16-bit grey keeps its high byte, where Pillow clips at 255.

mod exif;
mod gif;
mod jpeg;
mod pixels;
mod png;
mod webp;

use crate::error::MediaError;
use crate::image::RgbImage;

/// A file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Portable Network Graphics.
    Png,
    /// JPEG, baseline or progressive.
    Jpeg,
    /// WebP, lossy or lossless.
    WebP,
    /// GIF.
    Gif,
}

impl Format {
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some(Self::Png),
            [0xff, 0xd8, 0xff, ..] => Some(Self::Jpeg),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some(Self::WebP),
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(Self::Gif),
            _ => None,
        }
    }

    /// The media type, as in a `data:` URL.
    #[must_use]
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::WebP => "image/webp",
            Self::Gif => "image/gif",
        }
    }

    /// Most bytes for a pixel that decoding occupies at one time, the decoder's own and the result.
    fn bytes_per_pixel(self) -> u64 {
        match self {
            // The expanded image with alpha, then RGB.
            Self::Png => 4 + 3,
            // The coefficients of four components in 16 bits, which a progressive file needs, and the components; then RGB.
            Self::Jpeg => 8 + 4 + 3,
            // Two canvases with alpha, a frame, and its planes; then RGB.
            Self::WebP => 4 + 4 + 4 + 2 + 3,
            // Indices of a frame and of the canvas, then RGB.
            Self::Gif => 1 + 1 + 3,
        }
    }
}

/// Most pixels of an image, whatever the limit: decoders count the bytes of four channels in 32 bits.
const MAX_PIXELS: u64 = (1 << 30) - 1;

/// What the first bytes of a file say about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The format.
    pub format: Format,
    /// Width in pixels, before the orientation is applied.
    pub width: u32,
    /// Height in pixels, before the orientation is applied.
    pub height: u32,
}

impl Header {
    /// Upper bound of the memory that decoding occupies, in bytes. The result has three for each pixel.
    #[must_use]
    pub fn decoding_bytes(&self) -> u64 {
        // Applying the orientation needs a second image.
        let turned = 3;
        u64::from(self.width) * u64::from(self.height) * (self.format.bytes_per_pixel() + turned) + (1 << 20)
    }
}

/// Reads the header of a file. `max_pixels` of 0 means no limit but that of the decoders, which is 2^30.
///
/// # Errors
/// The file has none of the formats, its header is broken, or it has too many pixels.
pub fn inspect(bytes: &[u8], max_pixels: u64) -> Result<Header, MediaError> {
    let format = Format::from_bytes(bytes).ok_or_else(|| MediaError::Image("cannot identify image file".to_owned()))?;
    let (width, height) = match format {
        Format::Png => png::size(bytes),
        Format::Jpeg => jpeg::size(bytes),
        Format::WebP => webp::size(bytes),
        Format::Gif => gif::size(bytes),
    }?;
    if width == 0 || height == 0 {
        return Err(broken("an image without pixels"));
    }
    let pixels = u64::from(width) * u64::from(height);
    if max_pixels > 0 && pixels > max_pixels {
        return Err(MediaError::Pixels { width, height, max: max_pixels });
    }
    if pixels > MAX_PIXELS {
        return Err(broken(format!(
            "an image of {width}x{height} pixels cannot be decoded: the maximum is {MAX_PIXELS}"
        )));
    }
    Ok(Header { format, width, height })
}

/// Decodes a file whose header was read by [`inspect`]. The orientation of its EXIF block is applied, and transparent
/// pixels are laid over `background`.
///
/// # Errors
/// The file is broken, ends too early, or contradicts its header.
pub fn decode(bytes: &[u8], header: &Header, background: [u8; 3]) -> Result<RgbImage, MediaError> {
    let (image, exif) = match header.format {
        Format::Png => png::decode(bytes, header, background),
        Format::Jpeg => jpeg::decode(bytes, header),
        Format::WebP => webp::decode(bytes, header, background),
        Format::Gif => gif::decode(bytes, header, background).map(|image| (image, None)),
    }?;
    let orientation = exif.as_deref().and_then(exif::orientation).unwrap_or(1);
    Ok(exif::turned(image, orientation))
}

fn broken(reason: impl std::fmt::Display) -> MediaError {
    MediaError::Image(reason.to_string())
}

/// A little-endian number of two bytes.
fn u16_le(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A big-endian number of two bytes.
fn u16_be(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A little-endian number of four bytes.
fn u32_le(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A big-endian number of four bytes.
fn u32_be(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests;
