//! Cases of products with the weights of experts.

use octavo_kernels::manifest::{self, ExpertProduct, ExpertTiles};
use octavo_kernels::params::{ExpertLinearParams, QuantWeight};
use octavo_kernels::quant::{QuantFormat, QuantLayout};

use super::ExpertSizes;
use super::cases::{Cases, Tables, Work, counted};
use crate::arena::Plan;

/// Formats of measured weights: dense, and those in which mixtures of experts are published most.
const FORMATS: [Option<QuantFormat>; 5] =
    [None, Some(QuantFormat::Q4K), Some(QuantFormat::Mxfp4), Some(QuantFormat::Nvfp4), Some(QuantFormat::F8E4M3)];

impl Cases<'_> {
    /// Adds the product of gate and up of the experts of each step, whose tokens choose experts evenly.
    pub(super) fn experts(&mut self) {
        let Some(sizes) = self.bench.experts else { return };
        for (rows, format) in self.row_counts().into_iter().flat_map(|rows| FORMATS.map(|format| (rows, format))) {
            let tiles = ExpertTiles::for_pairs((rows * sizes.chosen) as u32, sizes.count as u32);
            let gemm = match tiles {
                ExpertTiles::Few => None,
                ExpertTiles::Gemm(tile) => manifest::expert_gemm(self.chip(), format, self.dtype, tile),
            };
            self.expert_product(sizes, rows, format, &manifest::expert_gemv(format, self.dtype), ExpertTiles::Few);
            if let Some(gemm) = gemm {
                self.expert_product(sizes, rows, format, &gemm, tiles);
            }
        }
    }

    fn expert_product(
        &mut self,
        sizes: ExpertSizes,
        rows: usize,
        format: Option<QuantFormat>,
        product: &ExpertProduct,
        tiles: ExpertTiles,
    ) {
        let ExpertSizes { count, chosen, inner } = sizes;
        let (n, k, size, pairs) = (2 * inner, self.bench.hidden, self.size(), rows * chosen);
        let layout = match format.map(|format| QuantLayout::new(format, count * n, k)) {
            Some(None) => return,
            layout => layout.flatten(),
        };
        let weight_bytes = layout.map_or(count * n * k * size, |layout| layout.bytes());
        let (mut plan, mut tables) = (Plan::default(), Tables::default());
        let [weight, input, out] =
            [weight_bytes, rows * k * size, pairs * n * size].map(|bytes| plan.take(bytes as u64));
        let list = Tiled::by_expert(rows, sizes, tiles.rows());
        let (order, list_tiles) = (tables.add(list.order), tables.add(list.tiles));
        let bytes = weight_bytes / count * list.kinds + rows * k * size + pairs * n * size;
        let what = format!("{count} experts {n}x{k}, {} of {chosen}", counted(rows, "row"));
        let work = Work { what, bytes, flops: 2 * pairs * n * k, plan, tables };
        let cta = product.cta;
        self.kernel(product.instance.clone(), work, move |at, _| {
            let params = ExpertLinearParams {
                quant: layout.map_or_else(QuantWeight::default, |layout| layout.planes(at.data(weight))),
                weight: at.data(weight),
                input: at.data(input),
                out: at.data(out),
                order: at.table(order),
                tiles: at.table(list_tiles),
                n: n as u32,
                k: k as u32,
                share: chosen as u32,
                input_stride: k as u32,
                out_stride: n as u32,
                tile_rows: tiles.rows(),
                ..ExpertLinearParams::default()
            };
            (params, params.grid(pairs as u32, count as u32, cta))
        });
    }
}

/// Returns the expert of a pair, among `count` experts: all have equally many pairs.
pub(super) const fn expert_of(pair: usize, count: usize) -> usize {
    // The factor is a prime.
    pair * 7919 % count
}

/// Pairs of tokens and experts in tiles of one kind each, with adjacent pairs.
pub(super) struct Tiled {
    /// The pairs by kind.
    pub(super) order: Vec<u32>,
    /// The number of tiles, and of each the words of its kind, its first pair in the order and its number of pairs.
    pub(super) tiles: Vec<u32>,
    /// Number of kinds that have pairs.
    pub(super) kinds: usize,
}

impl Tiled {
    /// Divides `pairs` pairs into tiles of at most `rows`. The order of kinds is that of the last of their words.
    pub(super) fn new<const WORDS: usize>(pairs: usize, rows: u32, kind: impl Fn(usize) -> [u32; WORDS]) -> Self {
        let kind = |pair: u32| kind(pair as usize);
        let mut order: Vec<u32> = (0..pairs as u32).collect();
        order.sort_by_key(|&pair| {
            let mut words = kind(pair);
            words.reverse();
            words
        });
        let (mut tiles, mut kinds, mut first) = (vec![0], 0, 0);
        for same in order.chunk_by(|&a, &b| kind(a) == kind(b)) {
            kinds += 1;
            for tile in same.chunks(rows as usize) {
                tiles.extend(kind(same[0]));
                tiles.extend([first, tile.len() as u32]);
                first += tile.len() as u32;
                tiles[0] += 1;
            }
        }
        Self { order, tiles, kinds }
    }

    /// Divides the pairs of `rows` tokens as [`manifest::sort_experts`] does. Adjacent pairs have different experts, and all
    /// experts have equally many pairs.
    fn by_expert(rows: usize, ExpertSizes { count, chosen, .. }: ExpertSizes, tile_rows: u32) -> Self {
        Self::new(rows * chosen, tile_rows, |pair| [expert_of(pair, count) as u32])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_divided_evenly_and_into_tiles() {
        let sizes = ExpertSizes { count: 8, chosen: 2, inner: 1 };
        let Tiled { order, tiles, kinds } = Tiled::by_expert(40, sizes, 4);
        assert_eq!((order.len(), kinds, tiles[0]), (80, 8, 24), "ten pairs of each expert are three tiles");
        assert_eq!(tiles[1..7], [0, 0, 4, 0, 4, 4]);
        assert_eq!(Tiled::by_expert(1, sizes, 4).kinds, 2);
    }
}
