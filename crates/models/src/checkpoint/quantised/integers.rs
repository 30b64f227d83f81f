//! Integers with scales, and with zero points: GPTQ, AWQ, the integer formats of compressed-tensors, and the 8-bit one of
//! bitsandbytes.

use half::f16;
use octavo_ops::{StorageType, TensorData, WeightError};

use super::config::Gptq;
use super::tensors::{Bytes, I8, Module, U8};

/// Elements in a block of the storage types of integers.
pub(super) const BLOCK: usize = 32;

/// A matrix `[rows, cols]` of values `(code − zero) · scale`.
pub(super) struct Integers {
    pub(super) rows: usize,
    pub(super) cols: usize,
    bits: u32,
    /// Codes `[rows, cols]`; empty if only the shape was asked for.
    codes: Vec<u8>,
    zeros: Zeros,
    /// Scales `[groups, rows]`.
    scales: Vec<f32>,
    groups: Groups,
}

enum Zeros {
    /// The middle of the range.
    Middle,
    /// Zero points `[groups, rows]`.
    Each(Vec<u8>),
}

/// Group of each column.
enum Groups {
    /// So many columns are a group.
    Of(usize),
    /// The group is named for each column.
    Named(Vec<u32>),
}

impl Integers {
    /// Returns the storage type that holds the same values in the fewest bytes. Scales that are not exact in f16 are kept in
    /// f32, and columns that are not in order of their groups as numbers.
    pub(super) fn storage(&self) -> StorageType {
        let whole = matches!(self.groups, Groups::Of(size) if size.is_multiple_of(BLOCK) || size == self.cols);
        if !whole || !self.cols.is_multiple_of(BLOCK) {
            return StorageType::F32;
        }
        let exact = self.scales.iter().all(|&scale| f16::from_f32(scale).to_f32() == scale);
        match (self.bits, &self.zeros) {
            (4, Zeros::Middle) if exact => StorageType::Q4_0,
            (8, Zeros::Middle) if exact => StorageType::Q8_0,
            (2 | 4, _) if exact => StorageType::Int4,
            _ => StorageType::Int8,
        }
    }

    /// Returns the order of the columns by their groups, if they are not in it and fill whole blocks then.
    pub(super) fn order(&self) -> Option<Vec<u32>> {
        let Groups::Named(groups) = &self.groups else { return None };
        let size = self.cols.div_ceil((self.scales.len() / self.rows.max(1)).max(1));
        let mut order: Vec<u32> = (0..self.cols as u32).collect();
        order.sort_by_key(|&col| groups[col as usize]);
        let are_equal = order.iter().enumerate().all(|(at, &col)| groups[col as usize] as usize == at / size);
        (are_equal && size.is_multiple_of(BLOCK) && self.cols.is_multiple_of(BLOCK)).then_some(order)
    }

    /// Brings the columns into an order of [`Integers::order`].
    pub(super) fn by_group(mut self, order: &[u32]) -> Self {
        for row in self.codes.chunks_exact_mut(self.cols.max(1)) {
            let codes: Vec<u8> = order.iter().map(|&col| row[col as usize]).collect();
            row.copy_from_slice(&codes);
        }
        self.groups = Groups::Of(self.cols.div_ceil((self.scales.len() / self.rows.max(1)).max(1)));
        self
    }

    /// Returns the values in that type.
    pub(super) fn into_tensor(self) -> TensorData<'static> {
        let storage = self.storage();
        let mut bytes = Vec::with_capacity(storage.bytes_for(self.codes.len()).unwrap_or(0));
        let middle = 1u8 << (self.bits - 1);
        for (row, codes) in self.codes.chunks_exact(self.cols.max(1)).enumerate() {
            if storage == StorageType::F32 {
                bytes.extend(self.values(row, codes).flat_map(f32::to_le_bytes));
                continue;
            }
            for (block, codes) in codes.as_chunks::<BLOCK>().0.iter().enumerate() {
                let at = self.at(block * BLOCK, row);
                match storage {
                    StorageType::Int8 => bytes.extend(self.scales[at].to_le_bytes()),
                    _ => bytes.extend(f16::from_f32(self.scales[at]).to_le_bytes()),
                }
                if matches!(storage, StorageType::Int4 | StorageType::Int8) {
                    bytes.push(self.zero(at));
                }
                match storage {
                    StorageType::Q4_0 | StorageType::Int4 => bytes.extend(nibbles(codes)),
                    StorageType::Int8 => bytes.extend(codes),
                    _ => bytes.extend(codes.map(|code| code.wrapping_sub(middle))),
                }
            }
        }
        TensorData { storage, shape: vec![self.rows, self.cols], bytes: bytes.into() }
    }

    /// Returns the place of the scale of a column in a row.
    fn at(&self, col: usize, row: usize) -> usize {
        let group = match &self.groups {
            Groups::Of(size) => col / size,
            Groups::Named(groups) => groups[col] as usize,
        };
        group * self.rows + row
    }

    fn values(&self, row: usize, codes: &[u8]) -> impl Iterator<Item = f32> {
        codes.iter().enumerate().map(move |(col, &code)| {
            let at = self.at(col, row);
            (f32::from(code) - f32::from(self.zero(at))) * self.scales[at]
        })
    }

    /// Returns the zero point beside the scale at a place.
    fn zero(&self, at: usize) -> u8 {
        match &self.zeros {
            Zeros::Middle => 1 << (self.bits - 1),
            Zeros::Each(zeros) => zeros[at],
        }
    }

    /// Checks the sizes of scales and zero points, and replaces names of groups that only count them.
    fn checked(mut self, module: &Module<'_>, scales: &str) -> Result<Self, WeightError> {
        let count = self.scales.len() / self.rows.max(1);
        let size = self.cols.div_ceil(count.max(1));
        if let Groups::Named(groups) = &self.groups {
            if groups.len() != self.cols || groups.iter().any(|&group| group as usize >= count) {
                return Err(module.invalid(scales, format!("its {count} groups are not those of the inputs")));
            }
            if groups.iter().enumerate().all(|(col, &group)| group as usize == col / size) {
                self.groups = Groups::Of(size);
            }
        }
        let counted = match self.groups {
            Groups::Of(size) => size > 0 && self.cols.div_ceil(size) == count,
            Groups::Named(_) => true,
        };
        let zeros = match &self.zeros {
            Zeros::Middle => self.scales.len(),
            Zeros::Each(zeros) => zeros.len(),
        };
        if !counted || count * self.rows != self.scales.len() || zeros != self.scales.len() {
            let (rows, cols) = (self.rows, self.cols);
            let reason = format!("its {} elements do not fit a weight of {rows} x {cols}", self.scales.len());
            return Err(module.invalid(scales, reason));
        }
        Ok(self)
    }
}

/// Packs codes of a block: those of the first half in the low nibbles, the others in the high ones.
pub(super) fn nibbles(codes: &[u8; BLOCK]) -> [u8; BLOCK / 2] {
    std::array::from_fn(|i| codes[i] | codes[i + BLOCK / 2] << 4)
}

/// Returns the `bits`-bit fields of a word, lowest first.
fn fields(word: u32, bits: u32) -> impl Iterator<Item = u8> {
    (0..32 / bits).map(move |field| (word >> (field * bits) & ((1 << bits) - 1)) as u8)
}

/// Unpacks a matrix whose words have `bits`-bit fields along a row, of which the first `cols` count.
fn unpacked(words: &[u32], bits: u32, width: usize, cols: usize) -> Vec<u8> {
    let rows = words.chunks_exact(width.max(1));
    rows.flat_map(|row| row.iter().flat_map(|&word| fields(word, bits)).take(cols)).collect()
}

/// Returns the transpose of a matrix of `cols` columns.
fn transposed<T: Copy>(matrix: &[T], cols: usize) -> Vec<T> {
    let rows = matrix.len() / cols.max(1);
    (0..cols).flat_map(|col| (0..rows).map(move |row| matrix[row * cols + col])).collect()
}

/// Reads a module of GPTQ: words along the inputs, `[inputs / p, outputs]`.
pub(super) fn gptq(module: &Module<'_>, config: Gptq, values: bool) -> Result<Integers, WeightError> {
    let Gptq { bits, symmetric, less_one } = config;
    let fields_in_word = (32 / bits) as usize;
    let shape = module.shape("qweight")?;
    let &[words, rows] = shape else {
        return Err(module.invalid("qweight", format!("its shape {shape:?} is not that of a matrix")));
    };
    let cols = words * fields_in_word;
    let mut codes = Vec::new();
    if values {
        let (_, words) = module.matrix("qweight")?;
        codes = vec![0; rows * cols];
        for (at, &word) in words.iter().enumerate() {
            let (first, row) = (at / rows * fields_in_word, at % rows);
            codes[row * cols + first..][..fields_in_word]
                .iter_mut()
                .zip(fields(word, bits))
                .for_each(|(to, code)| *to = code);
        }
    }
    let (_, scales) = module.numbers("scales")?;
    let zeros = match symmetric {
        true => Zeros::Middle,
        false => {
            let ([_, width], words) = module.matrix("qzeros")?;
            let mask = ((1u32 << bits) - 1) as u8;
            let stored = unpacked(&words, bits, width, rows);
            Zeros::Each(stored.iter().map(|&zero| if less_one { zero.wrapping_add(1) & mask } else { zero }).collect())
        }
    };
    let groups = match module.has("g_idx") {
        true => Groups::Named(module.words("g_idx")?.1.collect()),
        false => Groups::Of(cols.div_ceil((scales.len() / rows.max(1)).max(1))),
    };
    Integers { rows, cols, bits, codes, zeros, scales, groups }.checked(module, "scales")
}

/// Order of the outputs in a word of AWQ.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Returns a matrix of AWQ `[inputs, outputs]`, whose words have eight outputs each.
fn awq_matrix(words: &[u32]) -> Vec<u8> {
    let mut codes = vec![0; words.len() * AWQ_ORDER.len()];
    for (&word, out) in words.iter().zip(codes.as_chunks_mut::<8>().0) {
        AWQ_ORDER.into_iter().zip(fields(word, 4)).for_each(|(to, code)| out[to] = code);
    }
    codes
}

/// Reads a module of AWQ: words along the outputs, `[inputs, outputs / 8]`.
pub(super) fn awq(module: &Module<'_>, symmetric: bool, values: bool) -> Result<Integers, WeightError> {
    let shape = module.shape("qweight")?;
    let &[cols, words] = shape else {
        return Err(module.invalid("qweight", format!("its shape {shape:?} is not that of a matrix")));
    };
    let rows = words * AWQ_ORDER.len();
    let codes = match values {
        true => transposed(&awq_matrix(&module.matrix("qweight")?.1), rows),
        false => Vec::new(),
    };
    let zeros = if symmetric { Zeros::Middle } else { Zeros::Each(awq_matrix(&module.matrix("qzeros")?.1)) };
    let (_, scales) = module.numbers("scales")?;
    let groups = Groups::Of(cols.div_ceil((scales.len() / rows.max(1)).max(1)));
    Integers { rows, cols, bits: 4, codes, zeros, scales, groups }.checked(module, "scales")
}

/// Reads a module of compressed-tensors whose integers are packed in words along the inputs.
pub(super) fn packed(module: &Module<'_>, values: bool) -> Result<Integers, WeightError> {
    let Bytes { bytes, .. } = module.bytes("weight_shape", &["I64"])?;
    let sizes: Vec<usize> = bytes.as_chunks().0.iter().map(|n| u64::from_le_bytes(*n) as usize).collect();
    let shape = module.shape("weight_packed")?;
    let (&[rows, cols], &[stored, width]) = (sizes.as_slice(), shape) else {
        return Err(module.invalid("weight_packed", format!("its shape {shape:?} is not that of a matrix")));
    };
    let bits = [2, 4, 8].into_iter().find(|bits| stored == rows && cols.div_ceil(32 / *bits as usize) == width);
    let bits: u32 = bits.ok_or_else(|| {
        module.invalid(
            "weight_packed",
            format!("its shape {shape:?} is not that of {rows} x {cols} integers of 2, 4 or 8 bits"),
        )
    })?;
    let codes = match values {
        true => unpacked(&module.matrix("weight_packed")?.1, bits, width, cols),
        false => Vec::new(),
    };
    let (shape, by_row) = module.numbers("weight_scale")?;
    let across = shape.get(1).copied().unwrap_or(1);
    let scales = transposed(&by_row, across);
    let zeros = match module.has("weight_zero_point") {
        false => Zeros::Middle,
        true => {
            // They are packed along the outputs, `[rows / p, groups]`.
            let ([_, groups], words) = module.matrix("weight_zero_point")?;
            let by_group = transposed(&words, groups);
            Zeros::Each(unpacked(&by_group, bits, words.len() / groups.max(1), rows))
        }
    };
    let groups = match module.has("weight_g_idx") {
        true => Groups::Named(module.words("weight_g_idx")?.1.collect()),
        false => Groups::Of(cols.div_ceil(across.max(1))),
    };
    Integers { rows, cols, bits, codes, zeros, scales, groups }.checked(module, "weight_scale")
}

/// Reads a module of compressed-tensors with a byte for each integer, and scales for a row or for all.
pub(super) fn int8(module: &Module<'_>, values: bool) -> Result<Integers, WeightError> {
    let Bytes { shape, bytes } = module.bytes("weight", &[I8])?;
    let &[rows, cols] = shape else {
        return Err(module.invalid("weight", format!("its shape {shape:?} is not that of a matrix")));
    };
    let raised = |byte: &u8| byte.wrapping_add(128);
    let codes = if values { bytes.iter().map(raised).collect() } else { Vec::new() };
    let by_rows = |found: Vec<f32>| if found.len() == 1 { vec![found[0]; rows] } else { found };
    let scales = by_rows(module.numbers("weight_scale")?.1);
    let zeros = match module.has("weight_zero_point") {
        false => Zeros::Middle,
        true => {
            let Bytes { bytes, .. } = module.bytes("weight_zero_point", &[I8])?;
            let zeros: Vec<u8> = bytes.iter().map(raised).collect();
            Zeros::Each(if zeros.len() == 1 { vec![zeros[0]; rows] } else { zeros })
        }
    };
    let groups = Groups::Of(cols.max(1));
    Integers { rows, cols, bits: 8, codes, zeros, scales, groups }.checked(module, "weight_scale")
}

/// Reads a module of bitsandbytes with a byte for each integer, and the largest magnitude of each row.
pub(super) fn scaled_rows(module: &Module<'_>, values: bool) -> Result<Integers, WeightError> {
    let Bytes { shape, bytes } = module.bytes("weight", &[I8])?;
    let &[rows, cols] = shape else {
        return Err(module.invalid("weight", format!("its shape {shape:?} is not that of a matrix")));
    };
    if module.has("weight_format") && module.bytes("weight_format", &[U8])?.bytes != [0] {
        return Err(module.invalid("weight_format", "its rows are not in order"));
    }
    let codes = if values { bytes.iter().map(|byte| byte.wrapping_add(128)).collect() } else { Vec::new() };
    let scales = module.numbers("SCB")?.1.into_iter().map(|largest| largest / 127.0).collect();
    let (zeros, groups) = (Zeros::Middle, Groups::Of(cols.max(1)));
    Integers { rows, cols, bits: 8, codes, zeros, scales, groups }.checked(module, "SCB")
}
