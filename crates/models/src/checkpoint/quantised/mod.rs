//! Weights of Hugging Face directories that are quantised by GPTQ, AWQ, FP8, compressed-tensors, bitsandbytes or
//! ModelOpt.
//!
//! A quantised module `P` has tensors such as `P.qweight` and `P.scales` in the place of `P.weight`. They are read under the
//! name `P.weight`, in the storage type that holds the same values in the fewest bytes. A module that does not consist of
//! whole blocks of such a type, or whose inputs are not in order of their groups, is read as f32, in which the values of all
//! these formats are exact. In the latter case, [`BY_GROUP`] and [`ORDER`] after the name stand for the weight with its columns
//! in order of their groups, and for this order.

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

impl Matrix {
    fn storage(&self) -> StorageType {
        match self {
            Self::Integers(integers) => integers.storage(),
            Self::Blocks { storage, .. } => *storage,
        }
    }

    fn rows(&self) -> usize {
        match self {
            Self::Integers(Integers { rows, .. }) | Self::Blocks { rows, .. } => *rows,
        }
    }

    fn cols(&self) -> usize {
        match self {
            Self::Integers(Integers { cols, .. }) | Self::Blocks { cols, .. } => *cols,
        }
    }
}

/// Ends the name of a weight whose columns are in order of their groups.
pub(crate) const BY_GROUP: &str = ".by_group";

/// Ends the name of a vector with the input of each of these columns, in f32.
pub(crate) const ORDER: &str = ".order";

/// The weight of a quantised module.
pub(crate) struct QuantisedWeight<'a> {
    quantisation: &'a Quantisation,
    module: String,
    content: Content,
}

/// What a name stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Weight,
    ByGroup,
    Order,
}

impl Quantisation {
    /// Returns the weight that a tensor's name stands for, if the file has that of a quantised module.
    pub(super) fn weight(&self, checkpoint: &Checkpoint, name: &str) -> Option<QuantisedWeight<'_>> {
        let (name, content) = match (name.strip_suffix(BY_GROUP), name.strip_suffix(ORDER)) {
            (Some(name), _) => (name, Content::ByGroup),
            (None, Some(name)) => (name, Content::Order),
            (None, None) => (name, Content::Weight),
        };
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
        is_quantised.then(|| QuantisedWeight { quantisation: self, module: module.to_owned(), content })
    }
}

impl QuantisedWeight<'_> {
    /// Returns storage type and shape.
    pub(super) fn describe(&self, checkpoint: &Checkpoint) -> Result<(StorageType, Vec<usize>), WeightError> {
        let matrix = self.matrix(checkpoint, false)?;
        Ok(match self.content {
            Content::Order => (StorageType::F32, vec![matrix.cols()]),
            Content::Weight | Content::ByGroup => (matrix.storage(), vec![matrix.rows(), matrix.cols()]),
        })
    }

    /// Returns the order of the columns by their groups, if that lets them fill whole blocks.
    pub(super) fn order(&self, checkpoint: &Checkpoint) -> Result<Option<Vec<u32>>, WeightError> {
        let module = Module { checkpoint, name: &self.module };
        if !module.has("g_idx") && !module.has("weight_g_idx") {
            return Ok(None);
        }
        let plain = Self { module: self.module.clone(), content: Content::Weight, ..*self };
        Ok(match plain.matrix(checkpoint, false)? {
            Matrix::Integers(integers) => integers.order(),
            Matrix::Blocks { .. } => None,
        })
    }

    /// Reads the tensor.
    pub(super) fn read(&self, checkpoint: &Checkpoint) -> Result<TensorData<'static>, WeightError> {
        if self.content == Content::Order {
            let order = self.order(checkpoint)?.ok_or_else(|| self.unordered(checkpoint))?;
            let bytes: Vec<u8> = order.iter().flat_map(|&column| (column as f32).to_le_bytes()).collect();
            return Ok(TensorData { storage: StorageType::F32, shape: vec![order.len()], bytes: bytes.into() });
        }
        match self.matrix(checkpoint, true)? {
            Matrix::Integers(integers) => Ok(integers.into_tensor()),
            Matrix::Blocks { storage, rows, cols, bytes } => {
                Ok(TensorData { storage, shape: vec![rows, cols], bytes: bytes.into() })
            }
        }
    }

    /// Returns the error of a module whose columns are in order, or whose groups are no whole blocks.
    fn unordered(&self, checkpoint: &Checkpoint) -> WeightError {
        Module { checkpoint, name: &self.module }.invalid("g_idx", "its inputs have no other order")
    }

    /// Reads the module; its shape and scales if no `values` are asked for.
    fn matrix(&self, checkpoint: &Checkpoint, values: bool) -> Result<Matrix, WeightError> {
        let matrix = self.stored(checkpoint, values)?;
        match (self.content, matrix) {
            (Content::ByGroup, Matrix::Integers(integers)) => match integers.order() {
                Some(order) => Ok(Matrix::Integers(integers.by_group(&order))),
                None => Err(self.unordered(checkpoint)),
            },
            (Content::ByGroup, Matrix::Blocks { .. }) => Err(self.unordered(checkpoint)),
            (Content::Weight | Content::Order, matrix) => Ok(matrix),
        }
    }

    fn stored(&self, checkpoint: &Checkpoint, values: bool) -> Result<Matrix, WeightError> {
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
