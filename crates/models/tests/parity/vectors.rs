//! Compares the vectors of texts with those that PyTorch computed: reductions, the products after them, and classifiers.

use octavo_backend_candle::CandleBackend;
use octavo_backend_cpu::{CpuBackend, CpuConfig};
use octavo_models::{Checkpoint, build_program};
use octavo_ops::testing::in_each_group;
use octavo_ops::{Backend, StepBatch};
use safetensors::SafeTensors;

use crate::support::{instruction_sets, relative_difference, testdata, words};

const BLOCK: usize = 16;
const TEXTS: usize = 3;

/// Maximum difference from PyTorch's numbers, relative to the largest of a checkpoint.
const TOLERANCE: f32 = 2e-5;
/// The same of the CPU backend, which stores keys and values in bf16.
const CPU_TOLERANCE: f32 = 0.03;

struct Text {
    ids: Vec<u32>,
    types: Vec<u32>,
    vector: Vec<f32>,
    /// Vectors of the tokens; empty for a classifier.
    rows: Vec<f32>,
}

fn texts(name: &str) -> Vec<Text> {
    let bytes = std::fs::read(testdata(name).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let text = |n: usize| {
        let rows = format!("{n}.rows");
        Text {
            ids: words(&file, &format!("{n}.ids"), u32::from_le_bytes),
            types: words(&file, &format!("{n}.types"), u32::from_le_bytes),
            vector: words(&file, &format!("{n}.vector"), f32::from_le_bytes),
            rows: file.tensor(&rows).map_or(vec![], |_| words(&file, &rows, f32::from_le_bytes)),
        }
    };
    (0..TEXTS).map(text).collect()
}

/// Returns the vectors of all texts in one step, or those of all their tokens.
fn run(backend: &mut dyn Backend, checkpoint: &Checkpoint, texts: &[Text], tokens: bool) -> Vec<f32> {
    let program = build_program(checkpoint).unwrap();
    backend.load(&program, checkpoint, &mut |_| {}).unwrap();
    let mut batch = StepBatch { query_start: vec![0], ..StepBatch::default() };
    for (slot, text) in texts.iter().enumerate() {
        let (start, len) = (batch.token_ids.len() as u32, text.ids.len() as u32);
        batch.token_ids.extend(&text.ids);
        batch.positions.extend(0..len);
        batch.query_start.push(start + len);
        batch.seq_lens.push(len);
        batch.seats.push(slot as u32);
        let pooled = if tokens { start..start + len } else { start + len - 1..start + len };
        if program.reduces_rows() {
            batch.pooled_lens.extend(pooled.clone().map(|_| if tokens { 1 } else { len }));
        }
        if program.token_types() > 0 {
            batch.token_types.extend(&text.types);
        }
        batch.pooled_rows.extend(pooled);
    }
    let mut step = StepBatch::default();
    let blocks = batch.in_own_blocks(BLOCK, &mut step);
    let groups = program.kv_groups.len();
    (batch.slot_mapping, batch.block_tables) = (step.slot_mapping, step.block_tables);
    in_each_group(&mut batch, groups, blocks, BLOCK);
    backend.allocate_kv(BLOCK, blocks * groups).unwrap();
    backend.forward(&batch).unwrap();
    let mut out = Vec::new();
    backend.embeddings(&mut out).unwrap();
    out
}

fn check(name: &str) {
    let texts = texts(name);
    let checkpoint = Checkpoint::open(&testdata(name)).unwrap();
    let mut backends: Vec<(String, Box<dyn Backend>, f32)> =
        vec![("candle".into(), Box::new(CandleBackend::new()), TOLERANCE)];
    for isa in instruction_sets() {
        let backend = CpuBackend::new(CpuConfig { isa: Some(isa), ..CpuConfig::default() }).unwrap();
        backends.push((isa.to_string(), Box::new(backend), CPU_TOLERANCE));
    }
    for (backend_name, mut backend, tolerance) in backends {
        for tokens in [false, true] {
            let expected: Vec<f32> =
                texts.iter().flat_map(|text| if tokens { &text.rows } else { &text.vector }).copied().collect();
            if expected.is_empty() {
                continue;
            }
            let found = run(&mut *backend, &checkpoint, &texts, tokens);
            let difference = relative_difference(&found, &expected);
            let what = if tokens { "tokens" } else { "texts" };
            println!("{name} on {backend_name}, {what}: largest difference {difference:.1e} of the largest number");
            assert!(difference <= tolerance, "{name} on {backend_name}, {what}: {difference}");
        }
    }
}

macro_rules! golden_tests {
    ($($test:ident: $name:literal;)*) => {
        $(
            #[test]
            fn $test() {
                check($name);
            }
        )*
    };
}

golden_tests! {
    bert_classifier: "bert-classifier";
    bert_sentence: "bert-sentence";
    xlm_roberta: "xlm-roberta";
    modernbert: "modernbert";
    modernbert_classifier: "modernbert-classifier";
    qwen3_embedding: "qwen3-embedding";
    qwen3_classifier: "qwen3-classifier";
    bert_reranker: "bert-reranker";
}
