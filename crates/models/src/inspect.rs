//! The output of `octavo inspect`: a program and its cost.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use octavo_ops::cost::{Cost, ElementBytes, StepShape, op_cost, step_cost};
use octavo_ops::{BufferId, EmbedIds, InjectMode, LoraInput, MergeKind, Op, Program, Residual, WeightId};

use crate::config::{AttentionConfig, ModelConfig, VisionConfig};
use crate::progress::human_bytes;

/// Maximum number of ops in a block when repeated layers are folded.
const MAX_PERIOD: usize = 64;

/// Steps whose cost [`inspect`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InspectOptions {
    /// Number of keys that the decoded token attends to, including its own; at least 1.
    pub context: usize,
    /// Number of tokens of the prefilled prompt.
    pub prompt: usize,
    /// Side in pixels of the image that is encoded; it is rounded down to whole tokens.
    pub image_side: usize,
    /// Element sizes of activations and KV cache.
    pub elements: ElementBytes,
}

impl Default for InspectOptions {
    /// Returns one token at a context of 1024 tokens, a prompt of 512 tokens, an image of 1024 by 1024 pixels, and f32
    /// throughout.
    fn default() -> Self {
        Self { context: 1024, prompt: 512, image_side: 1024, elements: ElementBytes::F32 }
    }
}

/// Returns the program as text: a header, one line per op (repeated layers folded), and the totals of a decode and a
/// prefill.
pub fn inspect(config: &ModelConfig, program: &Program, options: &InspectOptions) -> String {
    let InspectOptions { context, prompt, elements, .. } = *options;
    let decode = PricedStep {
        column: "decode FLOP",
        title: format!("decode of 1 token at {context} of context"),
        shape: StepShape::decode(1, context.max(1)),
    };
    let prefill = PricedStep {
        column: "prefill FLOP",
        title: format!("prefill of {prompt} tokens"),
        shape: StepShape::prefill(prompt),
    };
    header(config, program, options) + &Report { program, elements, steps: vec![decode, prefill] }.text()
}

/// Returns the encoder of a model as text, like [`inspect`]: its totals are those of one image.
pub fn inspect_encoder(config: &VisionConfig, program: &Program, options: &InspectOptions) -> String {
    let InspectOptions { image_side, elements, .. } = *options;
    let tokens = (image_side / (config.patch_size * config.merge_size)).pow(2);
    let row = program.media_columns() as u64 * elements.activation;
    let mut lines = vec![
        format!("encoder        {}", program.name),
        format!("parameters     {}", si(program.parameters())),
        format!("weights        {} ({})", human_bytes(program.weight_bytes()), storage(program)),
        format!(
            "layers         {} of hidden size {}, MLP {}",
            config.layers, config.hidden_size, config.intermediate_size
        ),
        format!("heads          {} of {}", config.heads, config.head_shape().dim),
        format!("patch          {} pixels wide, {} patches a token", config.patch_size, config.merged_patches()),
    ];
    if !config.deepstack_layers.is_empty() {
        lines.push(format!("deepstack      after the layers {:?}", config.deepstack_layers));
    }
    lines.push(format!("media cache    {} a token", human_bytes(row)));
    let encode = PricedStep {
        column: "FLOP",
        title: format!("image of {image_side} by {image_side} pixels, {tokens} tokens"),
        shape: StepShape::encode(&[tokens * config.merged_patches()]),
    };
    lines.join("\n") + "\n\n" + &Report { program, elements, steps: vec![encode] }.text()
}

/// Returns the size of the weights by storage type.
fn storage(program: &Program) -> String {
    let mut by_storage = BTreeMap::new();
    for weight in &program.weights {
        for part in &weight.parts {
            let bytes = part.storage.bytes_for(part.rows * weight.cols).unwrap_or_default() as u64;
            *by_storage.entry(part.storage.name()).or_insert(0u64) += bytes;
        }
    }
    let mut by_storage: Vec<_> = by_storage.into_iter().collect();
    by_storage.sort_by_key(|&(name, bytes)| (std::cmp::Reverse(bytes), name));
    let parts = by_storage.iter().map(|(name, bytes)| format!("{name} {}", human_bytes(*bytes)));
    parts.collect::<Vec<_>>().join(", ")
}

fn header(config: &ModelConfig, program: &Program, options: &InspectOptions) -> String {
    let kv: usize = program.kv_groups.iter().map(octavo_ops::KvGroup::elements_per_token).sum();
    let attention = &config.layers[0].attention;
    let tied = if config.tie_word_embeddings { ", head tied to the embedding" } else { "" };
    let lines = [
        format!("architecture   {} ({})", config.family.name(), config.dtype),
        format!("parameters     {}", si(program.parameters())),
        format!("weights        {} ({})", human_bytes(program.weight_bytes()), storage(program)),
        format!("layers         {} of hidden size {}, {}", config.layers.len(), config.hidden_size, mlps(config)),
        format!("heads          {}{}", heads(attention), window(config)),
        format!("vocabulary     {}{tied}", config.vocab_size),
        format!("context        {} tokens", config.max_position_embeddings),
        format!("KV cache       {} a token", human_bytes(kv as u64 * options.elements.kv)),
    ];
    lines.join("\n") + "\n\n"
}

/// Describes the heads of a layer.
fn heads(attention: &AttentionConfig) -> String {
    let heads = attention.heads;
    match &attention.latent {
        None => format!("{} query, {} key-value, of {}", heads.q, heads.kv, heads.dim),
        Some(latent) => format!(
            "{} of {} and {} rotated, with a latent of {} for all",
            heads.q, latent.content, latent.rotated, latent.rank
        ),
    }
}

/// Describes the MLPs and experts of the layers.
fn mlps(config: &ModelConfig) -> String {
    let with_experts = config.layers.iter().filter(|layer| layer.experts.is_some()).count();
    let dense = config.layers.iter().find(|layer| layer.experts.is_none()).map(|layer| layer.mlp.intermediate_size);
    let sparse = config.layers.iter().find_map(|layer| Some((layer.mlp.intermediate_size, layer.experts.as_ref()?)));
    let Some((size, experts)) = sparse else { return format!("MLP {}", dense.unwrap_or(0)) };
    let shared = experts.shared.map(|shared| format!(" and a shared one of {}", shared.intermediate_size));
    let some = dense.map(|size| format!(" in {with_experts} of {} layers, else MLP {size}", config.layers.len()));
    format!(
        "{} of {} experts of {size}{}{}",
        experts.chosen,
        experts.count,
        shared.unwrap_or_default(),
        some.unwrap_or_default()
    )
}

/// Describes the sliding window of the layers.
fn window(config: &ModelConfig) -> String {
    let Some(longest) = config.sliding_window() else { return String::new() };
    match config.windows().flatten().count() {
        all if all == config.layers.len() => format!(", sliding window {longest}"),
        some => format!(", sliding window {longest} in {some} of {} layers", config.layers.len()),
    }
}

/// An op with its cost.
struct Line {
    name: &'static str,
    shapes: String,
    /// Weights of the op. Layer numbers are replaced by `*`, so that repeated layers are equal.
    weights: String,
    /// Costs by step.
    costs: Vec<Cost>,
    weight_bytes: u64,
}

impl Line {
    fn same(&self, other: &Line) -> bool {
        (self.name, &self.shapes, &self.weights, &self.costs)
            == (other.name, &other.shapes, &other.weights, &other.costs)
    }
}

struct Report<'a> {
    program: &'a Program,
    elements: ElementBytes,
    steps: Vec<PricedStep>,
}

/// A step whose cost is a column of the report.
struct PricedStep {
    column: &'static str,
    title: String,
    shape: StepShape,
}

impl Report<'_> {
    fn text(&self) -> String {
        let mut out = String::new();
        self.ops(&mut out);
        self.totals(&mut out);
        out
    }

    fn ops(&self, out: &mut String) {
        let lines: Vec<Line> = self.program.ops.iter().map(|op| self.line(op)).collect();
        let shapes = lines.iter().map(|l| l.shapes.chars().count()).max().unwrap_or(0);
        let columns: String = self.steps.iter().map(|step| format!("  {:>12}", step.column)).collect();
        let _ = writeln!(out, "{:<18}{:<shapes$}  {:>11}{columns}  weights", "op", "in → out", "bytes");
        let mut at = 0;
        while at < lines.len() {
            let (period, times) = repetition(&lines[at..]);
            if times > 1 {
                let _ = writeln!(out, "{times} times:");
            }
            for line in &lines[at..at + period] {
                let indent = if times > 1 { "  " } else { "" };
                let costs: String = line.costs.iter().map(|cost| format!("  {:>12}", si(cost.flops))).collect();
                let text = format!(
                    "{:<18}{:<shapes$}  {:>11}{costs}  {}",
                    format!("{indent}{}", line.name),
                    line.shapes,
                    if line.weight_bytes == 0 { String::from("-") } else { human_bytes(line.weight_bytes) },
                    line.weights,
                );
                let _ = writeln!(out, "{}", text.trim_end());
            }
            at += period * times;
        }
    }

    fn totals(&self, out: &mut String) {
        for PricedStep { title, shape, .. } in &self.steps {
            let cost = step_cost(self.program, shape, self.elements);
            let _ = write!(
                out,
                "\n{title}\n  {}FLOP, {} moved: weights {}, KV cache {}, activations {}\n",
                si(cost.flops),
                human_bytes(cost.bytes()),
                human_bytes(cost.weight_bytes),
                human_bytes(cost.kv_bytes),
                human_bytes(cost.activation_bytes),
            );
        }
    }

    fn line(&self, op: &Op) -> Line {
        let weights = weights_of(op);
        let describe = |id: &WeightId| {
            let weight = &self.program.weights[id.0];
            let mut storage: Vec<&str> = weight.parts.iter().map(|p| p.storage.name()).collect();
            storage.dedup();
            let name = without_layer(&weight.name);
            format!("{name} [{},{}] {}", weight.rows, weight.cols, storage.join("+"))
        };
        Line {
            name: op.name(),
            shapes: self.shapes(op),
            weights: weights.iter().map(describe).collect::<Vec<_>>().join(", "),
            costs: self.steps.iter().map(|step| op_cost(self.program, op, &step.shape, self.elements)).collect(),
            weight_bytes: weights.iter().map(|id| self.program.weights[id.0].bytes()).sum(),
        }
    }

    fn buffer(&self, id: BufferId) -> String {
        let buffer = &self.program.buffers[id.0];
        format!("{}[{},{}]", buffer.name, buffer.rows.symbol(), buffer.cols)
    }

    fn shapes(&self, op: &Op) -> String {
        let b = |id: &BufferId| self.buffer(*id);
        match op {
            Op::Embed(e) => {
                let ids = match e.ids {
                    EmbedIds::Tokens => "ids",
                    EmbedIds::Positions { .. } => "positions",
                    EmbedIds::Types => "types",
                };
                format!("{ids}[T] → {}{}", if e.add { "+= " } else { "" }, b(&e.out))
            }
            Op::Norm(n) => match n.add {
                Some(Residual::Before(x)) => format!("{} += {} → {}", b(&x), b(&n.input), b(&n.out)),
                Some(Residual::After(x)) if x == n.out => format!("{} → += {}", b(&n.input), b(&x)),
                Some(Residual::After(x)) => format!("{} + {} → {}", b(&x), b(&n.input), b(&n.out)),
                None => format!("{} → {}", b(&n.input), b(&n.out)),
            },
            Op::Linear(l) if l.add == Some(l.out) => format!("{} → += {}", b(&l.input), b(&l.out)),
            Op::Linear(l) => format!("{} → {}", b(&l.input), b(&l.out)),
            Op::Lora(l) => match l.input {
                LoraInput::Rows(input) | LoraInput::Experts { input, .. } => {
                    format!("{} → += {}", b(&input), b(&l.out))
                }
                LoraInput::Tokens => format!("ids[T] → += {}", b(&l.out)),
            },
            Op::Patches { out } => format!("bytes[T] → {}", b(out)),
            Op::EmbedTaps(e) => format!("taps[T] → += {}", b(&e.out)),
            Op::QkvPost(q) => format!("{} → {}, KV", b(&q.input), b(&q.out)),
            Op::HeadLinear(l) => format!("{} → {}", b(&l.input), b(&l.out)),
            Op::LatentPost(p) => format!("{}, {} → {}, KV", b(&p.q), b(&p.kv), b(&p.out)),
            Op::SegmentAttention(a) => {
                let window = a.window.map(|w| format!(" window ±{w}")).unwrap_or_default();
                format!("{}, KV{window} → {}", b(&a.q), b(&a.out))
            }
            Op::Act(a) => format!("{} → {}", b(&a.input), b(&a.out)),
            Op::MergeRows(m) => {
                let kind = if m.kind == MergeKind::Mean { "mean of " } else { "" };
                format!("{kind}{} → {}", b(&m.input), b(&m.out))
            }
            Op::StoreRows { input, column } => format!("{} → media[.,{column}..]", b(input)),
            Op::InjectRows(i) => {
                let sign = if i.mode == InjectMode::Add { "+=" } else { "=" };
                format!("{} {sign} media[.,{}..]", b(&i.out), i.column)
            }
            Op::PagedAttention(a) => {
                let window = a.window.map(|w| format!(" window {w}")).unwrap_or_default();
                let spans = if a.spans { " spans" } else { "" };
                format!("{}, KV{window}{spans} → {}", b(&a.q), b(&a.out))
            }
            Op::Glu(g) => format!("{} → {}", b(&g.input), b(&g.out)),
            Op::GateRows(g) => format!("{} → *= {}", b(&g.gate), b(&g.out)),
            Op::Route(r) => format!("{} → {}", b(&r.input), b(&r.out)),
            Op::ExpertLinear(l) => format!("{} → {}", b(&l.input), b(&l.out)),
            Op::ExpertSum(s) if s.add == Some(s.out) => format!("{} → += {}", b(&s.input), b(&s.out)),
            Op::ExpertSum(s) => format!("{} → {}", b(&s.input), b(&s.out)),
            Op::GatherRows { input, out } => format!("{} → {}", b(input), b(out)),
            Op::GatherColumns(g) => format!("{} → {}", b(&g.input), b(&g.out)),
            Op::PoolRows(p) => format!("{} → {}", b(&p.input), b(&p.out)),
            Op::Logits(l) => format!("{} → {}", b(&l.input), b(&l.out)),
            Op::Sample { logits } => format!("{} → ids[R]", b(logits)),
        }
    }
}

/// Returns the weights that an op reads.
fn weights_of(op: &Op) -> Vec<WeightId> {
    match op {
        Op::Embed(e) => vec![e.table],
        Op::Norm(n) => std::iter::once(n.weight).chain(n.bias).collect(),
        Op::Linear(l) => std::iter::once(l.weight).chain(l.bias).collect(),
        Op::QkvPost(q) => q.norm.iter().flat_map(|n| [n.q, n.k]).collect(),
        Op::HeadLinear(l) => vec![l.weight],
        Op::LatentPost(p) => vec![p.norm],
        Op::Logits(l) => vec![l.weight],
        Op::EmbedTaps(e) => vec![e.table],
        Op::GatherColumns(g) => vec![g.order],
        Op::Route(r) => [Some(r.weight), r.bias, r.correction].into_iter().flatten().collect(),
        Op::ExpertLinear(l) => std::iter::once(l.weight).chain(l.bias).collect(),
        Op::Patches { .. }
        | Op::Lora(_)
        | Op::PagedAttention(_)
        | Op::SegmentAttention(_)
        | Op::Glu(_)
        | Op::Act(_)
        | Op::GateRows(_)
        | Op::ExpertSum(_)
        | Op::MergeRows(_)
        | Op::StoreRows { .. }
        | Op::InjectRows(_)
        | Op::GatherRows { .. }
        | Op::PoolRows(_)
        | Op::Sample { .. } => vec![],
    }
}

/// Replaces the layer: `layers.12.qkv` → `layers.*.qkv`.
fn without_layer(name: &str) -> String {
    let numeric = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    name.split('.').map(|part| if numeric(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
}

/// Finds the block at the start of `lines` whose repetitions cover most lines. Returns its length and the number of
/// repetitions.
fn repetition(lines: &[Line]) -> (usize, usize) {
    let mut best = (1, 1);
    for period in 1..=MAX_PERIOD.min(lines.len() / 2) {
        let block = &lines[..period];
        let equal = |other: &&[Line]| other.len() == period && other.iter().zip(block).all(|(a, b)| a.same(b));
        let times = lines.chunks(period).take_while(equal).count();
        if times > 1 && period * times > best.0 * best.1 {
            best = (period, times);
        }
    }
    best
}

/// A number with an SI prefix and one decimal: `134.5 M`.
fn si(value: u64) -> String {
    const PREFIXES: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let mut scaled = value as f64;
    let mut prefix = 0;
    while scaled >= 999.95 && prefix + 1 < PREFIXES.len() {
        scaled /= 1000.0;
        prefix += 1;
    }
    let number = if prefix == 0 { value.to_string() } else { format!("{scaled:.1}") };
    format!("{number} {}", PREFIXES[prefix]).trim_end().to_owned()
}
