//! The reference backend: every op in the plainest candle calls, on the CPU, in f32.
//!
//! It is the oracle of the other backends, and what runs where there is no faster one. Weights are dequantised to f32
//! when they are loaded; the KV cache is f32.
//!
//! **Invariant:** the bits of a row do not depend on the other rows of the step. A row alone, in any batch, prefilled
//! in one chunk or many, decoded or prefilled, with or without prefix-cache hits, has the same result: matrix products
//! run in row tiles of one fixed shape, every other sum runs over one row in one fixed order.

mod attention;
mod backend;
mod dense;
mod forward;
mod kv;
mod load;
mod rotary;

pub use backend::CandleBackend;

/// Name of the backend, for people and errors.
const NAME: &str = "candle";

/// The device's own words about a failed step.
fn failed(reason: impl std::fmt::Display) -> octavo_ops::BackendError {
    octavo_ops::BackendError::Failed { backend: NAME, reason: reason.to_string() }
}
