//! A program in the form in which this backend runs it.

mod readers;

use std::ops::Range;

use octavo_ops::{
    Act, BackendError, Buffer, BufferId, Element, Embed, EmbedTaps, ExpertLinear, GateRows, Glu, HeadLinear, HeadShape,
    InjectRows, KvPlace, LatentPost, Logits, Lora, LoraInput, MergeRows, NormKind, NormOp, Op, PoolRows, Program,
    QkNorm, QkvPost, Residual, Rope, Route, Rows, Sight, SiteId, WeightId,
};

use crate::activation::Forms;
use crate::attention::task_tokens;
use crate::experts::{self, ExpertProduct};
use crate::latent;
use crate::loaded::Loaded;
use crate::lora::{Expand, Place, Shrink};
use crate::rows::GROUP;
use crate::{Isa, NAME};

/// Work between two barriers.
pub(crate) enum Stage {
    /// Cosines and sines of the rotary embeddings.
    Angles,
    Embed(Embed),
    Patches {
        out: BufferId,
    },
    EmbedTaps(EmbedTaps),
    Norm(Norm),
    /// `Linear` or `Logits`.
    Product(Product),
    QkvPost(Projected),
    Attention {
        op: Attended,
        /// Index of its number of tokens per task.
        tile: usize,
    },
    Glu {
        op: Glu,
        /// Whether the product before may compute it.
        gates: bool,
    },
    Act(Act),
    GateRows(GateRows),
    Experts(experts::Stage),
    Latent(latent::Stage),
    Expand(Expand),
    Merge(MergeRows),
    Store {
        input: BufferId,
        column: usize,
    },
    Inject(InjectRows),
    Gather {
        input: BufferId,
        out: BufferId,
    },
    GatherColumns {
        /// Input column of each output column.
        order: Vec<usize>,
        input: BufferId,
        out: BufferId,
    },
    Pool(PoolRows),
    /// Converts a buffer written by a product or by attention to its other representations.
    Prepare(BufferId),
}

pub(crate) struct Norm {
    pub(crate) kind: NormKind,
    pub(crate) weight: Vec<f32>,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) eps: f32,
    pub(crate) input: BufferId,
    pub(crate) add: Option<Residual>,
    pub(crate) out: BufferId,
    /// Whether its output is read in f32, other than by adapters.
    pub(crate) plain: bool,
}

pub(crate) struct Product {
    /// Whether it computes the logits, of which most steps need only the largest.
    pub(crate) is_head: bool,
    pub(crate) weight: WeightId,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) scale: Option<f32>,
    pub(crate) softcap: Option<f32>,
    pub(crate) input: BufferId,
    pub(crate) add: Option<BufferId>,
    pub(crate) out: BufferId,
    /// Products of adapters that run beside it.
    pub(crate) shrink: Option<Shrink>,
    /// The gated activation that it may compute instead of storing its results, which nothing else reads.
    pub(crate) gated: Option<Gated>,
}

pub(crate) struct Gated {
    pub(crate) op: Glu,
    /// Whether its output is read in f32.
    pub(crate) plain: bool,
}

pub(crate) struct Projected {
    pub(crate) input: BufferId,
    pub(crate) out: BufferId,
    pub(crate) heads: HeadShape,
    pub(crate) norm: Option<HeadNorm>,
    /// Index of the rotary embedding.
    pub(crate) rope: Option<usize>,
    pub(crate) group: usize,
    pub(crate) layer: usize,
}

/// `PagedAttention` or `SegmentAttention`.
pub(crate) struct Attended {
    pub(crate) q: BufferId,
    pub(crate) out: BufferId,
    /// Whether the output is read in f32, other than by adapters.
    pub(crate) plain: bool,
    pub(crate) heads: HeadShape,
    pub(crate) scale: f32,
    pub(crate) sight: Sight,
    /// Number of keys that a row sees, or on each side of its own.
    pub(crate) window: Option<usize>,
    pub(crate) softcap: Option<f32>,
    /// Attention sinks by query head.
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) group: usize,
    pub(crate) layer: usize,
}

/// Weights of the norms of q and k, with any offset added.
pub(crate) struct HeadNorm {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) eps: f32,
}

impl HeadNorm {
    /// Returns whether it spans the whole row, so that heads depend on each other.
    pub(crate) fn spans_heads(&self, heads: HeadShape) -> bool {
        self.q.len() != heads.dim || self.k.len() != heads.dim
    }
}

/// The stages of a forward pass.
pub(crate) struct Plan {
    pub(crate) stages: Vec<Stage>,
    /// Index of the op to which each stage belongs.
    pub(crate) ops: Vec<Option<usize>>,
    /// Distinct rotary embeddings.
    pub(crate) ropes: Vec<Rope>,
    /// Distinct numbers of tokens of attention tasks.
    pub(crate) tiles: Vec<usize>,
    /// Buffers of the program, and then those that stages of one op use, and then those of another.
    pub(crate) buffers: Vec<Buffer>,
    /// Representations by buffer.
    pub(crate) forms: Vec<Forms>,
    /// Smallest number of rows of a group of threads.
    pub(crate) group_rows: usize,
    /// Buffer that `Logits` writes, and the weight it reads.
    pub(crate) logits: Option<(BufferId, WeightId)>,
}

struct Planner<'a> {
    program: &'a Program,
    weights: &'a [Loaded],
    isa: Isa,
    coarse: bool,
    /// Head shapes of the layers in the memory of the step, which is the only KV group of an encoder.
    step_layers: Vec<HeadShape>,
    /// Number of the program's buffers; those after them are shared by ops.
    shared: usize,
    plan: Plan,
}

impl Plan {
    /// Creates the plan of a program whose weights are loaded. With `coarse`, activations that are multiplied with
    /// integers have 8 bits where that saves time.
    pub(crate) fn new(program: &Program, weights: &[Loaded], isa: Isa, coarse: bool) -> Result<Self, BackendError> {
        let plan = Self {
            stages: Vec::new(),
            ops: Vec::new(),
            ropes: Vec::new(),
            tiles: Vec::new(),
            buffers: program.buffers.clone(),
            forms: vec![Forms::default(); program.buffers.len()],
            group_rows: 1,
            logits: None,
        };
        let step_layers = program.step_kv().layers;
        let shared = program.buffers.len();
        let mut planner = Planner { program, weights, isa, coarse, step_layers, shared, plan };
        let ops = program.forward_ops();
        for (index, op) in ops.iter().enumerate() {
            let (mut stage, later) = (planner.stage(op)?, &ops[index + 1..]);
            match &mut stage {
                Stage::Glu { op, gates } => *gates = planner.gate(op, later),
                Stage::Norm(norm) => norm.plain = !planner.is_read_by_products(norm.out, later),
                Stage::Attention { op, .. } => op.plain = !planner.is_read_by_products(op.out, later),
                _ => {}
            }
            planner.plan.stages.push(stage);
            if let Op::Linear(op) = op {
                planner.plan.group_rows = planner.plan.group_rows.max(planner.group_rows(op.weight));
            }
            planner.prepare(op, later);
            planner.plan.ops.resize(planner.plan.stages.len(), Some(index));
        }
        if !planner.plan.ropes.is_empty() {
            planner.plan.stages.insert(0, Stage::Angles);
            planner.plan.ops.insert(0, None);
        }
        Ok(planner.plan)
    }
}

impl Planner<'_> {
    fn stage(&mut self, op: &Op) -> Result<Stage, BackendError> {
        Ok(match op {
            Op::Embed(op) => Stage::Embed(op.clone()),
            Op::Patches { out } => Stage::Patches { out: *out },
            Op::EmbedTaps(op) => Stage::EmbedTaps(op.clone()),
            Op::Norm(op) => Stage::Norm(self.norm(op)),
            Op::Linear(op) => {
                if op.input == op.out {
                    return Err(unsupported("a product whose output is its input"));
                }
                Stage::Product(Product {
                    is_head: false,
                    weight: op.weight,
                    bias: op.bias.map(|id| self.vector(id, false)),
                    scale: factor(op.scale),
                    softcap: None,
                    input: op.input,
                    add: op.add,
                    out: op.out,
                    shrink: None,
                    gated: None,
                })
            }
            Op::Logits(op) => Stage::Product(self.logits(op)),
            Op::Lora(op) => Stage::Expand(self.expand(op)),
            Op::QkvPost(op) => Stage::QkvPost(self.projected(op)),
            Op::HeadLinear(op) => Stage::Latent(self.head_linear(op)),
            Op::LatentPost(op) => Stage::Latent(self.latent_post(op)),
            Op::PagedAttention(op) => self.attention(Attended {
                q: op.q,
                out: op.out,
                plain: true,
                heads: op.heads,
                scale: op.scale,
                sight: op.sight(),
                window: op.window,
                softcap: op.softcap,
                sinks: op.sinks.map(|id| self.vector(id, false)),
                group: op.group,
                layer: op.layer,
            }),
            Op::SegmentAttention(op) => {
                let (group, layer) = self.place(KvPlace::Step, op.heads);
                self.attention(Attended {
                    q: op.q,
                    out: op.out,
                    plain: true,
                    heads: op.heads,
                    scale: op.scale,
                    sight: Sight::Both,
                    window: op.window,
                    softcap: None,
                    sinks: None,
                    group,
                    layer,
                })
            }
            Op::Glu(op) => Stage::Glu { op: op.clone(), gates: false },
            Op::Act(op) => Stage::Act(op.clone()),
            Op::GateRows(op) => Stage::GateRows(op.clone()),
            Op::Route(op) => Stage::Experts(self.route(op)),
            Op::ExpertLinear(op) => Stage::Experts(self.expert_linear(op)),
            Op::ExpertSum(op) => Stage::Experts(experts::Stage::Sum(op.clone())),
            Op::MergeRows(op) => Stage::Merge(*op),
            Op::StoreRows { input, column } => Stage::Store { input: *input, column: *column },
            Op::InjectRows(op) => Stage::Inject(op.clone()),
            Op::GatherRows { input, out } => Stage::Gather { input: *input, out: *out },
            Op::GatherColumns(op) => {
                let order: Vec<_> = self.vector(op.order, false).iter().map(|&column| column as usize).collect();
                if order.iter().any(|&column| column >= self.program.buffers[op.input.0].cols) {
                    return Err(unsupported("an order of columns that has more than the input"));
                }
                Stage::GatherColumns { order, input: op.input, out: op.out }
            }
            Op::PoolRows(op) => Stage::Pool(op.clone()),
            Op::Sample { .. } => return Err(unsupported("sampling inside the forward pass")),
        })
    }

    /// Lets the product before it run the products with A. Returns the stage after the product.
    fn expand(&mut self, op: &Lora) -> Expand {
        let (input, place) = match op.input {
            LoraInput::Rows(input) if self.program.buffers[op.out.0].rows == Rows::Sampled => {
                (Some(input), Place::Sampled)
            }
            LoraInput::Rows(input) => (Some(input), Place::Tokens),
            LoraInput::Tokens => (None, Place::Tokens),
            LoraInput::Experts { input, routing } => {
                let by_token = self.program.buffers[input.0].rows == Rows::Tokens;
                (Some(input), Place::Experts { routing, by_token })
            }
        };
        let shrink = input.map(|input| Shrink { site: op.site, input, place });
        let mut head = None;
        match self.plan.stages.last_mut() {
            Some(Stage::Product(product)) if shrink.is_some() => {
                product.shrink = shrink;
                head = product.is_head.then_some(product.weight);
            }
            Some(Stage::Experts(experts::Stage::Product(product))) => product.shrink = shrink,
            _ => {}
        }
        let parts = self.site_outputs(op.site);
        Expand { site: op.site, input, place, scale: op.scale, out: op.out, head, parts }
    }

    /// Returns the outputs of each part of a site's weight, or of one of its experts.
    fn site_outputs(&self, site: SiteId) -> Vec<Range<usize>> {
        let mut outputs = self.program.site_outputs(site);
        outputs.truncate(self.program.parts_each(site));
        outputs
    }

    fn attention(&mut self, op: Attended) -> Stage {
        let tile = index_of(&mut self.plan.tiles, task_tokens(self.isa, op.heads));
        Stage::Attention { op, tile }
    }

    /// Returns the KV group and layer of a place for keys and values.
    fn place(&self, kv: KvPlace, heads: HeadShape) -> (usize, usize) {
        match kv {
            KvPlace::Cache { group, layer } => (group, layer),
            KvPlace::Step => (0, self.step_layers.iter().position(|known| *known == heads).unwrap_or(0)),
        }
    }

    fn norm(&self, op: &NormOp) -> Norm {
        Norm {
            kind: op.kind,
            weight: self.vector(op.weight, op.unit_offset),
            bias: op.bias.map(|id| self.vector(id, false)),
            eps: op.eps,
            input: op.input,
            add: op.add,
            out: op.out,
            plain: true,
        }
    }

    fn logits(&mut self, op: &Logits) -> Product {
        self.plan.logits = Some((op.out, op.weight));
        Product {
            is_head: true,
            weight: op.weight,
            bias: None,
            scale: factor(op.scale),
            softcap: op.softcap,
            input: op.input,
            add: None,
            out: op.out,
            shrink: None,
            gated: None,
        }
    }

    fn projected(&mut self, op: &QkvPost) -> Projected {
        let norm = op.norm.as_ref().map(|norm: &QkNorm| HeadNorm {
            q: self.vector(norm.q, norm.unit_offset),
            k: self.vector(norm.k, norm.unit_offset),
            eps: norm.eps,
        });
        let rope = op.rope.as_ref().map(|rope| index_of(&mut self.plan.ropes, rope.clone()));
        let (group, layer) = self.place(op.kv, op.heads);
        Projected { input: op.input, out: op.out, heads: op.heads, norm, rope, group, layer }
    }

    /// Appends the product and the choice of a router. Returns the stage that sorts its rows by expert.
    fn route(&mut self, op: &Route) -> experts::Stage {
        let count = self.weights[op.weight.0].factor().rows();
        let logits = self.buffer("router", Rows::Tokens, count, Forms::default());
        let shrink = op.site.map(|site| Shrink { site, input: op.input, place: Place::Tokens });
        self.plan.stages.push(Stage::Product(Product {
            is_head: false,
            weight: op.weight,
            bias: op.bias.map(|id| self.vector(id, false)),
            scale: None,
            softcap: None,
            input: op.input,
            add: None,
            out: logits,
            shrink,
            gated: None,
        }));
        if let Some(Shrink { site, input, place }) = shrink {
            let parts = self.site_outputs(site);
            let expand = Expand { site, input: Some(input), place, scale: 1.0, out: logits, head: None, parts };
            self.plan.stages.push(Stage::Expand(expand));
        }
        let correction = op.correction.map(|id| self.vector(id, false)).unwrap_or_default();
        self.plan.stages.push(Stage::Experts(experts::Stage::Choose { op: op.clone(), logits, correction }));
        experts::Stage::Sort { routing: op.out, experts: count }
    }

    /// Appends the stage that orders the rows of tokens by expert, if the op reads such rows. Returns its product.
    fn expert_linear(&mut self, op: &ExpertLinear) -> experts::Stage {
        let mut input = op.input;
        let Buffer { rows, cols, .. } = self.plan.buffers[input.0];
        if rows == Rows::Tokens {
            let forms = self.wanted(op.weight, self.plan.forms[input.0].coarse);
            let chosen = self.plan.buffers[op.routing.0].cols;
            input = self.buffer("dispatched", Rows::Routed(chosen), cols, forms);
            let plain = self.reads_plain(op.weight);
            let dispatch = experts::Stage::Dispatch { routing: op.routing, input: op.input, out: input, plain };
            self.plan.stages.push(Stage::Experts(dispatch));
        }
        let (weight, routing, out) = (op.weight, op.routing, op.out);
        let bias = op.bias.map(|id| self.vector(id, false));
        experts::Stage::Product(ExpertProduct { weight, bias, input, routing, out, shrink: None })
    }

    /// Appends the stage that puts the inputs of each head into rows of their own. Returns the product.
    fn head_linear(&mut self, op: &HeadLinear) -> latent::Stage {
        let cols = self.program.weights[op.weight.0].cols;
        let forms = self.wanted(op.weight, self.prefers_coarse(op.weight));
        let rows = self.buffer("heads", Rows::Routed(op.heads), cols, forms);
        self.plan.stages.push(Stage::Latent(latent::Stage::Split { heads: op.heads, input: op.input, out: rows }));
        latent::Stage::Product { weight: op.weight, input: rows, out: op.out }
    }

    fn latent_post(&mut self, op: &LatentPost) -> latent::Stage {
        latent::Stage::Post(latent::Post {
            q: op.q,
            kv: op.kv,
            out: op.out,
            heads: op.heads,
            norm: self.vector(op.norm, false),
            eps: op.eps,
            rope: index_of(&mut self.plan.ropes, op.rope.clone()),
            group: op.group,
            layer: op.layer,
        })
    }

    /// Returns a buffer that only stages of the same op use. Ops use the same one after the other, if it fits them.
    fn buffer(&mut self, name: &str, rows: Rows, cols: usize, forms: Forms) -> BufferId {
        let buffer = Buffer { name: name.into(), rows, cols, element: Element::Activation };
        let known = self.plan.buffers.iter().zip(&self.plan.forms).enumerate().skip(self.shared);
        let mut known = known.filter(|(_, (known, in_forms))| **known == buffer && **in_forms == forms);
        if let Some((index, _)) = known.next() {
            return BufferId(index);
        }
        self.plan.buffers.push(buffer);
        self.plan.forms.push(forms);
        BufferId(self.plan.buffers.len() - 1)
    }

    fn vector(&self, id: WeightId, unit_offset: bool) -> Vec<f32> {
        let offset = if unit_offset { 1.0 } else { 0.0 };
        match &self.weights[id.0] {
            Loaded::Vector(values) => values.iter().map(|x| x + offset).collect(),
            Loaded::Matrix(_) | Loaded::Experts(_) => unreachable!("loaded as `weight_forms` says"),
        }
    }
}

/// Returns a factor that changes anything.
fn factor(scale: f32) -> Option<f32> {
    (scale != 1.0).then_some(scale)
}

/// Returns whether the query heads of a KV head fill whole groups, so that attention can quantise its output.
pub(crate) fn prepares_by_head(heads: HeadShape) -> bool {
    (heads.q / heads.kv * heads.value_dim()).is_multiple_of(GROUP)
}

fn unsupported(what: &str) -> BackendError {
    BackendError::Unsupported { backend: NAME, what: what.into() }
}

/// Returns the index of a value in a list of distinct values, and adds it if it is new.
fn index_of<T: PartialEq>(list: &mut Vec<T>, value: T) -> usize {
    list.iter().position(|known| *known == value).unwrap_or_else(|| {
        list.push(value);
        list.len() - 1
    })
}

#[cfg(test)]
mod tests {
    use octavo_ops::WeightSource;
    use octavo_ops::testing::{TinyExperts, TinyModel};

    use super::*;
    use crate::loaded::Copies;
    use crate::pool::Pool;
    use crate::weights::{Arena, Target, WeightDtype};

    fn plan(program: &Program, source: &dyn WeightSource) -> Plan {
        let target = Target {
            pool: &mut Pool::new(1).unwrap(),
            arenas: vec![Arena::default()],
            dtype: WeightDtype::AsStored,
            short: false,
        };
        let loaded = Copies::read(program, target, source, &mut |_| {}).unwrap();
        Plan::new(program, loaded.shapes(), Isa::Portable, false).unwrap()
    }

    #[test]
    fn layers_with_experts_share_the_buffers_of_their_stages() {
        let shared = |layers: usize| {
            let experts = Some(TinyExperts::default());
            let model = TinyModel { experts, layers: vec![0; layers], ..TinyModel::default() };
            let (program, source) = model.build().unwrap();
            plan(&program, &source).buffers.len() - program.buffers.len()
        };
        assert_eq!([shared(1), shared(5)], [2, 2], "the logits of the router, and the rows in the order of experts");
    }

    #[test]
    fn products_compute_activations_of_whole_groups() {
        let gated = |inner: usize| {
            let (program, source) = TinyModel { inner, layers: vec![0; 3], ..TinyModel::default() }.build().unwrap();
            let stages = plan(&program, &source).stages;
            let products =
                stages.iter().filter(|stage| matches!(stage, Stage::Product(Product { gated: Some(_), .. })));
            (products.count(), stages.iter().filter(|stage| matches!(stage, Stage::Glu { gates: true, .. })).count())
        };
        assert_eq!([gated(96), gated(40)], [(3, 3), (0, 0)]);
    }
}
