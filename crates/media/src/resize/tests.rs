use proptest::prelude::*;
use sha2::{Digest, Sha256};

use super::*;

/// The noise of `testdata/generate.py`.
pub(crate) fn noise(width: usize, height: usize) -> RgbImage {
    let mut state = 1_u32;
    let data = (0..width * height * 3).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    RgbImage::from_raw(width, height, data.collect())
}

/// One line of pixels resized by the definition: exact weights, divided by their sum, rounded to integers.
fn line(pixels: &[u8], output: usize, filter: Filter, precision: u32) -> Vec<u8> {
    let weights = exact(pixels.len(), output, filter);
    let value = |(low, weights): &(usize, Vec<f64>)| {
        let unit = f64::from(1 << precision);
        let integer = |weight: f64| (weight.abs() * unit + 0.5).floor() as i64 * if weight < 0.0 { -1 } else { 1 };
        let sum: i64 = weights.iter().zip(&pixels[*low..]).map(|(weight, x)| integer(*weight) * i64::from(*x)).sum();
        let half = if precision == 0 { 0 } else { 1 << (precision - 1) };
        ((sum + half) >> precision).clamp(0, 255) as u8
    };
    weights.iter().map(value).collect()
}

fn exact(input: usize, output: usize, filter: Filter) -> Vec<(usize, Vec<f64>)> {
    let scale = input as f64 / output as f64;
    let stretch = scale.max(1.0);
    let weights = |i| {
        let centre = (f64::from(i) + 0.5) * scale;
        let reach = filter.support() * stretch;
        let low = (centre - reach + 0.5).max(0.0) as usize;
        let high = ((centre + reach + 0.5) as usize).min(input);
        let weights: Vec<_> = (low..high).map(|x| filter.at((x as f64 - centre + 0.5) * (1.0 / stretch))).collect();
        let sum: f64 = weights.iter().sum();
        (low, weights.iter().map(|weight| weight / sum).collect())
    };
    (0..output as u32).map(weights).collect()
}

fn precision(input: usize, output: usize, filter: Filter) -> u32 {
    let weights = exact(input, output, filter);
    let largest = weights.iter().flat_map(|(_, weights)| weights).copied().fold(0.0, f64::max);
    (0..22).find(|p| (0.5 + largest * f64::from(1 << (p + 1))) as i64 >= 1 << 15).unwrap_or(22)
}

/// Resizes pixel by pixel.
fn reference(image: &RgbImage, (width, height): (usize, usize), filter: Filter) -> RgbImage {
    let mut image = image.clone();
    for horizontal in [true, false] {
        let (from, to) = if horizontal { (image.width(), width) } else { (image.height(), height) };
        if from == to {
            continue;
        }
        let bits = precision(from, to, filter);
        let (new_width, new_height) = if horizontal { (width, image.height()) } else { (image.width(), height) };
        let mut data = vec![0; new_width * new_height * 3];
        for (other, channel) in
            (0..if horizontal { new_height } else { new_width }).flat_map(|o| (0..3).map(move |c| (o, c)))
        {
            let at = |along: usize, width: usize| {
                let (x, y) = if horizontal { (along, other) } else { (other, along) };
                (y * width + x) * 3 + channel
            };
            let pixels: Vec<_> = (0..from).map(|along| image.data()[at(along, image.width())]).collect();
            for (along, value) in line(&pixels, to, filter, bits).into_iter().enumerate() {
                data[at(along, new_width)] = value;
            }
        }
        image = RgbImage::from_raw(new_width, new_height, data);
    }
    image
}

const FILTERS: [Filter; 3] = [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos];

#[test]
fn noise_is_resized_byte_for_byte_as_torchvision_does() {
    let mut cases = 0;
    for golden in include_str!("../../testdata/resize.txt").lines() {
        let words: Vec<_> = golden.split(' ').collect();
        let filter = ["bilinear", "bicubic", "lanczos"].iter().position(|name| *name == words[0]).unwrap();
        let sizes: Vec<usize> = words[1..5].iter().map(|size| size.parse().unwrap()).collect();
        let image = noise(sizes[0], sizes[1]);
        let size = (sizes[2], sizes[3]);
        let resized = resize(image, size, FILTERS[filter], &|| false).unwrap();
        let digest: String = Sha256::digest(resized.data()).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, words[5], "{golden}");
        cases += 1;
    }
    assert!(cases >= 60, "{cases}");
}

#[test]
fn cancelled_work_has_no_result() {
    let asked = std::cell::Cell::new(0);
    let cancelled = || {
        asked.set(asked.get() + 1);
        asked.get() > 2
    };
    assert_eq!(resize(noise(40, 200), (50, 100), Filter::Bicubic, &cancelled), None);
    assert_eq!(asked.get(), 3);
}

proptest! {
    #[test]
    fn every_size_and_filter_equals_the_definition(
        from in (1_usize..90, 1_usize..40),
        to in (1_usize..90, 1_usize..40),
        filter in 0..3_usize,
        seed: u8,
    ) {
        let image = noise(from.0, from.1);
        // Extremes show where a sum is clamped.
        let extreme = |x: &u8| if *x < seed { 0 } else if *x > seed.saturating_add(40) { 255 } else { *x };
        let image = RgbImage::from_raw(from.0, from.1, image.data().iter().map(extreme).collect());
        let filter = FILTERS[filter];
        let resized = resize(image.clone(), to, filter, &|| false).unwrap();
        prop_assert!(resized == reference(&image, to, filter), "{from:?} to {to:?} {filter:?}");
    }

    #[test]
    fn an_even_image_stays_even(value: u8, from in (1_usize..300, 1_usize..20), to in (1_usize..300, 1_usize..20)) {
        let image = RgbImage::from_raw(from.0, from.1, vec![value; from.0 * from.1 * 3]);
        let resized = resize(image, to, Filter::Bilinear, &|| false).unwrap();
        // Weights are rounded one by one, so that their sum may miss one by a little.
        prop_assert!(resized.data().iter().all(|x| x.abs_diff(value) <= 1));
    }
}
