use sha2::{Digest, Sha256};

use super::*;
use crate::resize::tests::noise;
use crate::views::Tiles;

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

/// The size of the single view of an image.
fn resized(processor: &ImageProcessor, width: usize, height: usize) -> Result<(usize, usize), MediaError> {
    let plan = processor.plan(width, height)?;
    assert_eq!((plan.views.len(), plan.tiles), (1, Tiles::default()));
    Ok(plan.views[0].size)
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
        assert_eq!(resized(&processor(), width, height), Ok(expected), "{width}x{height}");
        assert_eq!(resized(&processor(), height, width), Ok((expected.1, expected.0)), "{height}x{width}");
    }
}

#[test]
fn an_aspect_ratio_above_200_is_refused() {
    assert!(resized(&processor(), 2000, 10).is_ok());
    let error = resized(&processor(), 10, 2005).unwrap_err();
    assert_eq!(error.to_string(), "absolute aspect ratio must be smaller than 200, got 200.5");
    assert_eq!(error.status(), 400);
    let fixed = ImageProcessor { size: SizeRule::Fixed { width: 64, height: 32 }, ..processor() };
    assert_eq!(resized(&fixed, 10, 2005), Ok((64, 32)));
}

#[test]
fn impossible_parameters_are_named() {
    type Change = (&'static str, fn(&mut ImageProcessor));
    let changes: [Change; 16] = [
        ("patch_size", |p| p.layout.patch = 0),
        ("merge_size", |p| p.layout.merge = 0),
        ("temporal_patch_size", |p| p.layout.frames = 0),
        ("size", |p| p.size = SizeRule::Area { min: 10_000, max: 5000 }),
        ("size", |p| p.size = SizeRule::Area { min: 0, max: 1023 }),
        ("size", |p| p.size = SizeRule::Fixed { width: 48, height: 32 }),
        ("size", |p| p.size = SizeRule::Square { longest: 5000, side: 64 }),
        ("size", |p| p.size = SizeRule::Square { longest: 0, side: 64 }),
        ("max_image_size", |p| p.size = SizeRule::Square { longest: 128, side: 48 }),
        ("max_image_size", |p| p.size = SizeRule::Square { longest: 128, side: 0 }),
        ("size", |p| p.size = SizeRule::Tiles { longest: 5000, side: 64 }),
        ("max_image_size", |p| p.size = SizeRule::Tiles { longest: 128, side: 63 }),
        ("size", |p| p.size = SizeRule::Tiles { longest: 1025, side: 32 }),
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
    let views = processor().process(image.clone(), &|| false).unwrap().unwrap();
    let [patches] = views.patches() else { panic!("a single view") };
    assert_eq!((patches.grid().width, patches.grid().height, patches.tokens()), (20, 14, 70));
    assert_eq!(*patches, expected);
    assert_eq!(processor().process(image, &|| true), Ok(None), "cancelled work has no result");
}

/// A processor for goldens: patches of 4 by 4 pixels in cells of 3 by 3.
fn of_goldens(size: SizeRule) -> ImageProcessor {
    let layout = PatchLayout { patch: 4, merge: 3, frames: 1 };
    let processor = ImageProcessor { size, filter: Filter::Lanczos, layout, ..processor() };
    assert_eq!(processor.validate(), Ok(()));
    processor
}

/// The numbers and the digest of each line of goldens.
fn goldens(lines: &str) -> impl Iterator<Item = (Vec<u32>, &str)> {
    lines.lines().map(|line| {
        let (numbers, digest) = line.rsplit_once(' ').unwrap();
        (numbers.split(' ').map(|number| number.parse().unwrap()).collect(), digest)
    })
}

fn digest(views: &Views) -> String {
    let mut hash = Sha256::new();
    views.patches().iter().for_each(|patches| hash.update(patches.data()));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn squares_in_two_steps_are_those_of_the_reference_byte_for_byte() {
    let mut cases = 0;
    for (numbers, expected) in goldens(include_str!("../../testdata/square.txt")) {
        let &[width, height, longest, side] = &numbers[..] else { panic!("{numbers:?}") };
        let processor = of_goldens(SizeRule::Square { longest, side });
        let views = processor.process(noise(width as usize, height as usize), &|| false).unwrap().unwrap();
        let [patches] = views.patches() else { panic!("a single view") };
        assert_eq!((patches.grid().height, patches.grid().width), (side as usize / 4, side as usize / 4));
        assert_eq!(digest(&views), expected, "{numbers:?}");
        cases += 1;
    }
    assert!(cases >= 20, "{cases}");
}

#[test]
fn tiles_are_those_of_the_reference_byte_for_byte() {
    let (mut tiled, mut whole) = (0, 0);
    for (numbers, expected) in goldens(include_str!("../../testdata/tiles.txt")) {
        let &[width, height, longest, side, rows, columns] = &numbers[..] else { panic!("{numbers:?}") };
        let processor = of_goldens(SizeRule::Tiles { longest, side });
        let plan = processor.plan(width as usize, height as usize).unwrap();
        let views = processor.process(noise(width as usize, height as usize), &|| false).unwrap().unwrap();
        assert_eq!(views.tiles(), Tiles { rows: rows as usize, columns: columns as usize }, "{numbers:?}");
        assert_eq!(views.patches().len(), (rows * columns + 1) as usize, "{numbers:?}");
        assert_eq!(digest(&views), expected, "{numbers:?}");
        assert_eq!(plan.patch_bytes(processor.layout), views.bytes(), "{numbers:?}");
        assert!(views.tokens() <= processor.largest_image(), "{numbers:?}");
        *(if rows > 0 { &mut tiled } else { &mut whole }) += 1;
    }
    assert!(tiled >= 20 && whole >= 2, "{tiled} and {whole}");
}

#[test]
fn the_largest_image_is_a_square() {
    for (longest, side) in [(96, 24), (25, 24), (23, 24), (24, 24), (100, 27)] {
        let processor = of_goldens(SizeRule::Tiles { longest, side });
        let tokens = |plan: Plan| plan.views.len() * processor.layout.cells((side as usize, side as usize));
        let sizes = (90..=110).flat_map(|width| (90..=110).map(move |height| (width, height)));
        let largest = sizes.map(|(width, height)| tokens(processor.plan(width, height).unwrap())).max();
        assert_eq!(largest, Some(processor.largest_image()), "{longest} {side}");
        assert_eq!(processor.largest_view(), 4, "{longest} {side}");
    }
    assert_eq!(processor().largest_image(), 128 * 128);
    let fixed = ImageProcessor { size: SizeRule::Fixed { width: 64, height: 32 }, ..processor() };
    assert_eq!(fixed.largest_image(), 2);
    assert_eq!(of_goldens(SizeRule::Square { longest: 96, side: 26 }).largest_image(), 4);
}

#[test]
fn the_memory_of_a_plan_is_that_of_its_steps_and_views() {
    let processor = of_goldens(SizeRule::Tiles { longest: 48, side: 26 });
    let plan = processor.plan(100, 20).unwrap();
    assert_eq!((plan.steps.as_slice(), plan.tiles), ([(48, 10), (52, 26)].as_slice(), Tiles { rows: 1, columns: 2 }));
    assert_eq!(plan.patch_bytes(processor.layout), 3 * 3 * 24 * 24);
    let steps = 48 * 20 + 48 * 10 + 52 * 10 + 52 * 26;
    let whole = 52 * 26 + 26 * 26 + 26 * 26;
    assert_eq!(plan.working_bytes((100, 20), processor.layout), 3 * (steps + whole + 3 * 24 * 24));
}

#[test]
fn the_longest_side_is_set_and_the_other_is_even() {
    assert_eq!(with_longest(100, 50, 200), (200, 100));
    assert_eq!(with_longest(50, 100, 33), (16, 33));
    assert_eq!(with_longest(100, 99, 33), (33, 32));
    assert_eq!(with_longest(300, 200, 35), (35, 24));
    assert_eq!(with_longest(1000, 1, 100), (100, 1));
}
