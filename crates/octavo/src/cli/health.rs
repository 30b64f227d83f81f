//! Flags of `octavo health`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::values;

/// The server. The flags are named as those of `octavo serve`, so that its variables (`OCTAVO_PORT`, ...) apply as well.
#[derive(Debug, Args)]
pub(crate) struct HealthArgs {
    /// URL to request, in place of the flags below: `http://` or `https://`, a host, and a path other than /health if
    /// needed.
    #[arg(long)]
    pub(crate) url: Option<String>,

    /// Address of the server.
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,

    /// Port of the server.
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,

    /// Unix domain socket of the server, instead of --host and --port.
    #[arg(long, value_name = "PATH")]
    pub(crate) uds: Option<PathBuf>,

    /// Certificate of the server; its presence selects HTTPS. The certificate is not verified.
    #[arg(long, value_name = "FILE")]
    pub(crate) ssl_certfile: Option<PathBuf>,

    /// Seconds to wait for the answer.
    #[arg(long, default_value_t = 5.0, value_parser = values::seconds, value_name = "SECONDS")]
    pub(crate) timeout: f64,
}
