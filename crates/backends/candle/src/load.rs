//! Conversion of weights from a checkpoint to f32 tensors.

use candle_core::quantized::GgmlDType;
use candle_core::{Device, Tensor};
use octavo_ops::{BackendError, StorageType, TensorData, Weight, WeightSource};

use crate::failed;

/// Number of elements dequantised at a time, which limits the temporary memory. It is a multiple of every block size.
const CHUNK: usize = 1 << 20;

/// Reads the parts of a weight into one f32 tensor `[rows, cols]`. `progress` is called with the number of bytes read
/// since the last call.
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
        let data = part.read(weight.cols, source)?;
        dequantise(&data, &mut values, progress)?;
    }
    if values.len() != elements {
        return Err(failed(format!("weight '{}' has {} elements, expected {elements}", weight.name, values.len())));
    }
    Tensor::from_vec(values, (weight.rows, weight.cols), &Device::Cpu).map_err(failed)
}

/// Appends the tensor's elements to `out`.
fn dequantise(data: &TensorData<'_>, out: &mut Vec<f32>, progress: &mut dyn FnMut(usize)) -> Result<(), BackendError> {
    let Some(chunk_bytes) = data.storage.bytes_for(CHUNK) else {
        return Err(failed(format!("{CHUNK} elements are no whole number of {} blocks", data.storage)));
    };
    for bytes in data.bytes.chunks(chunk_bytes) {
        let elements = bytes.len() / data.storage.block_bytes() * data.storage.block_elements();
        match ggml_type(data.storage) {
            None => {
                let decode = data.storage.decoder();
                let decode = decode.ok_or_else(|| failed(format!("{} blocks have no decoder", data.storage)))?;
                let from = out.len();
                out.resize(from + elements, 0.0);
                decode(bytes, &mut out[from..]);
            }
            Some(dtype) => {
                let blocks = Aligned::new(bytes);
                let values = dtype.from_data(blocks.bytes().into()).dequantize(elements).map_err(failed)?;
                out.extend_from_slice(values.as_slice::<f32>().map_err(failed)?);
            }
        }
        progress(bytes.len());
    }
    Ok(())
}

/// Returns candle's name of a block format; `None` for the types that it lacks.
fn ggml_type(storage: StorageType) -> Option<GgmlDType> {
    Some(match storage {
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
        _ => return None,
    })
}

/// A copy of bytes at an address that suits candle's block structs, which panic on a block at an odd address.
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

#[cfg(test)]
mod tests {
    use candle_core::quantized::QTensor;
    use half::{bf16, f16};
    use octavo_ops::testing::TestRng;
    use octavo_ops::{WeightError, WeightPart};

    use super::*;

    /// Provides the tensor `t`, `rows × cols`, at an odd address.
    struct Source {
        storage: StorageType,
        shape: Vec<usize>,
        bytes: Vec<u8>,
    }

    impl Source {
        fn new(storage: StorageType, shape: [usize; 2], bytes: &[u8]) -> Self {
            let bytes = std::iter::once(0).chain(bytes.iter().copied()).collect();
            Self { storage, shape: shape.to_vec(), bytes }
        }

        fn load(&self) -> Vec<f32> {
            let (rows, cols) = (self.shape[0], self.shape[1]);
            let part = WeightPart { tensor: "t".into(), rows, storage: self.storage, slab: None };
            let weight = Weight { name: "w".into(), rows, cols, parts: vec![part] };
            let mut read = 0;
            let tensor = load_weight(&weight, self, &mut |bytes| read += bytes).unwrap();
            assert_eq!(read, self.bytes.len() - 1);
            assert_eq!(tensor.dims(), [rows, cols]);
            tensor.flatten_all().unwrap().to_vec1().unwrap()
        }
    }

    impl WeightSource for Source {
        fn tensor(&self, _: &str) -> Result<TensorData<'_>, WeightError> {
            let bytes = self.bytes[1..].into();
            Ok(TensorData { storage: self.storage, shape: self.shape.clone(), bytes })
        }
    }

    #[test]
    fn block_formats_are_read_as_defined() {
        let f16 = |x: f32| f16::from_f32(x).to_le_bytes();
        let nibbles: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
        // Element i is the low nibble of byte i, element i + 16 its high nibble.
        let codes: Vec<f32> = (0..16).chain((0..16).rev()).map(|x| x as f32).collect();

        let bytes = [&f16(0.5)[..], &nibbles].concat();
        let expected: Vec<f32> = codes.iter().map(|c| 0.5 * (c - 8.0)).collect();
        assert_eq!(Source::new(StorageType::Q4_0, [1, 32], &bytes).load(), expected);

        let bytes = [&f16(0.5)[..], &f16(-3.0), &nibbles].concat();
        let expected: Vec<f32> = codes.iter().map(|c| 0.5 * c - 3.0).collect();
        assert_eq!(Source::new(StorageType::Q4_1, [1, 32], &bytes).load(), expected);

        // The fifth bit of element i is bit i; here it is set for the first 16.
        let bytes = [&f16(0.5)[..], &0x0000_ffffu32.to_le_bytes(), &nibbles].concat();
        let fifth = |i: usize| if i < 16 { 16.0 } else { 0.0 };
        let expected: Vec<f32> = codes.iter().enumerate().map(|(i, c)| 0.5 * (c + fifth(i) - 16.0)).collect();
        assert_eq!(Source::new(StorageType::Q5_0, [1, 32], &bytes).load(), expected);

        let bytes = [&f16(0.5)[..], &f16(1.0), &0x0000_ffffu32.to_le_bytes(), &nibbles].concat();
        let expected: Vec<f32> = codes.iter().enumerate().map(|(i, c)| 0.5 * (c + fifth(i)) + 1.0).collect();
        assert_eq!(Source::new(StorageType::Q5_1, [1, 32], &bytes).load(), expected);

        let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let signed: Vec<f32> = values.into_iter().chain(values.map(|x| -x)).collect();
        let bytes = [&[128][..], &nibbles].concat();
        let expected: Vec<f32> = signed.iter().chain(signed.iter().rev()).map(|x| 2.0 * x).collect();
        assert_eq!(Source::new(StorageType::Mxfp4, [1, 32], &bytes).load(), expected);

        let quants: Vec<u8> = (0..32).map(|i| (i * 8 - 128i32) as u8).collect();
        let bytes = [&f16(0.25)[..], &quants].concat();
        let expected: Vec<f32> = (0..32).map(|i| 0.25 * (i * 8 - 128) as f32).collect();
        assert_eq!(Source::new(StorageType::Q8_0, [1, 32], &bytes).load(), expected);
    }

    #[test]
    fn plain_formats_are_read_exactly() {
        let values: Vec<f32> = [0.0, -1.5, 3.0, 1024.0, -0.0078125, f32::INFINITY].into();
        let encode = |f: &dyn Fn(f32) -> Vec<u8>| values.iter().flat_map(|&x| f(x)).collect::<Vec<u8>>();
        for (storage, bytes) in [
            (StorageType::F32, encode(&|x| x.to_le_bytes().into())),
            (StorageType::F16, encode(&|x| f16::from_f32(x).to_le_bytes().into())),
            (StorageType::BF16, encode(&|x| bf16::from_f32(x).to_le_bytes().into())),
        ] {
            assert_eq!(Source::new(storage, [2, 3], &bytes).load(), values, "{storage}");
        }
    }

    /// Dequantises more than one chunk of each format, with chunk boundaries inside rows.
    #[test]
    fn every_format_is_near_what_was_quantised() {
        let (rows, cols) = (700, 1536);
        let mut rng = TestRng(11);
        let values: Vec<f32> = (0..rows * cols).map(|_| rng.signed()).collect();
        let tensor = Tensor::from_slice(&values, (rows, cols), &Device::Cpu).unwrap();
        for storage in StorageType::ALL {
            let Some(dtype) = ggml_type(storage) else { continue };
            let quantised = QTensor::quantize(&tensor, dtype).unwrap();
            let found = Source::new(storage, [rows, cols], &quantised.data().unwrap()).load();
            let error: f64 = found.iter().zip(&values).map(|(a, b)| f64::from((a - b).powi(2))).sum();
            let rms = (error / values.len() as f64).sqrt();
            // The bound is a uniform error of half a step of 2 / 2^bits, with some margin for shared scales.
            let bits = storage.block_bytes() as f64 * 8.0 / storage.block_elements() as f64;
            assert!(rms < 2.5 / bits.floor().exp2() && rms > 0.0, "{storage}: {rms}");
        }
    }
}
