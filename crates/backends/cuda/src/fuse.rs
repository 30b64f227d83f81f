//! Launches that take the place of several: products of few rows that compute the norm of their input and the activation of their
//! output, and decode attention that completes its heads ([`fused_decode`](crate::fused_decode)).
//!
//! The stages of a program stay as they are, because steps of more rows need them. A [`Fusion`] names those that one launch takes the
//! place of. It has the same bits, so it does not matter which steps use it.

use octavo_kernels::manifest::{self, Dtype, FUSED_SHARED, Pairs};
use octavo_kernels::params::{FusedLinearParams, GluParams, LinearParams, NormParams};
use octavo_ops::{BackendError, BufferId, NormKind, Op, Rows};

use crate::build::KernelId;
use crate::dense::Way;
use crate::forward::{Machine, Step};
use crate::fused_decode::FusedDecode;
use crate::launcher::Launcher;
use crate::linear::ProductPart;
use crate::lower::{Lowering, Stage, activation, is_read};

/// Stages that one launch takes the place of, by the first of them.
#[derive(Clone, Debug)]
pub(crate) enum Fusion {
    /// A product with what is around it.
    Product(FusedProduct),
    /// The heads of q, k and v and decode attention.
    Decode(FusedDecode),
}

/// A product with the norm before it, the activation after it, or both.
#[derive(Clone, Debug)]
pub(crate) struct FusedProduct {
    /// Index of the first stage.
    first: usize,
    /// Index of the product's stage.
    product: usize,
    /// Number of stages that one launch takes the place of. Those of adapters among them launch nothing in a step without adapters.
    count: usize,
    /// Rows of all buffers.
    rows: Rows,
    /// Kernels with their number of rows, ascending.
    kernels: Vec<(u32, KernelId)>,
    /// Parameters except the number of rows.
    params: FusedLinearParams,
}

/// Indices of the ops of a fusion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    norm: Option<usize>,
    product: usize,
    glu: Option<usize>,
}

impl Found {
    /// Finds what can be fused with the product at an index.
    fn around(ops: &[Op], product: usize) -> Option<Self> {
        let (input, out, is_plain) = match &ops[product] {
            Op::Linear(op) => (op.input, op.out, op.add.is_none()),
            Op::Logits(op) => (op.input, op.out, false),
            _ => return None,
        };
        let glu = following(ops, product).filter(|&at| match &ops[at] {
            Op::Glu(op) => {
                let has_kernel = Pairs::of(activation(op.kind)).is_some();
                is_plain && has_kernel && op.input == out && op.out != input && is_dead(ops, out, at)
            }
            _ => false,
        });
        let written = match glu.map(|at| &ops[at]) {
            Some(Op::Glu(op)) => op.out,
            _ => out,
        };
        let norm = product.checked_sub(1).filter(|&at| match &ops[at] {
            // Other CTAs still read the input when the first write their outputs.
            Op::Norm(op) => {
                let is_rms = op.kind == NormKind::Rms && op.bias.is_none() && op.add.is_none();
                is_rms && op.out == input && op.input != written && is_dead(ops, input, product)
            }
            _ => false,
        });
        (norm.is_some() || glu.is_some()).then_some(Self { norm, product, glu })
    }
}

/// Returns the index of the next op after another that is not one of adapters.
fn following(ops: &[Op], at: usize) -> Option<usize> {
    (at + 1..ops.len()).find(|&next| !matches!(ops[next], Op::Lora(_)))
}

/// Returns whether no op after an index reads what a buffer has. Those of adapters do not count.
pub(crate) fn is_dead(ops: &[Op], buffer: BufferId, at: usize) -> bool {
    !is_read(ops[at + 1..].iter().filter(|op| !matches!(op, Op::Lora(_))), buffer)
}

impl Lowering<'_> {
    /// Returns the fusions of the forward part, by the index of their first stage.
    pub(crate) fn fusions(&mut self, stages: &[Stage]) -> Vec<Option<Fusion>> {
        let ops = self.program.forward_ops();
        let mut fusions = vec![None; stages.len()];
        if self.setting.dtype == Dtype::F32 || self.setting.batch_invariant {
            return fusions;
        }
        for found in (0..ops.len()).filter_map(|product| Found::around(ops, product)) {
            if let Some(product) = self.fused_product(ops, stages, found) {
                let first = product.first;
                fusions[first] = Some(Fusion::Product(product));
            }
        }
        for (at, fusion) in fusions.iter_mut().enumerate() {
            if let Some(decode) = self.fused_decode(ops, stages, at) {
                *fusion = Some(Fusion::Decode(decode));
            }
        }
        fusions
    }

    fn fused_product(&mut self, ops: &[Op], stages: &[Stage], found: Found) -> Option<FusedProduct> {
        let Stage::Product { product, rows } = &stages[found.product] else { return None };
        let [part] = product.parts.as_slice() else { return None };
        let kernels = self.fused_kernels(part);
        if kernels.is_empty() {
            return None;
        }
        let mut params = FusedLinearParams { linear: part.params, ..FusedLinearParams::default() };
        if let Some(Stage::Norm { params: norm, .. }) = found.norm.map(|at| &stages[at]) {
            let NormParams { input, weight, eps, weight_offset, .. } = *norm;
            let linear = LinearParams { input, ..params.linear };
            params = FusedLinearParams { norm_weight: weight, eps, weight_offset, linear, ..params };
        }
        if let Some((Stage::Glu { params: glu, .. }, Op::Glu(op))) = found.glu.map(|at| (&stages[at], &ops[at])) {
            let GluParams { out, cols, .. } = *glu;
            params.linear = LinearParams { out, out_stride: cols, ..params.linear };
            params.pairs = Pairs::of(activation(op.kind))? as u32;
        }
        let first = found.norm.unwrap_or(found.product);
        let count = found.glu.unwrap_or(found.product) + 1 - first;
        Some(FusedProduct { first, product: found.product, count, rows: *rows, kernels, params })
    }

    /// Returns the kernels for a part of a product, with their number of rows; none if no GEMV may be chosen for it.
    fn fused_kernels(&mut self, part: &ProductPart) -> Vec<(u32, KernelId)> {
        if !part.is_dense() {
            return Vec::new();
        }
        let rows = manifest::FUSED_ROWS.into_iter().filter(|rows| part.dense.has_vectors(*rows));
        let mut kernel = |rows| self.instances.id(manifest::gemv_fused(self.setting.dtype, part.out(), rows));
        rows.map(|rows| (rows, kernel(rows))).collect()
    }
}

impl<L: Launcher> Machine<L> {
    /// Launches the forward part.
    pub(crate) fn run(&self, step: &Step<'_>) -> Result<(), BackendError> {
        let mut at = 0;
        while at < self.stages.len() {
            at += self.stages_from(at, step)?;
        }
        Ok(())
    }

    /// Launches the stage at an index, or those that run as one from there on, and returns their number.
    pub(crate) fn stages_from(&self, at: usize, step: &Step<'_>) -> Result<usize, BackendError> {
        let (is_launched, count) = match &self.fusions[at] {
            Some(Fusion::Product(product)) => (self.product_fused(product, step)?, product.count),
            Some(Fusion::Decode(decode)) => (self.decode_fused(*decode, at, step)?, FusedDecode::STAGES),
            None => (false, 1),
        };
        if is_launched {
            return Ok(count);
        }
        self.stage(&self.stages[at], step)?;
        Ok(1)
    }

    /// Launches stages as one. Returns `false` if they have to be launched one by one.
    fn product_fused(&self, fusion: &FusedProduct, step: &Step<'_>) -> Result<bool, BackendError> {
        let rows = step.rows(fusion.rows);
        let is_adapted = step.shape.adapted.iter().any(|adapted| adapted.tiles > 0);
        let Stage::Product { product, .. } = &self.stages[fusion.product] else { return Ok(false) };
        if rows == 0 || is_adapted || product.parts[0].dense.choice.way(rows) != Way::Vectors {
            return Ok(false);
        }
        let mut kernels = fusion.kernels.iter();
        let Some(&(most, kernel)) = kernels.find(|(most, _)| rows <= *most) else { return Ok(false) };
        let params = FusedLinearParams { linear: LinearParams { m: rows, ..fusion.params.linear }, ..fusion.params };
        let shared = params.dynamic_shared(most, self.element as usize);
        if shared > FUSED_SHARED {
            return Ok(false);
        }
        let grid = params.grid(self.launcher.threads(kernel), self.launcher.processors());
        self.launcher.launch(kernel, grid, Some(shared as u32), &params)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use octavo_ops::Program;
    use octavo_ops::testing::{NormPlacement, TinyExperts, TinyModel};

    use super::*;

    /// Returns what is fused in a program: for each product with something, whether it is a norm and an activation.
    fn found(program: &Program) -> Vec<(bool, bool)> {
        let ops = program.forward_ops();
        let found = (0..ops.len()).filter_map(|product| Found::around(ops, product));
        found.map(|found| (found.norm.is_some(), found.glu.is_some())).collect()
    }

    fn program(model: &TinyModel) -> Program {
        model.build().unwrap().0
    }

    #[test]
    fn norms_and_activations_are_fused_with_the_product_between() {
        let layer = [(true, false), (true, true)];
        let model = TinyModel { placement: NormPlacement::Sandwich, ..TinyModel::default() };
        assert_eq!(
            found(&program(&model)),
            [layer, layer].concat().into_iter().chain([(true, false)]).collect::<Vec<_>>()
        );
        // A norm that adds to the residual stream is one launch of its own.
        let expected = [(true, false), (false, true), (false, true), (true, false)];
        assert_eq!(found(&program(&TinyModel::default())), expected);
    }

    #[test]
    fn what_others_read_is_computed_apart() {
        let model = TinyModel { placement: NormPlacement::Sandwich, ..TinyModel::default() };
        let mut program = program(&model);
        let product = (0..program.ops.len()).find(|&at| Found::around(&program.ops, at).is_some()).unwrap();
        // A second product reads the norm's output.
        program.ops.insert(product + 1, program.ops[product].clone());
        assert_eq!(Found::around(&program.ops, product), None);
        // Experts read the norm's output after the router.
        let experts = TinyModel { experts: Some(TinyExperts::default()), ..model };
        assert_eq!(found(&experts.build().unwrap().0), [(true, false); 3]);
    }

    #[test]
    fn a_product_does_not_write_what_its_norm_reads() {
        let mut program = program(&TinyModel { placement: NormPlacement::Sandwich, ..TinyModel::default() });
        let product = (0..program.ops.len()).find(|&at| Found::around(&program.ops, at).is_some()).unwrap();
        let Op::Norm(norm) = &program.ops[product - 1] else { panic!("a norm") };
        let read = norm.input;
        let Op::Linear(linear) = &mut program.ops[product] else { panic!("the projection of q, k and v") };
        linear.out = read;
        assert_eq!(Found::around(&program.ops, product), None);
    }
}
