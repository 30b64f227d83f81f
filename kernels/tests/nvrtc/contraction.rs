//! Checks that the compiler makes one operation of a product and a sum only where a source calls `fmaf`. Kernels that promise the same
//! bits may then be different instances, and the emulation rounds as they do.

use octavo_kernels::manifest::{Chip, Target};
use octavo_kernels::nvrtc::Nvrtc;

use crate::{RELEASES, code, count, tools};

const TEXT: &str = r#"
extern "C" __global__ void apart(float* x) { x[0] = x[1] * x[2] + x[3]; }
extern "C" __global__ void at_once(float* x) { x[0] = fmaf(x[1], x[2], x[3]); }
"#;

#[test]
fn a_product_and_a_sum_are_rounded_as_the_source_says() {
    for (nvrtc, release) in RELEASES.iter().filter_map(|release| Some(((release.open)()?, release))) {
        release.chips().for_each(|chip| check_contraction(&nvrtc, chip));
    }
}

fn check_contraction(nvrtc: &Nvrtc, chip: Chip) {
    let Some(nvdisasm) = tools::nvdisasm(chip) else { return };
    let compiled = nvrtc.compile("contraction.cu", TEXT, Target::Code(chip)).expect("a valid program");
    let name = format!("{}-contraction-{:?}", chip.arch(), nvrtc.version());
    let instructions = code::instructions(&tools::disassemble(&nvdisasm, &name, &compiled.code));
    let counts = |kernel: &str| ["FMUL", "FADD", "FFMA"].map(|of| count(&instructions[kernel], of, ""));
    assert_eq!([counts("apart"), counts("at_once")], [[1, 1, 0], [0, 0, 1]], "{}", chip.arch());
}

#[test]
fn a_driver_that_compiles_ptx_contracts_nothing_else() {
    let Some(nvrtc) = tools::nvrtc() else { return };
    let compiled = nvrtc.compile("contraction.cu", TEXT, Target::Ptx(Chip::SM_90)).expect("a valid program");
    let text = String::from_utf8_lossy(&compiled.code).into_owned();
    // A product or a sum without a kind of rounding may be contracted.
    let counts = ["mul.rn.f32", "add.rn.f32", "fma.rn.f32"].map(|of| text.matches(of).count());
    assert_eq!(counts, [1, 1, 1], "{text}");
}
