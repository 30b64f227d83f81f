//! Measures the limits of this machine: `limits`.
//!
//! Prints the read bandwidth of memory and the peak rate of each compute unit, with all threads together.

use octavo_backend_cpu::probe::{Limits, ProbeConfig, Unit};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::measure(&ProbeConfig::default())?;
    println!("{} threads read {:.1} GB/s", limits.threads, limits.read_bandwidth / 1e9);
    for unit in Unit::ALL {
        let peak = limits.peak(unit).map_or("not there".to_owned(), |peak| format!("{:.3} TOP/s", peak / 1e12));
        println!("{:<12}  {peak}", unit.name());
    }
    Ok(())
}
