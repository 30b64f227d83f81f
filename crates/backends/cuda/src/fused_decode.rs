//! Decode attention of few rows that completes the heads of q, k and v in the same launch.
//!
//! Its results have the bits of the two launches. Each of its CTAs completes the queries of its split, which would take longer than a
//! launch of their own if a CTA had several splits one after the other.

use octavo_kernels::manifest;
use octavo_kernels::params::{FusedDecodeParams, QkvPostParams};
use octavo_kernels::plan::DecodeTile;
use octavo_ops::{BackendError, KvPlace, Op, Values};

use crate::build::KernelId;
use crate::forward::{Machine, Step};
use crate::fuse::is_dead;
use crate::launcher::Launcher;
use crate::lower::{Attention, Lowering, Stage};

/// Maximum number of sequences of a step in which one launch does both: that of steps whose products normalise their input.
const MOST_SEQUENCES: usize = 4;

/// The kernel that completes the heads and attends: the stage at which it is, and the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FusedDecode {
    kernel: KernelId,
    tile: DecodeTile,
}

impl FusedDecode {
    /// Number of stages that the launch takes the place of.
    pub(crate) const STAGES: usize = 2;
}

impl Lowering<'_> {
    /// Returns the kernel that takes the place of the stage at an index and of the next, if there is one.
    pub(crate) fn fused_decode(&mut self, ops: &[Op], stages: &[Stage], at: usize) -> Option<FusedDecode> {
        let (Op::QkvPost(post), Op::PagedAttention(attention)) = (&ops[at], ops.get(at + 1)?) else { return None };
        let Stage::Attention { attention: Attention::Planned { .. }, .. } = &stages[at + 1] else { return None };
        let place = KvPlace::Cache { group: attention.group, layer: attention.layer };
        let is_own = post.kv == place && post.out == attention.q && post.heads == attention.heads;
        // Other CTAs still read the output of the projection when the first write theirs.
        if !is_own || post.input == attention.out || !is_dead(ops, post.out, at + 1) || post.heads.values != Values::Own
        {
            return None;
        }
        let (chip, heads) = (self.setting.chip, post.heads);
        let kernel = manifest::paged_decode_fused(chip, self.setting.attention(), heads.dim, heads.q / heads.kv)?;
        Some(FusedDecode { kernel: self.instances.id(kernel.instance), tile: kernel.tile })
    }
}

impl<L: Launcher> Machine<L> {
    /// Launches the stages at an index as one. Returns `false` if they have to be launched one by one.
    pub(crate) fn decode_fused(&self, fused: FusedDecode, at: usize, step: &Step<'_>) -> Result<bool, BackendError> {
        let shape = &step.shape;
        let (Stage::QkvPost { params: post, cache, .. }, Stage::Attention { attention, .. }) =
            (&self.stages[at], &self.stages[at + 1])
        else {
            return Ok(false);
        };
        let Attention::Planned { params: decode, codes, .. } = attention else { return Ok(false) };
        if shape.splits == 0 || shape.tiles > 0 || shape.sequences > MOST_SEQUENCES {
            return Ok(false);
        }
        let post: QkvPostParams = self.qkv_params(post, *cache, step);
        let params = FusedDecodeParams { post, decode: self.decode_params(decode, *codes, *cache, step) };
        let grid = fused.tile.grid(&params.decode, self.launcher.processors(), shape.splits as u32);
        self.launch(fused.kernel, grid, &params)?;
        Ok(true)
    }
}
