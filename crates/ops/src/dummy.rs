//! Dummy weights for measuring a model without its files. They are the same in every run and on every device.
//!
//! A value is a function of the tensor's name and the element's index, in integer arithmetic except for the last step,
//! so that values generated on a device have the same bits as values copied from the host.

use std::borrow::Cow;
use std::collections::HashMap;

use half::{bf16, f16};

use crate::{Op, Program, StorageType, TensorData, WeightError, WeightId, WeightSource};

/// Values of a tensor: `centre + spread · u`, where u has 16 bits and is uniform between −1 and 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DummyRule {
    /// Seed of the tensor.
    pub seed: u32,
    /// Mean.
    pub centre: f32,
    /// Maximum distance from the mean. It is a power of two if the mean is not 0, so that the result does not depend on
    /// whether a device rounds once or twice.
    pub spread: f32,
}

impl DummyRule {
    /// Returns the element at `index`.
    pub fn value(&self, index: u64) -> f32 {
        let unit = f32::from((mix(self.seed, index) >> 16) as u16 as i16) * (1.0 / 32768.0);
        self.centre + self.spread * unit
    }

    /// Returns the first `count` elements in their storage type, generated on all threads, because a large model has
    /// billions.
    fn bytes<const N: usize>(&self, count: usize, stored: impl Fn(f32) -> [u8; N] + Sync) -> Vec<u8> {
        let mut bytes = vec![0; count * N];
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = count.div_ceil(threads).max(1 << 16);
        let make = |first: usize, part: &mut [u8]| {
            for (index, element) in (first as u64..).zip(part.as_chunks_mut().0) {
                *element = stored(self.value(index));
            }
        };
        std::thread::scope(|scope| {
            for (number, part) in bytes.chunks_mut(share * N).enumerate() {
                let make = &make;
                scope.spawn(move || make(number * share, part));
            }
        });
        bytes
    }
}

/// Hashes the seed and the index into uncorrelated bits. The fill kernel of the CUDA backend does the same.
const fn mix(seed: u32, index: u64) -> u32 {
    let mut bits = (index as u32) ^ (index >> 32) as u32 ^ seed;
    bits = (bits ^ (bits >> 16)).wrapping_mul(0x7feb_352d);
    bits = (bits ^ (bits >> 15)).wrapping_mul(0x846c_a68b);
    bits ^ (bits >> 16)
}

/// Returns the FNV-1a hash of a tensor's name.
fn seed(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Dummy weights of a program whose storage types are all plain.
///
/// Matrices are uniform around 0 with the variance 1 / inputs, so that a product keeps the size of its input. Norm
/// weights are around 1, biases around 0.
#[derive(Clone, Debug)]
pub struct DummyWeights {
    tensors: HashMap<String, Tensor>,
}

#[derive(Clone, Debug)]
struct Tensor {
    rule: DummyRule,
    storage: StorageType,
    shape: Vec<usize>,
}

/// Maximum distance of norm weights from 1 and of biases from 0.
const VECTOR_SPREAD: f32 = 0.125;

impl DummyWeights {
    /// Creates the rules of every tensor in the program.
    pub fn new(program: &Program) -> Self {
        let factors = norm_weights(program);
        let mut tensors = HashMap::new();
        for (id, weight) in program.weights.iter().enumerate() {
            let (centre, spread) = match weight.cols {
                _ if factors.contains(&WeightId(id)) => (1.0, VECTOR_SPREAD),
                0 | 1 => (0.0, VECTOR_SPREAD),
                inputs => (0.0, (3.0 / inputs as f32).sqrt()),
            };
            for part in &weight.parts {
                let rule = DummyRule { seed: seed(&part.tensor), centre, spread };
                let shape = part.slab.map(|slab| slab.count).into_iter().chain([part.rows, weight.cols]).collect();
                tensors.insert(part.tensor.clone(), Tensor { rule, storage: part.storage, shape });
            }
        }
        Self { tensors }
    }
}

/// Returns the weights of norms.
fn norm_weights(program: &Program) -> Vec<WeightId> {
    let of = |op: &Op| match op {
        Op::Norm(norm) => vec![norm.weight],
        Op::QkvPost(post) => post.norm.iter().flat_map(|norm| [norm.q, norm.k]).collect(),
        Op::LatentPost(post) => vec![post.norm],
        _ => vec![],
    };
    program.ops.iter().flat_map(of).collect()
}

impl WeightSource for DummyWeights {
    fn tensor(&self, name: &str) -> Result<TensorData<'_>, WeightError> {
        let tensor = self.tensors.get(name).ok_or_else(|| WeightError::Missing(name.to_owned()))?;
        let count = tensor.shape.iter().product();
        let bytes = match tensor.storage {
            StorageType::F32 => tensor.rule.bytes(count, f32::to_le_bytes),
            StorageType::F16 => tensor.rule.bytes(count, |x| f16::from_f32(x).to_le_bytes()),
            StorageType::BF16 => tensor.rule.bytes(count, |x| bf16::from_f32(x).to_le_bytes()),
            quantised => {
                let reason = format!("no values are made up for {quantised}");
                return Err(WeightError::Invalid { name: name.to_owned(), reason });
            }
        };
        Ok(TensorData { storage: tensor.storage, shape: tensor.shape.clone(), bytes: Cow::Owned(bytes) })
    }

    fn rule(&self, name: &str) -> Option<DummyRule> {
        // The rule counts elements from the start of the tensor, and a slab begins elsewhere.
        let plain = |tensor: &&Tensor| tensor.storage.block_elements() == 1 && tensor.shape.len() <= 2;
        self.tensors.get(name).filter(plain).map(|tensor| tensor.rule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_even_around_their_mean() {
        let rule = DummyRule { seed: seed("a"), centre: 1.0, spread: 0.125 };
        let values: Vec<f64> = (0..100_000).map(|index| f64::from(rule.value(index))).collect();
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        assert!((mean - 1.0).abs() < 1e-3, "{mean}");
        assert!((variance - 0.125f64.powi(2) / 3.0).abs() < 1e-4, "{variance}");
        assert!(values.iter().all(|x| (0.875..1.125).contains(x)));
        // Neighbouring values are uncorrelated.
        let product = values.windows(2).map(|pair| (pair[0] - mean) * (pair[1] - mean)).sum::<f64>() / count;
        assert!((product / variance).abs() < 0.02, "{product}");
    }

    #[test]
    fn a_value_hangs_on_its_tensor_and_its_place() {
        let [a, b] = ["a", "b"].map(|name| DummyRule { seed: seed(name), centre: 0.0, spread: 1.0 });
        assert_eq!(a.value(7), a.value(7));
        let differ = |other: &dyn Fn(u64) -> f32| (0..1000).filter(|&i| a.value(i) != other(i)).count();
        assert!(differ(&|i| b.value(i)) > 990);
        assert!(differ(&|i| a.value(i + 1)) > 990);
        assert!(differ(&|i| a.value(i + (1 << 32))) > 990, "elements beyond 32 bits");
    }
}
