//! From the name of a host to its addresses.

use std::io;
use std::net::IpAddr;

use futures::FutureExt;
use futures::future::BoxFuture;

/// Finds the addresses of hosts.
pub trait Resolver: Send + Sync + 'static {
    /// All addresses of a host, in the order in which connections are tried.
    ///
    /// # Errors
    /// The host is unknown, or the service that knows it does not answer.
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;
}

/// The resolver of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolver for SystemResolver {
    fn resolve<'a>(&'a self, host: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        async move { Ok(tokio::net::lookup_host((host, 0)).await?.map(|address| address.ip()).collect()) }.boxed()
    }
}
