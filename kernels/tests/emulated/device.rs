//! Checks that the tests run on a device, with a stand-in for the driver.

use std::path::Path;
use std::process::Command;

use octavo_backend_cuda::testing::{DeviceKernels, HostArray, KernelPlaces, standin};
use octavo_kernels::manifest::{self, Dtype};
use octavo_kernels::params::GatherRowsParams;

use crate::launcher::GPU;

const V100: &str = "Emulated V100:70:1024";

/// Runs a test in a separate process, with kernels launched by the driver on these devices.
fn run(arguments: &[&str], asked: &str, devices: Option<&str>) -> (bool, String) {
    run_with(&standin(), arguments, asked, devices)
}

/// Does the same with libraries of a folder.
fn run_with(libraries: &Path, arguments: &[&str], asked: &str, devices: Option<&str>) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(arguments).env(GPU, asked).env("OCTAVO_CUDA_LIBS", libraries);
    command.envs(devices.map(|devices| ("OCTAVO_STANDIN_DEVICES", devices)));
    let output = command.output().expect("it starts");
    let text = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).join("\n");
    (output.status.success(), text)
}

/// Kernels run as code of the chip, as PTX of a V100 if it has them, and on a V100 itself, which lacks some.
#[test]
fn tests_reach_a_device() {
    for (asked, devices) in [("1", None), ("volta", None), ("1", Some(V100))] {
        let (passed, text) = run(&["small_", "--skip", "machine::", "--skip", "sanitizers::"], asked, devices);
        assert!(passed && text.contains("test attention::small_attention ... ok"), "{text}");
    }
    // CUDA 13 alone has no PTX for a V100.
    let thirteen = Path::new(env!("CARGO_TARGET_TMPDIR")).join("thirteen");
    let _ = std::fs::remove_dir_all(&thirteen);
    std::fs::create_dir_all(&thirteen).expect("a folder");
    for name in ["libcuda.so.1", "libnvrtc.so.13", "objects"] {
        std::os::unix::fs::symlink(standin().join(name), thirteen.join(name)).expect("a link");
    }
    let (passed, text) = run_with(&thirteen, &["attention::small_attention"], "volta", None);
    assert!(passed && text.contains("test attention::small_attention ... ok"), "{text}");
    // The driver launches the kernels, so without a device the test fails.
    let (passed, text) = run(&["--exact", "rows::small_rows"], "1", Some(""));
    assert!(!passed && text.contains("the NVIDIA driver finds no GPU"), "{text}");
}

#[test]
fn an_array_that_may_only_be_read_stays_as_it_is() {
    let instance = manifest::gather_rows(Dtype::F32);
    let places = KernelPlaces { libraries: vec![standin()], pack: None };
    let kernels = DeviceKernels::new(&places, std::slice::from_ref(&instance), false).expect("the stand-in's device");
    let (input, ids, mut out) = ([1.0f32, 2.0, 3.0, 4.0], [1u32], [f32::NAN; 2]);
    let array = |start: u64, bytes, writable| HostArray { start, bytes, writable };
    let (input_at, ids_at, out_at) = (input.as_ptr() as u64, ids.as_ptr() as u64, out.as_mut_ptr() as u64);
    let params = GatherRowsParams { out: out_at, input: input_at, row_index: ids_at, count: 1, cols: 2 };
    let launch = |writable| {
        let arrays = [array(input_at, 16, false), array(ids_at, 4, false), array(out_at, 8, writable)];
        // SAFETY: the arrays have these lengths, and `out` may be written.
        unsafe { kernels.launch(&instance, params.grid(), instance.dynamic_shared, &params, &arrays) }
    };
    let error = launch(false).expect_err("the output is not writable");
    assert_eq!(error, format!("{} wrote to an array that it may only read", instance.name));
    launch(true).expect("the launch is in order");
    assert_eq!(out, [3.0, 4.0]);
}
