//! Cases of products of few rows that compute the norm of their input or the activation of their output in the same launch.

use octavo_kernels::manifest::{self, Dtype, FUSED_ROWS, FUSED_SHARED, Pairs};
use octavo_kernels::params::{FusedLinearParams, LinearParams};

use super::cases::{Cases, Tables, Work, counted};
use crate::arena::Plan;

/// A product with what is computed around it.
#[derive(Clone, Copy)]
struct Fused {
    what: &'static str,
    /// Number of outputs before the activation.
    n: usize,
    has_norm: bool,
    pairs: Pairs,
}

impl Cases<'_> {
    pub(super) fn fused(&mut self) {
        if self.dtype == Dtype::F32 {
            return;
        }
        let (qkv, gate_up) = (self.bench.heads.qkv_cols(), 2 * self.bench.inner);
        let products = [
            Fused { what: "norm, qkv", n: qkv, has_norm: true, pairs: Pairs::Plain },
            Fused { what: "gate_up, silu", n: gate_up, has_norm: false, pairs: Pairs::Silu },
            Fused { what: "norm, gate_up, silu", n: gate_up, has_norm: true, pairs: Pairs::Silu },
        ];
        for product in products {
            for rows in self.bench.batch_sizes.clone() {
                self.fused_product(product, rows);
            }
        }
    }

    /// Adds a fused product, if there is a kernel for this number of rows and their inputs fit its shared memory.
    fn fused_product(&mut self, product: Fused, rows: usize) {
        let Fused { what, n, has_norm, pairs } = product;
        let (k, size, processors) = (self.bench.hidden, self.size(), self.device.processors);
        let Some(most) = FUSED_ROWS.into_iter().find(|most| rows as u32 <= *most) else { return };
        let cols = if pairs == Pairs::Plain { n } else { n / 2 };
        let norm_bytes = if has_norm { k * size_of::<f32>() } else { 0 };
        let mut plan = Plan::default();
        let [weight, norm, input, out] = [n * k * size, k * size_of::<f32>(), rows * k * size, rows * cols * size]
            .map(|bytes| plan.take(bytes as u64));
        let sizes = LinearParams {
            m: rows as u32,
            n: n as u32,
            k: k as u32,
            out_stride: cols as u32,
            scale: 1.0,
            ..LinearParams::default()
        };
        let sizes = FusedLinearParams { linear: sizes, eps: 1e-6, pairs: pairs as u32, ..FusedLinearParams::default() };
        let shared = sizes.dynamic_shared(most, size);
        if shared > FUSED_SHARED {
            return;
        }
        let bytes = n * k * size + rows * (k + cols) * size + norm_bytes;
        let what = format!("{what} {n}x{k}, {}", counted(rows, "row"));
        let work = Work { what, bytes, flops: 2 * rows * n * k, plan, tables: Tables::default() };
        let instance = manifest::gemv_fused(self.dtype, self.dtype, most);
        self.kernel_with_shared(instance, work, Some(shared as u32), move |at, threads| {
            let [weight, input, out] = [weight, input, out].map(|region| at.data(region));
            let norm_weight = if has_norm { at.data(norm) } else { 0 };
            let params =
                FusedLinearParams { norm_weight, linear: LinearParams { weight, input, out, ..sizes.linear }, ..sizes };
            (params, params.grid(threads, processors))
        });
    }
}
