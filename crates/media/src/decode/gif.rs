//! The first frame of a GIF file.

use std::num::NonZeroU64;

use gif::{ColorOutput, DecodeOptions, MemoryLimit};

use super::{Header, broken, pixels, u16_le};
use crate::error::MediaError;
use crate::image::RgbImage;

pub(super) fn size(bytes: &[u8]) -> Result<(u32, u32), MediaError> {
    let size = u16_le(bytes, 6).zip(u16_le(bytes, 8)).ok_or_else(|| broken("the GIF file has no header"))?;
    Ok((size.0.into(), size.1.into()))
}

/// As in Pillow, pixels that the frame does not cover are transparent if the frame has a transparent colour, and otherwise
/// have the first colour.
pub(super) fn decode(bytes: &[u8], header: &Header, background: [u8; 3]) -> Result<RgbImage, MediaError> {
    let (width, height) = (header.width as usize, header.height as usize);
    let mut options = DecodeOptions::new();
    options.set_color_output(ColorOutput::Indexed);
    // A frame outside the canvas is refused, so a frame has at most as many bytes as the canvas has pixels.
    options.check_frame_consistency(true);
    options.set_memory_limit(MemoryLimit::Bytes(NonZeroU64::MIN.saturating_add((width * height) as u64 + (1 << 16))));
    let mut decoder = options.read_info(bytes).map_err(broken)?;
    let global = decoder.global_palette().map(<[u8]>::to_vec);
    let frame = decoder.read_next_frame().map_err(broken)?.ok_or_else(|| broken("the GIF file has no frame"))?;
    let mut canvas = vec![frame.transparent.unwrap_or(0); width * height];
    let (left, frame_width) = (usize::from(frame.left), usize::from(frame.width));
    let rows = canvas.chunks_exact_mut(width).skip(usize::from(frame.top));
    for (to, from) in rows.zip(frame.buffer.chunks_exact(frame_width.max(1))) {
        to[left..left + frame_width].copy_from_slice(from);
    }
    let Some(palette) = frame.palette.as_ref().or(global.as_ref()) else {
        return Ok(RgbImage::from_raw(width, height, pixels::grey(&canvas)));
    };
    // Indices behind the palette are black.
    let mut colours = [[0, 0, 0]; 256];
    for (colour, entry) in colours.iter_mut().zip(palette.chunks_exact(3)) {
        colour.copy_from_slice(entry);
    }
    if let Some(transparent) = frame.transparent {
        colours[usize::from(transparent)] = background;
    }
    let data = pixels::palette(&canvas, &colours);
    Ok(RgbImage::from_raw(width, height, data))
}
