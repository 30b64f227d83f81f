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

/// Chunks of a frame of an animation that the decoder looks at: transparency and pixels.
const CHUNKS_OF_A_FRAME: usize = 2;

/// Whether no lossy frame is larger than the canvas. The decoder reserves the memory of a frame before it compares.
///
/// Every chunk that the decoder may read is checked: those of the file, of which it skips frames by their length, and the
/// first ones of each frame, whatever the length of the frame.
fn frames_fit(bytes: &[u8], header: &Header) -> bool {
    let mut chunks = Chunks { bytes, at: 12 };
    chunks.all(|chunk| {
        // The frame of an animation has a header of 16 bytes, followed by chunks of its own.
        let own = Chunks { bytes, at: chunk.content.saturating_add(16) };
        let count = if chunk.name == b"ANMF" { CHUNKS_OF_A_FRAME } else { 0 };
        chunk.fits(bytes, header) && own.take(count).all(|chunk| chunk.fits(bytes, header))
    })
}

/// A chunk of a file: its name, and the place of its content.
struct Chunk<'a> {
    name: &'a [u8],
    content: usize,
}

impl Chunk<'_> {
    /// Whether it is no lossy frame larger than the canvas.
    fn fits(&self, bytes: &[u8], header: &Header) -> bool {
        let side = |at: usize| u16_le(bytes, self.content + at).map_or(0, |side| u32::from(side & 0x3fff));
        self.name != b"VP8 " || (side(6) <= header.width && side(8) <= header.height)
    }
}

/// The chunks that follow one another from a place.
struct Chunks<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Iterator for Chunks<'a> {
    type Item = Chunk<'a>;

    fn next(&mut self) -> Option<Chunk<'a>> {
        let name = self.bytes.get(self.at..)?.get(..4)?;
        let length = u32_le(self.bytes, self.at + 4)? as usize;
        let content = self.at + 8;
        self.at = content.saturating_add(length).saturating_add(length % 2);
        Some(Chunk { name, content })
    }
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
