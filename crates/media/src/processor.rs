//! What a model's image processor does to a decoded image.

use crate::error::{MediaError, SettingsError};
use crate::identity::Framed;
use crate::image::RgbImage;
use crate::patches::Patches;
use crate::resize::{Filter, resize};
use crate::views::{Plan, View, Views};

/// Longest side divided by the shortest side that [`SizeRule::Area`] accepts.
const MAX_ASPECT_RATIO: f64 = 200.0;
/// Longest side of an image that [`SizeRule::Square`] and [`SizeRule::Tiles`] accept.
const MAX_LONGEST: u32 = 4096;
/// Most rows and columns of tiles.
const MAX_TILES: u32 = 32;

/// The parameters of an image processor, as a model's configuration gives them.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageProcessor {
    /// Colour below transparent pixels.
    pub background: [u8; 3],
    /// The sizes of an image and its views.
    pub size: SizeRule,
    /// Kernel of the resize.
    pub filter: Filter,
    /// How 8-bit values become floating-point numbers.
    pub normalize: Normalize,
    /// How pixels are grouped.
    pub layout: PatchLayout,
}

/// The sizes of an image and its views.
///
/// The sides of a view are multiples of [`PatchLayout::cell`], or up to a patch longer: pixels beyond the last whole patch
/// are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeRule {
    /// The nearest multiples of a cell that keep the aspect ratio, with an area between two limits.
    Area {
        /// Smallest area in pixels.
        min: u64,
        /// Largest area in pixels.
        max: u64,
    },
    /// The same size for every image, whatever its aspect ratio.
    Fixed {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// The same square for every image, in two steps. The first keeps the aspect ratio.
    Square {
        /// Longest side after the first step, in pixels.
        longest: u32,
        /// Side after the second step, in pixels.
        side: u32,
    },
    /// Square tiles, row by row, and after them the whole image as another square. The image is resized in two steps: the
    /// first keeps the aspect ratio, and the second makes the sides multiples of a tile's. An image of a single tile is
    /// one view.
    Tiles {
        /// Longest side after the first step, in pixels.
        longest: u32,
        /// Side of a tile in pixels.
        side: u32,
    },
}

/// Rescaling and normalisation: `(x * rescale - mean) / std` for each channel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalize {
    /// Factor of the 8-bit values, usually 1/255.
    pub rescale: f64,
    /// Mean of the rescaled values of each channel.
    pub mean: [f32; 3],
    /// Standard deviation of the rescaled values of each channel.
    pub std: [f32; 3],
}

impl Normalize {
    /// The value of every byte in every channel, in f32: `(x - mean / rescale) / (std / rescale)`.
    pub(crate) fn table(&self) -> [[f32; 256]; 3] {
        self.of_bytes().map(|(mean, std)| std::array::from_fn(|x| (x as f32 - mean) / std))
    }

    /// Mean and standard deviation of the 8-bit values of each channel, in f32.
    #[must_use]
    pub fn of_bytes(&self) -> [(f32, f32); 3] {
        let unscale = (1.0 / self.rescale) as f32;
        std::array::from_fn(|channel| (self.mean[channel] * unscale, self.std[channel] * unscale))
    }
}

/// How the pixels of a resized image are grouped into patches, and the patches into cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchLayout {
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Side of a cell in patches. The patches of a cell follow one another; an encoder merges them into one token.
    pub merge: usize,
    /// How often a still image is repeated in a patch. Encoders of videos take several frames at once.
    pub frames: usize,
}

impl PatchLayout {
    /// Side of a cell in pixels.
    #[must_use]
    pub fn cell(&self) -> usize {
        self.patch * self.merge
    }

    /// Whether a side has a whole number of cells, and less than a patch beyond them.
    fn is_whole(&self, side: usize) -> bool {
        let patches = side / self.patch;
        patches > 0 && patches.is_multiple_of(self.merge)
    }

    /// Number of cells of a view.
    fn cells(&self, (width, height): (usize, usize)) -> usize {
        (width / self.cell()).saturating_mul(height / self.cell())
    }

    /// Number of values in a patch: channels, frames, rows and columns.
    #[must_use]
    pub fn values(&self) -> usize {
        3 * self.frames * self.patch * self.patch
    }
}

impl ImageProcessor {
    /// Checks that the parameters describe a processor that can run.
    ///
    /// # Errors
    /// A parameter is impossible; the error names it.
    pub fn validate(&self) -> Result<(), SettingsError> {
        let refuse = |field, reason: String| Err(SettingsError::Processor { field, reason });
        let PatchLayout { patch, merge, frames } = self.layout;
        for (field, value, max) in
            [("patch_size", patch, 1024), ("merge_size", merge, 64), ("temporal_patch_size", frames, 64)]
        {
            if !(1..=max).contains(&value) {
                return refuse(field, format!("is {value}, and it must be between 1 and {max}"));
            }
        }
        let cell = self.layout.cell() as u64;
        match self.size {
            SizeRule::Area { min, max } if min > max => {
                return refuse("size", format!("has a smallest area of {min}, which exceeds the largest of {max}"));
            }
            SizeRule::Area { max, .. } if max < cell * cell => {
                return refuse(
                    "size",
                    format!("has a largest area of {max}, which is less than one cell of {cell} pixels"),
                );
            }
            SizeRule::Fixed { width, height }
                if [width, height].iter().any(|s| *s == 0 || u64::from(*s) % cell != 0) =>
            {
                return refuse(
                    "size",
                    format!("is {width}x{height}, which is no multiple of the cell of {cell} pixels"),
                );
            }
            SizeRule::Square { longest, .. } | SizeRule::Tiles { longest, .. }
                if !(1..=MAX_LONGEST).contains(&longest) =>
            {
                return refuse(
                    "size",
                    format!("has a longest side of {longest}, and it must be between 1 and {MAX_LONGEST}"),
                );
            }
            SizeRule::Square { side, .. } | SizeRule::Tiles { side, .. }
                if side > MAX_LONGEST || !self.layout.is_whole(side as usize) =>
            {
                return refuse(
                    "max_image_size",
                    format!("is {side}, which is no multiple of the cell of {cell} pixels up to {MAX_LONGEST}"),
                );
            }
            SizeRule::Tiles { longest, side } if longest.div_ceil(side) > MAX_TILES => {
                return refuse(
                    "size",
                    format!("has a longest side of {longest}, which is more than {MAX_TILES} tiles of {side} pixels"),
                );
            }
            SizeRule::Area { .. } | SizeRule::Fixed { .. } | SizeRule::Square { .. } | SizeRule::Tiles { .. } => {}
        }
        let Normalize { rescale, mean, std } = self.normalize;
        if !(rescale.is_normal() && rescale > 0.0) {
            return refuse("rescale_factor", format!("is {rescale}, and it must be positive"));
        }
        if !mean.iter().all(|mean| mean.is_finite()) {
            return refuse("image_mean", format!("is {mean:?}, and it must be finite"));
        }
        if !std.iter().all(|std| std.is_normal() && *std > 0.0) {
            return refuse("image_std", format!("is {std:?}, and it must be positive"));
        }
        Ok(())
    }

    /// What is done to an image of a width and height.
    ///
    /// # Errors
    /// The aspect ratio exceeds 200.
    pub fn plan(&self, width: usize, height: usize) -> Result<Plan, MediaError> {
        match self.size {
            SizeRule::Fixed { width: to, height: high } => {
                Ok(Plan::single(vec![], View::whole((width, height), (to as usize, high as usize))))
            }
            SizeRule::Square { longest, side } => {
                let first = with_longest(width, height, longest as usize);
                Ok(Plan::single(vec![first], View::whole(first, (side as usize, side as usize))))
            }
            SizeRule::Tiles { longest, side } => {
                let first = with_longest(width, height, longest as usize);
                let area = up_to_tiles(first, side as usize);
                Ok(Plan::tiled(vec![first, area], area, side as usize))
            }
            SizeRule::Area { min, max } => {
                let ratio = width.max(height) as f64 / width.min(height) as f64;
                if ratio > MAX_ASPECT_RATIO {
                    return Err(MediaError::AspectRatio { ratio: format!("{ratio:?}") });
                }
                let cell = self.layout.cell() as f64;
                let size = within_area(width as f64, height as f64, cell, min as f64, max as f64);
                Ok(Plan::single(vec![], View::whole((width, height), size)))
            }
        }
    }

    /// The number of tokens of the largest view.
    #[must_use]
    pub fn largest_view(&self) -> usize {
        match self.size {
            SizeRule::Area { max, .. } => {
                let cell = self.layout.cell() as u64;
                usize::try_from(max / (cell * cell)).unwrap_or(usize::MAX)
            }
            SizeRule::Fixed { width, height } => self.layout.cells((width as usize, height as usize)),
            SizeRule::Square { side, .. } | SizeRule::Tiles { side, .. } => {
                self.layout.cells((side as usize, side as usize))
            }
        }
    }

    /// Makes images that keep their aspect ratio smaller than `pixels`, as far as they may be. Returns whether that changes
    /// anything.
    pub fn limit_area(&mut self, pixels: u64) -> bool {
        match &mut self.size {
            SizeRule::Area { min, max } if *max > pixels => {
                let before = std::mem::replace(max, pixels.max(*min));
                *max != before
            }
            _ => false,
        }
    }

    /// The number of tokens of the largest image, over all its views.
    #[must_use]
    pub fn largest_image(&self) -> usize {
        let views = match self.size {
            SizeRule::Tiles { longest, side } => {
                // The shorter side is even, and so it may exceed an odd longest side.
                let tiles = longest.next_multiple_of(2).div_ceil(side) as usize;
                if tiles > 1 { tiles * tiles + 1 } else { 1 }
            }
            SizeRule::Area { .. } | SizeRule::Fixed { .. } | SizeRule::Square { .. } => 1,
        };
        self.largest_view().saturating_mul(views)
    }

    /// Resizes an image and cuts it into views of patches. Once `cancelled` returns true, the result is `None`.
    ///
    /// # Errors
    /// The aspect ratio of the image is too large.
    pub fn process(&self, image: RgbImage, cancelled: &dyn Fn() -> bool) -> Result<Option<Views>, MediaError> {
        let plan = self.plan(image.width(), image.height())?;
        Ok(self.follow(&plan, image, cancelled))
    }

    /// Does to an image what is planned for its size. Once `cancelled` returns true, the result is `None`.
    fn follow(&self, plan: &Plan, mut image: RgbImage, cancelled: &dyn Fn() -> bool) -> Option<Views> {
        for &size in &plan.steps {
            image = resize(image, size, self.filter, cancelled)?;
        }
        let patches = |part: RgbImage, size: (usize, usize)| {
            let resized = resize(part, size, self.filter, cancelled).filter(|_| !cancelled())?;
            Some(Patches::cut(&resized, self.layout, self.normalize))
        };
        let (last, others) = plan.views.split_last()?;
        let mut views: Vec<_> =
            others.iter().map(|view| patches(view.copy(&image), view.size)).collect::<Option<_>>()?;
        views.push(patches(last.take(image), last.size)?);
        Some(Views::new(views, plan.tiles))
    }

    /// Adds everything that changes the result to a hash.
    pub(crate) fn describe(&self, hash: &mut Framed) {
        hash.add(&self.background);
        match self.size {
            SizeRule::Area { min, max } => {
                hash.add(&[b"area".as_slice(), &min.to_le_bytes(), &max.to_le_bytes()].concat())
            }
            SizeRule::Fixed { width, height } => {
                hash.add(&[b"fixed".as_slice(), &width.to_le_bytes(), &height.to_le_bytes()].concat());
            }
            SizeRule::Square { longest, side } => {
                hash.add(&[b"square".as_slice(), &longest.to_le_bytes(), &side.to_le_bytes()].concat());
            }
            SizeRule::Tiles { longest, side } => {
                hash.add(&[b"tiles".as_slice(), &longest.to_le_bytes(), &side.to_le_bytes()].concat());
            }
        }
        hash.add(&[self.filter as u8]);
        hash.add(&self.normalize.rescale.to_le_bytes());
        hash.add(&self.normalize.mean.map(f32::to_le_bytes).concat());
        hash.add(&self.normalize.std.map(f32::to_le_bytes).concat());
        let PatchLayout { patch, merge, frames } = self.layout;
        hash.add(&[patch, merge, frames].map(|n| (n as u64).to_le_bytes()).concat());
    }
}

/// Multiples of `cell` near `width` and `height` with an area between `min` and `max`, where one cell allows it.
fn within_area(width: f64, height: f64, cell: f64, min: f64, max: f64) -> (usize, usize) {
    let nearest = |side: f64| (side / cell).round_ties_even() * cell;
    let area = nearest(width) * nearest(height);
    let (width, height) = if area > max {
        let shrink = (width * height / max).sqrt();
        let side = |side: f64| (side / shrink / cell).floor() * cell;
        (side(width), side(height))
    } else if area < min {
        let stretch = (min / (width * height)).sqrt();
        let side = |side: f64| (side * stretch / cell).ceil() * cell;
        (side(width), side(height))
    } else {
        (nearest(width), nearest(height))
    };
    (width.max(cell) as usize, height.max(cell) as usize)
}

/// The size of an image whose longest side becomes `longest`. The other side is rounded down, and then up to an even
/// number.
fn with_longest(width: usize, height: usize, longest: usize) -> (usize, usize) {
    // The order of the operations decides about the rounding.
    let ratio = width as f64 / height as f64;
    let even = |side: f64| (side as usize).next_multiple_of(2).max(1);
    match width >= height {
        true => (longest, even(longest as f64 / ratio)),
        false => (even(longest as f64 * ratio), longest),
    }
}

/// The smallest multiples of `side` that an image of this size fits. The longer side decides, and the other one follows it
/// by the aspect ratio, rounded down, before it is rounded up to a multiple.
fn up_to_tiles((width, height): (usize, usize), side: usize) -> (usize, usize) {
    // The order of the operations decides about the rounding.
    let ratio = width as f64 / height as f64;
    let tiled = |length: usize| length.next_multiple_of(side).max(side);
    if width >= height {
        let width = tiled(width);
        (width, tiled((width as f64 / ratio) as usize))
    } else {
        let height = tiled(height);
        (tiled((height as f64 * ratio) as usize), height)
    }
}

#[cfg(test)]
pub(crate) mod tests;
