//! Tests of resolving a name to a local model, with a local stand-in for the hub, a stand-in script for pip, and the
//! caches.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

#[path = "hub/failures.rs"]
mod failures;
#[path = "hub/offline.rs"]
mod offline;
#[path = "hub/packages.rs"]
mod packages;
#[path = "hub/repositories.rs"]
mod repositories;
#[path = "hub/server.rs"]
mod server;
#[path = "hub/support.rs"]
mod support;
