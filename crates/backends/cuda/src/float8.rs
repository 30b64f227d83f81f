//! Scales of FP8 weights for cuBLASLt, which multiplies FP8 on chips whose warps do not.
//!
//! A weight is kept in blocks of 32 elements with a scale each. The scales of a checkpoint are those of a matrix, of a row, or
//! of 128 x 128 elements. The blocks tell which, and cuBLASLt takes the codes where they are and a copy of the scales.

use octavo_kernels::quant::QuantFormat;

/// Which elements of the factors of a product share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scaling {
    /// A row of the input, and a row of the weight.
    Rows,
    /// 128 elements of a row of the input, and 128 x 128 elements of the weight.
    Blocks,
    /// Those of [`Scaling::Rows`], which are applied to the product of the codes afterwards.
    Afterwards,
}

/// Side of a block in elements.
pub(crate) const SIDE: usize = 128;

/// Number of elements with a scale in memory.
const GROUP: usize = QuantFormat::F8E4M3.block_elements();

/// Returns the distance between the scales of two rows of blocks: their number in a row, rounded up to a multiple of 4.
const fn stride(cols: usize) -> usize {
    cols.div_ceil(SIDE).next_multiple_of(4)
}

/// Returns the number of f32 that hold the scales of a weight, whichever elements share them.
pub(crate) fn most_scales(rows: usize, cols: usize) -> usize {
    rows.max(stride(cols) * rows.div_ceil(SIDE))
}

/// Finds which elements of a weight share a scale, and returns the scales: one for each row, or those of the blocks, row by row
/// of blocks. `None` if scales vary in another way. `blocks` are those of [`QuantFormat::F8E4M3`].
pub(crate) fn shared_scales(blocks: &[u8], rows: usize, cols: usize) -> Option<(Scaling, Vec<f32>)> {
    let groups = cols / GROUP;
    let scale = |row: usize, group: usize| {
        let block = &blocks[(row * groups + group) * QuantFormat::F8E4M3.block_bytes()..];
        f32::from_le_bytes([block[0], block[1], block[2], block[3]])
    };
    let all_are = |first_row: usize, first_group: usize, height: usize, width: usize| {
        let first = scale(first_row, first_group);
        let mut places = (first_row..first_row + height)
            .flat_map(|row| (first_group..first_group + width).map(move |group| (row, group)));
        places.all(|(row, group)| scale(row, group) == first).then_some(first)
    };
    if let Some(scales) = (0..rows).map(|row| all_are(row, 0, 1, groups)).collect() {
        return Some((Scaling::Rows, scales));
    }
    let wide = SIDE / GROUP;
    let mut scales = Vec::with_capacity(most_scales(rows, cols));
    for row in (0..rows).step_by(SIDE) {
        let height = SIDE.min(rows - row);
        for group in (0..groups).step_by(wide) {
            scales.push(all_are(row, group, height, wide.min(groups - group))?);
        }
        scales.resize(scales.len().next_multiple_of(stride(cols)), 0.0);
    }
    Some((Scaling::Blocks, scales))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns blocks with scales by row and column of elements.
    fn blocks(rows: usize, cols: usize, scale: impl Fn(usize, usize) -> f32) -> Vec<u8> {
        let block = |row: usize, col: usize| [scale(row, col).to_le_bytes().as_slice(), &[0x38; GROUP]].concat();
        (0..rows).flat_map(|row| (0..cols).step_by(GROUP).flat_map(move |col| block(row, col))).collect()
    }

    #[test]
    fn scales_of_a_matrix_or_of_rows_are_found() {
        let found = shared_scales(&blocks(3, 64, |_, _| 0.5), 3, 64);
        assert_eq!(found, Some((Scaling::Rows, vec![0.5; 3])));
        let found = shared_scales(&blocks(130, 256, |row, _| row as f32), 130, 256);
        assert_eq!(found, Some((Scaling::Rows, (0..130).map(|row| row as f32).collect())));
    }

    #[test]
    fn scales_of_blocks_are_found_with_partial_blocks_at_the_ends() {
        let scale = |row: usize, col: usize| (1 + row / SIDE * 10 + col / SIDE) as f32;
        let found = shared_scales(&blocks(130, 288, scale), 130, 288);
        assert_eq!(found, Some((Scaling::Blocks, vec![1.0, 2.0, 3.0, 0.0, 11.0, 12.0, 13.0, 0.0])));
        assert!(most_scales(130, 288) >= 8 && most_scales(64, 4096) == 64 && most_scales(2, 4096) == 32);
    }

    #[test]
    fn other_scales_are_not_shared() {
        let mut wrong = blocks(256, 256, |row, col| (row / SIDE + col / SIDE) as f32);
        assert!(shared_scales(&wrong, 256, 256).is_some());
        // The last block of the last row.
        let at = wrong.len() - QuantFormat::F8E4M3.block_bytes();
        wrong[at..at + 4].copy_from_slice(&7.0f32.to_le_bytes());
        assert_eq!(shared_scales(&wrong, 256, 256), None);
        // A part that begins within a block of its tensor.
        assert_eq!(
            shared_scales(&blocks(128, 256, |row, col| ((row + 64) / SIDE + col / SIDE) as f32), 128, 256),
            None
        );
    }
}
