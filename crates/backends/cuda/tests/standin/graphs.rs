//! Tests of recorded decode steps and of the work after the start.

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H200, V100};
use octavo_backend_cuda::{CudaConfig, Dtype};
use octavo_ops::Backend;
use octavo_ops::testing::{PagedBatches, TestRng};

use crate::common::{BLOCKS, generate, loaded, wide};
use crate::config;

#[test]
fn a_recorded_step_has_the_bits_of_one_that_is_launched() {
    for (device, dtype) in [(H200, Dtype::Bf16), (V100, Dtype::F16), (H200, Dtype::F32)] {
        let eager = CudaConfig { device, dtype: Some(dtype), ..config() };
        let recorded = CudaConfig { graphs: true, ..eager.clone() };
        let [mut eager, mut recorded] = [eager, recorded].map(|config| loaded(config, &wide(), BLOCKS));
        assert_eq!(generate(&mut recorded, || {}), generate(&mut eager, || {}), "{dtype:?}");
        assert_eq!(eager.graph_steps(), (0, 6));
        assert_eq!(recorded.graph_steps(), (5, 1), "the prefill is launched, the decodes are replayed");
    }
}

#[test]
fn nothing_is_allocated_after_the_start() {
    let control = Control::new();
    for graphs in [true, false] {
        let config = CudaConfig { dtype: Some(Dtype::Bf16), graphs, ..config() };
        control.reset();
        let mut backend = loaded(config, &wide(), BLOCKS);
        assert!(control.allocations() > 0, "the start allocates");
        control.reset();
        generate(&mut backend, || {});
        assert_eq!(control.allocations(), 0);
        assert_eq!(control.calls("cuModuleLoadData"), 0);
    }
}

#[test]
fn a_step_is_one_copy_to_the_device_and_one_for_sampling() {
    let control = Control::new();
    let config = CudaConfig { dtype: Some(Dtype::Bf16), graphs: true, ..config() };
    let mut backend = loaded(config, &wide(), BLOCKS);
    generate(&mut backend, || control.reset());
    assert_eq!(control.calls("cuGraphLaunch"), 5);
    assert_eq!(control.calls("cuMemcpyHtoDAsync_v2"), 2 * 5);
    // The copies are those of the tokens, and of the logits that the test requests.
    assert_eq!(control.calls("cuMemcpyDtoHAsync_v2"), 2 * 5);
    assert_eq!(control.calls("cuLaunchKernelEx"), 5, "the draw");
}

#[test]
fn two_runs_have_the_same_bits() {
    let config = CudaConfig { dtype: Some(Dtype::Bf16), graphs: true, ..config() };
    let [first, second] = [(); 2].map(|()| generate(&mut loaded(config.clone(), &wide(), BLOCKS), || {}));
    assert_eq!(first, second);
}

#[test]
fn a_step_may_be_asked_for_before_the_one_before_is_over() {
    let run = |waits: bool| {
        let mut backend = loaded(CudaConfig { dtype: Some(Dtype::Bf16), ..config() }, &wide(), BLOCKS);
        let mut batches = PagedBatches::new(16, 2, BLOCKS, &mut TestRng(5));
        let sequence = batches.add(TestRng(6).tokens(30, 101));
        for count in [20, 9, 1] {
            let mut batch = batches.step(&[(sequence, count)]);
            batch.pooled_rows.clear();
            batch.sampled_rows = vec![count as u32 - 1];
            backend.forward(&batch).expect("the step runs");
            if waits {
                backend.logits().expect("there are logits");
            }
        }
        backend.logits().expect("there are logits")
    };
    assert_eq!(run(false), run(true));
}
