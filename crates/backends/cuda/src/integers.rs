//! Blocks of integers as those of another storage type.
//!
//! A checkpoint may have some of its experts in wider blocks than others: where a scale is not exact in f16, for example. All
//! experts of a weight are multiplied by one kernel.

use half::f16;
use octavo_ops::StorageType;

/// Returns the storage type that holds the values of all these types: their own, or that of the widest integers. `None` if there
/// is none.
pub(crate) fn common(mut storages: impl Iterator<Item = StorageType>) -> Option<StorageType> {
    use StorageType::{Int4, Int8, Q4_0, Q8_0};
    let first = storages.next()?;
    let is_integer = |storage| matches!(storage, Q4_0 | Q8_0 | Int4 | Int8);
    storages.try_fold(first, |found, storage| match storage {
        _ if storage == found => Some(found),
        _ => (is_integer(found) && is_integer(storage)).then_some(Int8),
    })
}

/// Returns blocks of integers as those of [`StorageType::Int8`], which have the same values.
pub(crate) fn widened(storage: StorageType, blocks: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(blocks.len() / storage.block_bytes() * StorageType::Int8.block_bytes());
    for block in blocks.chunks_exact(storage.block_bytes()) {
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
        let (zero, codes): (u8, Vec<u8>) = match storage {
            StorageType::Q4_0 => (8, nibbles(&block[2..])),
            StorageType::Int4 => (block[2], nibbles(&block[3..])),
            StorageType::Q8_0 => (128, block[2..].iter().map(|code| code ^ 128).collect()),
            _ => {
                out.extend_from_slice(block);
                continue;
            }
        };
        out.extend(scale.to_le_bytes());
        out.push(zero);
        out.extend(codes);
    }
    out
}

/// Returns the low halves of bytes, then the high ones.
fn nibbles(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| byte & 15).chain(bytes.iter().map(|byte| byte >> 4)).collect()
}

#[cfg(test)]
mod tests {
    use octavo_ops::testing::{TestRng, random_blocks};

    use super::*;

    #[test]
    fn only_integers_have_a_common_type() {
        use StorageType::{F8E4M3, F32, Int4, Int8, Q4_0, Q4K, Q8_0};
        let of = |storages: &[StorageType]| common(storages.iter().copied());
        assert_eq!([of(&[]), of(&[Q4K]), of(&[F8E4M3, F8E4M3])], [None, Some(Q4K), Some(F8E4M3)]);
        assert_eq!(
            [of(&[Q4_0, Int4, Q4_0]), of(&[Q8_0, Int8]), of(&[Q4_0, Q4_0])],
            [Some(Int8), Some(Int8), Some(Q4_0)]
        );
        assert_eq!([of(&[Q4_0, Q4K]), of(&[F32, Int8]), of(&[Int4, Q8_0, F32])], [None; 3]);
    }

    #[test]
    fn widened_blocks_have_the_same_values() {
        let values = |storage: StorageType, blocks: &[u8]| {
            let mut values = vec![f32::NAN; 64 * 32];
            storage.decoder().expect("its blocks are read")(blocks, &mut values);
            values
        };
        for storage in [StorageType::Q4_0, StorageType::Q8_0, StorageType::Int4, StorageType::Int8] {
            let blocks = random_blocks(storage, 64 * 32, 0.1, &mut TestRng(5));
            let wide = widened(storage, &blocks);
            assert_eq!(values(StorageType::Int8, &wide), values(storage, &blocks), "{storage}");
        }
    }
}
