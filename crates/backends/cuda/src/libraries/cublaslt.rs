//! cuBLASLt: dense products.
//!
//! A product's descriptors and its algorithm are made once, when the model is loaded; a step only calls
//! `cublasLtMatmul`, with a workspace of ours, so that it neither allocates nor chooses and can be captured.
//!
//! cuBLASLt counts by columns: to it, our `out[M,N] = input[M,K] · weight[N,K]ᵀ` is `Outᵀ[N,M] = Wᵀ · Inputᵀ`, whose factors and
//! result lie in memory as they are.

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::Arc;

use octavo_kernels::manifest::Dtype;
use octavo_ops::BackendError;

use super::{Candidate, functions, open};
use crate::driver::Gpu;
use crate::failed;

/// Bytes of workspace: what NVIDIA recommends for Hopper, and more than enough for the others.
pub(crate) const WORKSPACE: u64 = 32 << 20;

type Handle = *mut c_void;

/// `CUBLAS_COMPUTE_32F`: sums in f32, no reduced precision.
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
}

/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`.
const MAX_WORKSPACE_BYTES: i32 = 1;

/// `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Heuristic {
    algorithm: Algorithm,
    workspace: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

functions! {
    /// cuBLASLt's functions.
    Functions {
        cublasLtCreate: fn(*mut Handle);
        cublasLtDestroy: fn(Handle);
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

/// What a product is, but for its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// Outputs.
    pub(crate) n: u32,
    /// Inputs.
    pub(crate) k: u32,
    /// Elements from one row of the output to the next.
    pub(crate) stride: u32,
    /// Of the output: the type of the activations, or f32.
    pub(crate) out: Dtype,
    /// Whether a bias is added.
    pub(crate) bias: bool,
}

/// Where a product's matrices lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    pub(crate) input: u64,
    pub(crate) weight: u64,
    /// Of the output's type; read if the shape has one.
    pub(crate) bias: u64,
    /// Added to the product; 0 for nothing.
    pub(crate) add: u64,
    pub(crate) out: u64,
    /// Factor on the product.
    pub(crate) scale: f32,
}

/// The library, its handle on the current context, and the plans made with it.
pub(crate) struct CublasLt {
    gpu: Arc<Gpu>,
    functions: Functions,
    handle: Handle,
    /// Of activations and weights.
    dtype: Dtype,
    workspace: u64,
    plans: HashMap<(Shape, u32), Plan>,
    /// The file.
    pub(crate) path: PathBuf,
}

// SAFETY: handles may be used from any thread, one at a time, which `&mut self` and the device's one thread are.
unsafe impl Send for CublasLt {}

struct Plan {
    description: Handle,
    weight: Handle,
    input: Handle,
    out: Handle,
    algorithm: Algorithm,
}

/// Rows that a product is planned for, of those asked for: at most an eighth more. The surplus rows are computed and not read.
pub(crate) fn bucket(rows: u32) -> u32 {
    let step = (rows.max(1).next_power_of_two() / 16).max(16);
    rows.max(1).next_multiple_of(step)
}

impl CublasLt {
    /// Opens a library. `workspace` is the address of [`WORKSPACE`] bytes on the device.
    ///
    /// # Errors
    /// A sentence.
    pub(crate) fn open(candidate: &Candidate, gpu: &Arc<Gpu>, dtype: Dtype, workspace: u64) -> Result<Self, String> {
        let functions = open(candidate, Functions::read)?;
        gpu.bind().map_err(|error| error.to_string())?;
        let mut handle = null_mut();
        // SAFETY: the handle is written to a pointer of ours.
        let result = unsafe { (functions.cublasLtCreate)(&raw mut handle) };
        let path = candidate.path.clone();
        if result != 0 {
            return Err(format!("{} does not start (error {result})", path.display()));
        }
        Ok(Self { gpu: gpu.clone(), functions, handle, dtype, workspace, plans: HashMap::new(), path })
    }

    /// Plans a product of that many rows (a [`bucket`]); nothing if it is planned already.
    pub(crate) fn prepare(&mut self, shape: Shape, rows: u32) -> Result<(), BackendError> {
        if !self.plans.contains_key(&(shape, rows)) {
            let plan = self.plan(shape, rows)?;
            self.plans.insert((shape, rows), plan);
        }
        Ok(())
    }

    fn plan(&self, shape: Shape, rows: u32) -> Result<Plan, BackendError> {
        let f = &self.functions;
        let (n, k, m) = (u64::from(shape.n), u64::from(shape.k), u64::from(rows));
        let layout = |dtype: Dtype, rows, columns, stride: u32| {
            let mut layout = null_mut();
            // SAFETY: the handle is written to a pointer of ours.
            let result = unsafe {
                (f.cublasLtMatrixLayoutCreate)(&raw mut layout, data_type(dtype), rows, columns, stride.into())
            };
            check("cublasLtMatrixLayoutCreate", result).map(|()| layout)
        };
        let mut description = null_mut();
        // SAFETY: as above.
        let result = unsafe { (f.cublasLtMatmulDescCreate)(&raw mut description, COMPUTE_F32, data_type(Dtype::F32)) };
        check("cublasLtMatmulDescCreate", result)?;
        let mut plan = Plan {
            description,
            weight: layout(self.dtype, k, n, shape.k)?,
            input: layout(self.dtype, k, m, shape.k)?,
            out: layout(shape.out, n, m, shape.stride)?,
            algorithm: Algorithm::default(),
        };
        self.set(&plan, Attribute::TransposeA, &TRANSPOSED)?;
        if shape.bias {
            self.set(&plan, Attribute::Epilogue, &EPILOGUE_BIAS)?;
        }
        plan.algorithm = self.choose(&plan, shape, rows)?;
        Ok(plan)
    }

    /// The library's first choice for a product.
    fn choose(&self, plan: &Plan, shape: Shape, rows: u32) -> Result<Algorithm, BackendError> {
        let f = &self.functions;
        let (mut preference, mut found, mut count) = (null_mut(), Heuristic::default(), 0);
        let bytes = WORKSPACE as usize;
        // SAFETY: handles and results are written to variables of ours; one result is asked for, as there is room for; the
        // preference is destroyed once.
        let result = unsafe {
            check("cublasLtMatmulPreferenceCreate", (f.cublasLtMatmulPreferenceCreate)(&raw mut preference))?;
            (f.cublasLtMatmulPreferenceSetAttribute)(
                preference,
                MAX_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                size_of::<usize>(),
            );
            let result = (f.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                plan.description,
                plan.weight,
                plan.input,
                plan.out,
                plan.out,
                preference,
                1,
                &raw mut found,
                &raw mut count,
            );
            (f.cublasLtMatmulPreferenceDestroy)(preference);
            result
        };
        check("cublasLtMatmulAlgoGetHeuristic", result)?;
        if count < 1 {
            return Err(failed(format!("cuBLASLt has no algorithm for {shape:?} on {rows} rows")));
        }
        Ok(found.algorithm)
    }

    fn set<T>(&self, plan: &Plan, attribute: Attribute, value: &T) -> Result<(), BackendError> {
        let value = std::ptr::from_ref(value).cast();
        // SAFETY: the attribute's value has the size of `T`.
        let result = unsafe {
            (self.functions.cublasLtMatmulDescSetAttribute)(plan.description, attribute as i32, value, size_of::<T>())
        };
        check("cublasLtMatmulDescSetAttribute", result)
    }

    /// Launches a product that is planned, in the stream's order.
    pub(crate) fn run(&self, shape: Shape, rows: u32, operands: &Operands) -> Result<(), BackendError> {
        let Some(plan) = self.plans.get(&(shape, rows)) else {
            return Err(failed(format!("a product of {shape:?} on {rows} rows was not planned")));
        };
        if shape.bias {
            self.set(plan, Attribute::BiasPointer, &operands.bias)?;
        }
        let beta = if operands.add == 0 { 0.0f32 } else { 1.0 };
        // Not read where beta is 0, but it must be an address.
        let add = if operands.add == 0 { operands.out } else { operands.add };
        // SAFETY: the plan's handles are alive; the matrices lie on the device with the plan's shapes; the factors are read
        // before the call returns.
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
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let f = &self.functions;
        for plan in self.plans.values() {
            // SAFETY: made once and destroyed once.
            unsafe {
                (f.cublasLtMatmulDescDestroy)(plan.description);
                for layout in [plan.weight, plan.input, plan.out] {
                    (f.cublasLtMatrixLayoutDestroy)(layout);
                }
            }
        }
        // SAFETY: as above.
        unsafe { (f.cublasLtDestroy)(self.handle) };
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

fn check(call: &str, result: i32) -> Result<(), BackendError> {
    if result == 0 { Ok(()) } else { Err(failed(format!("{call}: error {result}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
