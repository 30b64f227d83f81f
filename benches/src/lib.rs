//! Criterion benches and comparisons with other servers.

#[path = "../peers/mod.rs"]
pub mod peers;
