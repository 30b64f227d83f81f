//! The rules of a program: what its builder checks of each op and of the whole.

use super::{Buffer, HeadShape, KvGroup, KvScales, ProgramBuilder, ProgramKind, Rows, Values, Weight, WeightId};
use crate::{Act, EmbedIds, Glu, GluKind, KvPlace, Linear, Lora, LoraInput, Op, ProgramError, QkvPost, Rope};

impl ProgramBuilder {
    /// Checks that the program has the result of its kind.
    pub(super) fn check_end(&self) -> Result<(), ProgramError> {
        let has_result = match self.program.kind {
            ProgramKind::Decoder => matches!(self.program.ops.last(), Some(Op::Sample { .. })),
            ProgramKind::Encoder => {
                let stores = |op: &Op| matches!(op, Op::StoreRows { .. });
                self.program.ops.iter().any(stores) || self.program.embedding().is_some()
            }
            ProgramKind::Embedder => self.program.embedding().is_some(),
        };
        let rule = match self.program.kind {
            ProgramKind::Decoder => "a decoder program ends with Sample",
            ProgramKind::Encoder => "an encoder program stores rows or returns hidden states",
            ProgramKind::Embedder => "an embedder program returns hidden states",
        };
        if has_result { Ok(()) } else { Err(ProgramError::Invalid(rule.into())) }
    }

    /// Checks an op against the ops before it.
    pub(super) fn check(&self, op: &Op) -> Result<(), ProgramError> {
        let index = self.program.ops.len();
        for input in op.inputs() {
            if !self.written[input.0] {
                let buffer = self.program.buffers[input.0].name.clone();
                return Err(ProgramError::ReadBeforeWrite { op: index, name: op.name(), buffer });
            }
        }
        for (what, found, expected) in self.column_rules(op) {
            if found != expected {
                return Err(ProgramError::Shape { op: index, name: op.name(), what: what.into(), found, expected });
            }
        }
        self.check_elements(op)?;
        self.check_kind(op)?;
        self.check_activation(op)?;
        self.check_experts(op)?;
        self.check_latent(op)?;
        self.check_rows(op)?;
        self.check_order(op)?;
        self.check_heads(op)
    }

    pub(super) fn weight_of(&self, id: WeightId) -> &Weight {
        &self.program.weights[id.0]
    }

    /// Returns `(what, found, expected)` for every pair of column counts that must agree in an op.
    fn column_rules(&self, op: &Op) -> Vec<(&'static str, usize, usize)> {
        match op {
            Op::Embed(e) => {
                let mut rules = vec![("the output", self.cols(e.out), self.weight_of(e.table).cols)];
                if e.ids == EmbedIds::Tokens {
                    rules.push(("the table's rows", self.weight_of(e.table).rows, self.program.vocab_size));
                }
                rules
            }
            Op::Norm(n) => {
                let cols = self.cols(n.input);
                let elements = |id| self.weight_of(id).elements();
                let mut rules = vec![("the weight", elements(n.weight), cols), ("the output", self.cols(n.out), cols)];
                rules.extend(n.add.map(|r| ("the residual", self.cols(r.buffer()), cols)));
                rules.extend(n.bias.map(|b| ("the bias", elements(b), cols)));
                rules
            }
            Op::Patches { .. } | Op::StoreRows { .. } | Op::InjectRows(_) | Op::HeadLinear(_) => vec![],
            Op::LatentPost(p) => self.latent_post_rules(p),
            Op::EmbedTaps(e) => vec![("the output", self.cols(e.out), self.weight_of(e.table).cols)],
            Op::Linear(l) => self.linear_rules(l),
            Op::Lora(l) => vec![("the site", self.program.sites.len().min(l.site.0 + 1), l.site.0 + 1)],
            Op::QkvPost(q) => vec![
                ("the input", self.cols(q.input), q.heads.qkv_cols()),
                ("the output", self.cols(q.out), q.heads.q_cols()),
            ],
            Op::PagedAttention(a) => {
                let mut rules =
                    vec![("q", self.cols(a.q), a.heads.q_cols()), ("the output", self.cols(a.out), a.heads.out_cols())];
                rules.extend(a.sinks.map(|id| ("the sinks", self.weight_of(id).elements(), a.heads.q)));
                rules
            }
            Op::SegmentAttention(a) => {
                vec![("q", self.cols(a.q), a.heads.q_cols()), ("the output", self.cols(a.out), a.heads.q_cols())]
            }
            Op::Glu(g) => vec![("the input", self.cols(g.input), self.cols(g.out).saturating_mul(2))],
            Op::Act(a) => vec![("the output", self.cols(a.out), self.cols(a.input))],
            Op::GateRows(g) => vec![("the gate", self.cols(g.gate), 1)],
            Op::Route(r) => self.route_rules(r),
            Op::ExpertLinear(l) => self.expert_linear_rules(l),
            Op::ExpertSum(s) => {
                let cols = self.cols(s.input);
                let mut rules = vec![("the output", self.cols(s.out), cols)];
                rules.extend(s.add.map(|b| ("the addend", self.cols(b), cols)));
                rules
            }
            Op::MergeRows(m) => {
                vec![("the output", self.cols(m.out), m.kind.cols(self.cols(m.input), self.program.merge))]
            }
            Op::GatherRows { input, out } => vec![("the output", self.cols(*out), self.cols(*input))],
            Op::GatherColumns(g) => vec![
                ("the order", self.weight_of(g.order).elements(), self.cols(g.out)),
                ("the output", self.cols(g.out), self.cols(g.input)),
            ],
            Op::PoolRows(p) => vec![("the output", self.cols(p.out), self.cols(p.input))],
            Op::Logits(l) => vec![
                ("the input", self.cols(l.input), self.weight_of(l.weight).cols),
                ("the weight's rows", self.weight_of(l.weight).rows, self.program.vocab_size),
                ("the output", self.cols(l.out), self.program.vocab_size),
            ],
            Op::Sample { logits } => vec![("the logits", self.cols(*logits), self.program.vocab_size)],
        }
    }

    fn linear_rules(&self, l: &Linear) -> Vec<(&'static str, usize, usize)> {
        let weight = self.weight_of(l.weight);
        let mut rules =
            vec![("the input", self.cols(l.input), weight.cols), ("the output", self.cols(l.out), weight.rows)];
        rules.extend(l.bias.map(|b| ("the bias", self.weight_of(b).elements(), weight.rows)));
        rules.extend(l.add.map(|b| ("the epilogue's addend", self.cols(b), weight.rows)));
        rules
    }

    /// Checks that only an encoder does without the cache, and only a decoder predicts tokens.
    fn check_kind(&self, op: &Op) -> Result<(), ProgramError> {
        let kinds: &[ProgramKind] = match op {
            Op::PagedAttention(_) | Op::LatentPost(_) | Op::QkvPost(QkvPost { kv: KvPlace::Cache { .. }, .. }) => {
                &[ProgramKind::Decoder, ProgramKind::Embedder]
            }
            Op::InjectRows(_) | Op::Logits(_) | Op::Sample { .. } => &[ProgramKind::Decoder],
            Op::SegmentAttention(_)
            | Op::QkvPost(QkvPost { kv: KvPlace::Step, .. })
            | Op::Patches { .. }
            | Op::EmbedTaps(_)
            | Op::MergeRows(_)
            | Op::StoreRows { .. } => &[ProgramKind::Encoder],
            _ => return Ok(()),
        };
        if kinds.contains(&self.program.kind) {
            return Ok(());
        }
        let name = match self.program.kind {
            ProgramKind::Decoder => "a decoder",
            ProgramKind::Encoder => "an encoder",
            ProgramKind::Embedder => "an embedder",
        };
        Err(ProgramError::Invalid(format!("op {} ({}) has no meaning in {name}", self.program.ops.len(), op.name())))
    }

    /// Checks the parameters of an activation.
    fn check_activation(&self, op: &Op) -> Result<(), ProgramError> {
        let reason = match op {
            Op::Act(Act { kind: GluKind::ClampedSwiglu { .. }, .. }) => "ClampedSwiglu needs a gate".into(),
            Op::Glu(Glu { kind: GluKind::Tanh, .. }) => "Tanh is no activation of a gate".into(),
            Op::Glu(Glu { kind: GluKind::ClampedSwiglu { alpha, limit }, .. })
                if !alpha.is_finite() || limit.is_nan() || *limit <= 0.0 =>
            {
                format!(
                    "the activation has the factor {alpha} and the limit {limit}, expected a number and a positive one"
                )
            }
            _ => return Ok(()),
        };
        Err(ProgramError::Invalid(format!("op {} ({}): {reason}", self.program.ops.len(), op.name())))
    }

    /// Checks that every op keeps the rows of its input, except for the ops that gather or merge rows.
    fn check_rows(&self, op: &Op) -> Result<(), ProgramError> {
        let (from, to) = match op {
            Op::Embed(_)
            | Op::Patches { .. }
            | Op::EmbedTaps(_)
            | Op::InjectRows(_)
            | Op::QkvPost(_)
            | Op::HeadLinear(_)
            | Op::LatentPost(_)
            | Op::PagedAttention(_)
            | Op::SegmentAttention(_) => (Some(Rows::Tokens), Rows::Tokens),
            Op::MergeRows(_) => (Some(Rows::Tokens), Rows::Merged),
            Op::StoreRows { .. } => (Some(Rows::Merged), Rows::Merged),
            Op::GatherRows { out, .. } => match self.program.buffers[out.0].rows {
                Rows::Pooled => (Some(Rows::Tokens), Rows::Pooled),
                Rows::Tokens | Rows::Sampled | Rows::Merged | Rows::Routed(_) => (Some(Rows::Tokens), Rows::Sampled),
            },
            Op::PoolRows(_) => (Some(Rows::Tokens), Rows::Pooled),
            Op::Route(_) => (Some(Rows::Tokens), Rows::Tokens),
            // Their inputs have rows of several kinds, which `check_experts` checks.
            Op::ExpertLinear(op) => (None, self.routed(op.routing)),
            Op::Lora(Lora { input: LoraInput::Experts { routing, .. }, .. }) => (None, self.routed(*routing)),
            Op::ExpertSum(_) => (None, Rows::Tokens),
            Op::Logits(_) | Op::Sample { .. } => (Some(Rows::Sampled), Rows::Sampled),
            Op::Norm(_)
            | Op::Linear(_)
            | Op::Lora(_)
            | Op::Glu(_)
            | Op::Act(_)
            | Op::GateRows(_)
            | Op::GatherColumns(_) => {
                let rows = op.inputs().first().map(|id| self.program.buffers[id.0].rows);
                (rows, rows.unwrap_or(Rows::Tokens))
            }
        };
        let pairs =
            op.inputs().into_iter().map(|id| (id, from)).chain(op.outputs().into_iter().map(|id| (id, Some(to))));
        for (id, expected) in pairs {
            let Buffer { name, rows, .. } = &self.program.buffers[id.0];
            if let Some(expected) = expected.filter(|expected| expected != rows) {
                return Err(ProgramError::Invalid(format!(
                    "op {} ({}): buffer '{name}' has {} rows, expected {}",
                    self.program.ops.len(),
                    op.name(),
                    rows.symbol(),
                    expected.symbol()
                )));
            }
        }
        Ok(())
    }

    /// Checks that nothing follows `Sample` and that attention reads a layer which has been written.
    fn check_order(&self, op: &Op) -> Result<(), ProgramError> {
        if let Some(Op::Sample { .. }) = self.program.ops.last() {
            return Err(ProgramError::Invalid(format!("{} follows Sample, which must be the last op", op.name())));
        }
        let invalid = |reason: String| Err(ProgramError::Invalid(reason));
        match op {
            Op::PagedAttention(a) => {
                let place = KvPlace::Cache { group: a.group, layer: a.layer };
                match self.program.ops.iter().filter_map(Op::written_kv).any(|(written, _)| written == place) {
                    true => Ok(()),
                    false => invalid(format!(
                        "PagedAttention reads KV group {}, layer {} before any op writes it",
                        a.group, a.layer
                    )),
                }
            }
            Op::SegmentAttention(a) => {
                match self.program.ops.iter().rev().find_map(Op::written_kv).map(|(_, heads)| heads) {
                    Some(heads) if heads == a.heads => Ok(()),
                    found => {
                        invalid(format!("SegmentAttention reads keys of {:?}, the last op wrote {found:?}", a.heads))
                    }
                }
            }
            _ => Ok(()),
        }
    }

    fn check_heads(&self, op: &Op) -> Result<(), ProgramError> {
        let (place, heads) = match op {
            Op::QkvPost(_) | Op::LatentPost(_) => match op.written_kv() {
                Some(written) => written,
                None => return Ok(()),
            },
            Op::PagedAttention(a) => (KvPlace::Cache { group: a.group, layer: a.layer }, a.heads),
            Op::SegmentAttention(a) => (KvPlace::Step, a.heads),
            _ => return Ok(()),
        };
        let invalid = |reason: String| {
            let place = match place {
                KvPlace::Cache { group, layer } => format!("KV group {group}, layer {layer}"),
                KvPlace::Step => "the step".into(),
            };
            Err(ProgramError::Invalid(format!("{} of {place}: {reason}", op.name())))
        };
        if let KvPlace::Cache { group, layer } = place {
            let declared = self.program.kv_groups.get(group).and_then(|g| g.layers.get(layer));
            if declared != Some(&heads) {
                return invalid(format!("{heads:?} does not match {declared:?}"));
            }
        }
        if heads.value_dim() == 0
            || heads.value_dim() > heads.dim
            || heads.kv == 0
            || heads.q == 0
            || !heads.q.is_multiple_of(heads.kv)
        {
            return invalid(format!("{heads:?} is not a whole number of query heads for each KV head"));
        }
        let has_own_values = heads.values == Values::Own;
        if !has_own_values && matches!(op, Op::QkvPost(_) | Op::SegmentAttention(_)) {
            return invalid("values that are a part of the keys".into());
        }
        if let Some(reason) = op.rope().and_then(|rope| rope_defect(rope, heads.dim)) {
            return invalid(reason);
        }
        match op {
            Op::QkvPost(q) => self.check_qkv_post(q).or_else(invalid),
            Op::PagedAttention(a) if a.spans && !has_own_values => invalid("spans with latent attention".into()),
            Op::PagedAttention(a) => match (self.program.kv_groups[a.group].window, a.window) {
                (Some(kept), window) if window.is_none_or(|w| w > kept) => {
                    invalid(format!("the group keeps {kept} tokens, the op reads {window:?}"))
                }
                (_, Some(0)) => invalid("a window of no tokens".into()),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn check_qkv_post(&self, op: &QkvPost) -> Result<(), String> {
        let HeadShape { dim, .. } = op.heads;
        if let Some(norm) = &op.norm {
            let widths = [norm.q, norm.k].map(|id| self.weight_of(id).elements());
            let whole = [op.heads.q_cols(), op.heads.kv_cols()];
            if widths != [dim, dim] && widths != whole {
                return Err(format!("norms of {widths:?} elements, expected {dim} each or {whole:?}"));
            }
        }
        Ok(())
    }
}

/// Returns what is wrong with a rotary embedding of heads of `dim` elements.
fn rope_defect(rope: &Rope, dim: usize) -> Option<String> {
    if rope.rotary_dim() > dim || rope.rotary_dim() == 0 {
        return Some(format!("a rotary embedding of {} elements in heads of {dim}", rope.rotary_dim()));
    }
    let (streams, pairs) = (rope.streams.len(), rope.inv_freq.len());
    (streams != 0 && streams != pairs)
        .then(|| format!("a rotary embedding that names the positions of {streams} of its {pairs} pairs"))
}

/// Checks that each layer of a group has scales, or none has.
pub(super) fn check_scales(group: &KvGroup) -> Result<(), ProgramError> {
    let (found, layers) = (group.scales.len(), group.layers.len());
    if found != 0 && found != layers {
        return Err(ProgramError::Invalid(format!("a KV group of {layers} layers with the scales of {found}")));
    }
    for (&KvScales { key, value }, heads) in group.scales.iter().zip(&group.layers) {
        if [key, value].iter().any(|scale| !(scale.is_finite() && *scale > 0.0)) {
            return Err(ProgramError::Invalid(format!("keys and values with the scales {key} and {value}")));
        }
        if heads.values != Values::Own && key != value {
            return Err(ProgramError::Invalid(format!("values with the scale {value}, of keys with the scale {key}")));
        }
    }
    Ok(())
}
