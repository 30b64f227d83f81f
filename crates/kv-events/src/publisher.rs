//! The publisher's thread, which sends batches to subscribers and replays missed ones.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use octavo_sockets::remove_stale_socket;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, split};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use crate::address::Address;
use crate::message::encode;
use crate::zmtp::{SocketKind, Wish, handshake, message, read_frame};
use crate::{Batch, Frames, KvEventsConfig, KvEventsError, Sink};

/// Sequence number that ends a replay.
const END: [u8; 8] = [0xff; 8];

/// Timeout of a peer's handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Time after which a peer that takes no bytes is given up.
const STALL: Duration = Duration::from_secs(30);

/// Interval between attempts to connect to a subscriber.
const RECONNECT: Duration = Duration::from_secs(1);

/// Maximum number of subscribers and replays at a time, and of topics of a subscriber.
const MAX_PEERS: usize = 256;
const MAX_TOPICS: usize = 256;

/// The running publisher. Dropping it closes all its connections.
#[derive(Debug)]
pub struct Publisher {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Publisher {
    /// Listens on the endpoints of `config`, starts a thread and returns the sink for the engine.
    ///
    /// # Errors
    /// Returns an error if an endpoint is not supported or in use, or if its path is that of a file other than a socket.
    pub fn start(config: KvEventsConfig) -> Result<(Self, Sink), KvEventsError> {
        let endpoint = Address::parse(&config.endpoint)?;
        let replay = config.replay_endpoint.as_deref().map(Address::parse_bound).transpose()?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(KvEventsError::Thread)?;
        let entered = runtime.enter();
        let endpoint = Door::open(endpoint, &config.endpoint)?;
        let replay_name = config.replay_endpoint.clone().unwrap_or_default();
        let replay = replay.map(|address| Door::open(address, &replay_name)).transpose()?;
        drop(entered);
        let (queue, batches) = mpsc::channel(config.max_queue_size.max(1));
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name("octavo-kv-events".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = run(Arc::new(Shared::new(config)), batches, endpoint, replay) => {}
                    _ = stopped => {}
                }
            });
        });
        let thread = Some(thread.map_err(KvEventsError::Thread)?);
        Ok((Self { stop: Some(stop), thread }, Sink { queue, next: 0, full: false }))
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the publisher of KV events had panicked");
        }
    }
}

/// Source of connections.
enum Door {
    Tcp(TcpListener),
    Ipc(UnixListener),
    /// Connections are made to this address instead of accepted.
    Out(String),
}

impl Door {
    fn open(address: Address, endpoint: &str) -> Result<Self, KvEventsError> {
        let failed = |error| KvEventsError::Listen { endpoint: endpoint.to_owned(), error };
        match address {
            Address::Connect(place) => Ok(Self::Out(place)),
            Address::Ipc(path) => {
                remove_stale_socket(&path).map_err(failed)?;
                UnixListener::bind(path).map(Self::Ipc).map_err(failed)
            }
            Address::Bind(host, port) => {
                let host = if host.is_empty() { "0.0.0.0" } else { &host };
                let listener = std::net::TcpListener::bind((host, port)).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                TcpListener::from_std(listener).map(Self::Tcp).map_err(failed)
            }
        }
    }
}

/// Accepts a connection on which batches are sent at once.
async fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Connects to `host:port`. Batches are sent at once.
async fn connect(place: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(place).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// State shared by all connections.
struct Shared {
    config: KvEventsConfig,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    subscribers: Vec<Subscriber>,
    /// Latest batches, oldest first.
    replayable: VecDeque<(u64, Bytes)>,
    peers: usize,
}

struct Subscriber {
    /// Topic prefixes to which it subscribed, each as often as it did.
    wanted: Arc<Mutex<Vec<Bytes>>>,
    queue: mpsc::Sender<Frames>,
}

impl Shared {
    fn new(config: KvEventsConfig) -> Self {
        Self { config, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a batch to its subscribers and keeps it for replays.
    fn publish(&self, batch: &Batch) {
        let config = &self.config;
        let payload: Bytes = encode(batch, config.encoding, config.int_hashes).into();
        let topic = config.topic.as_bytes();
        let frames = message(&[topic, &batch.sequence.to_be_bytes(), &payload]);
        let mut state = self.state();
        state.subscribers.retain(|subscriber| {
            if topics(&subscriber.wanted).iter().any(|wanted| topic.starts_with(wanted)) {
                // A subscriber that is too slow misses this batch, as with any ZeroMQ publisher.
                drop(subscriber.queue.try_send(frames.clone()));
            }
            !subscriber.queue.is_closed()
        });
        if config.buffer_steps > 0 {
            if state.replayable.len() == config.buffer_steps {
                state.replayable.pop_front();
            }
            state.replayable.push_back((batch.sequence, payload));
        }
    }
}

fn topics(wanted: &Mutex<Vec<Bytes>>) -> MutexGuard<'_, Vec<Bytes>> {
    wanted.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Publishes until the engine is gone.
async fn run(shared: Arc<Shared>, mut batches: mpsc::Receiver<Batch>, endpoint: Door, replay: Option<Door>) {
    tokio::spawn(serve(Arc::clone(&shared), endpoint, SocketKind::Publish));
    if let Some(replay) = replay {
        tokio::spawn(serve(Arc::clone(&shared), replay, SocketKind::Route));
    }
    while let Some(batch) = batches.recv().await {
        shared.publish(&batch);
    }
}

async fn serve(shared: Arc<Shared>, door: Door, kind: SocketKind) {
    loop {
        let accepted = match &door {
            Door::Tcp(listener) => accept(listener).await.map(|stream| {
                let shared = Arc::clone(&shared);
                tokio::spawn(async move { peer(&shared, stream, kind).await });
            }),
            Door::Ipc(listener) => listener.accept().await.map(|(stream, _)| {
                let shared = Arc::clone(&shared);
                tokio::spawn(async move { peer(&shared, stream, kind).await });
            }),
            Door::Out(place) => {
                if let Ok(stream) = connect(place).await {
                    peer(&shared, stream, kind).await;
                }
                sleep(RECONNECT).await;
                Ok(())
            }
        };
        if let Err(error) = accepted {
            tracing::warn!(%error, "no subscriber of KV events can be taken");
            sleep(RECONNECT).await;
        }
    }
}

/// Serves one connection until it ends.
async fn peer(shared: &Shared, mut stream: impl AsyncRead + AsyncWrite + Unpin, kind: SocketKind) {
    {
        let mut state = shared.state();
        if state.peers >= MAX_PEERS {
            tracing::warn!(peers = state.peers, "a subscriber of KV events is sent away: there are too many");
            return;
        }
        state.peers += 1;
    }
    let ended = match timeout(HANDSHAKE, handshake(&mut stream, kind)).await {
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
        Ok(Err(error)) => Err(error),
        Ok(Ok(())) if kind == SocketKind::Publish => subscriber(shared, stream).await,
        Ok(Ok(())) => replay(shared, stream).await,
    };
    shared.state().peers -= 1;
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection for KV events ended");
    }
}

async fn subscriber(shared: &Shared, stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    let (reader, writer) = split(stream);
    let (queue, frames) = mpsc::channel(shared.config.hwm.max(1));
    let (answer, answers) = mpsc::channel(4);
    let wanted = Arc::new(Mutex::new(vec![]));
    shared.state().subscribers.push(Subscriber { wanted: Arc::clone(&wanted), queue });
    tokio::select! {
        ended = listen(reader, &wanted, answer) => ended,
        ended = send(writer, frames, answers) => ended,
    }
}

/// Reads a subscriber's subscriptions.
async fn listen(
    mut reader: impl AsyncRead + Unpin,
    wanted: &Mutex<Vec<Bytes>>,
    answer: mpsc::Sender<Bytes>,
) -> io::Result<()> {
    loop {
        match Wish::from_frame(&read_frame(&mut reader).await?) {
            Wish::Subscribe(topic) if topics(wanted).len() < MAX_TOPICS => topics(wanted).push(topic),
            Wish::Subscribe(_) => return Err(io::ErrorKind::InvalidData.into()),
            Wish::Cancel(topic) => {
                let mut topics = topics(wanted);
                if let Some(index) = topics.iter().position(|known| *known == topic) {
                    topics.swap_remove(index);
                }
            }
            // A peer whose heartbeat answers queue up does not read them.
            Wish::Pong(pong) => drop(answer.try_send(pong)),
            Wish::Nothing => {}
        }
    }
}

async fn send(
    mut writer: impl AsyncWrite + Unpin,
    mut frames: mpsc::Receiver<Frames>,
    mut answers: mpsc::Receiver<Bytes>,
) -> io::Result<()> {
    loop {
        let bytes = tokio::select! {
            frames = frames.recv() => frames,
            answer = answers.recv() => answer,
        };
        let Some(bytes) = bytes else { return Ok(()) };
        write(&mut writer, bytes).await?;
    }
}

/// Writes all bytes to a peer. The peer is given up if it takes none of them for [`STALL`].
async fn write(writer: &mut (impl AsyncWrite + Unpin), bytes: Bytes) -> io::Result<()> {
    write_within(STALL, writer, bytes).await
}

async fn write_within(stall: Duration, writer: &mut (impl AsyncWrite + Unpin), mut bytes: Bytes) -> io::Result<()> {
    while !bytes.is_empty() {
        if timeout(stall, writer.write_buf(&mut bytes)).await?? == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
    }
    Ok(())
}

/// Sends the batches from the requested one on, and an end mark.
async fn replay(shared: &Shared, mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    let topic = shared.config.topic.as_bytes();
    loop {
        let mut frames = vec![];
        loop {
            let frame = read_frame(&mut stream).await?;
            if frame.command {
                if let Wish::Pong(pong) = Wish::from_frame(&frame) {
                    write(&mut stream, pong).await?;
                }
                continue;
            }
            let more = frame.more;
            frames.push(frame.body);
            if !more || frames.len() > 2 {
                break;
            }
        }
        let [delimiter, start] = &frames[..] else { return Err(io::ErrorKind::InvalidData.into()) };
        let Ok(start) = <[u8; 8]>::try_from(&start[..]) else { return Err(io::ErrorKind::InvalidData.into()) };
        let start = u64::from_be_bytes(start);
        let missed: Vec<(u64, Bytes)> = {
            let state = shared.state();
            state.replayable.iter().filter(|(sequence, _)| *sequence >= start).cloned().collect()
        };
        for (sequence, payload) in missed {
            write(&mut stream, message(&[delimiter, topic, &sequence.to_be_bytes(), &payload])).await?;
        }
        write(&mut stream, message(&[delimiter, topic, &END, b""])).await?;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixStream as StdStream;

    use tokio::io::AsyncReadExt;

    use super::*;

    fn ipc(path: &std::path::Path) -> KvEventsConfig {
        KvEventsConfig { endpoint: format!("ipc://{}", path.display()), ..KvEventsConfig::default() }
    }

    #[test]
    fn a_socket_in_use_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv");
        let _first = Publisher::start(ipc(&path)).unwrap();
        let error = Publisher::start(ipc(&path)).map(drop).unwrap_err();
        assert!(error.to_string().contains("another process listens there"), "{error}");
        StdStream::connect(&path).unwrap();
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv");
        fs::write(&path, "precious").unwrap();
        let error = Publisher::start(ipc(&path)).map(drop).unwrap_err();
        assert!(error.to_string().contains("not a socket"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn the_socket_of_an_earlier_process_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kv");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let _publisher = Publisher::start(ipc(&path)).unwrap();
        StdStream::connect(&path).unwrap();
    }

    #[tokio::test]
    async fn batches_are_not_delayed_by_nagles_algorithm() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let place = listener.local_addr().unwrap().to_string();
        let (out, taken) = tokio::join!(connect(&place), accept(&listener));
        assert!(out.unwrap().nodelay().unwrap() && taken.unwrap().nodelay().unwrap());
    }

    #[tokio::test]
    async fn a_peer_that_takes_nothing_is_given_up() {
        let bytes = Bytes::from(vec![7; 64]);
        let (mut ours, mut theirs) = tokio::io::duplex(16);
        let error = write_within(Duration::from_millis(20), &mut ours, bytes.clone()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        // The time limit is that of each part, so a peer that reads is not given up.
        theirs.read_exact(&mut [0; 16]).await.unwrap();
        let mut read = [0; 64];
        let (written, taken) = tokio::join!(write(&mut ours, bytes), theirs.read_exact(&mut read));
        written.unwrap();
        assert_eq!((taken.unwrap(), read), (64, [7; 64]));
    }
}
