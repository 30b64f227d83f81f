//! Loading, memory and errors.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may panic, as it may")]

use std::borrow::Cow;

use octavo_backend_candle::CandleBackend;
use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow};
use octavo_ops::testing::{MemoryWeights, PagedBatches, TestRng, TinyModel};
use octavo_ops::{Backend, BackendError, Op, Program, StepBatch, StorageType, TensorData, WeightError};

fn tiny() -> (Program, MemoryWeights) {
    TinyModel::default().build().unwrap()
}

fn loaded() -> (CandleBackend, Program) {
    let (program, weights) = tiny();
    let mut backend = CandleBackend::new();
    backend.load(&program, &weights, &mut |_| {}).unwrap();
    (backend, program)
}

fn first_batch(tokens: usize) -> StepBatch {
    let mut batches = PagedBatches::new(16, 1, 8, &mut TestRng(3));
    let sequence = batches.add(TestRng(4).tokens(tokens, 50));
    batches.step(&[(sequence, tokens)])
}

fn load_error(spoil: impl Fn(&mut MemoryWeights)) -> String {
    let (program, mut weights) = tiny();
    spoil(&mut weights);
    CandleBackend::new().load(&program, &weights, &mut |_| {}).unwrap_err().to_string()
}

#[test]
fn a_checkpoint_that_does_not_fit_is_an_error() {
    assert_eq!(load_error(|w| drop(w.tensors.remove("last.0"))), "the checkpoint has no tensor 'last.0'");
    let edit = |f: fn(&mut TensorData<'static>)| move |w: &mut MemoryWeights| f(w.tensors.get_mut("last.0").unwrap());
    let prefix = "tensor 'last.0' of the checkpoint is unusable: ";
    let message = load_error(edit(|t| t.storage = StorageType::F16));
    assert_eq!(message, format!("{prefix}it is stored as F16, expected F32"));
    let message = load_error(edit(|t| t.shape = vec![12, 48]));
    assert_eq!(message, format!("{prefix}its shape is [12, 48], expected [24, 24]"));
    let message = load_error(edit(|t| t.shape = vec![usize::MAX, 24]));
    assert!(message.starts_with(&format!("{prefix}its shape is")), "{message}");
    let message = load_error(edit(|t| t.bytes = Cow::Owned(vec![0; 100])));
    assert_eq!(message, format!("{prefix}it holds 100 bytes, its shape needs 2304"));
}

#[test]
fn progress_counts_the_checkpoint_s_bytes() {
    let (program, weights) = tiny();
    let mut seen = Vec::new();
    let mut backend = CandleBackend::new();
    assert_eq!(backend.weight_bytes(), 0);
    backend.load(&program, &weights, &mut |bytes| seen.push(bytes)).unwrap();
    assert!(seen.is_sorted());
    assert_eq!(seen.last(), Some(&program.weight_bytes()));
    assert_eq!(backend.weight_bytes(), program.weight_bytes(), "all is F32");
}

#[test]
fn a_kv_cache_that_cannot_be_is_an_error() {
    let (mut backend, program) = loaded();
    let group = &program.kv_groups[0];
    assert_eq!(backend.kv_block_bytes(group, 16), 2 * 2 * 2 * 8 * 16 * 4);
    let error = backend.allocate_kv(32, &[10]).unwrap_err();
    assert_eq!(error.to_string(), "the candle backend does not support KV blocks of 32 tokens; it supports [16]");
    for blocks in [1 << 45, usize::MAX] {
        let error = backend.allocate_kv(16, &[blocks]).unwrap_err();
        assert!(matches!(error, BackendError::OutOfMemory { .. }), "{error}");
    }
    assert!(backend.allocate_kv(16, &[4, 4]).is_err(), "two counts for one group");
    assert!(CandleBackend::new().allocate_kv(16, &[4]).is_err(), "no model");
    backend.allocate_kv(16, &[8]).unwrap();
    backend.forward(&first_batch(20)).unwrap();
}

#[test]
fn a_weight_that_does_not_fit_is_an_error() {
    let mut b = octavo_ops::ProgramBuilder::new("large", 1 << 30);
    let x = b.buffer("x", octavo_ops::Rows::Sampled, 1 << 28);
    let y = b.buffer("y", octavo_ops::Rows::Tokens, 1 << 28);
    let logits = b.buffer("logits", octavo_ops::Rows::Sampled, 1 << 30);
    let part = octavo_ops::WeightPart { tensor: "t".into(), rows: 1 << 30, storage: StorageType::F32 };
    let table = b.weight("table", 1 << 28, vec![part]);
    b.push(Op::Embed { table, scale: 1.0, out: y });
    b.push(Op::GatherRows { input: y, out: x });
    let head = octavo_ops::Logits { weight: table, input: x, out: logits, scale: 1.0, softcap: None };
    b.push(Op::Logits(head));
    b.push(Op::Sample { logits });
    let error = CandleBackend::new().load(&b.finish().unwrap(), &MemoryWeights::default(), &mut |_| {}).unwrap_err();
    assert_eq!(error.to_string(), "not enough memory for weight 'table': 1152921504606846976 bytes are needed");
}

#[test]
fn a_malformed_batch_is_an_error_and_the_next_one_runs() {
    let (mut backend, _) = loaded();
    assert!(backend.forward(&first_batch(20)).is_err(), "no KV cache yet");
    backend.allocate_kv(16, &[8]).unwrap();
    type Spoil = fn(&mut StepBatch);
    let spoilt: [(&str, Spoil); 9] = [
        ("positions", |b| b.positions.truncate(19)),
        ("a token id beyond the vocabulary", |b| b.token_ids[3] = 50),
        ("a slot beyond the KV cache", |b| b.slot_mapping[0][3] = 128),
        ("a block beyond the KV cache", |b| b.block_tables[0].ids[1] = 8),
        ("a position beyond its table", |b| b.positions[3] = 32),
        ("a sampled row", |b| b.sampled_rows[0] = 20),
        ("a pooled row", |b| b.pooled_rows[0] = 20),
        ("the last query start", |b| b.query_start[1] = 19),
        ("the number of KV groups", |b| b.slot_mapping.clear()),
    ];
    for (what, spoil) in spoilt {
        let mut batch = first_batch(20);
        spoil(&mut batch);
        let message = backend.forward(&batch).unwrap_err().to_string();
        assert_eq!(message, format!("the candle backend failed: the batch is malformed: {what}"));
    }
    backend.forward(&first_batch(20)).unwrap();
    assert_eq!(backend.logits().unwrap().len(), 20 * 50);
}

#[test]
fn a_step_may_sample_nothing() {
    let (mut backend, _) = loaded();
    backend.allocate_kv(16, &[8]).unwrap();
    let mut batch = first_batch(20);
    batch.sampled_rows.clear();
    backend.forward(&batch).unwrap();
    assert_eq!(backend.logits().unwrap().len(), 0);
    let mut out = Vec::new();
    backend.sample(&SampleBatch { rows: &[] }, &mut out).unwrap();
    assert_eq!(out.len(), 0);
    let params = SampleParams::default();
    let row = SampleRow::new(&params);
    let message = backend.sample(&SampleBatch { rows: &[row] }, &mut out).unwrap_err().to_string();
    assert_eq!(message, "the candle backend failed: 1 rows to sample, but the forward pass left 0");
}

#[test]
fn hidden_states_need_no_head() {
    let (mut backend, program) = loaded();
    backend.allocate_kv(16, &[8]).unwrap();
    let mut batch = first_batch(20);
    backend.forward(&batch).unwrap();
    let mut all = Vec::new();
    backend.embeddings(&mut all).unwrap();
    batch.sampled_rows.clear();
    batch.pooled_rows = vec![3, 19];
    backend.forward(&batch).unwrap();
    let mut some = Vec::new();
    backend.embeddings(&mut some).unwrap();
    let width = program.buffers[program.embedding().unwrap().0].cols;
    assert_eq!(some, [&all[3 * width..4 * width], &all[19 * width..]].concat());
    assert_eq!(backend.logits().unwrap().len(), 0);
    batch.pooled_rows.clear();
    backend.forward(&batch).unwrap();
    backend.embeddings(&mut some).unwrap();
    assert_eq!(some.len(), 0, "those of an earlier step are gone");
}

#[test]
fn copied_blocks_hold_the_same_keys() {
    let (mut backend, program) = loaded();
    backend.allocate_kv(16, &[40]).unwrap();
    let mut batches = PagedBatches::new(16, 1, 8, &mut TestRng(3));
    let sequence = batches.add(TestRng(4).tokens(33, 50));
    backend.forward(&batches.step(&[(sequence, 32)])).unwrap();
    let mut last = batches.step(&[(sequence, 1)]);
    backend.forward(&last).unwrap();
    let expected = backend.logits().unwrap();
    let pairs: Vec<_> = last.block_tables[0].ids.iter().map(|&id| (id, id + 20)).collect();
    backend.copy_blocks(0, &pairs).unwrap();
    // The copies serve as well as the originals, which are then overwritten.
    let mut other = batches.clone();
    let scribble = other.add_sharing(sequence, TestRng(9).tokens(33, 50));
    let mut overwrite = other.step(&[(scribble, 33)]);
    overwrite.block_tables[0] = last.block_tables[0].clone();
    let slot = |p: usize| last.block_tables[0].ids[p / 16] * 16 + p as u32 % 16;
    overwrite.slot_mapping[0] = (0..33).map(slot).collect();
    backend.forward(&overwrite).unwrap();
    last.block_tables[0].ids.iter_mut().for_each(|id| *id += 20);
    last.slot_mapping[0].iter_mut().for_each(|slot| *slot += 20 * 16);
    backend.forward(&last).unwrap();
    assert_eq!(backend.logits().unwrap(), expected);
    assert!(backend.copy_blocks(0, &[(0, 40)]).is_err());
    assert!(backend.copy_blocks(1, &[(0, 1)]).is_err());
    assert_eq!(program.kv_groups.len(), 1);
}

#[test]
fn a_missing_tensor_has_its_own_error() {
    let (program, _) = tiny();
    let error = CandleBackend::new().load(&program, &MemoryWeights::default(), &mut |_| {}).unwrap_err();
    assert!(matches!(error, BackendError::Weight(WeightError::Missing(name)) if name == "embed.0"));
}
