//! Ceilings of a device: the rates of a large copy and of large products by cuBLASLt. Kernels are compared with them beside the data
//! sheet, whose clocks a device under load does not hold.

use std::time::Duration;

use octavo_kernels::manifest::Dtype;
use octavo_ops::BackendError;

use super::{OPERANDS, Unmeasured, launch_seconds};
use crate::CudaBackend;
use crate::arena::{Arena, Plan};
use crate::backend::long_name;
use crate::build::Builder;
use crate::dummy::Fill;
use crate::libraries::cublaslt::{Operands, Shape, USUAL_ALIGNMENT, WORKSPACE};
use crate::loaded::Opened;

/// Sizes of the measurement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CeilingsBench {
    /// Bytes that a copy reads.
    pub copy_bytes: u64,
    /// Rows, inputs and outputs of a product.
    pub product_size: u32,
    /// Duration of each of seven measurements.
    pub min_time: Duration,
}

/// The rate of products with operands of one element type.
#[derive(Clone, Debug, PartialEq)]
pub struct ProductRate {
    /// Value of `--dtype` for the element type.
    pub dtype: &'static str,
    /// Rate in FLOP/s.
    ///
    /// # Errors
    /// Contains the reason why there is no rate.
    pub flops: Result<f64, Unmeasured>,
}

/// Rates that a device reaches.
#[derive(Clone, Debug, PartialEq)]
pub struct Ceilings {
    /// Number of bytes per second that a copy within the device's memory reads and writes together.
    pub bandwidth: f64,
    /// Rates of products with operands of each 16-bit type that the chip supports.
    pub products: Vec<ProductRate>,
}

impl CudaBackend {
    /// Measures the device's ceilings on random data. No model needs to be loaded.
    ///
    /// # Errors
    /// Returns an error if the operands exceed the memory, there is no compiler for the kernel that writes them, or the
    /// device fails.
    pub fn measure_ceilings(&self, bench: &CeilingsBench) -> Result<Ceilings, BackendError> {
        let opened = self.opened();
        opened.gpu.bind()?;
        let bandwidth = copy_rate(&opened, bench)?;
        let dtypes = [Dtype::Bf16, Dtype::F16].into_iter().filter(|dtype| opened.gpu.info().chip.has(*dtype));
        let products = dtypes.map(|dtype| {
            let flops = product_rate(&Opened { dtype, ..opened }, bench)?;
            Ok(ProductRate { dtype: long_name(dtype), flops })
        });
        Ok(Ceilings { bandwidth, products: products.collect::<Result<_, BackendError>>()? })
    }
}

/// Writes random elements to device memory. Zeros would be multiplied faster than any real data.
fn fill(opened: &Opened<'_>, at: u64, bytes: u64) -> Result<(), BackendError> {
    let builder = Builder { gpu: opened.gpu, driver: opened.driver, config: opened.config };
    let count = bytes / opened.dtype.bytes() as u64;
    Fill::for_dtype(&builder, opened.dtype)?.write(at, count, opened.dtype, &OPERANDS)
}

/// Measures the rate of a copy in bytes per second.
fn copy_rate(opened: &Opened<'_>, bench: &CeilingsBench) -> Result<f64, BackendError> {
    let mut plan = Plan::default();
    let [from, to] = [(); 2].map(|()| plan.take(bench.copy_bytes));
    let memory = Arena::new(opened.gpu, plan.bytes(), "operands")?;
    fill(opened, memory.start(), bench.copy_bytes)?;
    let copy = |_| Ok(opened.gpu.copy(memory.at(to), memory.at(from), bench.copy_bytes)?);
    Ok((2 * bench.copy_bytes) as f64 / launch_seconds(opened.gpu, bench.min_time, &copy)?)
}

/// Measures the rate of a product in FLOP/s.
fn product_rate(opened: &Opened<'_>, bench: &CeilingsBench) -> Result<Result<f64, Unmeasured>, BackendError> {
    let size = bench.product_size;
    let bytes = u64::from(size) * u64::from(size) * opened.dtype.bytes() as u64;
    let mut plan = Plan::default();
    let workspace = plan.take(WORKSPACE);
    let [input, weight, out] = [(); 3].map(|()| plan.take(bytes));
    let memory = Arena::new(opened.gpu, plan.bytes(), "operands")?;
    let Some(mut library) = opened.cublaslt(memory.at(workspace)) else {
        return Ok(Err(Unmeasured::Missing("cuBLASLt")));
    };
    for region in [input, weight] {
        fill(opened, memory.at(region), bytes)?;
    }
    let alignment = USUAL_ALIGNMENT;
    let shape = Shape { n: size, k: size, stride: size, out: opened.dtype, bias: false, scaling: None, alignment };
    let [input, weight, out] = [input, weight, out].map(|region| memory.at(region));
    let operands = Operands { input, weight, bias: 0, add: 0, out, scale: 1.0, scales: [0; 2] };
    library.prepare(shape, size, Some(&operands));
    let refused = || crate::failed("cuBLASLt has no algorithm for the product");
    let multiply = |_| library.run(shape, size, &operands)?.then_some(()).ok_or_else(refused);
    match launch_seconds(opened.gpu, bench.min_time, &multiply) {
        Ok(seconds) => Ok(Ok(2.0 * f64::from(size).powi(3) / seconds)),
        // A refusal leaves the device unchanged.
        Err(error) => {
            opened.gpu.synchronize().map(|()| Err(Unmeasured::Refused(error.to_string()))).map_err(Into::into)
        }
    }
}
