//! The socket that `octavo serve` listens on.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, Result};
use octavo_sockets::Listener;
use tokio::net::TcpSocket;

use crate::cli::NetworkArgs;
use crate::serve::settings::Settings;

/// Backlog of the socket, large enough that a burst of clients is not refused.
const BACKLOG: u32 = 4096;

/// A bound socket and its addresses for clients on this machine.
pub(crate) struct Bound {
    pub(crate) listener: Listener,
    /// The address in the log: `http://ADDRESS` or the path of a Unix socket.
    pub(crate) place: String,
    /// The address of the server for a browser on this machine; `None` for a Unix socket.
    pub(crate) page: Option<String>,
    /// curl's arguments before the path of a route.
    pub(crate) curl: String,
}

/// Binds the configured address. It must be called on the runtime that will serve.
///
/// # Errors
/// The address is in use or unknown, or a certificate cannot be used; the error names the flag.
pub(crate) async fn bind(args: &NetworkArgs, settings: &Settings) -> Result<Bound> {
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let (listener, place, page, curl) = match &settings.uds {
        Some(path) => {
            let listener = Listener::unix(path)?;
            let path = path.display();
            (listener, format!("unix:{path}"), None, format!("--unix-socket {path} {scheme}://localhost"))
        }
        None => {
            let (listener, address) = tcp(args).await?;
            let reached = format!("{scheme}://{}", loopback_if_unspecified(address));
            (listener, format!("{scheme}://{address}"), Some(reached.clone()), reached)
        }
    };
    let listener = match &settings.tls {
        Some(tls) => listener.with_tls(tls)?,
        None => listener,
    };
    Ok(Bound { listener, place, page, curl })
}

/// The address at which a client on this machine reaches a listener. An unspecified address includes the loopback one.
fn loopback_if_unspecified(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    address
}

async fn tcp(args: &NetworkArgs) -> Result<(Listener, SocketAddr)> {
    let target = format!("{}:{}", args.host, args.port);
    let address = tokio::net::lookup_host((args.host.as_str(), args.port))
        .await
        .with_context(|| format!("--host {}: no such address", args.host))?
        .next()
        .with_context(|| format!("--host {}: no such address", args.host))?;
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    let listener =
        socket.bind(address).and_then(|()| socket.listen(BACKLOG)).map_err(|error| listen_error(&target, &error))?;
    let address = listener.local_addr()?;
    Ok((listener.into(), address))
}

fn listen_error(target: &str, error: &std::io::Error) -> anyhow::Error {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            anyhow::anyhow!("{target} is in use by another process: choose another --port, or 0 for a free one")
        }
        _ => anyhow::anyhow!("cannot listen on {target}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_reached_over_loopback() {
        for (bound, expected) in [
            ("0.0.0.0:80", "127.0.0.1:80"),
            ("[::]:80", "127.0.0.1:80"),
            ("[::1]:80", "[::1]:80"),
            ("10.0.0.1:80", "10.0.0.1:80"),
        ] {
            assert_eq!(loopback_if_unspecified(bound.parse().unwrap()).to_string(), expected);
        }
    }
}
