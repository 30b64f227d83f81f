//! The reference backend: every op in the simplest candle calls, on the CPU, in f32.
//!
//! The tests compare the other backends with it, and it runs where there is no faster one. Weights are dequantised to
//! f32 when they are loaded; the KV cache is f32.
//!
//! **Invariant:** the bits of a row do not depend on the other rows of the step. A row has the same result alone or in
//! any batch, prefilled in one chunk or many, decoded or prefilled, with or without prefix-cache hits. Matrix products
//! run in row tiles of one fixed shape, and every other sum runs over one row in one fixed order.

mod attention;
mod backend;
mod dense;
mod experts;
mod forward;
mod kv;
mod latent;
mod load;
mod lora;
mod media;
mod rotary;

pub use backend::CandleBackend;

/// Name of the backend for display and errors.
const NAME: &str = "candle";

/// Returns the error of a failed step, with the message of candle.
fn failed(reason: impl std::fmt::Display) -> octavo_ops::BackendError {
    octavo_ops::BackendError::Failed { backend: NAME, reason: reason.to_string() }
}
