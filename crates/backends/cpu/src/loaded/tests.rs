//! Weights on several NUMA nodes. Threads that are not pinned stand for those of each node.

use std::collections::HashSet;

use octavo_ops::testing::{PagedBatches, TestRng, TinyExperts, TinyLatent, TinyModel};
use octavo_ops::{Backend, HeadShape, StorageType};

use super::*;
use crate::kv::BLOCK;
use crate::pool::{Place, Pool};
use crate::weights::PARTS_READ;
use crate::{CpuBackend, CpuConfig};

/// Number of steps of a test. In each of them, every thread is likely to take some pieces.
const STEPS: usize = 20;

/// Returns a backend with a thread for each of some nodes, and so much memory for weights.
fn backend(nodes: &[usize], copies_bytes: u64) -> CpuBackend {
    let places: Vec<Place> = nodes.iter().map(|&node| Place { node, processor: None }).collect();
    CpuBackend::on(CpuConfig { copies_bytes, ..CpuConfig::default() }, Pool::on(&places).unwrap()).unwrap()
}

/// Loads a model.
fn load(backend: &mut CpuBackend, model: &TinyModel) -> Program {
    let (program, source) = model.build().unwrap();
    backend.load(&program, &source, &mut |_| {}).unwrap();
    program
}

/// Runs a text in steps of two tokens and returns the bits of its logits.
fn logits(backend: &mut CpuBackend, program: &Program) -> Vec<u32> {
    let (groups, blocks) = (program.kv_groups.len(), STEPS.div_ceil(BLOCK) * 2 + 1);
    backend.allocate_kv(BLOCK, blocks * groups).unwrap();
    let mut batches = PagedBatches::for_program(program, BLOCK, blocks * groups, &mut TestRng(1));
    let text = batches.add(TestRng(2).tokens(2 * STEPS, program.vocab_size));
    let mut bits = Vec::new();
    for _ in 0..STEPS {
        backend.forward(&batches.step(&[(text, 2)])).unwrap();
        bits.extend(backend.logits().unwrap().into_iter().map(f32::to_bits));
    }
    bits
}

fn models() -> [TinyModel; 3] {
    let dense = TinyModel {
        hidden: 256,
        inner: 512,
        heads: HeadShape::new(4, 2, 64),
        storage: StorageType::Q4_1,
        ..TinyModel::default()
    };
    let latent = TinyLatent { rank: 40, rotated: 8, content: 12, value: 12, query_rank: None };
    [
        TinyModel { experts: Some(TinyExperts::default()), ..TinyModel::default() },
        latent.model(20, TinyModel { layers: vec![0], ..TinyModel::default() }),
        dense,
    ]
}

/// Returns the addresses of the parts of a copy.
fn addresses(copy: &[Loaded]) -> HashSet<usize> {
    let parts = copy.iter().flat_map(Loaded::matrices).flat_map(|matrix| &matrix.parts);
    parts.map(|part| part.stored().bytes.as_ptr() as usize).collect()
}

#[test]
fn each_node_reads_its_own_copy_of_the_same_weights() {
    for model in models() {
        let mut one = backend(&[0, 0, 0], 0);
        let program = load(&mut one, &model);
        let expected = logits(&mut one, &program);
        let mut two = backend(&[0, 1, 1], u64::MAX);
        load(&mut two, &model);
        assert_eq!(two.weight_bytes(), 2 * one.weight_bytes());
        assert_eq!(one.weights().unwrap().0.len(), 1);
        let copies: Vec<_> = two.weights().unwrap().0.iter().map(|copy| addresses(copy)).collect();
        assert!(copies.len() == 2 && copies[0].is_disjoint(&copies[1]));

        two.threads_do(&|_, _| PARTS_READ.with_borrow_mut(Vec::clear));
        assert_eq!(logits(&mut two, &program), expected);
        two.threads_do(&|worker, weights| {
            assert_eq!(addresses(weights.near(worker)), copies[worker.node()]);
            let read = PARTS_READ.take();
            assert!(read.iter().all(|part| copies[worker.node()].contains(part)), "node {}", worker.node());
        });
    }
}

#[test]
fn there_is_one_copy_if_two_do_not_fit() {
    let model = &models()[0];
    let mut backend = backend(&[0, 1], 0);
    let program = load(&mut backend, model);
    let each = matrix_bytes(&program, WeightDtype::default());
    assert!(each > 0 && each <= backend.weight_bytes());
    for (bytes, copies) in [(2 * each - 1, 1), (2 * each, 2)] {
        let mut backend = self::backend(&[0, 1], bytes);
        load(&mut backend, model);
        assert_eq!(backend.weights().unwrap().0.len(), copies, "{bytes} bytes");
    }
}
