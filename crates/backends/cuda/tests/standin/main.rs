//! Tests of the unmodified backend over a stand-in for the driver and the libraries: kernels run on the CPU emulation.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod adapters;
mod bench;
mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod devices;
mod dummy;
mod faults;
mod fp8;
mod graphs;
mod images;
mod launches;
mod overlap;
mod programs;
mod quantised;
mod quantised_launches;
mod sampling;
mod texts;
mod tuning;

use octavo_backend_cuda::testing::config;
