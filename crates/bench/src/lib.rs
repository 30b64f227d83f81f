//! Measuring tools: an executor that only takes the time a device would take, and a load generator for the HTTP side.
//!
//! **Invariant:** nothing here is needed to serve; only the command line and the benches use it.

mod device;
pub mod load;
mod simulator;
mod usage;

pub use device::Device;
pub use simulator::{Clock, SimulatedExecutor, SimulatedTime, SimulatorConfig, SimulatorError};
pub use usage::ProcessUsage;
