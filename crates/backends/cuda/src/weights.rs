//! Copying of weights from a checkpoint to the device.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};
use octavo_kernels::manifest::Dtype;
use octavo_kernels::params::QuantWeight;
use octavo_kernels::quant::{QuantFormat, QuantLayout};
use octavo_ops::{
    BackendError, Op, Program, StorageType, TensorData, Weight, WeightError, WeightId, WeightPart, WeightSource,
};

use crate::arena::{Arena, Plan, Region};
use crate::driver::Gpu;
use crate::dummy::Fill;
use crate::float8::{SIDE, Scaling, most_scales, shared_scales};
use crate::linear::Setting;
use crate::uploads::{Piece, Uploads};
use crate::{integers, unsupported};

/// Location and layout of a weight.
#[derive(Clone, Debug)]
pub(crate) enum Placed {
    /// Numbers in f32, for norms and attention sinks.
    Vector(Region),
    /// Numbers in f32 and, for cuBLASLt, in the element type; for biases.
    Bias(Region, Region),
    /// A matrix for products, as row parts.
    Matrix(Vec<Part>),
    /// The matrices of experts or heads: each part has the rows of one part of every expert.
    Experts(Vec<Part>),
}

/// Consecutive rows of a matrix.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Number of rows of the part.
    pub(crate) rows: usize,
    pub(crate) region: Region,
    /// Quantisation; `None` for numbers of the element type, `[rows, cols]`.
    pub(crate) quant: Option<(QuantFormat, QuantLayout)>,
    /// Scales of an FP8 matrix that cuBLASLt may multiply.
    pub(crate) scales: Option<Region>,
}

impl Part {
    /// Returns the planes of a quantised part.
    pub(crate) fn planes(&self, arena: &Arena) -> QuantWeight {
        self.quant.map_or_else(QuantWeight::default, |(_, layout)| layout.planes(arena.at(self.region)))
    }
}

/// Returns the format in which a storage type is kept; `None` if it is kept as plain numbers.
const fn format_of(storage: StorageType) -> Option<QuantFormat> {
    match storage {
        StorageType::F32 | StorageType::F16 | StorageType::BF16 => None,
        StorageType::Q4_0 => Some(QuantFormat::Q4_0),
        StorageType::Q4_1 => Some(QuantFormat::Q4_1),
        StorageType::Q5_0 => Some(QuantFormat::Q5_0),
        StorageType::Q5_1 => Some(QuantFormat::Q5_1),
        StorageType::Q8_0 => Some(QuantFormat::Q8_0),
        StorageType::Q2K => Some(QuantFormat::Q2K),
        StorageType::Q3K => Some(QuantFormat::Q3K),
        StorageType::Q4K => Some(QuantFormat::Q4K),
        StorageType::Q5K => Some(QuantFormat::Q5K),
        StorageType::Q6K => Some(QuantFormat::Q6K),
        StorageType::Mxfp4 => Some(QuantFormat::Mxfp4),
        StorageType::Nvfp4 => Some(QuantFormat::Nvfp4),
        StorageType::Iq4Nl => Some(QuantFormat::Iq4Nl),
        StorageType::Iq4Xs => Some(QuantFormat::Iq4Xs),
        StorageType::Int4 => Some(QuantFormat::Int4),
        StorageType::Int8 => Some(QuantFormat::Int8),
        StorageType::F8E4M3 => Some(QuantFormat::F8E4M3),
        StorageType::Nf4 => Some(QuantFormat::Nf4),
        StorageType::Fp4 => Some(QuantFormat::Fp4),
    }
}

/// Use of a weight by the ops of a program.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Matrix,
    /// Matrices of so many experts or heads.
    Experts(usize),
    Vector,
    Bias,
}

fn uses(program: &Program) -> Vec<Use> {
    let mut uses = vec![Use::Matrix; program.weights.len()];
    let mut mark = |id: WeightId, how| uses[id.0] = how;
    for op in &program.ops {
        match op {
            Op::Norm(op) => [Some(op.weight), op.bias].into_iter().flatten().for_each(|id| mark(id, Use::Vector)),
            Op::Linear(op) => op.bias.into_iter().for_each(|id| mark(id, Use::Bias)),
            Op::GatherColumns(op) => mark(op.order, Use::Vector),
            Op::QkvPost(op) => {
                op.norm.iter().flat_map(|norm| [norm.q, norm.k]).for_each(|id| mark(id, Use::Vector));
            }
            Op::HeadLinear(op) => mark(op.weight, Use::Experts(op.heads)),
            Op::LatentPost(op) => mark(op.norm, Use::Vector),
            Op::PagedAttention(op) => op.sinks.into_iter().for_each(|id| mark(id, Use::Vector)),
            // A router is in f32, whatever the element type.
            Op::Route(op) => {
                [Some(op.weight), op.bias, op.correction].into_iter().flatten().for_each(|id| mark(id, Use::Vector));
            }
            Op::ExpertLinear(op) => {
                mark(op.weight, Use::Experts(op.experts));
                op.bias.into_iter().for_each(|id| mark(id, Use::Vector));
            }
            _ => {}
        }
    }
    uses
}

/// Assigns a location to the weights of a program, by [`WeightId`].
pub(crate) fn place(program: &Program, setting: &Setting, plan: &mut Plan) -> Result<Vec<Placed>, BackendError> {
    let dtype = setting.dtype;
    let place_one = |(weight, how): (&Weight, Use)| -> Result<Placed, BackendError> {
        let bytes = |size: usize| (weight.elements() as u64).saturating_mul(size as u64);
        Ok(match how {
            Use::Vector => Placed::Vector(plan.take(bytes(size_of::<f32>()))),
            Use::Bias => Placed::Bias(plan.take(bytes(size_of::<f32>())), plan.take(bytes(dtype.bytes()))),
            Use::Matrix => Placed::Matrix(place_matrix(weight, setting, plan)?),
            Use::Experts(count) => Placed::Experts(place_experts(weight, count, dtype, plan)?),
        })
    };
    program.weights.iter().zip(uses(program)).map(place_one).collect()
}

/// Places a matrix. Adjacent parts of one format become one, which a single launch multiplies.
fn place_matrix(weight: &Weight, setting: &Setting, plan: &mut Plan) -> Result<Vec<Part>, BackendError> {
    let mut parts: Vec<Part> = Vec::new();
    let mut rest = &weight.parts[..];
    while let Some(first) = rest.first() {
        let format = format_of(first.storage);
        let by_library = format == Some(QuantFormat::F8E4M3) && setting.multiplies_fp8_by_library();
        let mut rows = 0usize;
        let joins = |part: &&WeightPart| {
            // The scales of blocks are found only in a part whose blocks begin with it.
            let is_whole = !by_library || rows.is_multiple_of(SIDE);
            rows += part.rows;
            format_of(part.storage) == format && is_whole
        };
        let (these, others) = rest.split_at(rest.iter().take_while(joins).count());
        rest = others;
        let rows = these.iter().map(|part| part.rows).sum();
        let mut part = place_part(weight, rows, format, setting.dtype, plan)?;
        if by_library {
            part.scales = Some(plan.take((most_scales(rows, weight.cols) * size_of::<f32>()) as u64));
        }
        parts.push(part);
    }
    Ok(parts)
}

/// Places the matrices of experts part by part, each part of all experts together.
fn place_experts(weight: &Weight, count: usize, dtype: Dtype, plan: &mut Plan) -> Result<Vec<Part>, BackendError> {
    let each = weight.parts.len() / count.max(1);
    let place = |index: usize| {
        let storages = || parts_of_experts(weight, index, each).map(|part| part.storage);
        let format = match integers::common(storages()) {
            Some(storage) => format_of(storage),
            None if storages().all(|storage| format_of(storage).is_none()) => None,
            None => {
                let what = format!("experts that are stored in different ways (weight '{}')", weight.name);
                return Err(unsupported(what));
            }
        };
        place_part(weight, weight.parts[index].rows * count, format, dtype, plan)
    };
    (0..each).map(place).collect()
}

/// Returns one part of every expert.
fn parts_of_experts(weight: &Weight, index: usize, each: usize) -> impl Iterator<Item = &WeightPart> {
    weight.parts.iter().skip(index).step_by(each)
}

fn place_part(
    weight: &Weight,
    rows: usize,
    format: Option<QuantFormat>,
    dtype: Dtype,
    plan: &mut Plan,
) -> Result<Part, BackendError> {
    let too_large = || unsupported(format!("the size of weight '{}'", weight.name));
    let quant = match format {
        Some(format) => Some((format, QuantLayout::new(format, rows, weight.cols).ok_or_else(too_large)?)),
        None if !weight.cols.is_multiple_of(8) => {
            let (name, cols) = (&weight.name, weight.cols);
            return Err(unsupported(format!("rows of {cols} elements, no multiple of 8 (weight '{name}')")));
        }
        None => None,
    };
    let plain = (rows as u64).saturating_mul(weight.cols as u64).saturating_mul(dtype.bytes() as u64);
    let region = plan.take(quant.map_or(plain, |(_, layout)| layout.bytes() as u64));
    Ok(Part { rows, region, quant, scales: None })
}

/// Reads weights and copies them to their locations.
pub(crate) struct Loader<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) arena: &'a Arena,
    pub(crate) dtype: Dtype,
    pub(crate) source: &'a dyn WeightSource,
    /// Copies under way.
    pub(crate) uploads: Uploads<'a>,
    /// Which elements share a scale, by the address of the scales.
    pub(crate) scalings: HashMap<u64, Scaling>,
    /// Generator of dummy weights, if the source uses them.
    pub(crate) fill: Option<&'a Fill>,
    /// Called with the number of bytes read since the last call.
    pub(crate) progress: &'a mut dyn FnMut(usize),
}

impl<'a> Loader<'a> {
    /// Loads one weight.
    pub(crate) fn load(&mut self, weight: &Weight, placed: &Placed) -> Result<(), BackendError> {
        match placed {
            Placed::Vector(region) => self.load_plain(weight, &weight.parts, &[(*region, Dtype::F32)]),
            Placed::Bias(wide, narrow) => {
                self.load_plain(weight, &weight.parts, &[(*wide, Dtype::F32), (*narrow, self.dtype)])
            }
            Placed::Matrix(parts) => {
                let mut rest = &weight.parts[..];
                for part in parts {
                    let mut rows = 0;
                    let count = rest.iter().take_while(|of| {
                        let more = rows < part.rows;
                        rows += of.rows;
                        more
                    });
                    let (these, others) = rest.split_at(count.count());
                    rest = others;
                    match part.quant {
                        None => self.load_plain(weight, these, &[(part.region, self.dtype)])?,
                        Some(quant) => self.load_quantised(weight, these, part, quant)?,
                    }
                }
                Ok(())
            }
            Placed::Experts(parts) => {
                for (index, part) in parts.iter().enumerate() {
                    let these: Vec<_> = parts_of_experts(weight, index, parts.len()).cloned().collect();
                    match part.quant {
                        None => self.load_plain(weight, &these, &[(part.region, self.dtype)])?,
                        Some(quant) => self.load_quantised(weight, &these, part, quant)?,
                    }
                }
                Ok(())
            }
        }
    }

    /// Loads numbers, one part after the other, to each target in its own type.
    fn load_plain(
        &mut self,
        weight: &Weight,
        parts: &[WeightPart],
        targets: &[(Region, Dtype)],
    ) -> Result<(), BackendError> {
        let mut elements = 0;
        for part in parts {
            if let (Some(fill), Some(rule)) = (self.fill, self.source.rule(&part.tensor)) {
                let count = part.rows * weight.cols;
                for &(region, dtype) in targets {
                    let at = self.arena.at(region) + (elements * dtype.bytes()) as u64;
                    fill.write(at, count as u64, dtype, &rule)?;
                }
                (self.progress)(part.storage.bytes_for(count).unwrap_or(0));
                elements += count;
                continue;
            }
            let data = plain(part.read(weight.cols, self.source)?)
                .map_err(|storage| unsupported(format!("the vector '{}' stored as {storage}", part.tensor)))?;
            let (size, tensor) = (data.storage.block_bytes(), Arc::<str>::from(part.tensor.as_str()));
            let data = Arc::new(data);
            for &(region, dtype) in targets {
                let at = self.arena.at(region) + (elements * dtype.bytes()) as u64;
                self.upload_plain(&data, &tensor, dtype, at)?;
            }
            let count = data.bytes.len() / size;
            (self.progress)(part.storage.bytes_for(count).unwrap_or(0));
            elements += count;
        }
        Ok(())
    }

    /// Loads the rows of a quantised matrix, one part after the other.
    fn load_quantised(
        &mut self,
        weight: &Weight,
        parts: &[WeightPart],
        part: &Part,
        (format, layout): (QuantFormat, QuantLayout),
    ) -> Result<(), BackendError> {
        let source = self.source;
        let read = |part: &WeightPart| -> Result<Cow<'a, [u8]>, WeightError> {
            part.read(weight.cols, source).map(|data| match format_of(data.storage) == Some(format) {
                true => data.bytes,
                false => integers::widened(data.storage, &data.bytes).into(),
            })
        };
        let to = self.arena.at(part.region);
        // Elements of several parts may share a scale.
        if let Some(region) = part.scales {
            let blocks = match parts {
                [part] => read(part)?,
                parts => parts.iter().map(read).collect::<Result<Vec<_>, _>>()?.concat().into(),
            };
            if let Some((scaling, scales)) = shared_scales(&blocks, part.rows, weight.cols) {
                let at = self.arena.at(region);
                self.gpu.write(at, &scales.into_iter().map(f32::to_bits).collect::<Vec<_>>())?;
                self.scalings.insert(at, scaling);
            }
            return self.upload_rows(blocks, layout, 0..part.rows, to);
        }
        let mut rows = 0..0;
        for part in parts {
            rows = rows.end..rows.end + part.rows;
            self.upload_rows(read(part)?, layout, rows.clone(), to)?;
        }
        Ok(())
    }

    /// Lets threads convert plain numbers to a type and copies them.
    fn upload_plain(
        &mut self,
        data: &Arc<TensorData<'a>>,
        tensor: &Arc<str>,
        dtype: Dtype,
        to: u64,
    ) -> Result<(), BackendError> {
        let (size, out_size) = (data.storage.block_bytes(), dtype.bytes());
        let (count, most) = (data.bytes.len() / size, Uploads::BUFFER_BYTES / out_size);
        for first in (0..count).step_by(most) {
            let range = first..count.min(first + most);
            let piece = Piece { to: to + (first * out_size) as u64, bytes: range.len() * out_size };
            let (data, tensor) = (data.clone(), tensor.clone());
            self.uploads.push(vec![piece], move |out| {
                if convert(data.storage, &data.bytes[range.start * size..range.end * size], dtype, out) {
                    return Ok(());
                }
                let reason = "it has values beyond the range of float16: use --dtype float32".to_owned();
                Err(WeightError::Invalid { name: tensor.to_string(), reason })
            })?;
        }
        Ok(())
    }

    /// Lets threads repack some rows of a quantised matrix and copies them.
    fn upload_rows(
        &mut self,
        blocks: Cow<'a, [u8]>,
        layout: QuantLayout,
        rows: Range<usize>,
        to: u64,
    ) -> Result<(), BackendError> {
        let (read, row) = (blocks.len(), blocks.len() / rows.len().max(1));
        let out_row: usize = layout.pieces(0..1).iter().map(|piece| piece.1).sum();
        let most = (Uploads::BUFFER_BYTES / out_row.max(1)).max(1);
        let blocks = Arc::new(blocks);
        for first in rows.clone().step_by(most) {
            let range = first..rows.end.min(first + most);
            let planes = layout.pieces(range.clone()).into_iter().filter(|(_, bytes)| *bytes > 0);
            let pieces = planes.map(|(start, bytes)| Piece { to: to + start as u64, bytes }).collect();
            let (blocks, start) = (blocks.clone(), (first - rows.start) * row);
            self.uploads.push(pieces, move |out| {
                layout.repack_rows(&blocks[start..start + range.len() * row], out);
                Ok(())
            })?;
        }
        (self.progress)(read);
        Ok(())
    }
}

/// Returns a tensor as plain numbers.
///
/// # Errors
/// Returns the storage type if there is no decoder for it.
fn plain(data: TensorData<'_>) -> Result<TensorData<'_>, StorageType> {
    if data.storage.block_elements() == 1 {
        return Ok(data);
    }
    let decode = data.storage.decoder().ok_or(data.storage)?;
    let mut values = vec![0.0; data.bytes.len() / data.storage.block_bytes() * data.storage.block_elements()];
    decode(&data.bytes, &mut values);
    let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
    Ok(TensorData { storage: StorageType::F32, shape: data.shape, bytes })
}

/// Returns whether elements of a type are stored in that type.
fn is_stored_as(storage: StorageType, dtype: Dtype) -> bool {
    let own = match dtype {
        Dtype::F32 => StorageType::F32,
        Dtype::F16 => StorageType::F16,
        Dtype::Bf16 => StorageType::BF16,
    };
    storage == own
}

/// Converts elements to a type. Returns `false` if a finite one has become infinite.
fn convert(storage: StorageType, bytes: &[u8], dtype: Dtype, out: &mut [u8]) -> bool {
    match storage {
        _ if is_stored_as(storage, dtype) => {
            out.copy_from_slice(bytes);
            true
        }
        StorageType::F16 => {
            write_numbers(bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()), dtype, out)
        }
        StorageType::BF16 => {
            write_numbers(bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()), dtype, out)
        }
        _ => write_numbers(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)), dtype, out),
    }
}

/// Writes numbers in a type. Returns `false` if a finite one has become infinite.
pub(crate) fn write_numbers(values: impl Iterator<Item = f32>, dtype: Dtype, out: &mut [u8]) -> bool {
    let mut whole = true;
    match dtype {
        Dtype::F32 => out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, x)| *out = x.to_le_bytes()),
        Dtype::Bf16 => {
            let bits = values.map(|x| bf16::from_f32(x).to_le_bytes());
            out.as_chunks_mut().0.iter_mut().zip(bits).for_each(|(out, x)| *out = x);
        }
        Dtype::F16 => {
            for (out, x) in out.as_chunks_mut().0.iter_mut().zip(values) {
                let half = f16::from_f32(x);
                whole &= half.is_finite() || !x.is_finite();
                *out = half.to_le_bytes();
            }
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use octavo_ops::testing::TinyModel;

    use super::*;

    #[test]
    fn numbers_are_told_in_every_type() {
        let from: Vec<u8> = [1.5f32, -0.25, 300.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut out = vec![0; 6];
        assert!(convert(StorageType::F32, &from, Dtype::F16, &mut out));
        let found: Vec<_> = out.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect();
        assert_eq!(found, [1.5, -0.25, 300.0]);
        assert!(convert(StorageType::F32, &from, Dtype::Bf16, &mut out));
        let mut back = vec![0; 12];
        assert!(convert(StorageType::BF16, &out, Dtype::F32, &mut back));
        assert_eq!(back, from);
    }

    #[test]
    fn numbers_of_the_own_type_keep_their_bits() {
        // A conversion would make the NaN a quiet one.
        let bits: Vec<u8> = [0x7f81u16, 0xff80, 0x8000, 0x0001].iter().flat_map(|x| x.to_le_bytes()).collect();
        for (storage, dtype) in [(StorageType::BF16, Dtype::Bf16), (StorageType::F16, Dtype::F16)] {
            let mut out = vec![0; bits.len()];
            assert!(convert(storage, &bits, dtype, &mut out));
            assert_eq!(out, bits);
        }
    }

    #[test]
    fn what_f16_cannot_tell_is_noticed() {
        let mut out = [0; 2];
        assert!(!convert(StorageType::BF16, &bf16::from_f32(1e5).to_le_bytes(), Dtype::F16, &mut out));
        assert!(convert(StorageType::BF16, &bf16::INFINITY.to_le_bytes(), Dtype::F16, &mut out), "it was infinite");
    }

    #[test]
    fn parts_of_plain_numbers_are_one() {
        let (program, _) = TinyModel { biases: true, ..TinyModel::default() }.build().unwrap();
        let mut plan = Plan::default();
        let placed = place(&program, &crate::linear::tests::setting(Dtype::Bf16), &mut plan).unwrap();
        let of = |name: &str| &placed[program.weights.iter().position(|w| w.name == name).unwrap()];
        assert!(matches!(of("0.qkv"), Placed::Matrix(parts) if parts.len() == 1 && parts[0].rows == 64));
        assert!(matches!(of("0.in.norm"), Placed::Vector(region) if region.bytes == 24 * 4));
        let biases =
            placed.iter().filter(|p| matches!(p, Placed::Bias(wide, narrow) if wide.bytes == 2 * narrow.bytes));
        assert!(biases.count() > 0);
    }

    #[test]
    fn adjacent_parts_of_a_format_are_one() {
        use StorageType::{BF16, F8E4M3, F16, Q4K, Q6K};
        let rows_of = |storages: &[(StorageType, usize)], setting: &Setting| -> Vec<usize> {
            let part = |(at, &(storage, rows)): (usize, &(StorageType, usize))| WeightPart {
                tensor: at.to_string(),
                rows,
                storage,
                slab: None,
            };
            let parts: Vec<_> = storages.iter().enumerate().map(part).collect();
            let rows = parts.iter().map(|part| part.rows).sum();
            let weight = Weight { name: "w".into(), rows, cols: 256, parts };
            place_matrix(&weight, setting, &mut Plan::default()).unwrap().iter().map(|part| part.rows).collect()
        };
        let setting = crate::linear::tests::setting(Dtype::Bf16);
        assert_eq!(rows_of(&[(Q4K, 4), (Q4K, 2), (Q6K, 2), (Q6K, 1), (Q4K, 3)], &setting), [6, 3, 3]);
        assert_eq!(rows_of(&[(BF16, 4), (F16, 2), (Q6K, 2), (BF16, 1)], &setting), [6, 2, 1]);
        // Where the library needs scales of blocks, a part begins with a block.
        let eights = [(F8E4M3, 256), (F8E4M3, 130), (F8E4M3, 128), (F8E4M3, 1)];
        assert_eq!(rows_of(&eights, &setting), [515]);
        assert_eq!(rows_of(&eights, &Setting { fp8_inputs: true, ..setting }), [386, 129]);
    }

    #[test]
    fn formats_are_those_of_the_files() {
        for storage in StorageType::ALL {
            match format_of(storage) {
                None => assert_eq!(storage.block_elements(), 1, "{storage}"),
                Some(format) => {
                    let (elements, bytes) = (format.block_elements(), format.block_bytes());
                    assert_eq!((elements, bytes), (storage.block_elements(), storage.block_bytes()), "{storage}");
                    assert_eq!(format.name().to_uppercase(), storage.name());
                }
            }
        }
    }

    #[test]
    fn what_no_kernel_takes_is_said() {
        let model = TinyModel { hidden: 12, ..TinyModel::default() };
        let (program, _) = model.build().unwrap();
        let error =
            place(&program, &crate::linear::tests::setting(Dtype::F32), &mut Plan::default()).unwrap_err().to_string();
        assert_eq!(error, "the cuda backend does not support rows of 12 elements, no multiple of 8 (weight 'embed')");
    }
}
