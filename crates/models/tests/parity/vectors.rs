//! Compares the vectors of texts with those that PyTorch computed: reductions, the products after them, and classifiers.

use octavo_models::{Checkpoint, build_program};
use octavo_ops::testing::in_each_group;
use octavo_ops::{Backend, StepBatch};
use safetensors::SafeTensors;

use crate::limits::{DEFECT, Difference, largest_mean, limit};
use crate::support::{Defect, Device, golden_tests, testdata, words};

const BLOCK: usize = 16;
const TEXTS: usize = 3;

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
fn run(
    backend: &mut dyn Backend,
    checkpoint: &Checkpoint,
    texts: &[Text],
    tokens: bool,
    defect: Option<Defect>,
) -> Vec<f32> {
    let mut program = build_program(checkpoint).unwrap();
    if let Some(defect) = defect {
        defect.put_into(&mut program);
    }
    backend.load(&program, checkpoint, &mut |_| {}).unwrap();
    let mut batch = StepBatch { query_start: vec![0], ..StepBatch::default() };
    for (slot, text) in texts.iter().enumerate() {
        let (start, len) = (batch.token_ids.len() as u32, text.ids.len() as u32);
        batch.token_ids.extend(&text.ids);
        // Rotary embeddings depend on distances only, so that one half of the rows stays where it is.
        let shift =
            |position| if defect == Some(Defect::Position) && position >= len / 2 { position + 1 } else { position };
        batch.positions.extend((0..len).map(shift));
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
    for Device { name: device, mut backend, isa } in Device::all() {
        for tokens in [false, true] {
            let expected: Vec<f32> =
                texts.iter().flat_map(|text| if tokens { &text.rows } else { &text.vector }).copied().collect();
            if expected.is_empty() {
                continue;
            }
            let found = run(&mut *backend, &checkpoint, &texts, tokens, None);
            let what = format!("{name} {}", if tokens { "tokens" } else { "texts" });
            Difference::between(&found, &expected).assert_within(limit(&what, isa), &format!("{what} on {device}"));
        }
    }
}

/// Checks that the comparison of the texts' vectors detects each defect on every backend.
fn sees_defects(name: &str) {
    let (texts, what) = (texts(name), format!("{name} texts"));
    let checkpoint = Checkpoint::open(&testdata(name)).unwrap();
    let program = build_program(&checkpoint).unwrap();
    let longest = texts.iter().map(|text| text.ids.len()).max().unwrap();
    let expected: Vec<f32> = texts.iter().flat_map(|text| text.vector.clone()).collect();
    let least = DEFECT * largest_mean(&what);
    for defect in Defect::ALL.into_iter().filter(|&defect| {
        // Learned positions are shifted too.
        defect == Defect::Position || defect.applies(&program, longest)
    }) {
        for Device { name: device, mut backend, .. } in Device::all() {
            let found = run(&mut *backend, &checkpoint, &texts, false, Some(defect));
            let Difference { mean, .. } = Difference::between(&found, &expected);
            println!("{what} on {device}, {defect:?}: {mean:.1e} in the mean, {:.1} limits", DEFECT * mean / least);
            assert!(mean >= least, "{what} on {device}, {defect:?}: {mean} is below {least}");
        }
    }
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
