//! Parity of the programs, run by the candle and the CPU backend, with PyTorch (`golden`, `smollm2`) and with
//! candle-transformers.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod adapters;
mod candle_transformers;
mod dequantise;
mod embedding;
mod golden;
mod images;
mod limits;
mod measured;
mod quantised;
mod real;
mod support;
mod vectors;
