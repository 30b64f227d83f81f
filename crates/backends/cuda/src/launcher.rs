//! What a program's launches run on: a device, or a list of them on paper ([`predict`](crate::predict)).

use std::sync::Arc;

use octavo_kernels::params::Params;
use octavo_ops::BackendError;

use crate::build::{KernelId, Kernels};
use crate::driver::Gpu;
use crate::libraries::cublaslt::{CublasLt, Operands, Shape};

/// What a program's launches run on.
pub(crate) trait Launcher {
    /// Returns the number of multiprocessors.
    fn processors(&self) -> u32;

    /// Returns the number of threads in a CTA of a kernel.
    fn threads(&self, kernel: KernelId) -> u32;

    /// Launches a kernel with `shared` bytes of dynamic shared memory, by default its maximum.
    fn launch<P: Params + 'static>(
        &self,
        kernel: KernelId,
        grid: [u32; 3],
        shared: Option<u32>,
        params: &P,
    ) -> Result<(), BackendError>;

    /// Copies bytes.
    fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), BackendError>;

    /// Returns whether the library multiplies this shape on so many rows (a [`bucket`](crate::libraries::cublaslt::bucket)).
    fn supports(&self, shape: Shape, rows: u32) -> bool;

    /// Launches a product by the library. Returns `false` if there is none, or if it does not support it.
    fn multiply(&self, shape: Shape, rows: u32, operands: &Operands) -> Result<bool, BackendError>;
}

/// A device with its kernels, and its library if there is one.
pub(crate) struct Device {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) kernels: Kernels,
    pub(crate) cublaslt: Option<CublasLt>,
}

impl Launcher for Device {
    fn processors(&self) -> u32 {
        self.gpu.info().processors
    }

    fn threads(&self, kernel: KernelId) -> u32 {
        self.kernels.get(kernel).threads
    }

    fn launch<P: Params + 'static>(
        &self,
        kernel: KernelId,
        grid: [u32; 3],
        shared: Option<u32>,
        params: &P,
    ) -> Result<(), BackendError> {
        let kernel = self.kernels.get(kernel);
        Ok(self.gpu.launch(kernel, grid, shared.unwrap_or(kernel.shared), params)?)
    }

    fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), BackendError> {
        Ok(self.gpu.copy(to, from, bytes)?)
    }

    fn supports(&self, shape: Shape, rows: u32) -> bool {
        self.cublaslt.as_ref().is_some_and(|library| library.supports(shape, rows))
    }

    fn multiply(&self, shape: Shape, rows: u32, operands: &Operands) -> Result<bool, BackendError> {
        self.cublaslt.as_ref().map_or(Ok(false), |library| library.run(shape, rows, operands))
    }
}
