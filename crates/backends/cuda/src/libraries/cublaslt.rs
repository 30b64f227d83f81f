//! cuBLASLt, for dense products.
//!
//! A product's descriptors and its algorithm are created once, when the model is loaded. A step only calls
//! `cublasLtMatmul` with our own workspace, so that it neither allocates nor chooses and can be captured.
//!
//! cuBLASLt uses column-major order: our `out[M,N] = input[M,K] · weight[N,K]ᵀ` is its `Outᵀ[N,M] = Wᵀ · Inputᵀ`, whose
//! factors and result need no change in memory.
//!
//! Factors in e4m3 (cuBLAS documentation, "Narrow Precision Data Types Usage"; the numbers are those of `cublasLt.h`) need
//! compute capability 8.9, a transposed first factor and a second one that is not (our order), rows of a multiple of 16 bytes,
//! sums in f32, and an output in f16, bf16 or f32. Without scales, every release multiplies them. Scales for parts of a factor,
//! on the device, need cuBLASLt 12.9 and compute capability 9.0. An older library refuses the attribute of the mode, and other
//! chips get no algorithm, so neither version nor chip is asked for. With [`Scaling::Rows`], a row of either factor has a
//! scale. With [`Scaling::Blocks`], N and the planned number of rows are multiples of 4; the scales of the weight are rows of
//! blocks, padded to a multiple of 4; those of the input are `[K / 128, rows]`, of as many rows as are planned. Scales are
//! aligned to 16 bytes. Sums are promoted to f32 on the way (`FAST_ACCUM` stays 0).

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::Arc;

use octavo_kernels::manifest::Dtype;
use octavo_ops::BackendError;
use serde::{Deserialize, Serialize};

use super::{Candidate, functions, open};
use crate::driver::Gpu;
use crate::failed;
use crate::float8::Scaling;

/// Size of the workspace in bytes: NVIDIA's recommendation for Hopper, and more than enough for the others.
pub(crate) const WORKSPACE: u64 = 32 << 20;

type Handle = *mut c_void;

/// `CUBLAS_COMPUTE_32F`: accumulation in f32 without reduced precision.
const COMPUTE_F32: i32 = 68;
/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;
/// `CUBLASLT_EPILOGUE_BIAS`.
const EPILOGUE_BIAS: i32 = 4;

/// Attributes of a product's descriptor.
#[repr(i32)]
enum Attribute {
    TransposeA = 3,
    Epilogue = 7,
    BiasPointer = 8,
    WeightScalePointer = 17,
    InputScalePointer = 18,
    WeightScaleMode = 31,
    InputScaleMode = 32,
}

/// `CUDA_R_8F_E4M3`.
const E4M3: i32 = 28;

/// Returns the modes of the scales of weight and input, `cublasLtMatmulMatrixScale_t`; `None` if they have no scales.
const fn modes(scaling: Scaling) -> Option<[i32; 2]> {
    /// `OUTER_VEC_32F`.
    const ROWS: i32 = 3;
    /// `VEC128_32F`.
    const VECTORS: i32 = 4;
    /// `BLK128x128_32F`.
    const BLOCKS: i32 = 5;
    match scaling {
        Scaling::Rows => Some([ROWS, ROWS]),
        Scaling::Blocks => Some([BLOCKS, VECTORS]),
        Scaling::Afterwards => None,
    }
}

/// Criteria for choosing an algorithm, `cublasLtMatmulPreferenceAttributes_t`.
#[repr(i32)]
enum Preference {
    MaxWorkspaceBytes = 1,
    ReductionSchemeMask = 3,
    MinAlignmentC = 7,
    MinAlignmentD = 8,
}

/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: if inputs are split, partial sums are added in f32 and not in the output's
/// type.
const SUMS_IN_F32: u32 = 2;

/// Default alignment in bytes, which the regions of the arena have.
pub(crate) const USUAL_ALIGNMENT: u32 = 256;

/// Minimum alignment of outputs and biases in bytes. cuBLASLt does not compute other products, because its kernels
/// store 16 bytes at a time.
pub(crate) const LEAST_ALIGNMENT: u32 = 16;

/// `cublasLtMatmulAlgo_t`: an algorithm, which may be stored and used again with the same release of the library.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Algorithm([u64; 8]);

#[cfg(test)]
impl Algorithm {
    /// Returns an algorithm of tests.
    pub(crate) const fn of(number: u64) -> Self {
        Self([number; 8])
    }
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Heuristic {
    algorithm: Algorithm,
    workspace: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

functions! {
    /// Functions of cuBLASLt.
    Functions {
        cublasLtCreate: fn(*mut Handle);
        cublasLtDestroy: fn(Handle);
        cublasLtGetProperty: fn(i32, *mut i32);
        cublasLtMatmulDescCreate: fn(*mut Handle, i32, i32);
        cublasLtMatmulDescDestroy: fn(Handle);
        cublasLtMatmulDescSetAttribute: fn(Handle, i32, *const c_void, usize);
        cublasLtMatrixLayoutCreate: fn(*mut Handle, i32, u64, u64, i64);
        cublasLtMatrixLayoutDestroy: fn(Handle);
        cublasLtMatmulPreferenceCreate: fn(*mut Handle);
        cublasLtMatmulPreferenceDestroy: fn(Handle);
        cublasLtMatmulPreferenceSetAttribute: fn(Handle, i32, *const c_void, usize);
        cublasLtMatmulAlgoGetHeuristic:
            fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut Heuristic, *mut i32);
        cublasLtMatmul:
            fn(Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64, Handle,
               *const Algorithm, u64, usize, *mut c_void);
    }
}

/// Properties of a product except its number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// Number of outputs.
    pub(crate) n: u32,
    /// Number of inputs.
    pub(crate) k: u32,
    /// Number of elements from one row of the output to the next.
    pub(crate) stride: u32,
    /// Type of the output: that of the activations, or f32.
    pub(crate) out: Dtype,
    /// Whether a bias is added.
    pub(crate) bias: bool,
    /// How factors in e4m3 are scaled; `None` if they have the type of activations.
    pub(crate) scaling: Option<Scaling>,
    /// Alignment in bytes of the output and of the added matrix, from [`LEAST_ALIGNMENT`] to [`USUAL_ALIGNMENT`].
    pub(crate) alignment: u32,
}

/// Returns the alignment of an address in bytes, up to [`USUAL_ALIGNMENT`].
pub(crate) fn alignment_of(address: u64) -> u32 {
    1 << address.trailing_zeros().min(USUAL_ALIGNMENT.trailing_zeros())
}

/// Addresses of a product's matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) input: u64,
    pub(crate) weight: u64,
    /// Bias in the output's type; read if the shape has one.
    pub(crate) bias: u64,
    /// Matrix added to the product; 0 for none.
    pub(crate) add: u64,
    pub(crate) out: u64,
    /// Factor of the product.
    pub(crate) scale: f32,
    /// Scales of the weight and of the input; read if the shape has a scaling.
    pub(crate) scales: [u64; 2],
}

/// The library, its handle on the current context, and the plans made with it.
pub(crate) struct CublasLt {
    gpu: Arc<Gpu>,
    functions: Functions,
    handle: Handle,
    /// Type of activations and weights.
    dtype: Dtype,
    workspace: u64,
    /// Plans; `None` if the library has no algorithm, or none that runs.
    plans: HashMap<(Shape, u32), Option<Plan>>,
    /// Whether an algorithm has run.
    tried: HashMap<Tried, Result<(), Refused>>,
    /// Path of the library.
    pub(crate) path: PathBuf,
}

// SAFETY: handles may be used from any thread, one at a time; `&mut self` and the device's one thread ensure that.
unsafe impl Send for CublasLt {}

/// An algorithm, and what it loads another kernel for: the type of the output, whether there is a bias, and the scaling.
type Tried = (Algorithm, Dtype, bool, Option<Scaling>);

/// Message of the library about an unsupported product.
type Refused = String;

struct Plan {
    description: Handle,
    weight: Handle,
    input: Handle,
    out: Handle,
    algorithm: Algorithm,
}

/// Returns the number of rows for which a product is planned: at most an eighth more than requested. The surplus rows
/// are computed and not read.
pub(crate) fn bucket(rows: u32) -> u32 {
    let step = (rows.max(1).next_power_of_two() / 16).max(16);
    rows.max(1).next_multiple_of(step)
}

/// Returns all numbers of rows for which products of at most `most` rows are planned.
pub(crate) fn buckets(most: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(bucket(1)), |rows| Some(bucket(rows + 1))).take_while(move |rows| *rows <= bucket(most))
}

impl CublasLt {
    /// Opens a library. `workspace` is the address of [`WORKSPACE`] bytes on the device.
    ///
    /// # Errors
    /// Returns a sentence.
    pub(crate) fn open(candidate: &Candidate, gpu: &Arc<Gpu>, dtype: Dtype, workspace: u64) -> Result<Self, String> {
        let functions = open(candidate, Functions::read)?;
        gpu.bind().map_err(|error| error.to_string())?;
        let mut handle = null_mut();
        // SAFETY: the handle is written to a local pointer.
        let result = unsafe { (functions.cublasLtCreate)(&raw mut handle) };
        let path = candidate.path.clone();
        check("cublasLtCreate", result).map_err(|reason| format!("{} does not start: {reason}", path.display()))?;
        let (plans, tried) = (HashMap::new(), HashMap::new());
        Ok(Self { gpu: gpu.clone(), functions, handle, dtype, workspace, plans, tried, path })
    }

    /// Returns the release as a text, such as `12.9.1`.
    pub(crate) fn release(&self) -> String {
        // The numbers are those of `libraryPropertyType`: major, minor, patch level.
        let number = |property| {
            let mut value = 0;
            // SAFETY: the value is written to a local variable.
            let result = unsafe { (self.functions.cublasLtGetProperty)(property, &raw mut value) };
            check("cublasLtGetProperty", result).map_or_else(|refused| refused, |()| value.to_string())
        };
        [0, 1, 2].map(number).join(".")
    }

    /// Plans a product of `rows` rows (a [`bucket`]), unless it is planned already. With `operands`, an algorithm that
    /// has not run before is run, because the library loads a kernel on its first run, which takes memory and time and
    /// may fail only then. [`CublasLt::run`] leaves unsupported products to other kernels. Returns whether it is supported.
    pub(crate) fn prepare(&mut self, shape: Shape, rows: u32, operands: Option<&Operands>) -> bool {
        if let Some(known) = self.plans.get(&(shape, rows)) {
            return known.is_some();
        }
        let planned = self.plan(shape, rows, operands).and_then(|plan| {
            let tried = self.try_once(&plan, shape, operands);
            if tried.is_err() {
                self.destroy(&plan);
            }
            tried.map(|()| plan)
        });
        if let Err(reason) = &planned {
            tracing::debug!(reason, ?shape, rows, "cuBLASLt does not multiply this");
        }
        let supported = planned.is_ok();
        self.plans.insert((shape, rows), planned.ok());
        supported
    }

    /// Returns at most `most` algorithms for a planned product, in the library's order; none if it does not support the product.
    pub(crate) fn algorithms(&self, shape: Shape, rows: u32, most: usize) -> Vec<Algorithm> {
        let Some(Some(plan)) = self.plans.get(&(shape, rows)) else { return Vec::new() };
        let found = self.heuristics(plan, shape, most).unwrap_or_default();
        found.into_iter().filter(|found| found.state == 0).map(|found| found.algorithm).collect()
    }

    /// Launches a planned product by one of its algorithms. Returns `false` if the library refuses that.
    pub(crate) fn run_by(&self, algorithm: Algorithm, shape: Shape, rows: u32, operands: &Operands) -> bool {
        let Some(Some(plan)) = self.plans.get(&(shape, rows)) else { return false };
        let launched = self.launch(&Plan { algorithm, ..*plan }, shape, operands);
        if let Err(reason) = &launched {
            tracing::debug!(reason, ?shape, rows, ?algorithm, "an algorithm of cuBLASLt does not run");
        }
        launched.is_ok()
    }

    /// Makes an algorithm that of a planned product, unless it does not run with these operands.
    pub(crate) fn choose(&mut self, algorithm: Algorithm, shape: Shape, rows: u32, operands: &Operands) {
        let Some(Some(plan)) = self.plans.get(&(shape, rows)) else { return };
        let plan = Plan { algorithm, ..*plan };
        match self.try_once(&plan, shape, Some(operands)) {
            Ok(()) => drop(self.plans.insert((shape, rows), Some(plan))),
            Err(reason) => tracing::debug!(reason, ?shape, rows, "cuBLASLt's first choice replaces a kept algorithm"),
        }
    }

    /// Returns whether a product is planned and supported.
    pub(crate) fn supports(&self, shape: Shape, rows: u32) -> bool {
        matches!(self.plans.get(&(shape, rows)), Some(Some(_)))
    }

    /// Returns the number of products that were to be planned, and the number of unsupported ones, without those in e4m3.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let plans = || self.plans.iter().filter(|((shape, _), _)| shape.scaling.is_none());
        (plans().count(), plans().filter(|(_, plan)| plan.is_none()).count())
    }

    fn try_once(&mut self, plan: &Plan, shape: Shape, operands: Option<&Operands>) -> Result<(), Refused> {
        let Some(operands) = operands else { return Ok(()) };
        let key = (plan.algorithm, shape.out, shape.bias, shape.scaling);
        if let Some(known) = self.tried.get(&key) {
            return known.clone();
        }
        let result = self.launch(plan, shape, operands);
        self.tried.insert(key, result.clone());
        result
    }

    fn plan(&self, shape: Shape, rows: u32, operands: Option<&Operands>) -> Result<Plan, Refused> {
        let [description, weight, input, out] = [null_mut(); 4];
        let mut plan = Plan { description, weight, input, out, algorithm: Algorithm::default() };
        let described = self.describe(&mut plan, shape, rows, operands).and_then(|()| self.first_choice(&plan, shape));
        match described {
            Ok(algorithm) => Ok(Plan { algorithm, ..plan }),
            Err(refused) => {
                self.destroy(&plan);
                Err(refused)
            }
        }
    }

    fn describe(&self, plan: &mut Plan, shape: Shape, rows: u32, operands: Option<&Operands>) -> Result<(), Refused> {
        let f = &self.functions;
        let (n, k, m) = (u64::from(shape.n), u64::from(shape.k), u64::from(rows));
        let layout = |to: &mut Handle, of: i32, rows, columns, stride: u32| {
            // SAFETY: the handle is written to a local pointer.
            let result = unsafe { (f.cublasLtMatrixLayoutCreate)(&raw mut *to, of, rows, columns, stride.into()) };
            check("cublasLtMatrixLayoutCreate", result)
        };
        let factors = if shape.scaling.is_some() { E4M3 } else { data_type(self.dtype) };
        layout(&mut plan.weight, factors, k, n, shape.k)?;
        layout(&mut plan.input, factors, k, m, shape.k)?;
        layout(&mut plan.out, data_type(shape.out), n, m, shape.stride)?;
        // SAFETY: as above.
        let result =
            unsafe { (f.cublasLtMatmulDescCreate)(&raw mut plan.description, COMPUTE_F32, data_type(Dtype::F32)) };
        check("cublasLtMatmulDescCreate", result)?;
        self.set_attribute(plan, Attribute::TransposeA, &TRANSPOSED)?;
        if shape.bias {
            self.set_attribute(plan, Attribute::Epilogue, &EPILOGUE_BIAS)?;
        }
        if let Some([weight, input]) = shape.scaling.and_then(modes) {
            self.set_attribute(plan, Attribute::WeightScaleMode, &weight)?;
            self.set_attribute(plan, Attribute::InputScaleMode, &input)?;
        }
        // The choice of an algorithm needs addresses; each launch sets its own.
        let (bias, scales) = operands.map_or((self.workspace, [self.workspace; 2]), |of| (of.bias, of.scales));
        self.set_addresses(plan, shape, bias, scales)
    }

    /// Sets the addresses that are part of a description.
    fn set_addresses(&self, plan: &Plan, shape: Shape, bias: u64, [weight, input]: [u64; 2]) -> Result<(), Refused> {
        if shape.bias {
            self.set_attribute(plan, Attribute::BiasPointer, &bias)?;
        }
        if shape.scaling.and_then(modes).is_some() {
            self.set_attribute(plan, Attribute::WeightScalePointer, &weight)?;
            self.set_attribute(plan, Attribute::InputScalePointer, &input)?;
        }
        Ok(())
    }

    /// Returns the library's first choice for a product.
    fn first_choice(&self, plan: &Plan, shape: Shape) -> Result<Algorithm, Refused> {
        match self.heuristics(plan, shape, 1)?.first() {
            None => Err("cublasLtMatmulAlgoGetHeuristic: no algorithm".into()),
            // The rest of the result is valid only in this case.
            Some(found) => check("the algorithm", found.state).map(|()| found.algorithm),
        }
    }

    /// Returns at most `most` results of the library's heuristic for a product, the one that it expects to be fastest first.
    fn heuristics(&self, plan: &Plan, shape: Shape, most: usize) -> Result<Vec<Heuristic>, Refused> {
        let f = &self.functions;
        let (mut preference, mut found, mut count) = (null_mut(), vec![Heuristic::default(); most], 0);
        // SAFETY: the handle is written to a local variable.
        let result = unsafe { (f.cublasLtMatmulPreferenceCreate)(&raw mut preference) };
        check("cublasLtMatmulPreferenceCreate", result)?;
        let chosen = self.prefer(preference, shape).and_then(|()| {
            // SAFETY: the plan's handles are alive; there is room for the requested number of results.
            let result = unsafe {
                (f.cublasLtMatmulAlgoGetHeuristic)(
                    self.handle,
                    plan.description,
                    plan.weight,
                    plan.input,
                    plan.out,
                    plan.out,
                    preference,
                    most as i32,
                    found.as_mut_ptr(),
                    &raw mut count,
                )
            };
            check("cublasLtMatmulAlgoGetHeuristic", result)
        });
        // SAFETY: the preference is created above and destroyed once.
        unsafe { (f.cublasLtMatmulPreferenceDestroy)(preference) };
        chosen?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        Ok(found)
    }

    /// Sets the limits of an algorithm.
    fn prefer(&self, preference: Handle, shape: Shape) -> Result<(), Refused> {
        let set = |attribute: Preference, value: *const c_void, bytes| {
            // SAFETY: the value has the given size.
            let result = unsafe {
                (self.functions.cublasLtMatmulPreferenceSetAttribute)(preference, attribute as i32, value, bytes)
            };
            check("cublasLtMatmulPreferenceSetAttribute", result)
        };
        let workspace = WORKSPACE as usize;
        set(Preference::MaxWorkspaceBytes, (&raw const workspace).cast(), size_of::<usize>())?;
        for (attribute, value) in [
            (Preference::ReductionSchemeMask, SUMS_IN_F32),
            (Preference::MinAlignmentC, shape.alignment),
            (Preference::MinAlignmentD, shape.alignment),
        ] {
            set(attribute, (&raw const value).cast(), size_of::<u32>())?;
        }
        Ok(())
    }

    fn set_attribute<T>(&self, plan: &Plan, attribute: Attribute, value: &T) -> Result<(), Refused> {
        let value = std::ptr::from_ref(value).cast();
        // SAFETY: the attribute's value has the size of `T`.
        let result = unsafe {
            (self.functions.cublasLtMatmulDescSetAttribute)(plan.description, attribute as i32, value, size_of::<T>())
        };
        check("cublasLtMatmulDescSetAttribute", result)
    }

    /// Launches a planned product, in the order of the stream. Returns `false` if the library does not support it.
    pub(crate) fn run(&self, shape: Shape, rows: u32, operands: &Operands) -> Result<bool, BackendError> {
        match self.plans.get(&(shape, rows)) {
            Some(Some(plan)) => self.launch(plan, shape, operands).map(|()| true).map_err(failed),
            Some(None) => Ok(false),
            None => Err(failed(format!("a product of {shape:?} on {rows} rows was not planned"))),
        }
    }

    fn launch(&self, plan: &Plan, shape: Shape, operands: &Operands) -> Result<(), Refused> {
        self.set_addresses(plan, shape, operands.bias, operands.scales)?;
        let beta = if operands.add == 0 { 0.0f32 } else { 1.0 };
        // The address is not read if beta is 0, but it must be valid.
        let add = if operands.add == 0 { operands.out } else { operands.add };
        // SAFETY: the plan's handles are alive; the matrices are on the device with the plan's shapes; the factors are
        // read before the call returns.
        let result = unsafe {
            (self.functions.cublasLtMatmul)(
                self.handle,
                plan.description,
                (&raw const operands.scale).cast(),
                operands.weight,
                plan.weight,
                operands.input,
                plan.input,
                (&raw const beta).cast(),
                add,
                plan.out,
                operands.out,
                plan.out,
                &raw const plan.algorithm,
                self.workspace,
                WORKSPACE as usize,
                self.gpu.stream(),
            )
        };
        check("cublasLtMatmul", result)
    }

    fn destroy(&self, plan: &Plan) {
        let f = &self.functions;
        // SAFETY: the descriptors are created once and destroyed once.
        unsafe {
            if !plan.description.is_null() {
                (f.cublasLtMatmulDescDestroy)(plan.description);
            }
            for layout in [plan.weight, plan.input, plan.out].into_iter().filter(|layout| !layout.is_null()) {
                (f.cublasLtMatrixLayoutDestroy)(layout);
            }
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        self.plans.values().flatten().for_each(|plan| self.destroy(plan));
        // SAFETY: as above.
        unsafe { (self.functions.cublasLtDestroy)(self.handle) };
    }
}

/// `cudaDataType_t`.
fn data_type(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 2,
        Dtype::Bf16 => 14,
    }
}

fn check(call: &str, result: i32) -> Result<(), Refused> {
    // The names are those of `cublasStatus_t`.
    let name = match result {
        0 => return Ok(()),
        1 => "NOT_INITIALIZED",
        3 => "ALLOC_FAILED",
        7 => "INVALID_VALUE",
        8 => "ARCH_MISMATCH",
        11 => "MAPPING_ERROR",
        13 => "EXECUTION_FAILED",
        14 => "INTERNAL_ERROR",
        15 => "NOT_SUPPORTED",
        other => return Err(format!("{call}: error {other}")),
    };
    Err(format!("{call}: CUBLAS_STATUS_{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_tell_their_alignment() {
        let cases =
            [(0, 256), (256, 256), (1 << 40, 256), (1152, 128), (384, 128), (0x7f00_0000_0010, 16), (8, 8), (3, 1)];
        assert_eq!(cases.map(|(address, _)| alignment_of(address)), cases.map(|(_, alignment)| alignment));
    }

    #[test]
    fn buckets_cover_and_waste_little() {
        assert_eq!([1, 16, 17, 100, 129, 257, 8192].map(bucket), [16, 16, 32, 112, 144, 288, 8192]);
        for rows in 1..10_000 {
            let planned = bucket(rows);
            assert!(planned >= rows && bucket(planned) == planned);
            assert!(rows < 128 || planned * 8 <= rows * 9, "{rows} rows are planned as {planned}");
        }
        let all: std::collections::BTreeSet<_> = (1..=8192).map(bucket).collect();
        assert!(all.len() < 80, "{}", all.len());
    }
}
