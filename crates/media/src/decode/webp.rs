//! WebP.

use std::io::Cursor;

use image_webp::WebPDecoder;

use super::{Header, broken, pixels, u16_le, u32_le};
use crate::error::MediaError;
use crate::image::RgbImage;

/// Memory for an EXIF block, in bytes.
const CHUNKS: usize = 4 << 20;

pub(super) fn size(bytes: &[u8]) -> Result<(u32, u32), MediaError> {
    Ok(WebPDecoder::new(Cursor::new(bytes)).map_err(broken)?.dimensions())
}

/// The image, or the first frame on its canvas, and its EXIF block.
pub(super) fn decode(
    bytes: &[u8],
    header: &Header,
    background: [u8; 3],
) -> Result<(RgbImage, Option<Vec<u8>>), MediaError> {
    let mut decoder = WebPDecoder::new(Cursor::new(bytes)).map_err(broken)?;
    decoder.set_memory_limit(CHUNKS);
    let (width, height) = (header.width as usize, header.height as usize);
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    let size = decoder.output_buffer_size();
    let lies = decoder.dimensions() != (header.width, header.height) || size != Some(width * height * channels);
    if lies || !frames_fit(bytes, header) {
        return Err(broken("the WebP file contradicts its header"));
    }
    let mut data = vec![0; width * height * channels];
    decoder.read_image(&mut data).map_err(broken)?;
    let rgb = if channels == 4 { pixels::over(&data, background) } else { data };
    let exif = decoder.exif_metadata().ok().flatten();
    Ok((RgbImage::from_raw(width, height, rgb), exif))
}

/// Whether no lossy frame is larger than the canvas. The decoder reserves the memory of a frame before it compares.
///
/// The decoder looks into the first frame of an animation, and else skips frames by their length. What a frame contains
/// may claim to reach beyond it, so both ways through the file are gone.
fn frames_fit(bytes: &[u8], header: &Header) -> bool {
    [true, false].into_iter().all(|into_frames| chunks_fit(bytes, header, into_frames))
}

fn chunks_fit(bytes: &[u8], header: &Header, into_frames: bool) -> bool {
    let mut at = 12;
    while let (Some(name), Some(length)) = (bytes.get(at..at + 4), u32_le(bytes, at + 4)) {
        let content = at + 8;
        // An animation's frame has a header of 16 bytes, followed by chunks of its own.
        if into_frames && name == b"ANMF" {
            at = content + 16;
            continue;
        }
        if name == b"VP8 "
            && let Some(size) = u16_le(bytes, content + 6).zip(u16_le(bytes, content + 8))
            && (u32::from(size.0 & 0x3fff) > header.width || u32::from(size.1 & 0x3fff) > header.height)
        {
            return false;
        }
        let length = length as usize;
        at = content + length + length % 2;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::Format;

    fn chunk(name: &[u8; 4], content: &[u8]) -> Vec<u8> {
        [name.as_slice(), &(content.len() as u32).to_le_bytes(), content].concat()
    }

    /// A lossy frame of this side.
    fn frame(side: u16) -> Vec<u8> {
        chunk(b"VP8 ", &[&[0; 6][..], &side.to_le_bytes(), &side.to_le_bytes()].concat())
    }

    #[test]
    fn a_frame_larger_than_the_canvas_is_found_wherever_the_decoder_looks() {
        let header = Header { format: Format::WebP, width: 20, height: 20 };
        let fits = |chunks: &[Vec<u8>]| frames_fit(&[b"RIFF\0\0\0\0WEBP".to_vec(), chunks.concat()].concat(), &header);
        let animated = |own: &[u8]| chunk(b"ANMF", &[&[0; 16], own].concat());
        // Its inner chunk claims to reach beyond the file.
        let decoy = animated(b"ALPH\xf0\xff\xff\xff");
        assert!(fits(&[frame(20), animated(&frame(20)), decoy.clone()]));
        assert!(!fits(&[frame(21)]));
        assert!(!fits(&[decoy, frame(16_383)]), "behind a decoy");
        assert!(!fits(&[animated(&frame(21))]));
        assert!(!fits(&[animated(&[chunk(b"ALPH", &[0; 3]), vec![0], frame(21)].concat())]), "behind its transparency");
    }
}
