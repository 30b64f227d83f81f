use super::*;

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
    let changes: [Change; 9] = [
        ("patch_size", |p| p.layout.patch = 0),
        ("merge_size", |p| p.layout.merge = 0),
        ("temporal_patch_size", |p| p.layout.frames = 0),
        ("size", |p| p.size = SizeRule::Area { min: 10_000, max: 5000 }),
        ("size", |p| p.size = SizeRule::Area { min: 0, max: 1023 }),
        ("size", |p| p.size = SizeRule::Fixed { width: 48, height: 32 }),
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
