//! Tests of greedy tokens of every architecture's tiny checkpoint.

use octavo_backend_cuda::CudaConfig;

use crate::common::{checkpoints, open};
use crate::config;

#[test]
fn greedy_tokens_are_those_of_candle() {
    checkpoints::agree(|graphs| open(CudaConfig { max_num_seqs: 2, graphs, ..config() }));
}
