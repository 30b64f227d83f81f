//! Images as a model sees them: the order, the positions and the weights of their patches, and the positions of their
//! tokens in a prompt.

use octavo_ops::{EncodeBatch, TAPS, Tap};

use crate::config::{PositionTable, VisionConfig};

/// Number of rows and columns of patches of an image, each a multiple of the merge size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageGrid {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
}

/// An image to encode.
#[derive(Clone, Copy, Debug)]
pub struct EncodedImage<'a> {
    /// Grid of its patches.
    pub grid: ImageGrid,
    /// Patches, in blocks of merged patches: block row, block column, row in the block, column in the block. Each has the
    /// channels of all frames, or of one that all are equal to, as in a still image.
    pub patches: &'a [u8],
    /// Row of the media cache for each merged row.
    pub store_rows: &'a [u32],
}

impl VisionConfig {
    /// Returns the number of tokens of an image; `None` if its grid is not one of whole blocks, or not that of the table
    /// of positions if every image must have it.
    pub fn image_tokens(&self, grid: ImageGrid) -> Option<usize> {
        let merge = self.merge_size;
        let is_whole = grid.rows.is_multiple_of(merge) && grid.cols.is_multiple_of(merge);
        let is_square = |grid: ImageGrid| grid.rows == self.table_side && grid.cols == self.table_side;
        let has_positions = self.table == PositionTable::Stretched || is_square(grid);
        let tokens = (grid.rows / merge).checked_mul(grid.cols / merge)?;
        (is_whole && has_positions && tokens > 0).then_some(tokens)
    }

    /// Writes images into a batch, except for the channels' normalisation.
    ///
    /// # Errors
    /// Describes the image whose arrays do not have the sizes of its grid.
    pub fn fill(&self, images: &[EncodedImage<'_>], batch: &mut EncodeBatch) -> Result<(), String> {
        batch.clear();
        for (index, image) in images.iter().enumerate() {
            let ImageGrid { rows, cols } = image.grid;
            let tokens = self.image_tokens(image.grid);
            let tokens = tokens.ok_or_else(|| format!("image {index} has a grid of {rows} rows and {cols} columns"))?;
            let bytes = |elements: usize| tokens.checked_mul(self.merged_patches() * elements);
            let is_still = bytes(self.frame_elements()) == Some(image.patches.len());
            let is_whole = is_still || bytes(self.patch_elements()) == Some(image.patches.len());
            if !is_whole || tokens != image.store_rows.len() {
                let (bytes, stored) = (image.patches.len(), image.store_rows.len());
                return Err(format!("image {index} of {tokens} tokens has {bytes} bytes and {stored} rows to store"));
            }
            batch.push_segment(rows * cols);
            if is_still {
                for channel in image.patches.chunks_exact(self.patch_size * self.patch_size) {
                    (0..self.temporal_patch_size).for_each(|_| batch.patches.extend_from_slice(channel));
                }
            } else {
                batch.patches.extend_from_slice(image.patches);
            }
            batch.store_rows.extend_from_slice(image.store_rows);
            batch.taps.extend(self.places(image.grid).map(|place| self.taps(image.grid, place)));
        }
        // Without rotary positions, one stream is there, which nothing reads.
        for axis in 0..if self.theta.is_some() { 2 } else { 1 } {
            let positions = images.iter().flat_map(|image| self.places(image.grid)).map(|place| place[axis] as u32);
            batch.rows.positions.extend(positions);
        }
        Ok(())
    }

    /// Returns row and column of each patch, in the order of the patches.
    fn places(&self, grid: ImageGrid) -> impl Iterator<Item = [usize; 2]> + use<> {
        let merge = self.merge_size;
        let blocks = (0..grid.rows / merge).flat_map(move |row| (0..grid.cols / merge).map(move |col| [row, col]));
        blocks.flat_map(move |block| {
            let within = (0..merge * merge).map(move |i| [i / merge, i % merge]);
            within.map(move |within| [0, 1].map(|axis| block[axis] * merge + within[axis]))
        })
    }

    /// Returns the corners of the cell of the table that contains a patch, if the table is stretched over the grid.
    fn taps(&self, grid: ImageGrid, place: [usize; 2]) -> [Tap; TAPS] {
        let last = self.table_side - 1;
        let axis = |at: usize, count: usize| {
            let exact = if count > 1 { at as f64 * last as f64 / (count - 1) as f64 } else { 0.0 };
            let low = (exact as usize).min(last);
            ([low, (low + 1).min(last)], [1.0 - (exact - low as f64), exact - low as f64])
        };
        let (rows, row_weights) = axis(place[0], grid.rows);
        let (cols, col_weights) = axis(place[1], grid.cols);
        std::array::from_fn(|corner| {
            let (r, c) = (corner / 2, corner % 2);
            Tap { row: (rows[r] * self.table_side + cols[c]) as u32, weight: (row_weights[r] * col_weights[c]) as f32 }
        })
    }
}

/// Tokens of an image in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageSpan {
    /// Index of the first token in the sequence.
    pub start: u32,
    /// Number of rows of merged patches.
    pub rows: u32,
    /// Number of columns of merged patches.
    pub cols: u32,
}

impl ImageSpan {
    /// Returns the index after the last token.
    pub const fn end(self) -> u32 {
        self.start + self.rows * self.cols
    }
}

/// Positions of a sequence's tokens by time, height and width.
///
/// The tokens of an image have the time of its first token, and count rows and columns from there; the text after it
/// continues behind the larger side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImagePositions {
    /// Images in order, each with the position of its first token.
    spans: Vec<(ImageSpan, u32)>,
}

impl ImagePositions {
    /// Computes the positions. The spans must be in order and must not overlap.
    pub fn new(spans: impl IntoIterator<Item = ImageSpan>) -> Self {
        let mut positions = Self::default();
        for span in spans {
            let first = positions.at(span.start)[0];
            positions.spans.push((span, first));
        }
        positions
    }

    /// Returns the last image that begins at or before an index, with its position.
    fn before(&self, index: u32) -> Option<(ImageSpan, u32)> {
        let after = self.spans.partition_point(|(span, _)| span.start <= index);
        self.spans.get(after.checked_sub(1)?).copied()
    }

    /// Returns the index after the last token that the token at an index sees if the tokens of an image see each other: the
    /// image's end, or the token's own place and one.
    pub fn seen_end(&self, index: u32) -> u32 {
        self.before(index).map_or(0, |(span, _)| span.end()).max(index + 1)
    }

    /// Returns the positions of the token at an index.
    pub fn at(&self, index: u32) -> [u32; 3] {
        let Some((span, first)) = self.before(index) else {
            return [index; 3];
        };
        if index < span.end() {
            let within = index - span.start;
            return [first, first + within / span.cols, first + within % span.cols];
        }
        [first + span.rows.max(span.cols) + (index - span.end()); 3]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_an_image_count_its_rows_and_columns() {
        let positions = ImagePositions::new([ImageSpan { start: 3, rows: 2, cols: 3 }]);
        let found: Vec<_> = (2..10).map(|index| positions.at(index)).collect();
        let image = [[3, 3, 3], [3, 3, 4], [3, 3, 5], [3, 4, 3], [3, 4, 4], [3, 4, 5]];
        assert_eq!(found[0], [2; 3]);
        assert_eq!(found[1..7], image);
        assert_eq!(found[7], [6; 3]);
    }

    #[test]
    fn an_image_may_follow_another() {
        let spans = [ImageSpan { start: 0, rows: 1, cols: 4 }, ImageSpan { start: 4, rows: 3, cols: 1 }];
        let positions = ImagePositions::new(spans);
        assert_eq!([3, 4, 6, 7].map(|index| positions.at(index)), [[0, 0, 3], [4, 4, 4], [4, 6, 4], [7; 3]]);
    }

    #[test]
    fn the_tokens_of_an_image_see_its_end() {
        let spans = [ImageSpan { start: 1, rows: 1, cols: 2 }, ImageSpan { start: 3, rows: 2, cols: 1 }];
        let positions = ImagePositions::new(spans);
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(|index| positions.seen_end(index)), [1, 3, 3, 5, 5, 6, 7]);
    }

    #[test]
    fn a_still_image_is_in_every_frame() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata/qwen3-vl");
        let vision = crate::Checkpoint::open(&folder).unwrap().config().vision.clone().unwrap();
        let grid = ImageGrid { rows: 2, cols: 2 };
        let fill = |patches: &[u8]| {
            let mut batch = EncodeBatch::default();
            vision.fill(&[EncodedImage { grid, patches, store_rows: &[0] }], &mut batch).map(|()| batch.patches)
        };
        let still: Vec<u8> = (0..192).collect();
        let moving: Vec<u8> = still.chunks(16).flat_map(|channel| [channel, channel].concat()).collect();
        assert_eq!(fill(&still), Ok(moving.clone()));
        assert_eq!(fill(&moving), Ok(moving));
        assert!(fill(&still[..191]).is_err());
    }
}
