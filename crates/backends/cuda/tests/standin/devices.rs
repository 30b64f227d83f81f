//! Tests of devices and precisions, and of the errors of devices that cannot be used.

use octavo_backend_cuda::testing::devices::{H200, L40S, P100, V100};
use octavo_backend_cuda::testing::standin;
use octavo_backend_cuda::{CudaBackend, CudaConfig, Dtype, LibraryKind, Unavailable, probe};
use octavo_ops::Backend;

use crate::common::open;
use crate::config;

#[test]
fn the_element_type_is_that_of_the_chip() {
    for (device, dtype, kv) in [(H200, None, "bfloat16"), (L40S, None, "bfloat16"), (V100, None, "float16")] {
        let backend = open(CudaConfig { device, dtype, ..config() });
        assert_eq!((backend.dtype(), backend.kv_dtype()), (kv, kv));
    }
    let error = CudaBackend::new(CudaConfig { device: V100, dtype: Some(Dtype::Bf16), ..config() }).err().unwrap();
    assert_eq!(error.to_string(), "Emulated V100 (sm_70) has no bfloat16: use --dtype half");
}

#[test]
fn what_cannot_be_used_is_said() {
    let error = |device| CudaBackend::new(CudaConfig { device, ..config() }).err().unwrap();
    assert_eq!(
        error(P100).to_string(),
        "Emulated P100 is too old: its compute capability is 6.0, but 7.0 is needed (Volta or later)"
    );
    assert_eq!(error(9), Unavailable::NoSuchDevice { wanted: 9, found: 7 });
}

#[test]
fn a_report_tells_devices_and_libraries() {
    let report = probe(&[standin()]);
    assert_eq!(report.driver.as_ref().unwrap().to_string(), "13.0");
    let names: Vec<_> = report.devices.iter().map(|device| device.name.as_str()).collect();
    let expected = [
        "Emulated H200",
        "Emulated L40S",
        "Emulated V100",
        "Emulated P100",
        "Small H200",
        "Emulated T4",
        "Emulated H100",
    ];
    assert_eq!(names, expected);
    assert_eq!(report.usable(V100).unwrap().chip.arch(), "sm_70");
    assert!(matches!(report.usable(P100), Err(Unavailable::OldChip { .. })));
    // Both releases of the compiler are installed: each chip gets the newest that supports it.
    for (device, library) in [(H200, "libnvrtc.so.13"), (L40S, "libnvrtc.so.13"), (V100, "libnvrtc.so.12")] {
        let chip = report.devices[device].chip;
        assert_eq!(report.chosen(LibraryKind::Nvrtc, chip).unwrap().path, standin().join(library));
        assert_eq!(report.chosen(LibraryKind::CublasLt, chip).unwrap().path, standin().join("libcublasLt.so.12"));
        assert!(report.libraries_for(LibraryKind::Nvrtc, chip).len() >= 2);
    }
}
