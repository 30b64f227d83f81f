//! `octavo health`: checks whether a server is ready, for images without a shell and curl.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http::{Method, Uri};
use octavo_http_client::{Certificates, Connection, Target};

use crate::cli::HealthArgs;

/// Default path of the request.
const PATH: &str = "/health";

/// Prints one line with the request and the result.
///
/// # Errors
/// The answer is not 200, or there is no answer in time. The error is the line.
pub(crate) fn run(args: &HealthArgs) -> Result<()> {
    let place = Place::from_args(args)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let patience = Duration::from_secs_f64(args.timeout);
    let answer = runtime.block_on(async { tokio::time::timeout(patience, place.ask()).await });
    // A pending name lookup is not awaited.
    runtime.shutdown_background();
    let status = match answer {
        Ok(answer) => answer.with_context(|| place.to_string())?,
        Err(_) => bail!("{place}: no answer within {} s", args.timeout),
    };
    if status != http::StatusCode::OK {
        bail!("{place}: {status}");
    }
    println!("{place}: {status}");
    Ok(())
}

/// The address of a server and the path of the request.
#[derive(Debug, PartialEq)]
struct Place {
    socket: Socket,
    tls: bool,
    path: String,
}

#[derive(Debug, PartialEq)]
enum Socket {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

impl Place {
    fn from_args(args: &HealthArgs) -> Result<Self> {
        if let Some(url) = &args.url {
            return Self::of_url(url);
        }
        let socket = match &args.uds {
            Some(path) => Socket::Unix(path.clone()),
            None => Socket::Tcp { host: loopback_if_unspecified(&args.host), port: args.port },
        };
        Ok(Self { socket, tls: args.ssl_certfile.is_some(), path: PATH.to_owned() })
    }

    fn of_url(url: &str) -> Result<Self> {
        let uri: Uri = url.parse().with_context(|| format!("--url {url}"))?;
        let (tls, port) = match uri.scheme_str() {
            Some("http") => (false, 80),
            Some("https") => (true, 443),
            _ => bail!("--url {url}: it must start with http:// or https://"),
        };
        let host = uri.host().with_context(|| format!("--url {url}: it has no host"))?;
        let socket = Socket::Tcp {
            host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: uri.port_u16().unwrap_or(port),
        };
        let path = match uri.path() {
            "" | "/" => PATH,
            path => path,
        };
        Ok(Self { socket, tls, path: path.to_owned() })
    }

    /// The status of the answer. A probe accepts any certificate, as those of Kubernetes do: it is issued for the name that
    /// clients use rather than for the loopback address, and the request has no secret.
    async fn ask(&self) -> Result<http::StatusCode> {
        let scheme = if self.tls { "https" } else { "http" };
        let target = |authority: &str| Target::new(&format!("{scheme}://{authority}"), None, &Certificates::Any);
        let target = match &self.socket {
            Socket::Tcp { host, port } => target(&authority(host, *port))?,
            Socket::Unix(path) => target("localhost")?.at_socket(path.clone()),
        };
        let request = target.request(Method::GET, &self.path, Bytes::new())?;
        Ok(Connection::new(target).send(request).await?.status())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        match &self.socket {
            Socket::Tcp { host, port } => write!(f, "{scheme}://{}{}", authority(host, *port), self.path),
            Socket::Unix(path) => write!(f, "{scheme}+unix:{}:{}", path.display(), self.path),
        }
    }
}

/// Host and port as in a URL.
fn authority(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The address at which a server that listens on `host` is reached from this machine.
fn loopback_if_unspecified(host: &str) -> String {
    match host.parse() {
        Ok(IpAddr::V4(address)) if address.is_unspecified() => "127.0.0.1".to_owned(),
        Ok(IpAddr::V6(address)) if address.is_unspecified() => "::1".to_owned(),
        _ => host.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, Command};

    /// What the flags and variables lead to, or the error.
    fn place(line: &str, variables: &[(&str, &str)]) -> Result<String, String> {
        let environment =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let args = ["health"].into_iter().chain(line.split_whitespace()).map(Into::into).collect();
        let cli = cli::parse(args, &environment).map_err(|failure| failure.to_string())?;
        let Command::Health(args) = cli.command else { return Err("another command".to_owned()) };
        Place::from_args(&args).map(|place| place.to_string()).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn the_flags_are_those_of_the_server() {
        for (line, expected) in [
            ("", "http://127.0.0.1:8000/health"),
            ("--port 8080", "http://127.0.0.1:8080/health"),
            ("--host 0.0.0.0", "http://127.0.0.1:8000/health"),
            ("--host :: --port=80", "http://[::1]:80/health"),
            ("--host 10.0.0.7 --ssl_certfile c.pem", "https://10.0.0.7:8000/health"),
            ("--uds /run/s --port 9", "http+unix:/run/s:/health"),
            ("--uds /run/s --ssl-certfile c.pem", "https+unix:/run/s:/health"),
            ("--url http://h", "http://h:80/health"),
            ("--url https://h/ --port 9", "https://h:443/health"),
            ("--url https://[fe::1]:7/live", "https://[fe::1]:7/live"),
        ] {
            assert_eq!(place(line, &[]).as_deref(), Ok(expected), "{line}");
        }
        for (line, expected) in [
            ("--url h:80", "it must start with http:// or https://"),
            ("--url ftp://h", "it must start with http:// or https://"),
            ("--port no", "--port"),
            ("--timeout=-1", "seconds between 0 and 86400"),
            ("--model m", "--model"),
        ] {
            let error = place(line, &[]).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn the_variables_are_those_of_the_server() {
        let variables = [("OCTAVO_PORT", "8080"), ("OCTAVO_HOST", "0.0.0.0"), ("OCTAVO_SSL_CERTFILE", "/c.pem")];
        assert_eq!(place("", &variables).as_deref(), Ok("https://127.0.0.1:8080/health"));
        assert_eq!(place("--port 9", &variables).as_deref(), Ok("https://127.0.0.1:9/health"));
        assert_eq!(place("--url http://h:1/live", &variables).as_deref(), Ok("http://h:1/live"));
        // Of a Kubernetes service that is named octavo.
        let variables = [("OCTAVO_PORT", "tcp://10.0.0.1:80"), ("OCTAVO_UDS", "")];
        assert_eq!(place("", &variables).as_deref(), Ok("http://127.0.0.1:8000/health"));
    }
}
