//! Tests of the real binary, with the default model through a socket and with a tiny one.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod adapters;
mod bad_input;
mod bench;
mod candle;
mod cuda;
mod gpu_suite;
mod health;
mod images;
mod invariance;
mod kernels;
mod keys;
mod lifecycle;
mod quantised;
mod serving;
mod templates;
mod vectors;

use std::path::{Path, PathBuf};

use octavo_tests::Server;

/// The binary under test.
const OCTAVO: &str = env!("CARGO_BIN_EXE_octavo");

/// Returns the path of the default model.
fn model() -> PathBuf {
    octavo_models::testing::default_model()
}

/// Starts a server with the default model.
fn server(args: &[&str]) -> Server {
    // Several servers run at the same time; with more threads, they would wait for each other's processors.
    Server::start(Path::new(OCTAVO), &model(), &[&["--cpu-threads", "1"], args].concat())
}
