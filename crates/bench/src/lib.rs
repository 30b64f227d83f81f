//! Measuring tools: an executor that only takes the time a device would take, a load generator for the HTTP side,
//! measurements of an engine without it and of a backend's steps, and plots.
//!
//! **Invariant:** nothing here is needed to serve; only the command line and the benches use it.

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
