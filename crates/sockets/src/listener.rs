//! Listening sockets: a TCP port or a Unix domain socket, with or without TLS.

use std::fmt;
use std::fs::{self, Permissions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixSocket, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::stall::StallGuard;
use crate::tls::{Tls, TlsConfig, TlsError};

/// Backlog of a Unix socket, large enough that a burst of clients is not refused.
const BACKLOG: u32 = 4096;

/// Size of a TCP connection's send buffer; the kernel uses twice as much with its own records. By default it would grow
/// to several megabytes for a client that reads nothing.
const SEND_BUFFER: usize = 256 << 10;

/// Longest time limit of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time in which a rejected client must close the connection.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(2);

/// A listening socket. Dropping it stops listening and removes the file of a Unix socket.
pub struct Listener {
    socket: Socket,
    tls: Option<Tls>,
}

enum Socket {
    Tcp(TcpListener),
    Unix(SocketFile),
}

/// The reason why the server cannot listen on a Unix socket.
#[derive(Debug, thiserror::Error)]
pub enum UnixSocketError {
    /// A server answers there.
    #[error("--uds {}: another process listens there: choose another path", .0.display())]
    InUse(PathBuf),
    /// Another kind of file exists, which the server does not remove.
    #[error("--uds {}: there is a file that is no socket: remove it or choose another path", .0.display())]
    NotASocket(PathBuf),
    /// The system refuses.
    #[error("--uds {}: {source}", path.display())]
    System {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self { socket: Socket::Tcp(listener), tls: None }
    }
}

impl fmt::Display for Listener {
    /// The address for clients: `http://127.0.0.1:8000` or `unix:/run/octavo.sock`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        match &self.socket {
            Socket::Tcp(listener) => match listener.local_addr() {
                Ok(address) => write!(f, "{scheme}://{address}"),
                Err(_) => write!(f, "{scheme}://?"),
            },
            Socket::Unix(file) => write!(f, "unix:{}", file.path.display()),
        }
    }
}

impl Listener {
    /// Listens on a Unix socket that all users may connect to, as far as the process's umask allows. A stale socket of an
    /// earlier server is replaced.
    ///
    /// # Errors
    /// Another process listens there, there is a file of another kind, or the path is unusable.
    pub fn unix(path: impl Into<PathBuf>) -> Result<Self, UnixSocketError> {
        Ok(Self { socket: Socket::Unix(SocketFile::bind(path.into())?), tls: None })
    }

    /// Uses TLS with every client. With a refresh, it must be called on an async runtime.
    ///
    /// # Errors
    /// A file is unusable; the error names it and its flag.
    pub fn with_tls(mut self, config: &TlsConfig) -> Result<Self, TlsError> {
        self.tls = Some(Tls::new(config)?);
        Ok(self)
    }

    /// Accepts the next connection, without its handshake.
    ///
    /// # Errors
    /// The listener, the connection or a limit of the system; the error code says which.
    pub async fn accept(&self) -> io::Result<Accepted> {
        let (stream, peer) = match &self.socket {
            Socket::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                (Stream::Tcp(stream), Some(address.ip()))
            }
            Socket::Unix(file) => (Stream::Unix(file.listener.accept().await?.0), None),
        };
        Ok(Accepted { stream, peer, tls: self.tls.as_ref().map(Tls::acceptor) })
    }
}

/// A socket that is a file.
struct SocketFile {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    fn bind(path: PathBuf) -> Result<Self, UnixSocketError> {
        let failed = |source| UnixSocketError::System { path: path.clone(), source };
        let socket = UnixSocket::new_stream().map_err(failed)?;
        if let Err(error) = socket.bind(&path) {
            if error.kind() != io::ErrorKind::AddrInUse {
                return Err(failed(error));
            }
            remove_stale_socket(&path).map_err(|error| match error.kind() {
                io::ErrorKind::AddrInUse => UnixSocketError::InUse(path.clone()),
                io::ErrorKind::AlreadyExists => UnixSocketError::NotASocket(path.clone()),
                _ => failed(error),
            })?;
            socket.bind(&path).map_err(failed)?;
        }
        let listener = socket.listen(BACKLOG).map_err(failed)?;
        // Bound with mode 0777 less the umask. Connecting needs write permission.
        let mode = fs::metadata(&path).map_err(failed)?.mode() & 0o666;
        fs::set_permissions(&path, Permissions::from_mode(mode)).map_err(failed)?;
        let identity = identity(&path);
        Ok(Self { listener, path, identity })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // A file that replaced the socket is kept.
        if self.identity.is_some() && identity(&self.path) == self.identity {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Removes the socket that an earlier process left at `path`. It is no error if there is no file.
///
/// # Errors
/// `AddrInUse` if a process has the socket open, `AlreadyExists` if there is a file of another kind; neither is removed.
pub fn remove_stale_socket(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is not a socket"));
        }
        Ok(_) => {}
    }
    // A datagram socket never connects to a stream socket. The error says whether a process has it open, and unlike a
    // stream's attempt, this one does not wait for room in the queue of that process.
    match UnixDatagram::unbound()?.connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        _ => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there")),
    }
}

/// Both directions of a connection.
pub trait Duplex: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Duplex for S {}

/// A connection of any kind, guarded against readers that stall.
pub type Connection = Pin<Box<dyn Duplex>>;

/// How an accepted connection is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Time limit of the TLS handshake, at most ten seconds.
    pub handshake_timeout: Duration,
    /// A write fails when the peer has read no byte for this time.
    pub write_stall_timeout: Duration,
    /// The whole HTTP response for a client that does not use TLS where it is expected.
    pub plain_http_answer: fn() -> String,
}

/// An accepted connection before its handshake.
pub struct Accepted {
    stream: Stream,
    peer: Option<IpAddr>,
    tls: Option<TlsAcceptor>,
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Accepted {
    /// The address of the client; none on a Unix socket.
    pub fn peer(&self) -> Option<IpAddr> {
        self.peer
    }

    /// Performs the TLS handshake, if any. A client that sends plain HTTP receives the configured answer and is rejected.
    ///
    /// # Errors
    /// The handshake failed or took too long.
    pub async fn open(self, options: OpenOptions) -> io::Result<Connection> {
        let stall = options.write_stall_timeout;
        let Some(tls) = self.tls else { return Ok(self.stream.guarded(stall)) };
        let handshake = async {
            let plain = self.stream.begins_like_http().await?;
            let socket = self.stream.guarded(stall);
            if plain {
                turn_away(socket, (options.plain_http_answer)().as_bytes()).await?;
                return Err(io::Error::new(io::ErrorKind::InvalidData, "plain HTTP where TLS is expected"));
            }
            tls.accept(socket).await
        };
        let secured = timeout(HANDSHAKE_TIMEOUT.min(options.handshake_timeout), handshake).await;
        Ok(Box::pin(secured.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake took too long"))??))
    }
}

impl Stream {
    fn guarded(self, stall: Duration) -> Connection {
        match self {
            Self::Tcp(stream) => {
                tune(&stream);
                Box::pin(StallGuard::new(stream, stall))
            }
            Self::Unix(stream) => Box::pin(StallGuard::new(stream, stall)),
        }
    }

    /// Waits for the first byte, without reading it, and returns whether it begins an HTTP method; TLS begins with 22. Unix
    /// sockets are not checked, since TLS on them is set up deliberately.
    async fn begins_like_http(&self) -> io::Result<bool> {
        let Self::Tcp(stream) = self else { return Ok(false) };
        let mut first = [0];
        Ok(stream.peek(&mut first).await? == 1 && first[0].is_ascii_uppercase())
    }
}

/// Answers a client that sends plain HTTP in plain HTTP. The handshake would send a TLS alert, on which nginx lets its
/// client wait until a timeout.
async fn turn_away(mut socket: Connection, answer: &[u8]) -> io::Result<()> {
    socket.write_all(answer).await?;
    socket.shutdown().await?;
    // Closing the connection with unread bytes would reset it, and the answer could be lost.
    let mut rest = [0; 4096];
    let hang_up = async {
        while socket.read(&mut rest).await? > 0 {}
        Ok(())
    };
    timeout(FAREWELL_TIMEOUT, hang_up).await.unwrap_or(Ok(()))
}

fn tune(stream: &TcpStream) {
    // A token is a small packet, which must not wait for the acknowledgement of the previous one.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY could not be set");
    }
    if let Err(error) = SockRef::from(stream).set_send_buffer_size(SEND_BUFFER) {
        tracing::debug!(%error, "the send buffer could not be bounded");
    }
}
