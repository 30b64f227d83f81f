//! The parts of an image that an encoder reads one by one.

use crate::image::RgbImage;
use crate::patches::Patches;
use crate::processor::PatchLayout;

/// The tiles that an image is cut into. Both numbers are 0 if it is not cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tiles {
    /// Rows of tiles.
    pub rows: usize,
    /// Tiles in a row.
    pub columns: usize,
}

/// A processed image: the patches of its views, in the order in which a prompt has them.
///
/// A view is a picture of its own to the encoder, which attends within it only. An image that is not cut is one view. An
/// image that is cut has a view for each tile, row by row, and one more of the whole image.
#[derive(Clone, Debug, PartialEq)]
pub struct Views {
    patches: Box<[Patches]>,
    tiles: Tiles,
}

impl Views {
    pub(crate) fn new(patches: Vec<Patches>, tiles: Tiles) -> Self {
        Self { patches: patches.into(), tiles }
    }

    /// The patches of each view.
    #[must_use]
    pub fn patches(&self) -> &[Patches] {
        &self.patches
    }

    /// The tiles among the views.
    #[must_use]
    pub fn tiles(&self) -> Tiles {
        self.tiles
    }

    /// Number of tokens that an encoder makes of all views.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.patches.iter().map(Patches::tokens).sum()
    }

    /// Size of the patches in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.patches.iter().map(|view| view.data().len() as u64).sum()
    }
}

/// What is done to an image of a certain size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Widths and heights that the image is resized to, one after another, before it is cut.
    pub steps: Vec<(usize, usize)>,
    /// What is cut out of the result, at least one view.
    pub views: Vec<View>,
    /// The tiles among the views.
    pub tiles: Tiles,
}

/// A rectangle of an image, and the size that it is resized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Column of the first pixel.
    pub left: usize,
    /// Row of the first pixel.
    pub top: usize,
    /// Width and height of the rectangle.
    pub area: (usize, usize),
    /// Width and height of the view.
    pub size: (usize, usize),
}

impl View {
    /// The view of a whole image.
    pub(crate) fn whole(area: (usize, usize), size: (usize, usize)) -> Self {
        Self { left: 0, top: 0, area, size }
    }

    /// The pixels of the rectangle, without a copy if it is all of the image.
    pub(crate) fn take(&self, image: RgbImage) -> RgbImage {
        if (image.width(), image.height()) == self.area { image } else { self.copy(&image) }
    }

    /// A copy of the pixels of the rectangle.
    pub(crate) fn copy(&self, image: &RgbImage) -> RgbImage {
        image.cropped(self.left, self.top, self.area)
    }
}

impl Plan {
    /// The plan of an image of a single view.
    pub(crate) fn single(steps: Vec<(usize, usize)>, view: View) -> Self {
        Self { steps, views: vec![view], tiles: Tiles::default() }
    }

    /// The plan of an image that becomes an image of `area` in steps, and is then cut into squares. If there are several,
    /// the whole image follows them as a square of the same side.
    pub(crate) fn tiled(steps: Vec<(usize, usize)>, area: (usize, usize), side: usize) -> Self {
        let whole = View::whole(area, (side, side));
        let (columns, rows) = (area.0 / side, area.1 / side);
        if columns * rows == 1 {
            return Self::single(steps, whole);
        }
        let tile = |row: usize, column: usize| View {
            left: column * side,
            top: row * side,
            area: (side, side),
            size: (side, side),
        };
        let mut views: Vec<_> = (0..rows).flat_map(|row| (0..columns).map(move |column| tile(row, column))).collect();
        views.push(whole);
        Self { steps, views, tiles: Tiles { rows, columns } }
    }

    /// Size of the patches of all views in bytes.
    pub(crate) fn patch_bytes(&self, layout: PatchLayout) -> u64 {
        let covered = |side: usize| (side / layout.patch * layout.patch) as u64;
        self.views.iter().map(|view| 3 * covered(view.size.0) * covered(view.size.1)).sum()
    }

    /// Memory in bytes that an image of a width and height takes beside its own pixels, until only patches are left.
    pub(crate) fn working_bytes(&self, decoded: (usize, usize), layout: PatchLayout) -> u64 {
        let mut from = decoded;
        let steps = self.steps.iter().map(|&to| resizing_bytes(std::mem::replace(&mut from, to), to)).sum::<u64>();
        let view = |view: &View| image_bytes(view.area) + resizing_bytes(view.area, view.size);
        steps + self.views.iter().map(view).max().unwrap_or(0) + self.patch_bytes(layout)
    }
}

fn image_bytes((width, height): (usize, usize)) -> u64 {
    3 * width as u64 * height as u64
}

/// Memory of an image between the passes of a resize, when it has the new width and the old height, and after them.
fn resizing_bytes(from: (usize, usize), to: (usize, usize)) -> u64 {
    image_bytes((to.0, from.1)) + image_bytes(to)
}
