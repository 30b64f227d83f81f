//! Tests that the stand-in for the driver detects the mistakes that would fail on a real one.

use std::sync::Arc;

use octavo_kernels::manifest::{self, Dtype, Target};
use octavo_kernels::params::GatherRowsParams;

use super::devices::{H200, L40S};
use super::standin;
use crate::driver::{DeviceMemory, Driver, DriverError, Gpu, Kernel, Module, Pinned};
use crate::libraries::{LibraryKind, Places, compiler};

fn gpu() -> Arc<Gpu> {
    let driver = Driver::open(&[standin()]).unwrap();
    Gpu::new(driver, driver.device(H200).unwrap(), true).unwrap()
}

fn name(result: Result<(), DriverError>) -> String {
    result.unwrap_err().name
}

/// Returns the code of a kernel that gathers rows, for a device's chip.
fn code(device: usize) -> Vec<u8> {
    let driver = Driver::open(&[standin()]).unwrap();
    let chip = driver.device(device).unwrap().chip;
    let (nvrtc, _) = compiler(&Places::usual(&[standin()]).find(LibraryKind::Nvrtc), driver.version, chip).unwrap();
    let instance = manifest::gather_rows(Dtype::F32);
    let text = manifest::program(instance.source, &[instance]);
    nvrtc.compile("rows.cu", &text, Target::Code(chip)).unwrap().code
}

fn gather(gpu: &Arc<Gpu>) -> (Module, Kernel) {
    let module = Module::new(gpu, &code(H200)).unwrap();
    let kernel = module.kernel(&manifest::gather_rows(Dtype::F32)).unwrap();
    (module, kernel)
}

#[test]
fn what_is_changed_before_it_was_copied_is_seen_changed() {
    let gpu = gpu();
    let memory = DeviceMemory::new(&gpu, 4).unwrap();
    let mut host = Pinned::new(&gpu, 1).unwrap();
    host[0] = 7;
    gpu.upload(memory.address(), &host, 1).unwrap();
    // The test does not wait for the copy.
    host[0] = 9;
    let mut found = [0];
    gpu.download(&mut found, memory.address()).unwrap();
    assert_eq!(found, [9]);
}

#[test]
fn what_is_written_is_there_at_once() {
    let gpu = gpu();
    let memory = DeviceMemory::new(&gpu, 4).unwrap();
    let mut host = [7];
    gpu.write(memory.address(), &host).unwrap();
    host[0] = 9;
    let mut found = [0];
    gpu.download(&mut found, memory.address()).unwrap();
    assert_eq!((found, host), ([7], [9]));
}

#[test]
fn memory_is_nan_until_it_is_written_and_has_an_end() {
    let gpu = gpu();
    let memory = DeviceMemory::new(&gpu, 8).unwrap();
    let mut found = [0; 2];
    gpu.download(&mut found, memory.address()).unwrap();
    assert!(found.iter().all(|&bits| f32::from_bits(bits).is_nan()));
    let mut more = [0; 3];
    assert_eq!(name(gpu.download(&mut more, memory.address())), "CUDA_ERROR_INVALID_VALUE");
    assert_eq!(name(gpu.zero(memory.address() + 4, 8)), "CUDA_ERROR_INVALID_VALUE");
}

#[test]
fn nothing_is_allocated_loaded_or_waited_for_while_launches_are_recorded() {
    let gpu = gpu();
    let code = code(H200);
    let attempts: [&dyn Fn() -> Result<(), DriverError>; 4] = [
        &|| DeviceMemory::new(&gpu, 64).map(drop),
        &|| Pinned::new(&gpu, 16).map(drop),
        &|| Module::new(&gpu, &code).map(drop),
        &|| gpu.synchronize(),
    ];
    for attempt in attempts {
        let recorded = gpu.capture(attempt).map(drop);
        assert_eq!(name(recorded), "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
    }
    // The calls are allowed again afterwards.
    DeviceMemory::new(&gpu, 64).unwrap();
}

#[test]
fn launches_that_a_device_refuses_are_refused() {
    let gpu = gpu();
    let (_module, kernel) = gather(&gpu);
    let params = GatherRowsParams::default();
    for (grid, shared) in [([0, 1, 1], 0), ([1, 1 << 16, 1], 0), ([1, 1, 1], 49 << 10)] {
        assert_eq!(name(gpu.launch(kernel, grid, shared, &params)), "CUDA_ERROR_INVALID_VALUE", "{grid:?} {shared}");
    }
    let mut fewer = kernel;
    fewer.threads /= 2;
    assert_eq!(name(gpu.launch(fewer, [1; 3], 0, &params)), "CUDA_ERROR_INVALID_VALUE");
}

#[test]
fn code_of_another_chip_does_not_load() {
    let gpu = gpu();
    assert_eq!(name(Module::new(&gpu, &code(L40S)).map(drop)), "CUDA_ERROR_NO_BINARY_FOR_GPU");
}
