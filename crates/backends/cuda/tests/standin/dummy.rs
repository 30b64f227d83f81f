//! Tests that dummy weights generated on the device equal those of the host.

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H200, V100};
use octavo_backend_cuda::{CudaConfig, Dtype};
use octavo_ops::dummy::DummyWeights;
use octavo_ops::testing::{PagedBatches, TestRng};
use octavo_ops::{Backend, TensorData, WeightError, WeightSource};

use crate::common::{open, wide};
use crate::config;

/// Hides the rule from a device, so that it copies the host's values.
struct Copied(DummyWeights);

impl WeightSource for Copied {
    fn tensor(&self, name: &str) -> Result<TensorData<'_>, WeightError> {
        self.0.tensor(name)
    }
}

#[test]
fn weights_that_the_device_makes_up_are_those_of_the_host() {
    let (program, _) = wide().build().unwrap();
    let weights = DummyWeights::new(&program);
    for (device, dtype) in [(H200, Dtype::F32), (H200, Dtype::Bf16), (V100, Dtype::F16)] {
        let logits = |source: &dyn WeightSource| {
            let mut backend = open(CudaConfig { device, dtype: Some(dtype), ..config() });
            let mut told = 0;
            backend.load(&program, source, &mut |bytes| told = bytes).expect("the model is loaded");
            assert_eq!(told, program.weight_bytes());
            backend.allocate_kv(16, 16).expect("there is memory");
            let mut batches = PagedBatches::new(16, program.kv_groups.len(), 16, &mut TestRng(5));
            let sequence = batches.add(TestRng(6).tokens(20, program.vocab_size));
            backend.forward(&batches.step(&[(sequence, 20)])).expect("the step runs");
            backend.logits().expect("there are logits")
        };
        let (made, copied) = (logits(&weights), logits(&Copied(weights.clone())));
        assert!(!made.is_empty() && made.iter().all(|x| x.is_finite()), "{dtype:?}");
        assert!(made.iter().zip(&copied).all(|(a, b)| a.to_bits() == b.to_bits()), "{dtype:?}");
        // The logits vary and have the size of a head's logits.
        let spread = made.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!((0.5..20.0).contains(&spread), "{dtype:?}: {spread}");
    }
}

#[test]
fn no_made_up_weight_is_copied() {
    let control = Control::new();
    let (program, stored) = wide().build().unwrap();
    let copies = |source: &dyn WeightSource| {
        let mut backend = open(CudaConfig { dtype: Some(Dtype::Bf16), ..config() });
        control.reset();
        backend.load(&program, source, &mut |_| {}).expect("the model is loaded");
        control.calls("cuMemcpyHtoDAsync_v2")
    };
    // The remaining copies are the tables of angles.
    let (made, copied) = (copies(&DummyWeights::new(&program)), copies(&stored));
    assert!(made + program.weights.len() as u64 <= copied, "{made} copies, {copied} with weights of the host");
}
