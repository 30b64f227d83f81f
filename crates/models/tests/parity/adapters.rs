//! Compares models into which adapters were merged with PEFT's merged weights, and with PyTorch's logits for them.

use std::path::Path;

use octavo_models::progress::Silent;
use octavo_models::{Checkpoint, MergeOptions, Merged, merge};
use octavo_ops::WeightSource;
use safetensors::SafeTensors;

use crate::dequantise::read;
use crate::golden::check_checkpoint;
use crate::support::{testdata, words};

/// Every adapter, with its base, and what was merged: changed and unpacked weights.
const ADAPTERS: [(&str, &str, usize, usize); 3] =
    [("patterns", "qwen3-sharded", 7, 0), ("embedding", "qwen2", 3, 0), ("qlora", "quantised/nf4", 7, 7)];

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
        check_checkpoint(&format!("adapters/{name}"), &checkpoint);
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
