//! Weights from a checkpoint to f32 tensors.

use candle_core::quantized::GgmlDType;
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use octavo_ops::{BackendError, StorageType, TensorData, Weight, WeightError, WeightPart, WeightSource};

use crate::failed;

/// Elements dequantised at a time: bounds the memory needed beside the result. A multiple of every block size.
const CHUNK: usize = 1 << 20;

/// Reads the parts of a weight into one f32 tensor `[rows, cols]`. `progress` gets the bytes read since the last call.
pub(crate) fn load_weight(
    weight: &Weight,
    source: &dyn WeightSource,
    progress: &mut dyn FnMut(usize),
) -> Result<Tensor, BackendError> {
    let mut values = Vec::new();
    let out_of_memory = |elements: usize| BackendError::OutOfMemory {
        what: format!("weight '{}'", weight.name),
        needed: (elements as u64).saturating_mul(size_of::<f32>() as u64),
    };
    let elements = weight.rows.checked_mul(weight.cols).ok_or_else(|| out_of_memory(usize::MAX))?;
    values.try_reserve_exact(elements).map_err(|_| out_of_memory(elements))?;
    for part in &weight.parts {
        let data = source.tensor(&part.tensor)?;
        check(part, weight.cols, &data)?;
        dequantise(&data, &mut values, progress)?;
    }
    if values.len() != elements {
        return Err(failed(format!("weight '{}' has {} elements, expected {elements}", weight.name, values.len())));
    }
    Tensor::from_vec(values, (weight.rows, weight.cols), &Device::Cpu).map_err(failed)
}

/// What the program says of a tensor against what the checkpoint holds.
fn check(part: &WeightPart, cols: usize, data: &TensorData<'_>) -> Result<(), WeightError> {
    let invalid = |reason| Err(WeightError::Invalid { name: part.tensor.clone(), reason });
    if data.storage != part.storage {
        return invalid(format!("it is stored as {}, expected {}", data.storage, part.storage));
    }
    let elements = data.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    // A vector may be read as one row or as one column (the parts of a fused bias).
    let is_vector = data.shape.len() <= 1;
    if elements != part.rows.checked_mul(cols) || !(is_vector || data.shape.last() == Some(&cols)) {
        return invalid(format!("its shape is {:?}, expected [{}, {cols}]", data.shape, part.rows));
    }
    let expected = elements.and_then(|n| part.storage.bytes_for(n));
    if expected != Some(data.bytes.len()) {
        return invalid(format!("it holds {} bytes, its shape needs {expected:?}", data.bytes.len()));
    }
    Ok(())
}

/// Appends the tensor's elements to `out`.
fn dequantise(data: &TensorData<'_>, out: &mut Vec<f32>, progress: &mut dyn FnMut(usize)) -> Result<(), BackendError> {
    let Some(chunk_bytes) = data.storage.bytes_for(CHUNK) else {
        return Err(failed(format!("{CHUNK} elements are no whole number of {} blocks", data.storage)));
    };
    for bytes in data.bytes.chunks(chunk_bytes) {
        match ggml_type(data.storage) {
            None => plain(data.storage, bytes, out),
            Some(dtype) => {
                let elements = bytes.len() / data.storage.block_bytes() * data.storage.block_elements();
                let blocks = Aligned::new(bytes);
                let values = dtype.from_data(blocks.bytes().into()).dequantize(elements).map_err(failed)?;
                out.extend_from_slice(values.as_slice::<f32>().map_err(failed)?);
            }
        }
        progress(bytes.len());
    }
    Ok(())
}

fn plain(storage: StorageType, bytes: &[u8], out: &mut Vec<f32>) {
    match storage {
        StorageType::F16 => out.extend(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
        StorageType::BF16 => out.extend(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        _ => out.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
    }
}

/// candle's name of a block format; `None` for the plain types.
fn ggml_type(storage: StorageType) -> Option<GgmlDType> {
    Some(match storage {
        StorageType::F32 | StorageType::F16 | StorageType::BF16 => return None,
        StorageType::Q4_0 => GgmlDType::Q4_0,
        StorageType::Q4_1 => GgmlDType::Q4_1,
        StorageType::Q5_0 => GgmlDType::Q5_0,
        StorageType::Q5_1 => GgmlDType::Q5_1,
        StorageType::Q8_0 => GgmlDType::Q8_0,
        StorageType::Q2K => GgmlDType::Q2K,
        StorageType::Q3K => GgmlDType::Q3K,
        StorageType::Q4K => GgmlDType::Q4K,
        StorageType::Q5K => GgmlDType::Q5K,
        StorageType::Q6K => GgmlDType::Q6K,
    })
}

/// A copy of bytes at an address that suits candle's block structs: it panics on a block at an odd one.
struct Aligned {
    buffer: Vec<u8>,
    range: std::ops::Range<usize>,
}

impl Aligned {
    const ALIGN: usize = 16;

    fn new(bytes: &[u8]) -> Self {
        let mut buffer = vec![0; bytes.len() + Self::ALIGN];
        let start = buffer.as_ptr().align_offset(Self::ALIGN).min(Self::ALIGN);
        let range = start..start + bytes.len();
        buffer[range.clone()].copy_from_slice(bytes);
        Self { buffer, range }
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }
}
