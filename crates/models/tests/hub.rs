//! From a name to a local model: the hub against a local stand-in, pip against a stand-in script, the caches.

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
