//! The end of a program that returns vectors: the reduction of a text's rows, and the products that follow.

use octavo_ops::{Act, BufferId, Linear, Op, PoolKind, PoolRows, Rows, Slab, WeightPart};

use super::ModelError;
use super::decoder::{Decoder, part};
use super::names::Role;
use crate::config::{HeadLayer, PooledRow, TokenRows, VectorConfig};

impl Decoder<'_> {
    /// Emits `vector = head(pool(norm(x)))`. The norm precedes the reduction of all rows and follows the choice of one,
    /// which is the same.
    pub(super) fn vectors(&mut self, x: BufferId, config: &VectorConfig) -> Result<(), ModelError> {
        let hidden_size = self.config().hidden_size;
        let norm = self.config().final_norm.then(|| self.norm_weights("final_norm", Role::FinalNorm, 0)).transpose()?;
        let pooled = self.builder.buffer("pooled", Rows::Pooled, hidden_size);
        let all = match (norm, config.pooling) {
            (Some(weights), PooledRow::Mean) => {
                self.norm(weights, x, None, self.scratch.normed);
                self.scratch.normed
            }
            _ => x,
        };
        self.builder.push(match config.pooling {
            PooledRow::First => Op::PoolRows(PoolRows { kind: PoolKind::First, input: all, out: pooled }),
            PooledRow::Mean => Op::PoolRows(PoolRows { kind: PoolKind::Mean, input: all, out: pooled }),
            PooledRow::Last => Op::GatherRows { input: all, out: pooled },
        });
        let mut vector = pooled;
        if let Some(weights) = norm.filter(|_| config.pooling != PooledRow::Mean) {
            vector = self.builder.buffer("vector", Rows::Pooled, hidden_size);
            self.norm(weights, pooled, None, vector);
        }
        for (index, layer) in config.head.iter().enumerate() {
            vector = self.head_layer(index, layer, vector)?;
        }
        Ok(())
    }

    /// Emits a product with its activation and its norm. Returns the output.
    fn head_layer(&mut self, index: usize, layer: &HeadLayer, input: BufferId) -> Result<BufferId, ModelError> {
        let HeadLayer { tensor, outputs, .. } = layer;
        let cols = self.builder.buffer_cols(input);
        let parts = match &layer.tokens {
            Some(TokenRows::Each(ids)) => self.token_rows(ids, cols)?,
            Some(TokenRows::Difference(..)) | None => {
                vec![part(self.checkpoint, format!("{tensor}.weight"), *outputs, &[*outputs, cols])?]
            }
        };
        let weight = self.builder.weight(format!("head.{index}"), cols, parts);
        let bias = match layer.bias {
            true => {
                let rows = part(self.checkpoint, format!("{tensor}.bias"), *outputs, &[*outputs])?;
                Some(self.builder.weight(format!("head.{index}_bias"), 1, vec![rows]))
            }
            false => None,
        };
        let out = self.builder.buffer(format!("head.{index}"), Rows::Pooled, *outputs);
        self.builder.push(Op::Linear(Linear { weight, bias, scale: 1.0, input, add: None, out }));
        if let Some(kind) = layer.activation {
            self.builder.push(Op::Act(Act { kind, input: out, out }));
        }
        if let Some(norm) = &layer.norm {
            let names = ["weight", "bias"].map(|kind| format!("{}.{kind}", norm.tensor));
            let weights = self.norm_of(&format!("head.{index}_norm"), names, norm.bias)?;
            self.norm(weights, out, None, out);
        }
        Ok(out)
    }

    /// Returns rows of the language-model head as the parts of a weight.
    fn token_rows(&self, ids: &[usize], cols: usize) -> Result<Vec<WeightPart>, ModelError> {
        let vocab_size = self.config().vocab_size;
        let whole = part(self.checkpoint, self.checkpoint.head_name(), vocab_size, &[vocab_size, cols])?;
        let row = |&index: &usize| {
            let slab = Some(Slab { index, count: vocab_size });
            WeightPart { rows: 1, slab, ..whole.clone() }
        };
        Ok(ids.iter().map(row).collect())
    }
}
