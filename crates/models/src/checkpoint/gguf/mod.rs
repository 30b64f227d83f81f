//! GGUF files, versions 2 and 3.
//!
//! The header is read from the mapped bytes with every claim checked against the file's size before anything is
//! allocated for it, so memory and time are bounded by the bytes that are really there.

mod cursor;
mod metadata;
mod tokenizer;

use std::collections::HashMap;
use std::ops::Range;

use cursor::Cursor;
use octavo_ops::StorageType;

pub(crate) use metadata::{Metadata, MetadataView};
pub(super) use tokenizer::{chat_template, generation_config, tokenizer_data};

use super::TensorInfo;

const MAGIC: &[u8; 4] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Most tensors accepted; the largest published models have a few thousand.
const MAX_TENSORS: usize = 262_144;
/// Fewest bytes of a tensor's description: length of an empty name, rank, one dimension, type, offset.
const MIN_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;
/// Longest tensor name accepted; the reference implementation allows 63.
const MAX_NAME_BYTES: usize = 1024;
/// The format's limit on dimensions.
const MAX_DIMS: u32 = 4;

/// What is wrong with a GGUF file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The first four bytes are not `GGUF`.
    #[error("this is not a GGUF file (it does not begin with 'GGUF')")]
    Magic,
    /// A version other than 2 and 3.
    #[error("GGUF version {0} is not supported, only 2 and 3")]
    Version(u32),
    /// Version bytes are swapped.
    #[error("big-endian GGUF files are not supported")]
    BigEndian,
    /// The header runs past the end.
    #[error("the header claims more than the file holds: at byte {offset} of {size}; the file is truncated or damaged")]
    Truncated {
        /// Where the read began.
        offset: usize,
        /// Size of the file.
        size: usize,
    },
    /// A count that the file has no room for.
    #[error("the header claims {found} {what}, but there is room for {room} at most")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// Claimed.
        found: u64,
        /// Possible.
        room: u64,
    },
    /// A name that no writer produces.
    #[error("the name at byte {offset} is longer than {limit} bytes")]
    NameTooLong {
        /// Where.
        offset: usize,
        /// Longest accepted.
        limit: usize,
    },
    /// A name that is not text.
    #[error("the name at byte {offset} is not UTF-8")]
    NameNotUtf8 {
        /// Where.
        offset: usize,
    },
    /// Unknown value type.
    #[error("metadata key '{key}' has the unknown value type {id}")]
    ValueType {
        /// Key.
        key: String,
        /// Type id found.
        id: u32,
    },
    /// Array of arrays.
    #[error("metadata key '{key}' is an array of arrays, which is not supported")]
    NestedArray {
        /// Key.
        key: String,
    },
    /// The same key twice.
    #[error("metadata key '{key}' occurs twice")]
    DuplicateKey {
        /// Key.
        key: String,
    },
    /// `general.alignment` is no power of two.
    #[error("general.alignment must be a power of two that fits 32 bits")]
    Alignment,
    /// The same tensor twice.
    #[error("tensor '{name}' occurs twice")]
    DuplicateTensor {
        /// Tensor.
        name: String,
    },
    /// An element type that Octavo cannot read.
    #[error("tensor '{name}' has the type {found}, which is not supported (supported: {supported})")]
    TensorType {
        /// Tensor.
        name: String,
        /// Name or number of its type.
        found: String,
        /// Names of the supported types.
        supported: String,
    },
    /// Rank, dimensions or offset that cannot be.
    #[error("tensor '{name}' is unusable: {reason}")]
    Tensor {
        /// Tensor.
        name: String,
        /// Why.
        reason: String,
    },
}

/// A parsed header; offsets are into the whole file.
#[derive(Debug)]
pub(crate) struct Header {
    metadata: Metadata,
    tensors: HashMap<String, TensorInfo>,
}

impl Header {
    /// Reads and checks the header of a whole file.
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

    /// Where `name` lies, and how.
    pub(crate) const fn tensors(&self) -> &HashMap<String, TensorInfo> {
        &self.tensors
    }

    /// The key-value pairs.
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

/// A tensor's description as it stands in the header.
struct Record {
    name: String,
    /// Outermost dimension first (the file has them reversed).
    shape: Vec<usize>,
    storage: StorageType,
    bytes: u64,
    offset: u64,
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
    let storage = storage_type(id).ok_or_else(|| GgufError::TensorType {
        name: name.clone(),
        found: type_name(id),
        supported: StorageType::ALL.map(StorageType::name).join(", "),
    })?;
    let offset = cursor.u64()?;
    if shape.contains(&0) {
        return Err(fail(format!("its shape {shape:?} is empty")));
    }
    if !inner.is_multiple_of(storage.block_elements()) {
        let block = storage.block_elements();
        return Err(fail(format!("its rows of {inner} elements do not fill {storage} blocks of {block}")));
    }
    let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    let bytes =
        elements.and_then(|n| storage.bytes_for(n)).ok_or_else(|| fail(format!("its size overflows: {shape:?}")))?;
    Ok(Record { shape, storage, bytes: bytes as u64, offset, name })
}

/// Turns relative offsets into ranges of the file and checks that they are inside it and apart.
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
        let info = TensorInfo { storage: Ok(record.storage), shape: record.shape, range: range.clone() };
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

/// The supported types by their number in the format.
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
        30 => StorageType::BF16,
        _ => return None,
    })
}

/// The name of an unsupported type, as people know it.
fn type_name(id: u32) -> String {
    let name = match id {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return format!("number {id}"),
    };
    name.into()
}

#[cfg(test)]
mod tests;
