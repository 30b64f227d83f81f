use std::collections::BTreeMap;

use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;

const LIMIT: u64 = 1 << 20;

/// The largest difference of a JPEG file's values to Pillow's (libjpeg-turbo), and the largest mean. All other formats
/// are equal, lossy WebP included.
const JPEG: (u8, f64) = (4, 0.51);

struct Case {
    name: String,
    file: Vec<u8>,
    width: usize,
    height: usize,
    rgb: Vec<u8>,
}

fn cases() -> Vec<Case> {
    let goldens = include_bytes!("../../testdata/decode.safetensors");
    let goldens = SafeTensors::deserialize(goldens).unwrap();
    let mut cases = BTreeMap::new();
    for name in goldens.names() {
        if let Some(case) = name.strip_suffix(".file") {
            let rgb = goldens.tensor(&format!("{case}.rgb")).unwrap();
            let (file, name) = (goldens.tensor(name).unwrap().data().to_vec(), case.to_owned());
            let [height, width, 3] = rgb.shape() else { panic!("{:?}", rgb.shape()) };
            let case = Case { name, file, width: *width, height: *height, rgb: rgb.data().to_vec() };
            cases.insert(case.name.clone(), case);
        }
    }
    assert!(cases.len() >= 40, "{}", cases.len());
    cases.into_values().collect()
}

fn decoded(file: &[u8]) -> Result<RgbImage, MediaError> {
    decode(file, &inspect(file, LIMIT)?, [255; 3])
}

#[test]
fn files_are_decoded_as_pillow_decodes_them() {
    for case in cases() {
        let image = decoded(&case.file).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        assert_eq!((image.width(), image.height()), (case.width, case.height), "{}", case.name);
        let differences: Vec<u8> = image.data().iter().zip(&case.rgb).map(|(a, b)| a.abs_diff(*b)).collect();
        let largest = differences.iter().copied().max().unwrap();
        let mean = differences.iter().copied().map(f64::from).sum::<f64>() / differences.len() as f64;
        let limit = if case.name.starts_with("lossy_jpeg") { JPEG } else { (0, 0.0) };
        assert!(largest <= limit.0 && mean <= limit.1, "{}: largest difference {largest}, mean {mean}", case.name);
    }
}

#[test]
fn grey_of_16_bits_keeps_its_high_byte() {
    let case = cases().into_iter().find(|case| case.name == "png_grey_alpha_16").unwrap();
    // The colour type without alpha reads the same bytes as two pixels, one of which is the alpha value.
    let mut file = case.file.clone();
    assert_eq!(file[25], 4);
    file[25] = 0;
    file[16..20].copy_from_slice(&(case.width as u32 * 2).to_be_bytes());
    let check = crc(&file[12..29]).to_be_bytes();
    file[29..33].copy_from_slice(&check);
    let image = decoded(&file).unwrap();
    let pixels = image.data().chunks_exact(6);
    for (pixel, blended) in pixels.zip(case.rgb.chunks_exact(3)) {
        assert_eq!(pixels::grey_over(&[pixel[0], pixel[3]], [255; 3]), blended);
    }
}

/// The checksum of a PNG chunk.
fn crc(bytes: &[u8]) -> u32 {
    let table = |byte: u32| (0..8).fold(byte, |crc, _| if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 });
    !bytes.iter().fold(!0, |crc, byte| table((crc ^ u32::from(*byte)) & 0xff) ^ (crc >> 8))
}

/// A PNG header that claims a size.
fn claim(width: u32, height: u32) -> Vec<u8> {
    let mut file = cases().into_iter().find(|case| case.name == "png_rgb").unwrap().file;
    file[16..20].copy_from_slice(&width.to_be_bytes());
    file[20..24].copy_from_slice(&height.to_be_bytes());
    let check = crc(&file[12..29]).to_be_bytes();
    file[29..33].copy_from_slice(&check);
    file
}

#[test]
fn the_number_of_pixels_is_bounded_by_the_header() {
    let error = inspect(&claim(20_000, 30_000), 178_956_970).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Image dimensions 20000x30000 (600000000 pixels) exceed the maximum of 178956970 pixels. \
         Set VLLM_MAX_IMAGE_PIXELS to increase this limit."
    );
    assert_eq!(error.status(), 400);
    assert!(inspect(&claim(20_000, 30_000), 0).is_ok(), "no limit");
    assert!(matches!(inspect(&claim(0, 5), 0), Err(MediaError::Image(_))));
    assert!(matches!(decoded(&claim(1000, 1000)), Err(MediaError::Image(_))), "fewer rows than the header claims");
}

#[test]
fn a_limit_that_is_lifted_leaves_that_of_the_decoders() {
    assert!(inspect(&claim(1 << 15, (1 << 15) - 1), 0).is_ok());
    for (width, height) in [(1 << 15, 1 << 15), (1 << 17, 1 << 17), (u32::MAX, u32::MAX)] {
        for max_pixels in [0, u64::MAX] {
            let error = inspect(&claim(width, height), max_pixels).unwrap_err();
            let reason = "pixels cannot be decoded: the maximum is 1073741823";
            assert_eq!(error.to_string(), format!("Failed to load image: an image of {width}x{height} {reason}"));
        }
    }
}

#[test]
fn other_files_are_not_identified() {
    for file in [b"".as_slice(), b"<html></html>", b"BM\0\0\0\0", b"%PDF-1.7", b"RIFF\0\0\0\0WAVE", b"\x89PNG"] {
        let error = inspect(file, 0).unwrap_err();
        assert_eq!(error.to_string(), "Failed to load image: cannot identify image file");
    }
}

/// The number of bytes at the end of a file that may be missing: checksums and marks behind the last pixel.
fn trailer(name: &str) -> usize {
    match name {
        // The last chunk, and those behind the image.
        name if name.starts_with("png") => 80,
        // The end of the image, of the blocks and of the file; and all further frames.
        "gif_animated" => usize::MAX,
        name if name.starts_with("gif") => 8,
        // Padding, EXIF, and all further frames.
        "webp_animated" => usize::MAX,
        _ => 64,
    }
}

#[test]
fn a_file_that_ends_early_is_an_error_or_whole() {
    for case in cases() {
        let whole = decoded(&case.file).unwrap();
        for length in 0..case.file.len() {
            match decoded(&case.file[..length]) {
                Err(error) => assert!(matches!(error, MediaError::Image(_)), "{error}"),
                Ok(_) if case.name.contains("exif") => {}
                Ok(image) => {
                    let missing = case.file.len() - length;
                    assert!(image == whole && missing <= trailer(&case.name), "{}: {missing} bytes missing", case.name);
                }
            }
        }
    }
}

#[test]
fn an_unreadable_exif_block_is_ignored() {
    for block in [b"".as_slice(), b"Exif\0\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff", b"XX*\0\x08\0\0\0"]
    {
        assert_eq!(exif::orientation(block), None);
    }
    let block = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0";
    assert_eq!(exif::orientation(block), Some(6));
    let mut out_of_range = *block;
    out_of_range[19] = 9;
    assert_eq!(exif::orientation(&out_of_range), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_changed_file_is_an_image_or_an_error(
        case in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let cases = cases();
        let mut file = cases[case.index(cases.len())].file.clone();
        for (at, value) in changes {
            let at = at.index(file.len());
            file[at] = value;
        }
        if let Some(cut) = cut {
            let cut = cut.index(file.len());
            file.rotate_left(cut);
        }
        if let Ok(header) = inspect(&file, LIMIT) {
            prop_assert!(u64::from(header.width) * u64::from(header.height) <= LIMIT);
            if let Ok(image) = decode(&file, &header, [255; 3]) {
                prop_assert_eq!(image.data().len(), image.width() * image.height() * 3);
            }
        }
    }
}
