//! Who reads a buffer, and in which representations.

use octavo_ops::{BufferId, Glu, Op, WeightId};

use super::{Gated, Planner, Stage, prepares_by_head};
use crate::activation::Forms;
use crate::product::{self, gated};
use crate::weights::{PanelKind, Part, WordOrder};

impl Planner<'_> {
    /// Lets the product before a gated activation compute it, if nothing else reads its results. Returns whether it may.
    pub(super) fn gate(&mut self, op: &Glu, later: &[Op]) -> bool {
        let plain = self.is_read_plain(op.out, later);
        let mut before = self.plan.stages.iter_mut().rev();
        let mut stage = before.next();
        if matches!(stage, Some(Stage::Expand(expand)) if expand.out == op.input) {
            stage = before.next();
        }
        match stage {
            Some(Stage::Product(product))
                if product.out == op.input
                    && product.add.is_none()
                    && readers(op.input, later).next().is_none()
                    && gated::halves(self.weights[product.weight.0].factor()) =>
            {
                product.gated = Some(Gated { op: op.clone(), plain });
                true
            }
            _ => false,
        }
    }

    /// Returns whether anything but adapters reads a buffer in f32 before it is written again.
    fn is_read_plain(&self, buffer: BufferId, later: &[Op]) -> bool {
        readers(buffer, later).any(|op| match product_of(op) {
            Some((input, weight)) if input == buffer => self.reads_plain(weight),
            _ => !matches!(op, Op::Lora(_)),
        })
    }

    /// Returns whether only products, in other representations than f32, and adapters read a buffer before it is written again. What
    /// nothing reads may be the result of the program.
    pub(super) fn is_read_by_products(&self, buffer: BufferId, later: &[Op]) -> bool {
        self.read_as(buffer, later).any() && !self.is_read_plain(buffer, later)
    }

    /// Sets the representations in which later ops read the output of this op, and adds a stage that creates them if
    /// the op cannot.
    pub(super) fn prepare(&mut self, op: &Op, later: &[Op]) {
        for written in op.outputs() {
            let forms = self.read_as(written, later);
            if !forms.any() {
                continue;
            }
            self.plan.forms[written.0] = self.plan.forms[written.0].and(forms);
            let prepares = match op {
                Op::Embed(_)
                | Op::Patches { .. }
                | Op::Glu(_)
                | Op::Act(_)
                | Op::GateRows(_)
                | Op::MergeRows(_)
                | Op::GatherRows { .. }
                | Op::GatherColumns(_)
                | Op::PoolRows(_) => true,
                Op::Norm(norm) => written == norm.out,
                Op::PagedAttention(op) => prepares_by_head(op.heads),
                Op::SegmentAttention(op) => prepares_by_head(op.heads),
                _ => false,
            };
            if !prepares {
                self.plan.stages.push(Stage::Prepare(written));
            }
        }
    }

    /// Returns the representations of a buffer that products need before it is written again.
    fn read_as(&self, buffer: BufferId, later: &[Op]) -> Forms {
        let products = || {
            let products = readers(buffer, later).filter_map(|op| Some((op, product_of(op)?)));
            products.filter(|(_, (input, _))| *input == buffer).map(|(op, (_, weight))| (op, weight))
        };
        let coarse = products().any(|(_, weight)| self.prefers_coarse(weight));
        products().fold(Forms::default(), |forms, (_, weight)| forms.and(self.wanted(weight, coarse)))
    }

    fn parts(&self, weight: WeightId) -> impl Iterator<Item = &Part> {
        self.weights[weight.0].matrices().iter().flat_map(|matrix| &matrix.parts)
    }

    /// Returns the smallest number of rows of a group of threads in products with a weight.
    pub(super) fn group_rows(&self, weight: WeightId) -> usize {
        self.parts(weight).map(|part| product::group_rows(self.isa, part.layout.kind)).max().unwrap_or(1)
    }

    /// Returns whether activations are coarse where only products with a weight read them.
    pub(super) fn prefers_coarse(&self, weight: WeightId) -> bool {
        self.coarse && self.parts(weight).any(|part| part.layout.kind.gains_from_coarse_rows(self.isa))
    }

    /// Returns whether products with a weight read their input in f32.
    pub(super) fn reads_plain(&self, weight: WeightId) -> bool {
        self.parts(weight).any(|part| match part.layout.kind {
            kind if kind.takes_integers(self.isa) => false,
            PanelKind::Bf16 | PanelKind::Short | PanelKind::Packed(_) => !self.isa.multiplies_bf16(),
            PanelKind::F16 | PanelKind::F32 | PanelKind::Quant(..) => true,
        })
    }

    /// Returns the representations that products with a weight need of activations that are coarse or not.
    pub(super) fn wanted(&self, weight: WeightId, coarse: bool) -> Forms {
        self.parts(weight).fold(Forms::default(), |forms, part| {
            forms.and(match part.layout.kind {
                kind if kind.takes_integers(self.isa) => {
                    let words = kind.words(self.isa, coarse);
                    Forms {
                        quant: true,
                        coarse,
                        words: words == Some(WordOrder::InOrder),
                        crossed: words == Some(WordOrder::Crossed),
                        bf16: false,
                    }
                }
                PanelKind::Bf16 | PanelKind::Short | PanelKind::Packed(_) => {
                    Forms { bf16: self.isa.multiplies_bf16(), ..Forms::default() }
                }
                PanelKind::F16 | PanelKind::F32 | PanelKind::Quant(..) => Forms::default(),
            })
        })
    }
}

/// Returns the ops that read a buffer before it is written again.
fn readers(buffer: BufferId, later: &[Op]) -> impl Iterator<Item = &Op> {
    let last = later.iter().position(|op| op.outputs().contains(&buffer)).map_or(later.len(), |index| index + 1);
    later[..last].iter().filter(move |op| op.inputs().contains(&buffer))
}

/// Returns the input and the weight of a product.
fn product_of(op: &Op) -> Option<(BufferId, WeightId)> {
    match op {
        Op::Linear(op) => Some((op.input, op.weight)),
        Op::Logits(op) => Some((op.input, op.weight)),
        Op::Route(op) => Some((op.input, op.weight)),
        Op::ExpertLinear(op) => Some((op.input, op.weight)),
        _ => None,
    }
}
