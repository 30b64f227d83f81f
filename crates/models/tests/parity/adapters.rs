//! Compares models into which adapters were merged with PEFT's merged weights, and with PyTorch's logits for them. Compares
//! models with adapters beside them with PEFT's logits.

use std::path::Path;

use octavo_backend_candle::CandleBackend;
use octavo_backend_cpu::ActivationBits;
use octavo_models::progress::Silent;
use octavo_models::{AdapterTargets, Checkpoint, MergeOptions, Merged, build_program, merge};
use octavo_ops::{AdapterSource, Backend, WeightSource};
use safetensors::SafeTensors;

use crate::dequantise::read;
use crate::golden::{check_checkpoint, check_session};
use crate::limits::{CANDLE, MERGED, on_cpu};
use crate::support::{Golden, Session, checkpoint, cpu, instruction_sets, testdata, words};

/// Every adapter, with its base, and what was merged: changed and unpacked weights.
const ADAPTERS: [(&str, &str, usize, usize); 8] = [
    ("patterns", "qwen3-sharded", 7, 0),
    ("embedding", "qwen2", 3, 0),
    ("qlora", "quantised/nf4", 7, 7),
    // Two layers of q and five experts with three weights each.
    ("expert-modules", "mixtral", 32, 0),
    // Three layers of o, two of which have a router and six experts.
    ("expert-parameters", "qwen3-moe", 41, 0),
    ("expert-columns", "gpt-oss", 32, 0),
    // Gate with up, and down, of two layers are no longer in blocks.
    ("expert-blocks", "gpt-oss-mxfp4", 32, 4),
    // Two layers of o and five experts, whose gate and up are one weight.
    ("expert-rows", "granitemoe", 12, 0),
];

fn merged(adapter: &str, base: &str, output: &Path) -> (Checkpoint, Merged) {
    let (base, adapter) = (testdata(base), testdata(&format!("adapters/{adapter}")));
    let merged = merge(MergeOptions { base: &base, adapter: &adapter, output }, &Silent).unwrap();
    (Checkpoint::open(output).unwrap(), merged)
}

#[test]
fn merged_models_are_those_of_peft() {
    for (name, base, changed, unpacked) in ADAPTERS {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("merged");
        let (checkpoint, merged) = merged(name, base, &output);
        assert_eq!((merged.changed, merged.unpacked), (changed, unpacked), "{name}");
        assert_eq!(checkpoint.quantisation(), None, "{name}");
        assert!(!folder.path().join("merged.partial").exists());
        let file = std::fs::read(testdata(&format!("adapters/{name}/expected.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&file).unwrap();
        for weight in file.names() {
            let expected = words(&file, weight, f32::from_le_bytes);
            let found = checkpoint.tensor(weight).unwrap();
            assert_eq!(found.shape, file.tensor(weight).unwrap().shape(), "{name}, {weight}");
            let found = read(found.storage, &found.bytes, expected.len());
            let largest = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
            // A sum in another order may be rounded to the other of two numbers in 16 bits.
            let ulp = if base == "qwen3-sharded" { 1e-6 } else { 1.0 / 128.0 };
            let far =
                |(found, expected): (&f32, &f32)| (found - expected).abs() > ulp * expected.abs() + 1e-6 * largest;
            assert_eq!(found.iter().zip(&expected).position(far), None, "{name}, {weight}");
            let differing = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
            println!("{name}, {weight}: {differing} of {} weights differ in the last bit", expected.len());
            assert!(base == "qwen3-sharded" || 100 * differing < expected.len(), "{name}, {weight}");
        }
        let tolerance = if base == "qwen3-sharded" { CANDLE } else { MERGED };
        check_checkpoint(&format!("adapters/{name}"), &checkpoint, tolerance);
    }
}

#[test]
fn the_shards_of_the_base_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("merged");
    merged("patterns", "qwen3-sharded", &output);
    let index = std::fs::read_to_string(output.join("model.safetensors.index.json")).unwrap();
    assert!(index.contains("model-00002-of-00002.safetensors") && index.contains("\"total_size\""), "{index}");
    assert!(output.join("model-00001-of-00002.safetensors").exists());
}

#[test]
fn logits_with_an_adapter_are_those_of_peft() {
    for (name, base) in ADAPTERS.map(|(name, base, ..)| (name, base)).into_iter().chain([("permuted", "llama-gguf")]) {
        let checkpoint = checkpoint(base);
        let program = build_program(&checkpoint).unwrap().with_adapters();
        let folder = testdata(&format!("adapters/{name}"));
        let adapter = AdapterTargets::new(&checkpoint, &program).load(&folder, 16).unwrap();
        assert!((1..=16).contains(&adapter.rank()) && adapter.bytes() > 0, "{name}");
        assert_eq!(adapter.base(), Some(base.rsplit('/').next().unwrap()), "{name}");
        let golden = Golden::read_file(&folder.join("unmerged.safetensors"));
        let vocab = checkpoint.config().vocab_size;
        let session = |backend: Box<dyn Backend>| {
            Session::load(backend, &program, &checkpoint, golden.ids.len()).with_adapter(&adapter)
        };
        let candle = session(Box::new(CandleBackend::new()));
        check_session(candle, &format!("{base} with {name} on candle"), &golden, vocab, CANDLE);
        for isa in instruction_sets() {
            let session = session(Box::new(cpu(isa, ActivationBits::Twelve)));
            let limit = on_cpu(&format!("{base} with {name}"), isa);
            check_session(session, &format!("{base} with {name} on {isa}"), &golden, vocab, limit);
        }
    }
}
