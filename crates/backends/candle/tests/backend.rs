//! Tests that are specific to this backend.

use octavo_backend_candle::CandleBackend;
use octavo_ops::Backend;
use octavo_ops::testing::TinyModel;

#[test]
fn all_is_f32() {
    let (program, weights) = TinyModel::default().build().unwrap();
    let mut backend = CandleBackend::new();
    backend.load(&program, &weights, &mut |_| {}).unwrap();
    assert_eq!(backend.weight_bytes(), program.weight_bytes());
    assert_eq!(backend.kv_block_bytes(&program.kv_groups[0], 16), 2 * 2 * 2 * 8 * 16 * 4);
}
