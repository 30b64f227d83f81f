//! JPEG.
//!
//! The inverse transform and the upsampling of chroma are the decoder's own: values differ from libjpeg-turbo's by a few
//! units.

use std::io::Cursor;

use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::{Header, broken, pixels, u16_be};
use crate::error::MediaError;
use crate::image::RgbImage;

/// Scans of a progressive file. Each visits every pixel, so many of them in a small file are an attack.
const MAX_SCANS: usize = 100;

/// Longest side that the format can express.
const MAX_SIDE: usize = 65535;

/// A strict decoder refuses a file with a broken scan; otherwise the rest would be grey.
fn decoder(bytes: &[u8]) -> JpegDecoder<Cursor<&[u8]>> {
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(MAX_SIDE)
        .set_max_height(MAX_SIDE)
        .jpeg_set_max_scans(MAX_SCANS);
    JpegDecoder::new_with_options(Cursor::new(bytes), options)
}

pub(super) fn size(bytes: &[u8]) -> Result<(u32, u32), MediaError> {
    let mut decoder = decoder(bytes);
    decoder.decode_headers().map_err(broken)?;
    let info = decoder.info().ok_or_else(|| broken("the JPEG file has no header"))?;
    Ok((info.width.into(), info.height.into()))
}

/// The image and its EXIF block.
pub(super) fn decode(bytes: &[u8], header: &Header) -> Result<(RgbImage, Option<Vec<u8>>), MediaError> {
    if !is_whole(bytes) {
        return Err(broken("the JPEG file is truncated"));
    }
    let (width, height) = (header.width as usize, header.height as usize);
    let mut decoder = decoder(bytes);
    decoder.decode_headers().map_err(broken)?;
    let four = decoder.info().is_some_and(|info| info.components == 4);
    let output = match decoder.input_colorspace() {
        Some(ColorSpace::Luma) => ColorSpace::Luma,
        Some(ColorSpace::CMYK) if four => ColorSpace::CMYK,
        _ => ColorSpace::RGB,
    };
    let options = decoder.options().jpeg_set_out_colorspace(output);
    decoder.set_options(options);
    if decoder.output_buffer_size() != Some(width * height * output.num_components()) {
        return Err(broken("the JPEG file contradicts its header"));
    }
    let mut data = vec![0; width * height * output.num_components()];
    decoder.decode_into(&mut data).map_err(broken)?;
    let rgb = match output {
        ColorSpace::Luma => pixels::grey(&data),
        ColorSpace::CMYK => {
            // Adobe's programs write the inverse. As Pillow does, other files are taken for theirs.
            data.iter_mut().for_each(|value| *value = 255 - *value);
            pixels::cmyk(&data)
        }
        _ => data,
    };
    Ok((RgbImage::from_raw(width, height, rgb), decoder.exif().cloned()))
}

/// Whether the file has its end mark. The decoder makes up the pixels that a file which ends before it lacks.
///
/// Segments are skipped by their lengths, so that the end of a preview in one of them does not count.
fn is_whole(bytes: &[u8]) -> bool {
    const END: u8 = 0xd9;
    let mut at = 2;
    loop {
        let Some(mark) = bytes.get(at..).and_then(|rest| rest.iter().position(|byte| *byte == 0xff)) else {
            return false;
        };
        at += mark + 1;
        match bytes.get(at) {
            None => return false,
            Some(&END) => return true,
            // The fill byte of a mark; the next turn finds it again.
            Some(0xff) => {}
            // A stuffed byte of a scan, a restart, or a mark that has no length.
            Some(0 | 1 | 0xd0..=0xd8) => at += 1,
            Some(_) => {
                let Some(length) = u16_be(bytes, at + 1) else { return false };
                at += 1 + usize::from(length);
            }
        }
    }
}
