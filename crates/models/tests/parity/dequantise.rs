//! Compares the dequantisation of every storage type of GGUF with that of the gguf package, on random blocks: that of the
//! op set, and candle's for the others. The types that are read as another one are compared exactly, after its rounding.

use std::borrow::Cow;

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use half::bf16;
use octavo_models::GridType;
use octavo_ops::StorageType;
use safetensors::SafeTensors;

use crate::support::{testdata, words};

/// Tolerance relative to the largest value. Both sides compute in f32, some formats with products in another order.
const TOLERANCE: f32 = 1e-6;

fn ggml(storage: StorageType) -> Option<GgmlDType> {
    Some(match storage {
        StorageType::Q4_1 => GgmlDType::Q4_1,
        StorageType::Q5_0 => GgmlDType::Q5_0,
        StorageType::Q5_1 => GgmlDType::Q5_1,
        StorageType::Q2K => GgmlDType::Q2K,
        StorageType::Q3K => GgmlDType::Q3K,
        StorageType::Q4K => GgmlDType::Q4K,
        StorageType::Q5K => GgmlDType::Q5K,
        StorageType::Q6K => GgmlDType::Q6K,
        _ => return None,
    })
}

pub(crate) fn read(storage: StorageType, bytes: &[u8], elements: usize) -> Vec<f32> {
    if let Some(decode) = storage.decoder() {
        let mut values = vec![0.0; elements];
        decode(bytes, &mut values);
        return values;
    }
    let device = Device::Cpu;
    let blocks = QStorage::from_data(Cow::Borrowed(bytes), &device, ggml(storage).unwrap()).unwrap();
    QTensor::new(blocks, elements).unwrap().dequantize(&device).unwrap().to_vec1().unwrap()
}

#[test]
fn every_storage_type_reads_as_in_the_gguf_package() {
    let file = std::fs::read(testdata("blocks.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let mut types: Vec<_> = file.names().into_iter().filter_map(|name| name.strip_suffix(".bytes")).collect();
    types.sort_unstable();
    assert_eq!(types.len(), 16 + GridType::ALL.len());
    for name in types {
        // The others are in the next test.
        let Some(storage) = StorageType::ALL.into_iter().find(|storage| storage.name() == name) else { continue };
        let bytes = file.tensor(&format!("{storage}.bytes")).unwrap().data();
        let expected = words(&file, &format!("{storage}.values"), f32::from_le_bytes);
        assert_eq!(storage.bytes_for(expected.len()), Some(bytes.len()), "{storage}");
        let found = read(storage, bytes, expected.len());
        let difference = crate::support::relative_difference(&found, &expected);
        println!("{storage}: {difference:.1e}");
        assert!(difference <= TOLERANCE, "{storage}: {difference}");
    }
}

#[test]
fn every_grid_type_reads_as_in_the_gguf_package() {
    let file = std::fs::read(testdata("blocks.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    for grid in GridType::ALL {
        let bytes = file.tensor(&format!("{grid}.bytes")).unwrap().data();
        let expected = words(&file, &format!("{grid}.values"), f32::from_le_bytes);
        let found = read(grid.storage(), &grid.transcode(bytes), expected.len());
        let kept = |value: &f32| match grid.storage() {
            StorageType::BF16 => bf16::from_f32(*value).to_f32(),
            _ => *value,
        };
        assert_eq!(found, expected.iter().map(kept).collect::<Vec<_>>(), "{grid}");
        assert!(expected.iter().any(|value| *value != expected[0]), "{grid}");
    }
}
