//! The threads of the backend.
//!
//! A step is one parallel region: every thread runs the same closure, and the threads meet at barriers. Between regions
//! the threads sleep. A region costs one wake-up, and a barrier a few hundred nanoseconds while the threads keep pace.

pub(crate) mod denormals;
mod pinning;
mod rendezvous;
mod sync;
mod team;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use pinning::Place;
pub(crate) use pinning::available_threads;
pub(crate) use team::{Help, Pool, Worker};
