//! Antialiased resizing of 8-bit images in the integer arithmetic of torchvision, bit for bit.
//!
//! torchvision resizes horizontally, rounds to 8 bits, and then resizes vertically. A pass that does not change the size
//! is skipped. The weights are integers of 16 bits, with as many bits after the binary point as the largest one leaves.
//! The sums are integers too, so the order of additions and the width of vectors do not change the result.

mod passes;
mod weights;

use crate::RgbImage;
use weights::Weights;

/// The kernel that weights input pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Filter {
    /// A triangle of one pixel on each side.
    Bilinear,
    /// Keys' cubic with a = -0.5, two pixels on each side.
    Bicubic,
    /// Sinc windowed by sinc, three pixels on each side.
    Lanczos,
}

impl Filter {
    /// Reach on each side, in output pixels when an image shrinks and in input pixels when it grows.
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    fn at(self, x: f64) -> f64 {
        let x = x.abs();
        match self {
            Self::Bilinear => (1.0 - x).max(0.0),
            Self::Bicubic => {
                const A: f64 = -0.5;
                if x < 1.0 {
                    ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
                } else if x < 2.0 {
                    (((x - 5.0) * x + 8.0) * x - 4.0) * A
                } else {
                    0.0
                }
            }
            Self::Lanczos if x < 3.0 => sinc(x) * sinc(x / 3.0),
            Self::Lanczos => 0.0,
        }
    }
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 { 1.0 } else { (x * std::f64::consts::PI).sin() / (x * std::f64::consts::PI) }
}

/// Resizes an image.
///
/// `cancelled` is asked every few rows; once it returns true, the result is `None`. `width` and `height` are at least 1.
pub fn resize(
    image: RgbImage,
    (width, height): (usize, usize),
    filter: Filter,
    cancelled: &dyn Fn() -> bool,
) -> Option<RgbImage> {
    let mut image = image;
    if image.width() != width {
        let weights = Weights::new(image.width(), width, filter);
        image = passes::horizontal(&image, &weights, width, cancelled)?;
    }
    if image.height() != height {
        let weights = Weights::new(image.height(), height, filter);
        image = passes::vertical(&image, &weights, height, cancelled)?;
    }
    Some(image)
}

#[cfg(test)]
pub(crate) mod tests;
