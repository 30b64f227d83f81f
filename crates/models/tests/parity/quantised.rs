//! Compares quantised checkpoints with the values that their own packages read, and with PyTorch's logits for these values.

use octavo_models::{Checkpoint, build_program};
use octavo_ops::{Op, StorageType, WeightSource};
use safetensors::SafeTensors;

use crate::dequantise::read;
use crate::golden::check;
use crate::support::{checkpoint, testdata, words};

/// Every folder, with the storage type of its weights.
const FOLDERS: [(&str, StorageType); 21] = [
    ("gptq", StorageType::Q4_0),
    ("gptq-8", StorageType::Q8_0),
    ("gptq-zeros", StorageType::Int4),
    ("gptq-order", StorageType::F32),
    ("gptq-mixed", StorageType::Q4_0),
    ("awq", StorageType::Int4),
    ("fp8", StorageType::F8E4M3),
    ("fp8-block", StorageType::F32),
    ("pack-quantized", StorageType::Q4_0),
    ("pack-quantized-zeros", StorageType::Int8),
    ("int-quantized", StorageType::Q8_0),
    ("float-quantized", StorageType::F8E4M3),
    ("nf4", StorageType::Nf4),
    ("nf4-nested", StorageType::Nf4),
    ("int8", StorageType::Int8),
    ("fp8-block-32", StorageType::F8E4M3),
    ("fp4", StorageType::Fp4),
    ("gptq-2", StorageType::Int4),
    ("nvfp4", StorageType::Nvfp4),
    ("modelopt-nvfp4", StorageType::Nvfp4),
    ("mxfp4", StorageType::Mxfp4),
];

#[test]
fn weights_are_those_of_the_packages() {
    for (name, storage) in FOLDERS {
        let checkpoint: Checkpoint = checkpoint(&format!("quantised/{name}"));
        let file = std::fs::read(testdata(&format!("quantised/{name}/expected.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(file.len(), 2);
        for module in file.names() {
            let expected = words(&file, module, f32::from_le_bytes);
            let found = checkpoint.tensor(&format!("{module}.weight")).unwrap();
            assert_eq!(
                (found.storage, found.shape.as_slice()),
                (storage, file.tensor(module).unwrap().shape()),
                "{name}"
            );
            let values = read(found.storage, &found.bytes, expected.len());
            let differs = values.iter().zip(&expected).position(|(found, expected)| found != expected);
            assert_eq!(differs, None, "{name}, {module}");
        }
        println!("{name}: {storage}, exact");
    }
}

/// Inputs that are not in order of their groups stay packed: a program brings them into it.
#[test]
fn columns_are_kept_in_order_of_their_groups() {
    let checkpoint = checkpoint("quantised/gptq-order");
    let program = build_program(&checkpoint).unwrap();
    let gathers: Vec<_> = program.ops.iter().filter(|op| matches!(op, Op::GatherColumns(_))).collect();
    assert_eq!(gathers.len(), 4, "the inputs of qkv, output, gate and up, and down");
    let parts = program.weights.iter().flat_map(|weight| &weight.parts);
    let packed: Vec<_> =
        parts.filter_map(|part| part.tensor.strip_suffix(".by_group").map(|name| (name, part))).collect();
    assert_eq!(packed.len(), 7);
    for (name, part) in packed {
        assert_eq!(part.storage, StorageType::Q4_0, "{name}");
        let numbers = |name: &str| {
            let tensor = checkpoint.tensor(name).unwrap();
            let elements = tensor.shape.iter().product();
            (tensor.shape, read(tensor.storage, &tensor.bytes, elements))
        };
        let (shape, by_input) = numbers(name);
        let (same, by_group) = numbers(&part.tensor);
        let (order_shape, order) = numbers(&format!("{name}.order"));
        let cols = shape[1];
        assert_eq!((&shape, &order_shape), (&same, &vec![cols]), "{name}");
        for (at, found) in by_group.iter().enumerate() {
            let column = order[at % cols] as usize;
            assert_eq!(*found, by_input[at / cols * cols + column], "{name}, element {at}");
        }
    }
}

#[test]
fn logits_are_those_of_pytorch() {
    FOLDERS.into_iter().for_each(|(name, _)| check(&format!("quantised/{name}")));
}
