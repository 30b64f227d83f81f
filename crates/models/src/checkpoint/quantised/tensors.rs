//! The tensors of a quantised module.

use half::{bf16, f16};
use octavo_ops::{StorageType, WeightError};

use super::super::{Checkpoint, TensorInfo};

/// Names of element types that no plain weight has.
pub(super) const F8_E4M3: &str = "F8_E4M3";
const F8_E8M0: &str = "F8_E8M0";
pub(super) const I8: &str = "I8";
pub(super) const U8: &str = "U8";
const I32: &str = "I32";

/// A module of a checkpoint, by its name.
pub(in super::super) struct Module<'a> {
    pub(in super::super) checkpoint: &'a Checkpoint,
    pub(in super::super) name: &'a str,
}

/// A tensor's shape and bytes.
pub(super) struct Bytes<'a> {
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

impl<'a> Module<'a> {
    fn find(&self, suffix: &str) -> Result<(&'a TensorInfo, &'a [u8]), WeightError> {
        let name = format!("{}.{suffix}", self.name);
        self.checkpoint.find(&name).ok_or(WeightError::Missing(name))
    }

    pub(in super::super) fn has(&self, suffix: &str) -> bool {
        self.find(suffix).is_ok()
    }

    /// Returns the name of a tensor's element type, if it is none of a plain weight.
    pub(super) fn dtype(&self, suffix: &str) -> Option<&'a str> {
        self.find(suffix).ok()?.0.storage.as_ref().err().map(String::as_str)
    }

    pub(in super::super) fn invalid(&self, suffix: &str, reason: impl Into<String>) -> WeightError {
        WeightError::Invalid { name: format!("{}.{suffix}", self.name), reason: reason.into() }
    }

    /// Returns a tensor whose elements have one of these types.
    pub(super) fn bytes(&self, suffix: &str, dtypes: &[&str]) -> Result<Bytes<'a>, WeightError> {
        let (info, file) = self.find(suffix)?;
        match &info.storage {
            Err(dtype) if dtypes.contains(&dtype.as_str()) => {
                Ok(Bytes { shape: &info.shape, bytes: &file[info.range.clone()] })
            }
            found => {
                let found = found.as_ref().map_or_else(String::as_str, |storage| storage.name());
                Err(self.invalid(suffix, format!("it is stored as {found}, expected {}", dtypes.join(" or "))))
            }
        }
    }

    /// Returns the words of a tensor of 32-bit integers, with its shape.
    pub(super) fn words(&self, suffix: &str) -> Result<(&'a [usize], impl Iterator<Item = u32> + 'a), WeightError> {
        let Bytes { shape, bytes } = self.bytes(suffix, &[I32])?;
        Ok((shape, bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word))))
    }

    /// Returns a matrix of 32-bit integers with its shape.
    pub(super) fn matrix(&self, suffix: &str) -> Result<([usize; 2], Vec<u32>), WeightError> {
        let (shape, words) = self.words(suffix)?;
        match *shape {
            [rows, cols] => Ok(([rows, cols], words.collect())),
            _ => Err(self.invalid(suffix, format!("its shape {shape:?} is not that of a matrix"))),
        }
    }

    /// Returns the shape of a tensor.
    pub(super) fn shape(&self, suffix: &str) -> Result<&'a [usize], WeightError> {
        self.find(suffix).map(|(info, _)| info.shape.as_slice())
    }

    /// Returns the numbers of a tensor, with its shape.
    pub(in super::super) fn numbers(&self, suffix: &str) -> Result<(&'a [usize], Vec<f32>), WeightError> {
        let (info, file) = self.find(suffix)?;
        let bytes = &file[info.range.clone()];
        let pairs = |convert: fn([u8; 2]) -> f32| bytes.as_chunks().0.iter().map(|pair| convert(*pair)).collect();
        let numbers = match &info.storage {
            Ok(StorageType::F32) => bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
            Ok(StorageType::F16) => pairs(|pair| f16::from_le_bytes(pair).to_f32()),
            Ok(StorageType::BF16) => pairs(|pair| bf16::from_le_bytes(pair).to_f32()),
            Err(dtype) if dtype == F8_E8M0 || dtype == U8 => bytes.iter().map(|&byte| power_of_two(byte)).collect(),
            found => {
                let found = found.as_ref().map_or_else(String::as_str, |storage| storage.name());
                return Err(self.invalid(suffix, format!("it is stored as {found}, expected numbers")));
            }
        };
        Ok((&info.shape, numbers))
    }
}

/// Returns `2^(byte − 127)`.
fn power_of_two(byte: u8) -> f32 {
    (f32::from(byte) - 127.0).exp2()
}
