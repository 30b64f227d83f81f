//! Pixels in the order in which an encoder reads them.

use std::ops::Range;

use pulp::{Arch, NullaryFnOnce};

use crate::image::RgbImage;
use crate::processor::{Normalize, PatchLayout};

/// The patches of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Rows of patches.
    pub height: usize,
    /// Patches in a row.
    pub width: usize,
}

/// An image as patches of 8-bit values.
///
/// The values stay bytes, and a repeated frame is stored once, so that the cache and the way to a device need an eighth
/// of the memory of the normalised f32 values. [`Patches::normalized`] has those.
///
/// Patches are ordered by row of cells, column of cells, row in the cell, column in the cell. Within a patch, values are
/// ordered by channel, row, column.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    grid: Grid,
    layout: PatchLayout,
    normalize: Normalize,
    data: Box<[u8]>,
}

impl Patches {
    /// The sides of the image are multiples of a cell.
    pub(crate) fn cut(image: &RgbImage, layout: PatchLayout, normalize: Normalize) -> Self {
        let PatchLayout { patch, merge, .. } = layout;
        let grid = Grid { height: image.height() / patch, width: image.width() / patch };
        let mut data = vec![0; grid.height * grid.width * 3 * patch * patch];
        // One row of patches of the image at a time, as three planes.
        let plane = image.width() * patch;
        let mut planes = vec![0; 3 * plane];
        let rows = image.data().chunks_exact(plane * 3);
        let bytes = 3 * patch * patch;
        for (row, pixels) in rows.enumerate() {
            Arch::new().dispatch(SplitChannels { pixels, planes: &mut planes });
            let cells = &mut data[row / merge * merge * grid.width * bytes..][..merge * grid.width * bytes];
            for column in 0..grid.width {
                let place = column / merge * merge * merge + row % merge * merge + column % merge;
                let to = cells[place * bytes..][..bytes].chunks_exact_mut(patch);
                let lines = planes.chunks_exact(image.width());
                for (to, line) in to.zip(lines) {
                    to.copy_from_slice(&line[column * patch..][..patch]);
                }
            }
        }
        Self { grid, layout, normalize, data: data.into() }
    }

    /// Rows and columns of patches.
    #[must_use]
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// How pixels are grouped.
    #[must_use]
    pub fn layout(&self) -> PatchLayout {
        self.layout
    }

    /// How bytes become floating-point numbers.
    #[must_use]
    pub fn normalize(&self) -> Normalize {
        self.normalize
    }

    /// Number of patches.
    #[must_use]
    pub fn len(&self) -> usize {
        self.grid.height * self.grid.width
    }

    /// Whether there is no patch. An image has at least one cell.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of cells, each of which an encoder merges into one token.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.len() / (self.layout.merge * self.layout.merge)
    }

    /// The bytes of all patches, `[patch, channel, row, column]`.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Writes rows of normalised values: `[patch, channel, frame, row, column]`, [`PatchLayout::values`] for a patch.
    ///
    /// # Panics
    /// `patches` exceeds the number of patches, or `out` does not have the size of the result.
    pub fn normalized(&self, patches: Range<usize>, out: &mut [f32]) {
        let PatchLayout { patch, frames, .. } = self.layout;
        let square = patch * patch;
        assert_eq!(out.len(), patches.len() * self.layout.values(), "room for the patches");
        let table = self.normalize.table();
        let from = self.data[patches.start * 3 * square..patches.end * 3 * square].chunks_exact(square);
        for ((from, to), table) in from.zip(out.chunks_exact_mut(frames * square)).zip(table.iter().cycle()) {
            let (first, repeated) = to.split_at_mut(square);
            for (to, from) in first.iter_mut().zip(from) {
                *to = table[usize::from(*from)];
            }
            repeated.chunks_exact_mut(square).for_each(|frame| frame.copy_from_slice(first));
        }
    }
}

/// Splits interleaved pixels into three planes. A type, because the call of a closure would not be inlined into the code
/// for an instruction set.
struct SplitChannels<'a> {
    pixels: &'a [u8],
    planes: &'a mut [u8],
}

impl NullaryFnOnce for SplitChannels<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let (red, rest) = self.planes.split_at_mut(self.pixels.len() / 3);
        let (green, blue) = rest.split_at_mut(self.pixels.len() / 3);
        for (((pixel, red), green), blue) in self.pixels.chunks_exact(3).zip(red).zip(green).zip(blue) {
            *red = pixel[0];
            *green = pixel[1];
            *blue = pixel[2];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The place of a pixel by the definition: every coordinate is computed on its own.
    #[test]
    fn patches_follow_cells_and_values_follow_channels() {
        let layout = PatchLayout { patch: 3, merge: 2, frames: 2 };
        let (width, height) = (18, 12);
        let data: Vec<u8> = (0..width * height * 3).map(|i| (i * 7 % 251) as u8).collect();
        let image = RgbImage::from_raw(width, height, data);
        let normalize = Normalize { rescale: 1.0 / 255.0, mean: [0.5, 0.25, 0.1], std: [0.5, 0.3, 0.2] };
        let patches = Patches::cut(&image, layout, normalize);
        assert_eq!((patches.grid(), patches.tokens()), (Grid { height: 4, width: 6 }, 6));
        let mut rows = vec![0.0; patches.len() * layout.values()];
        patches.normalized(0..patches.len(), &mut rows);
        let table = normalize.table();
        let mut index = 0;
        for (cell_row, cell_column) in (0..2).flat_map(|r| (0..3).map(move |c| (r, c))) {
            for (row, column) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                for (channel, _, y, x) in (0..3)
                    .flat_map(|c| (0..2).map(move |t| (c, t)))
                    .flat_map(|(c, t)| (0..3).flat_map(move |y| (0..3).map(move |x| (c, t, y, x))))
                {
                    let (y, x) = ((cell_row * 2 + row) * 3 + y, (cell_column * 2 + column) * 3 + x);
                    let byte = image.data()[(y * width + x) * 3 + channel];
                    assert_eq!(rows[index], table[channel][usize::from(byte)], "value {index}");
                    index += 1;
                }
            }
        }
        let mut some = vec![0.0; 5 * layout.values()];
        patches.normalized(7..12, &mut some);
        assert_eq!(some, rows[7 * layout.values()..12 * layout.values()]);
    }

    #[test]
    fn normalisation_with_one_half_is_exact() {
        let half = Normalize { rescale: 1.0 / 255.0, mean: [0.5; 3], std: [0.5; 3] };
        for x in 0..256 {
            assert_eq!(half.table()[0][x], (x as f32 - 127.5) / 127.5);
        }
    }
}
