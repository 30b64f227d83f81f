//! Listening sockets: TCP and Unix domain sockets, TLS with certificates that are replaced while the process runs, and a
//! timeout for peers that read nothing.
//!
//! **Invariant:** this crate knows no HTTP. It only recognises its first byte, so that a client that speaks it in plain
//! text where TLS is expected receives the answer that the caller gives.

mod file_watch;
mod listener;
mod stall;
mod tls;

pub use file_watch::FileWatch;
pub use listener::{Accepted, Connection, Duplex, Listener, OpenOptions, UnixSocketError, remove_stale_socket};
pub use tls::{ClientAuth, TlsConfig, TlsError};
