//! Products of few rows with weights of integers: who rounds their input, and what one launch computes for them.
//!
//! Rounding is a launch before a product, unless the op before it writes the codes with its output: a norm, a gated activation, or
//! decode attention. A product whose outputs are gates and ups applies the activation itself, for one row. Ops whose rows are too
//! many are launched alone. The bits are the same.

use octavo_kernels::manifest::{self, Dtype};
use octavo_kernels::params::{
    GLU_COLUMNS, GluCodesParams, GluParams, NormCodesParams, NormParams, QuantGluParams, QuantLinearParams, RoundedRows,
};
use octavo_ops::{BackendError, GluKind, HeadShape, Op, Rows, Values};

use crate::build::{Instances, KernelId};
use crate::forward::{Machine, Scratch, Step, some};
use crate::launcher::Launcher;
use crate::linear::{Product, Rounding};
use crate::lower::{Attention, Lowering, Stage, activation, for_cols, is_read, norm_mean};
use crate::step::StepShape;

/// Number of CTAs of a product with its activation for each multiprocessor. With fewer, its columns would not hide each other's loads.
const GATED_CTAS: u32 = 2;

/// Codes of a product's input that the stage before writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prepared {
    pub(crate) rounding: Rounding,
    pub(crate) at: RoundedRows,
    /// Maximum number of rows that are rounded.
    most: u32,
    /// Whether decode attention writes them, which it does only if no sequence prefills.
    by_decode: bool,
}

impl Prepared {
    /// Returns whether the codes of so many rows are written in a step.
    pub(crate) fn is_written(&self, rows: u32, shape: &StepShape) -> bool {
        rows <= self.most && !(self.by_decode && shape.tiles > 0)
    }
}

/// A norm or a gated activation that also writes its output rounded, for few rows.
#[derive(Clone, Debug)]
pub(crate) struct RoundedStage {
    /// The op alone.
    plain: Stage,
    /// Kernel of both.
    kernel: KernelId,
    prepared: Prepared,
    /// The activation, as the product before may apply it.
    gate: Option<Gate>,
}

/// A gated activation that a product may apply.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    kernel: KernelId,
    /// Number of CTAs.
    ctas: u32,
    /// Address of the output.
    out: u64,
    /// The activation and its rounded output.
    params: QuantGluParams,
}

/// Returns whether decode attention rounds its output: whole blocks of each head.
fn rounds_by_head(heads: HeadShape) -> bool {
    heads.values == Values::Own && heads.value_dim().is_multiple_of(32)
}

impl Lowering<'_> {
    /// Lets stages write the codes of products that follow them, and products apply gated activations.
    pub(crate) fn join_rounding(&mut self, stages: &mut [Stage], scratch: &Scratch) {
        let ops = self.program.forward_ops();
        for at in 1..stages.len() {
            let (before, after) = stages.split_at_mut(at);
            let (Some(stage), Some(Stage::Product { product, rows })) = (before.last_mut(), after.first_mut()) else {
                continue;
            };
            let Some((rounding, most)) = product.rounding_of_few() else { continue };
            let prepared = Prepared { rounding, at: scratch.rounded, most, by_decode: false };
            let input = product.parts[0].params.input;
            product.prepared = self.prepare(stage, &ops[at - 1], (input, *rows), prepared, scratch);
        }
        for at in 2..stages.len() {
            if let [.., Stage::Product { product, rows }, Stage::Rounded(rounded)] = &mut stages[..at]
                && let Op::Glu(op) = &ops[at - 1]
                && !is_read(&self.program.ops[at..], op.input)
            {
                let gate = rounded.gate(product, *rows, op.kind, (self.setting.dtype, &mut self.instances));
                product.gate = gate.clone();
                rounded.gate = gate;
            }
        }
    }

    /// Lets a stage write the codes of its output, if that is the input. Returns where they are.
    fn prepare(
        &mut self,
        stage: &mut Stage,
        op: &Op,
        (input, rows): (u64, Rows),
        prepared: Prepared,
        scratch: &Scratch,
    ) -> Option<Prepared> {
        let dtype = self.setting.dtype;
        let (prepared, instance) = match (&mut *stage, op) {
            (Stage::Norm { params, rows: of, .. }, Op::Norm(op)) if params.out == input && *of == rows => {
                (prepared, for_cols(manifest::norm_codes(dtype, norm_mean(op.kind)), params.cols as usize))
            }
            // A product that applies the activation reads other codes at the same time.
            (Stage::Glu { params, rows: of, .. }, Op::Glu(op)) if params.out == input && *of == rows => {
                (Prepared { at: scratch.gated, ..prepared }, manifest::glu_codes(dtype, activation(op.kind)))
            }
            (Stage::Attention { attention: Attention::Planned { params, codes, .. }, .. }, Op::PagedAttention(op))
                if params.attention.out == input && rows == Rows::Tokens && rounds_by_head(op.heads) =>
            {
                let prepared = Prepared { by_decode: true, ..prepared };
                *codes = Some(prepared);
                return Some(prepared);
            }
            _ => return None,
        };
        let kernel = self.instances.id(instance);
        *stage = Stage::Rounded(Box::new(RoundedStage { plain: stage.clone(), kernel, prepared, gate: None }));
        Some(prepared)
    }
}

impl RoundedStage {
    /// Returns what a product needs to apply the activation, if it can.
    fn gate(
        &self,
        product: &Product,
        rows: Rows,
        kind: GluKind,
        (dtype, instances): (Dtype, &mut Instances),
    ) -> Option<Gate> {
        let (Stage::Glu { params: glu, rows: of, .. }, [part]) = (&self.plain, &product.parts[..]) else { return None };
        let params = &part.params;
        let is_whole = params.out == glu.input && params.n == 2 * glu.cols && params.out_stride == params.n;
        let is_plain = params.add == 0 && params.softcap == 0.0 && rows == *of && glu.cols % GLU_COLUMNS == 0;
        // It reads the codes of its input while it writes those of its output.
        let is_apart = product.prepared.is_none_or(|input| input.at != self.prepared.at);
        let activation = activation(kind);
        let format = part.format_of_few()?;
        if !is_whole || !is_plain || !is_apart || !manifest::has_mmvq_glu(dtype, activation) {
            return None;
        }
        let params = QuantGluParams {
            rounded: self.prepared.at,
            gelu_tanh: u32::from(activation == manifest::Activation::GeluTanh),
            ..QuantGluParams::default()
        };
        let kernel = instances.id(manifest::mmvq_glu(format, dtype));
        Some(Gate { kernel, ctas: glu.cols / GLU_COLUMNS, out: glu.out, params })
    }
}

impl<L: Launcher> Machine<L> {
    /// Launches an op, and the rounding of its output for few rows.
    pub(crate) fn rounded(&self, stage: &RoundedStage, step: &Step<'_>) -> Result<(), BackendError> {
        let rounded = stage.prepared.at;
        match &stage.plain {
            Stage::Norm { params, rows, .. } if stage.prepared.is_written(step.rows(*rows), &step.shape) => {
                let norm = NormParams { rows: step.rows(*rows), ..*params };
                let shared = NormParams::dynamic_shared(norm.cols as usize) as u32;
                let params = NormCodesParams { rounded, norm };
                some(norm.rows, || self.launcher.launch(stage.kernel, norm.grid(), Some(shared), &params))
            }
            Stage::Glu { params, rows, .. } if stage.prepared.is_written(step.rows(*rows), &step.shape) => {
                let glu = GluParams { rows: step.rows(*rows), ..*params };
                if stage.gate.as_ref().is_some_and(|gate| self.applies(gate, glu.rows)) {
                    return Ok(());
                }
                let grid = glu.grid(self.launcher.threads(stage.kernel));
                some(glu.rows, || self.launch(stage.kernel, grid, &GluCodesParams { rounded, glu }))
            }
            plain => self.stage(plain, step),
        }
    }

    /// Returns whether a product applies its activation to so many rows.
    pub(crate) fn applies(&self, gate: &Gate, rows: u32) -> bool {
        rows == 1 && gate.ctas >= GATED_CTAS * self.launcher.processors()
    }

    /// Launches a product that applies its activation. `product` has the parameters of the product alone.
    pub(crate) fn gated_product(&self, gate: &Gate, product: QuantLinearParams) -> Result<(), BackendError> {
        let params = QuantGluParams { product: QuantLinearParams { out: gate.out, ..product }, ..gate.params };
        self.launch(gate.kernel, params.grid(), &params)
    }
}
