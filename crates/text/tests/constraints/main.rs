//! Constraints, by random walks: tokens drawn from the masks must make texts that satisfy what was asked for.

#[path = "../support/mod.rs"]
mod support;

mod grammars;
mod hostile;
mod json;
mod lists;
mod matcher;
mod suite;
mod tags;
mod walk;
