//! Load generator and simulator.
