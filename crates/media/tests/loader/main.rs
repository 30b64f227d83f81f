//! Images through the public interface: from a server, a folder or the request itself, friendly and hostile.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod cache;
#[path = "../common/mod.rs"]
mod common;
mod files;
mod hostile;
mod http;
mod memory;
mod rebinding;
