//! The real binary: with the default model through the socket, with a tiny one without.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod bad_input;
mod bench;
mod cuda;
mod gpu_suite;
mod health;
mod invariance;
mod kernels;
mod lifecycle;
mod serving;

use std::path::{Path, PathBuf};

use octavo_tests::Server;

/// The binary under test.
const OCTAVO: &str = env!("CARGO_BIN_EXE_octavo");

/// The default model's file; `None` means that the test is to be skipped.
fn model() -> Option<PathBuf> {
    octavo_models::testing::default_model()
}

/// A server of the default model, unless the model cannot be had.
fn server(args: &[&str]) -> Option<Server> {
    // Servers run side by side here: with more threads, those of each would wait for a processor that another one has.
    Some(Server::start(Path::new(OCTAVO), &model()?, &[&["--cpu-threads", "1"], args].concat()))
}
