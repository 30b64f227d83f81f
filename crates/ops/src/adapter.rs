//! Low-rank adapters (LoRA, Hu et al. 2021): what the sequences of a step may add to the products of a program.
//!
//! An adapter has matrices A `[r,K]` and B `[N,r]` for some weights `[N,K]` and adds `s · B (A x)` to their products. A
//! backend holds a number of adapters in slots, and each sequence of a step uses one of them or none
//! ([`StepBatch::adapters`](crate::StepBatch::adapters)). The weights of the program stay as they are, so all sequences
//! share them.

use std::ops::Range;

use crate::experts::ExpertLinear;
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
    /// The weight of a router, whose logits an adapter changes before experts are chosen ([`Route::site`](crate::Route::site)).
    Router,
    /// The weights of so many experts. Each expert has the same number of parts, one after the other.
    Experts(usize),
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
    /// The input of the products of experts. A row of a token and one of its experts is multiplied with the matrices that
    /// the token's adapter has for that expert.
    Experts {
        /// Input: the row of the token if it is `[T,K]`, or the row of token and expert if it is `[k·T,K]`.
        input: BufferId,
        /// Experts of each token `[T,k]`.
        routing: BufferId,
    },
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
    /// Returns the program with a [`Lora`] after each product that an adapter can change: those in layers, those of experts,
    /// the table of embeddings, and the head unless its results are capped. The products of routers get their sites.
    pub fn with_adapters(mut self) -> Self {
        let ops = std::mem::take(&mut self.ops);
        for mut op in ops {
            if let Op::Route(route) = &mut op {
                route.site = Some(self.site(Site { weight: route.weight, kind: SiteKind::Router }));
            }
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
                // The matrices of adapters have their columns in the order of the model's inputs.
                let input = match self.ops.last() {
                    Some(Op::GatherColumns(gather)) if gather.out == *input => gather.input,
                    _ => *input,
                };
                (Site { weight: *weight, kind: SiteKind::Linear }, LoraInput::Rows(input), *scale, *out)
            }
            Op::Logits(Logits { weight, input, scale, softcap: None, out }) => {
                (Site { weight: *weight, kind: SiteKind::Head }, LoraInput::Rows(*input), *scale, *out)
            }
            Op::Embed(embed) if embed.ids == EmbedIds::Tokens && !embed.add => {
                let site = Site { weight: embed.table, kind: SiteKind::Embedding };
                (site, LoraInput::Tokens, embed.scale, embed.out)
            }
            Op::ExpertLinear(ExpertLinear { weight, experts, input, routing, out, .. }) => {
                let site = Site { weight: *weight, kind: SiteKind::Experts(*experts) };
                (site, LoraInput::Experts { input: *input, routing: *routing }, 1.0, *out)
            }
            _ => return None,
        };
        if !matches!(self.buffers[out.0].rows, Rows::Tokens | Rows::Sampled | Rows::Routed(_)) {
            return None;
        }
        Some(Lora { site: self.site(site), input, scale, out })
    }

    fn site(&mut self, site: Site) -> SiteId {
        self.sites.push(site);
        SiteId(self.sites.len() - 1)
    }

    /// Returns the size `[N,K]` of each part of a site's weight, in which N are the outputs of a product and K its inputs.
    pub fn site_parts(&self, site: SiteId) -> Vec<[usize; 2]> {
        let Site { weight, kind } = self.sites[site.0];
        let weight = &self.weights[weight.0];
        match kind {
            SiteKind::Embedding => vec![[weight.cols, weight.rows]],
            SiteKind::Linear | SiteKind::Head | SiteKind::Router | SiteKind::Experts(_) => {
                weight.parts.iter().map(|part| [part.rows, weight.cols]).collect()
            }
        }
    }

    /// Returns the outputs to which each part of a site's weight adds. Those of the parts of an expert begin at 0.
    pub fn site_outputs(&self, site: SiteId) -> Vec<Range<usize>> {
        let (sizes, each) = (self.site_parts(site), self.parts_each(site).max(1));
        let mut first = 0;
        let outputs = sizes.iter().enumerate().map(|(part, [outputs, _])| {
            let start = if part % each == 0 { 0 } else { first };
            first = start + outputs;
            start..first
        });
        outputs.collect()
    }

    /// Returns the number of parts of a site's weight, or of each expert if it has some.
    pub fn parts_each(&self, site: SiteId) -> usize {
        let Site { weight, kind } = self.sites[site.0];
        let parts = self.weights[weight.0].parts.len();
        match kind {
            SiteKind::Embedding => 1,
            SiteKind::Linear | SiteKind::Head | SiteKind::Router => parts,
            SiteKind::Experts(experts) => parts / experts.max(1),
        }
    }
}
