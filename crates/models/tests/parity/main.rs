//! Parity of the programs, run by the candle backend, with PyTorch (`golden`, `smollm2`) and with candle-transformers.

mod candle_transformers;
mod dequantise;
mod golden;
mod smollm2;
mod support;
