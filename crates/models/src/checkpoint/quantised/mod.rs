//! Weights of Hugging Face directories that are quantised by GPTQ, AWQ, FP8, compressed-tensors, bitsandbytes or
//! ModelOpt.
//!
//! A quantised module `P` has tensors such as `P.qweight` and `P.scales` in the place of `P.weight`. They are read under the
//! name `P.weight`, in the storage type that holds the same values in the fewest bytes. A module that does not consist of
//! whole blocks of such a type, or whose inputs are not in order of their groups, is read as f32, in which the values of all
//! these formats are exact.

mod config;
mod float8;
mod fp4;
mod integers;
mod nf4;
mod tensors;

use octavo_ops::{StorageType, TensorData, WeightError};

pub(crate) use config::{QUANTISATION, Quantisation, add_side_file, is_side_file, kv_scheme};
pub(super) use tensors::Module;

use super::Checkpoint;
use fp4::Global;
use integers::Integers;

/// A quantised matrix `[rows, cols]`.
enum Matrix {
    /// Integers with scales.
    Integers(Integers),
    /// Blocks of a storage type; none if only the shape was asked for.
    Blocks { storage: StorageType, rows: usize, cols: usize, bytes: Vec<u8> },
}

/// The weight of a quantised module.
pub(crate) struct QuantisedWeight<'a> {
    quantisation: &'a Quantisation,
    module: String,
}

impl Quantisation {
    /// Returns the weight that a tensor's name stands for, if the file has that of a quantised module.
    pub(super) fn weight(&self, checkpoint: &Checkpoint, name: &str) -> Option<QuantisedWeight<'_>> {
        let module = name.strip_suffix(".weight")?;
        let dtype = || checkpoint.find(name).and_then(|(info, _)| info.storage.as_ref().err()).map(String::as_str);
        let has = |suffix: &str| checkpoint.has_tensor(&format!("{module}.{suffix}"));
        let is_quantised = match self {
            Self::Gptq(_) | Self::Awq { .. } => has("qweight"),
            Self::Float8(_) => dtype() == Some(tensors::F8_E4M3),
            Self::ModelOpt(_) => matches!(dtype(), Some(tensors::F8_E4M3 | tensors::U8)),
            Self::CompressedTensors(_) => {
                has("weight_packed") || matches!(dtype(), Some(tensors::I8 | tensors::F8_E4M3))
            }
            Self::BitsAndBytes => has("weight.absmax") || has("SCB"),
        };
        is_quantised.then(|| QuantisedWeight { quantisation: self, module: module.to_owned() })
    }
}

impl QuantisedWeight<'_> {
    /// Returns storage type and shape.
    pub(super) fn describe(&self, checkpoint: &Checkpoint) -> Result<(StorageType, Vec<usize>), WeightError> {
        Ok(match self.matrix(checkpoint, false)? {
            Matrix::Integers(integers) => (integers.storage(), vec![integers.rows, integers.cols]),
            Matrix::Blocks { storage, rows, cols, .. } => (storage, vec![rows, cols]),
        })
    }

    /// Reads the tensor.
    pub(super) fn read(&self, checkpoint: &Checkpoint) -> Result<TensorData<'static>, WeightError> {
        match self.matrix(checkpoint, true)? {
            Matrix::Integers(integers) => Ok(integers.into_tensor()),
            Matrix::Blocks { storage, rows, cols, bytes } => {
                Ok(TensorData { storage, shape: vec![rows, cols], bytes: bytes.into() })
            }
        }
    }

    /// Reads the module; its shape and scales if no `values` are asked for.
    fn matrix(&self, checkpoint: &Checkpoint, values: bool) -> Result<Matrix, WeightError> {
        let module = Module { checkpoint, name: &self.module };
        match self.quantisation {
            Quantisation::Gptq(config) => integers::gptq(&module, *config, values).map(Matrix::Integers),
            Quantisation::Awq { symmetric } => integers::awq(&module, *symmetric, values).map(Matrix::Integers),
            Quantisation::ModelOpt(_) if module.dtype("weight") == Some(tensors::U8) => {
                fp4::read(&module, "weight", Global::Factor("weight_scale_2"), values)
            }
            Quantisation::Float8(config) | Quantisation::ModelOpt(config) => float8::read(&module, *config, values),
            Quantisation::CompressedTensors(config) => match module.dtype("weight") {
                Some(tensors::F8_E4M3) => float8::read(&module, *config, values),
                Some(_) => integers::int8(&module, values).map(Matrix::Integers),
                None if module.dtype("weight_packed") == Some(tensors::U8) => {
                    fp4::read(&module, "weight_packed", Global::Divisor("weight_global_scale"), values)
                }
                None => integers::packed(&module, values).map(Matrix::Integers),
            },
            Quantisation::BitsAndBytes if module.has("SCB") => {
                integers::scaled_rows(&module, values).map(Matrix::Integers)
            }
            Quantisation::BitsAndBytes => nf4::read(&module, values),
        }
    }
}
