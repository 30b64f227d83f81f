//! A small HTTP/1.1 client for the commands that talk with a server: one kept-alive connection over TCP or a Unix domain
//! socket, in plain text or over TLS, and a reader for server-sent events.

mod connection;
mod events;
mod target;
mod tls;

pub use connection::{ClientError, Connection};
pub use events::EventReader;
pub use target::{Target, TargetError};
pub use tls::{AuthoritiesError, Certificates};
