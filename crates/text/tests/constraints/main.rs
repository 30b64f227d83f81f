//! Tests of constraints by random walks: tokens sampled from the masks must form texts that satisfy the specification.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]
#![allow(unreachable_pub, missing_docs, dead_code, reason = "helpers of one test binary")]

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
