use sha2::{Digest, Sha256};

use super::*;
use crate::resize::tests::noise;

/// Cells of 32 pixels and areas between 256² and 4096².
pub(crate) fn processor() -> ImageProcessor {
    ImageProcessor {
        background: [255; 3],
        size: SizeRule::Area { min: 65536, max: 16_777_216 },
        filter: Filter::Bicubic,
        normalize: Normalize { rescale: 1.0 / 255.0, mean: [0.5; 3], std: [0.5; 3] },
        layout: PatchLayout { patch: 16, merge: 2, frames: 2 },
    }
}

#[test]
fn sizes_are_those_of_the_reference() {
    let cases = [
        ((80, 80), (256, 256)),
        ((1920, 1080), (1920, 1088)),
        ((1000, 10), (2560, 32)),
        ((5000, 5000), (4096, 4096)),
        ((33, 31), (288, 256)),
        // The shorter side rounds to nothing, which makes the area too small whatever the longer side is.
        ((2400, 12), (3648, 32)),
        // Half a cell rounds to the even number of cells.
        ((592, 560), (576, 576)),
    ];
    for ((width, height), expected) in cases {
        assert_eq!(processor().resized(width, height), Ok(expected), "{width}x{height}");
        assert_eq!(processor().resized(height, width), Ok((expected.1, expected.0)), "{height}x{width}");
    }
}

#[test]
fn an_aspect_ratio_above_200_is_refused() {
    assert!(processor().resized(2000, 10).is_ok());
    let error = processor().resized(10, 2005).unwrap_err();
    assert_eq!(error.to_string(), "absolute aspect ratio must be smaller than 200, got 200.5");
    assert_eq!(error.status(), 400);
    let fixed = ImageProcessor { size: SizeRule::Fixed { width: 64, height: 32 }, ..processor() };
    assert_eq!(fixed.resized(10, 2005), Ok((64, 32)));
}

#[test]
fn impossible_parameters_are_named() {
    type Change = (&'static str, fn(&mut ImageProcessor));
    let changes: [Change; 12] = [
        ("patch_size", |p| p.layout.patch = 0),
        ("merge_size", |p| p.layout.merge = 0),
        ("temporal_patch_size", |p| p.layout.frames = 0),
        ("size", |p| p.size = SizeRule::Area { min: 10_000, max: 5000 }),
        ("size", |p| p.size = SizeRule::Area { min: 0, max: 1023 }),
        ("size", |p| p.size = SizeRule::Fixed { width: 48, height: 32 }),
        ("size", |p| p.size = SizeRule::Square { longest: 5000, side: 64 }),
        ("size", |p| p.size = SizeRule::Square { longest: 0, side: 64 }),
        ("max_image_size", |p| p.size = SizeRule::Square { longest: 128, side: 48 }),
        ("rescale_factor", |p| p.normalize.rescale = 0.0),
        ("image_mean", |p| p.normalize.mean[1] = f32::NAN),
        ("image_std", |p| p.normalize.std[2] = 0.0),
    ];
    assert_eq!(processor().validate(), Ok(()));
    for (field, change) in changes {
        let mut changed = processor();
        change(&mut changed);
        let error = changed.validate().unwrap_err();
        assert!(error.to_string().starts_with(field), "{error}");
    }
}

#[test]
fn an_image_becomes_the_patches_of_its_resized_pixels() {
    let image = RgbImage::from_raw(50, 37, (0..50 * 37 * 3).map(|i| (i % 253) as u8).collect());
    let resized = resize(image.clone(), (320, 224), processor().filter, &|| false).unwrap();
    let expected = Patches::cut(&resized, processor().layout, processor().normalize);
    let patches = processor().process(image.clone(), &|| false).unwrap().unwrap();
    assert_eq!((patches.grid().width, patches.grid().height, patches.tokens()), (20, 14, 70));
    assert_eq!(patches, expected);
    assert_eq!(processor().process(image, &|| true), Ok(None), "cancelled work has no result");
}

#[test]
fn squares_in_two_steps_are_those_of_the_reference_byte_for_byte() {
    let mut cases = 0;
    for golden in include_str!("../../testdata/square.txt").lines() {
        let (digest, sizes) = golden.rsplit_once(' ').map(|(sizes, digest)| (digest, sizes)).unwrap();
        let sizes: Vec<u32> = sizes.split(' ').map(|size| size.parse().unwrap()).collect();
        let &[width, height, longest, side] = &sizes[..] else { panic!("{golden}") };
        let processor = ImageProcessor {
            size: SizeRule::Square { longest, side },
            filter: Filter::Lanczos,
            layout: PatchLayout { patch: 4, merge: 3, frames: 1 },
            ..processor()
        };
        assert_eq!(processor.validate(), Ok(()));
        let image = noise(width as usize, height as usize);
        let patches = processor.process(image, &|| false).unwrap().unwrap();
        assert_eq!((patches.grid().height, patches.grid().width), (side as usize / 4, side as usize / 4));
        let found: String = Sha256::digest(patches.data()).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, digest, "{golden}");
        cases += 1;
    }
    assert!(cases >= 20, "{cases}");
}

#[test]
fn the_longest_side_is_set_and_the_other_is_even() {
    assert_eq!(with_longest(100, 50, 200), (200, 100));
    assert_eq!(with_longest(50, 100, 33), (16, 33));
    assert_eq!(with_longest(100, 99, 33), (33, 32));
    assert_eq!(with_longest(300, 200, 35), (35, 24));
    assert_eq!(with_longest(1000, 1, 100), (100, 1));
}
