//! PNG.

use std::io::Cursor;

use png::{ColorType, Decoder, Limits, Transformations};

use super::{Header, broken, pixels, u32_be};
use crate::error::MediaError;
use crate::image::RgbImage;

/// Memory for chunks other than the image, in bytes.
const CHUNKS: usize = 4 << 20;

pub(super) fn size(bytes: &[u8]) -> Result<(u32, u32), MediaError> {
    let header = bytes.get(12..16) == Some(b"IHDR");
    let size = header.then(|| u32_be(bytes, 16).zip(u32_be(bytes, 20))).flatten();
    size.ok_or_else(|| broken("the PNG file has no header"))
}

/// The image and its EXIF block.
pub(super) fn decode(
    bytes: &[u8],
    header: &Header,
    background: [u8; 3],
) -> Result<(RgbImage, Option<Vec<u8>>), MediaError> {
    let (width, height) = (header.width as usize, header.height as usize);
    // A row of 16-bit values with alpha has 8 bytes a pixel, and the decoder keeps a few rows.
    let limits = Limits { bytes: CHUNKS + width * height * 4 + width * 64 };
    let mut decoder = Decoder::new_with_limits(Cursor::new(bytes), limits);
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    // These may be compressed, and nothing here reads them.
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let mut reader = decoder.read_info().map_err(broken)?;
    let size = reader.output_buffer_size().ok_or_else(|| broken("the image is too large"))?;
    if reader.info().size() != (header.width, header.height) || size > width * height * 4 {
        return Err(broken("the PNG file contradicts its header"));
    }
    let mut data = vec![0; size];
    let frame = reader.next_frame(&mut data).map_err(broken)?;
    if (frame.width, frame.height) != (header.width, header.height) {
        return Err(broken("the PNG file contradicts its header"));
    }
    let rgb = match frame.color_type {
        ColorType::Rgb => data,
        ColorType::Rgba => pixels::over(&data, background),
        ColorType::GrayscaleAlpha => pixels::grey_over(&data, background),
        ColorType::Grayscale => pixels::grey(&data),
        ColorType::Indexed => return Err(broken("the PNG file has no palette")),
    };
    // The block may stand behind the image. A file that is broken there still has an image.
    let _ = reader.finish();
    let exif = reader.info().exif_metadata.as_ref().map(|block| block.to_vec());
    Ok((RgbImage::from_raw(width, height, rgb), exif))
}
