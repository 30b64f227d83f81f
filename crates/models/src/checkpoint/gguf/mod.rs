//! GGUF files, versions 2 and 3.
//!
//! The header is read from the mapped bytes. Every count and size is checked against the file's size before memory is
//! allocated for it, so memory and time are bounded by the actual size of the file.

mod cursor;
mod file;
mod grid;
mod metadata;
mod mmproj;
mod tokenizer;

use std::collections::HashMap;
use std::ops::Range;

use cursor::Cursor;
use octavo_ops::StorageType;

pub(super) use file::GgufFile;
pub use grid::GridType;
pub(crate) use metadata::{Metadata, MetadataView};
pub(super) use mmproj::encoder_beside;
pub(crate) use mmproj::takes_images;
pub(super) use tokenizer::{chat_template, generation_config, tokenizer_data};

use super::TensorInfo;

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Maximum number of tensors accepted; the largest published models have a few thousand.
const MAX_TENSORS: usize = 262_144;
/// Minimum size of a tensor's description: length of an empty name, rank, one dimension, type, offset.
const MIN_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;
/// Maximum length of a tensor name accepted; the reference implementation allows 63.
const MAX_NAME_BYTES: usize = 1024;
/// Maximum number of dimensions in the format.
const MAX_DIMS: u32 = 4;

/// Defect of a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The first four bytes are not `GGUF`.
    #[error("this is not a GGUF file (it does not begin with 'GGUF')")]
    Magic,
    /// The version is neither 2 nor 3.
    #[error("GGUF version {0} is not supported, only 2 and 3")]
    Version(u32),
    /// The bytes of the version are swapped.
    #[error("big-endian GGUF files are not supported")]
    BigEndian,
    /// The header extends past the end of the file.
    #[error("the header claims more than the file holds: at byte {offset} of {size}; the file is truncated or damaged")]
    Truncated {
        /// Offset at which the read began.
        offset: usize,
        /// Size of the file.
        size: usize,
    },
    /// A count is too large for the file.
    #[error("the header claims {found} {what}, but there is room for {room} at most")]
    TooMany {
        /// Kind of the items.
        what: &'static str,
        /// Number claimed.
        found: u64,
        /// Maximum possible number.
        room: u64,
    },
    /// A name is longer than any writer produces.
    #[error("the name at byte {offset} is longer than {limit} bytes")]
    NameTooLong {
        /// Offset of the name.
        offset: usize,
        /// Maximum length accepted.
        limit: usize,
    },
    /// A name is not valid UTF-8.
    #[error("the name at byte {offset} is not UTF-8")]
    NameNotUtf8 {
        /// Offset of the name.
        offset: usize,
    },
    /// The type of a value is unknown.
    #[error("metadata key '{key}' has the unknown value type {id}")]
    ValueType {
        /// Key.
        key: String,
        /// Type id found.
        id: u32,
    },
    /// A value is an array of arrays.
    #[error("metadata key '{key}' is an array of arrays, which is not supported")]
    NestedArray {
        /// Key.
        key: String,
    },
    /// A key occurs twice.
    #[error("metadata key '{key}' occurs twice")]
    DuplicateKey {
        /// Key.
        key: String,
    },
    /// `general.alignment` is not a power of two.
    #[error("general.alignment must be a power of two that fits 32 bits")]
    Alignment,
    /// A tensor occurs twice.
    #[error("tensor '{name}' occurs twice")]
    DuplicateTensor {
        /// Name of the tensor.
        name: String,
    },
    /// Octavo does not support the element type of a tensor.
    #[error("tensor '{name}' has the type {found}, which is not supported (supported: {supported})")]
    TensorType {
        /// Name of the tensor.
        name: String,
        /// Name or number of its type.
        found: String,
        /// Names of the supported types.
        supported: String,
    },
    /// The rank, dimensions or offset of a tensor are invalid.
    #[error("tensor '{name}' is unusable: {reason}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// Description of the defect.
        reason: String,
    },
}

/// A parsed header. Offsets refer to the whole file.
#[derive(Debug)]
pub(crate) struct Header {
    metadata: Metadata,
    tensors: HashMap<String, TensorInfo>,
}

impl Header {
    /// Parses and checks the header of a whole file.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, GgufError> {
        let mut cursor = Cursor::new(bytes);
        if bytes.get(..MAGIC.len()) != Some(MAGIC) {
            return Err(GgufError::Magic);
        }
        cursor.skip(MAGIC.len())?;
        match cursor.u32()? {
            2 | 3 => {}
            v if matches!(v.swap_bytes(), 1..=3) => return Err(GgufError::BigEndian),
            v => return Err(GgufError::Version(v)),
        }
        let tensor_count = cursor.u64()?;
        let key_count = cursor.u64()?;
        let metadata = Metadata::read(&mut cursor, key_count)?;
        let alignment = alignment(&metadata.view(bytes))?;
        let records = read_records(&mut cursor, tensor_count)?;
        let data_start = (cursor.position() as u64).checked_next_multiple_of(alignment).ok_or(GgufError::Alignment)?;
        let tensors = place(records, data_start, alignment, bytes.len())?;
        Ok(Self { metadata, tensors })
    }

    /// Returns the key-value pairs, and the tensors by name.
    fn into_parts(self) -> (Metadata, HashMap<String, TensorInfo>) {
        (self.metadata, self.tensors)
    }

    /// Returns the tensors by name.
    #[cfg(test)]
    pub(crate) const fn tensors(&self) -> &HashMap<String, TensorInfo> {
        &self.tensors
    }

    /// Returns the key-value pairs.
    #[cfg(test)]
    pub(crate) const fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

fn alignment(metadata: &MetadataView<'_>) -> Result<u64, GgufError> {
    match metadata.u32("general.alignment") {
        Ok(None) => Ok(DEFAULT_ALIGNMENT),
        Ok(Some(n)) if n.is_power_of_two() => Ok(n.into()),
        _ => Err(GgufError::Alignment),
    }
}

/// A tensor's description in the header.
struct Record {
    name: String,
    /// Shape, outermost dimension first (reversed in the file).
    shape: Vec<usize>,
    stored: Stored,
    bytes: u64,
    offset: u64,
}

/// The type of a tensor in the file.
#[derive(Clone, Copy)]
enum Stored {
    As(StorageType),
    Grid(GridType),
}

impl Stored {
    /// Returns the type with this number in the format, if it is supported.
    fn of_id(id: u32) -> Option<Self> {
        storage_type(id).map(Self::As).or_else(|| GridType::of_id(id).map(Self::Grid))
    }

    const fn name(self) -> &'static str {
        match self {
            Self::As(storage) => storage.name(),
            Self::Grid(grid) => grid.name(),
        }
    }

    /// Returns the number of elements and of bytes of a block.
    const fn block(self) -> (usize, usize) {
        match self {
            Self::As(storage) => (storage.block_elements(), storage.block_bytes()),
            Self::Grid(grid) => grid.block(),
        }
    }
}

fn read_records(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<Record>, GgufError> {
    let room = (cursor.remaining() / MIN_TENSOR_BYTES).min(MAX_TENSORS) as u64;
    if count > room {
        return Err(GgufError::TooMany { what: "tensors", found: count, room });
    }
    (0..count).map(|_| read_record(cursor)).collect()
}

fn read_record(cursor: &mut Cursor<'_>) -> Result<Record, GgufError> {
    let name = cursor.name(MAX_NAME_BYTES)?.to_owned();
    let fail = |reason: String| GgufError::Tensor { name: name.clone(), reason };
    let rank = cursor.u32()?;
    if rank == 0 || rank > MAX_DIMS {
        return Err(fail(format!("it has {rank} dimensions, but 1 to {MAX_DIMS} are possible")));
    }
    let mut shape = Vec::with_capacity(rank as usize);
    for _ in 0..rank {
        shape.push(cursor.length()?);
    }
    let inner = shape[0];
    shape.reverse();
    let id = cursor.u32()?;
    let stored = Stored::of_id(id).ok_or_else(|| GgufError::TensorType {
        name: name.clone(),
        found: type_name(id),
        supported: supported_names().join(", "),
    })?;
    let offset = cursor.u64()?;
    if shape.contains(&0) {
        return Err(fail(format!("its shape {shape:?} is empty")));
    }
    let (block, block_bytes) = stored.block();
    if !inner.is_multiple_of(block) {
        let kind = stored.name();
        return Err(fail(format!("its rows of {inner} elements do not fill {kind} blocks of {block}")));
    }
    let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    let bytes = elements.and_then(|n| (n / block).checked_mul(block_bytes));
    let bytes = bytes.ok_or_else(|| fail(format!("its size overflows: {shape:?}")))?;
    Ok(Record { shape, stored, bytes: bytes as u64, offset, name })
}

/// Converts relative offsets to ranges of the file and checks that they are inside it and do not overlap.
fn place(
    mut records: Vec<Record>,
    data_start: u64,
    alignment: u64,
    file_size: usize,
) -> Result<HashMap<String, TensorInfo>, GgufError> {
    records.sort_by_key(|r| r.offset);
    let mut tensors = HashMap::new();
    let mut previous: Option<(Range<usize>, String)> = None;
    for record in records {
        let range = range_of(&record, data_start, alignment, file_size)
            .map_err(|reason| GgufError::Tensor { name: record.name.clone(), reason })?;
        let (storage, grid) = match record.stored {
            Stored::As(storage) => (storage, None),
            Stored::Grid(grid) => (grid.storage(), Some(grid)),
        };
        let info = TensorInfo { storage: Ok(storage), grid, shape: record.shape, range: range.clone() };
        if tensors.insert(record.name.clone(), info).is_some() {
            return Err(GgufError::DuplicateTensor { name: record.name });
        }
        if let Some((before, name)) = &previous
            && range.start < before.end
        {
            let reason = format!("its data overlaps that of '{name}'");
            return Err(GgufError::Tensor { name: record.name, reason });
        }
        previous = Some((range, record.name));
    }
    Ok(tensors)
}

fn range_of(record: &Record, data_start: u64, alignment: u64, file_size: usize) -> Result<Range<usize>, String> {
    let Record { offset, bytes, .. } = *record;
    if !offset.is_multiple_of(alignment) {
        return Err(format!("its offset {offset} is not a multiple of {alignment}"));
    }
    let start = data_start.checked_add(offset);
    let end = start.and_then(|start| start.checked_add(bytes));
    let range = start.zip(end).and_then(|(s, e)| Some(usize::try_from(s).ok()?..usize::try_from(e).ok()?));
    match range {
        Some(range) if range.end <= file_size => Ok(range),
        Some(range) => Err(format!(
            "its data ends at byte {}, but the file has {file_size} bytes; the file is truncated or damaged",
            range.end
        )),
        None => Err(format!("its offset {offset} overflows")),
    }
}

/// Returns the storage type with this number in the format, if it is supported.
fn storage_type(id: u32) -> Option<StorageType> {
    Some(match id {
        0 => StorageType::F32,
        1 => StorageType::F16,
        2 => StorageType::Q4_0,
        3 => StorageType::Q4_1,
        6 => StorageType::Q5_0,
        7 => StorageType::Q5_1,
        8 => StorageType::Q8_0,
        10 => StorageType::Q2K,
        11 => StorageType::Q3K,
        12 => StorageType::Q4K,
        13 => StorageType::Q5K,
        14 => StorageType::Q6K,
        20 => StorageType::Iq4Nl,
        23 => StorageType::Iq4Xs,
        30 => StorageType::BF16,
        39 => StorageType::Mxfp4,
        _ => return None,
    })
}

/// Returns the names of the types that files may have.
fn supported_names() -> Vec<&'static str> {
    (0..=64).filter_map(Stored::of_id).map(Stored::name).collect()
}

/// Returns the common name of an unsupported type.
fn type_name(id: u32) -> String {
    let name = match id {
        9 => "Q8_1",
        15 => "Q8_K",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        34 => "TQ1_0",
        35 => "TQ2_0",
        _ => return format!("number {id}"),
    };
    name.into()
}

#[cfg(test)]
mod tests;
