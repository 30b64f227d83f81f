//! Criterion benches and side-by-side runs.

#[path = "../peers/mod.rs"]
pub mod peers;
