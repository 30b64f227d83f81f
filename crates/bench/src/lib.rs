//! Benchmark tools: a simulated executor, a load generator for HTTP, measurements of an engine without HTTP and of a
//! backend's steps, and plots.
//!
//! **Invariant:** serving needs nothing of this crate; only the command line and the benches use it.

mod device;
pub mod load;
pub mod offline;
pub mod plot;
pub mod roofline;
mod simulator;
mod summary;
mod usage;

pub use device::Device;
pub use simulator::{Clock, SimulatedExecutor, SimulatedTime, SimulatorConfig, SimulatorError};
pub use summary::Summary;
pub use usage::ProcessUsage;
