//! The rules of the ops of latent attention.

use super::{ProgramBuilder, Values};
use crate::{HeadLinear, LatentPost, Op, ProgramError};

impl ProgramBuilder {
    pub(super) fn latent_post_rules(&self, p: &LatentPost) -> Vec<(&'static str, usize, usize)> {
        vec![
            ("the latent", self.cols(p.kv), p.heads.kv_cols()),
            ("the output", self.cols(p.out), p.heads.q_cols()),
            ("the norm's weight", self.weight_of(p.norm).elements(), p.heads.value_dim()),
        ]
    }

    /// Checks the ops of latent attention, beyond their columns.
    pub(super) fn check_latent(&self, op: &Op) -> Result<(), ProgramError> {
        match op {
            Op::HeadLinear(l) => self.check_head_linear(op, l),
            Op::LatentPost(p) => self.check_latent_post(op, p),
            _ => Ok(()),
        }
    }

    fn check_head_linear(&self, op: &Op, l: &HeadLinear) -> Result<(), ProgramError> {
        if l.input == l.out {
            return Err(self.invalid(op, "the output is the input".into()));
        }
        let weight = self.weight_of(l.weight);
        for (what, cols, least) in
            [("input", self.cols(l.input), weight.cols), ("output", self.cols(l.out), weight.rows / l.heads.max(1))]
        {
            if l.heads == 0 || !cols.is_multiple_of(l.heads) || cols / l.heads < least {
                let reason = format!("an {what} of {cols} columns for {} heads of at least {least}", l.heads);
                return Err(self.invalid(op, reason));
            }
        }
        self.check_slabs(op, l.weight, l.heads)
    }

    fn check_latent_post(&self, op: &Op, p: &LatentPost) -> Result<(), ProgramError> {
        if [p.q, p.kv].contains(&p.out) {
            return Err(self.invalid(op, "the output is an input of other columns".into()));
        }
        let Values::Prefix(rank) = p.heads.values else {
            return Err(self.invalid(op, "values that are no part of the keys".into()));
        };
        if p.heads.kv != 1 || rank == 0 || rank >= p.heads.dim {
            return Err(self.invalid(op, format!("{:?} is no latent that all heads share", p.heads)));
        }
        if p.rope.rotary_dim() != p.rotated() {
            let (rotary, rest) = (p.rope.rotary_dim(), p.rotated());
            return Err(
                self.invalid(op, format!("a rotary embedding of {rotary} elements beside a latent, not {rest}"))
            );
        }
        let cols = self.cols(p.q);
        if p.heads.q == 0 || !cols.is_multiple_of(p.heads.q) || cols / p.heads.q < p.rotated() {
            return Err(self.invalid(op, format!("q has {cols} columns for {} heads", p.heads.q)));
        }
        Ok(())
    }
}
