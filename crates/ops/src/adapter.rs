//! Low-rank adapters (LoRA, Hu et al. 2021): what the sequences of a step may add to the products of a program.
//!
//! An adapter has matrices A `[r,K]` and B `[N,r]` for some weights `[N,K]` and adds `s · B (A x)` to their products. A
//! backend holds a number of adapters in slots, and each sequence of a step uses one of them or none
//! ([`StepBatch::adapters`](crate::StepBatch::adapters)). The weights of the program stay as they are, so all sequences
//! share them.

use crate::op::{EmbedIds, Linear, Logits, Op};
use crate::program::{BufferId, Program, Rows, WeightId};

/// Index into [`Program::sites`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SiteId(pub usize);

/// Role of the weight of a [`Site`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SiteKind {
    /// The weight of a product in a layer.
    Linear,
    /// The table of embeddings, whose rows are read by the ids of tokens.
    Embedding,
    /// The language-model head.
    Head,
}

/// A weight to which adapters add. Each part of the weight has matrices of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// Weight `[N,K]`.
    pub weight: WeightId,
    /// Role of the weight.
    pub kind: SiteKind,
}

/// Source of the rows that a [`Lora`] multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraInput {
    /// The input `[.,K]` of the product.
    Rows(BufferId),
    /// The columns of A that belong to the tokens of the step: K is the size of the vocabulary.
    Tokens,
}

/// `out[.,N] += scale · s · B (A input)` for each row whose sequence has an adapter with matrices for this site. Other rows
/// keep their bits.
///
/// A row's sums depend neither on other rows nor on their adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lora {
    /// Weight whose product the op adds to.
    pub site: SiteId,
    /// Input.
    pub input: LoraInput,
    /// Factor of the product, which is also that of the weight's own.
    pub scale: f32,
    /// Output `[.,N]` of the product.
    pub out: BufferId,
}

/// The matrices of an adapter for one part of a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraMatrices<'a> {
    /// Rank r.
    pub rank: usize,
    /// Factor s of the product.
    pub scaling: f32,
    /// A `[r,K]`. For a site of the kind [`SiteKind::Embedding`], its transpose `[K,r]`, a row for each token.
    pub a: &'a [f32],
    /// B `[N,r]`, with the rows of the part only.
    pub b: &'a [f32],
}

/// The matrices of an adapter, which fit the program.
pub trait AdapterSource: Send + Sync {
    /// Returns the matrices for a part of a site's weight; `None` if the adapter has none.
    fn matrices(&self, site: SiteId, part: usize) -> Option<LoraMatrices<'_>>;

    /// Returns the largest rank.
    fn rank(&self) -> usize;
}

impl Program {
    /// Returns the program with a [`Lora`] after each product that an adapter can change: those in layers, the table of
    /// embeddings, and the head unless its results are capped.
    pub fn with_adapters(mut self) -> Self {
        let ops = std::mem::take(&mut self.ops);
        for op in ops {
            let lora = self.lora(&op);
            self.ops.push(op);
            self.ops.extend(lora.map(Op::Lora));
        }
        self
    }

    /// Declares the site of an op. Returns what follows the op.
    fn lora(&mut self, op: &Op) -> Option<Lora> {
        let (site, input, scale, out) = match op {
            Op::Linear(Linear { weight, input, scale, out, .. }) => {
                (Site { weight: *weight, kind: SiteKind::Linear }, LoraInput::Rows(*input), *scale, *out)
            }
            Op::Logits(Logits { weight, input, scale, softcap: None, out }) => {
                (Site { weight: *weight, kind: SiteKind::Head }, LoraInput::Rows(*input), *scale, *out)
            }
            Op::Embed(embed) if embed.ids == EmbedIds::Tokens && !embed.add => {
                let site = Site { weight: embed.table, kind: SiteKind::Embedding };
                (site, LoraInput::Tokens, embed.scale, embed.out)
            }
            _ => return None,
        };
        if !matches!(self.buffers[out.0].rows, Rows::Tokens | Rows::Sampled) {
            return None;
        }
        self.sites.push(site);
        Some(Lora { site: SiteId(self.sites.len() - 1), input, scale, out })
    }

    /// Returns the size `[N,K]` of each part of a site's weight, in which N are the outputs of a product and K its inputs.
    pub fn site_parts(&self, site: SiteId) -> Vec<[usize; 2]> {
        let Site { weight, kind } = self.sites[site.0];
        let weight = &self.weights[weight.0];
        match kind {
            SiteKind::Embedding => vec![[weight.cols, weight.rows]],
            SiteKind::Linear | SiteKind::Head => weight.parts.iter().map(|part| [part.rows, weight.cols]).collect(),
        }
    }
}
