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

/// A strict decoder refuses a file that ends too early; otherwise the rest would be grey.
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
            // Adobe's programs write the inverse.
            if is_from_adobe(bytes) {
                data.iter_mut().for_each(|value| *value = 255 - *value);
            }
            pixels::cmyk(&data)
        }
        _ => data,
    };
    Ok((RgbImage::from_raw(width, height, rgb), decoder.exif().cloned()))
}

/// Whether a segment before the image bears Adobe's name.
fn is_from_adobe(bytes: &[u8]) -> bool {
    const APP14: u8 = 0xee;
    const START_OF_SCAN: u8 = 0xda;
    let mut at = 2;
    while let (Some([0xff, marker]), Some(length)) = (bytes.get(at..at + 2), u16_be(bytes, at + 2)) {
        if *marker == APP14 && bytes.get(at + 4..at + 9) == Some(b"Adobe") {
            return true;
        }
        if *marker == START_OF_SCAN {
            break;
        }
        at += 2 + usize::from(length);
    }
    false
}
