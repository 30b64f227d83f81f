//! The orientation in an EXIF block, and turning images by it.

use super::{u16_be, u16_le, u32_be, u32_le};
use crate::image::RgbImage;

const ORIENTATION: u16 = 0x0112;

/// The value of the orientation tag, 1 to 8. A block that cannot be read has none.
pub(super) fn orientation(block: &[u8]) -> Option<u16> {
    let tiff = block.strip_prefix(b"Exif\0\0").unwrap_or(block);
    type Read<T> = fn(&[u8], usize) -> Option<T>;
    let (short, long): (Read<u16>, Read<u32>) = match tiff.first_chunk::<4>()? {
        b"II*\0" => (u16_le, u32_le),
        b"MM\0*" => (u16_be, u32_be),
        _ => return None,
    };
    let directory = long(tiff, 4)? as usize;
    let entries = usize::from(short(tiff, directory)?);
    let entry = (0..entries).map(|i| directory + 2 + i * 12).find(|at| short(tiff, *at) == Some(ORIENTATION))?;
    const SHORT: u16 = 3;
    let value = (short(tiff, entry + 2)? == SHORT).then(|| short(tiff, entry + 8))??;
    (1..=8).contains(&value).then_some(value)
}

/// The image as a viewer shows it.
pub(super) fn turned(image: RgbImage, orientation: u16) -> RgbImage {
    let (width, height) = (image.width(), image.height());
    let (right, bottom) = (width - 1, height - 1);
    match orientation {
        2 => gather(&image, (width, height), |x, y| (right - x, y)),
        3 => gather(&image, (width, height), |x, y| (right - x, bottom - y)),
        4 => gather(&image, (width, height), |x, y| (x, bottom - y)),
        5 => gather(&image, (height, width), |x, y| (y, x)),
        6 => gather(&image, (height, width), |x, y| (y, bottom - x)),
        7 => gather(&image, (height, width), |x, y| (right - y, bottom - x)),
        8 => gather(&image, (height, width), |x, y| (right - y, x)),
        _ => image,
    }
}

/// An image whose pixels come from the places that `source` names.
fn gather(
    image: &RgbImage,
    (width, height): (usize, usize),
    source: impl Fn(usize, usize) -> (usize, usize),
) -> RgbImage {
    let (pixels, _) = image.data().as_chunks::<3>();
    let mut data = Vec::with_capacity(pixels.len());
    for y in 0..height {
        data.extend((0..width).map(|x| {
            let (x, y) = source(x, y);
            pixels[y * image.width() + x]
        }));
    }
    RgbImage::from_raw(width, height, data.into_flattened())
}
