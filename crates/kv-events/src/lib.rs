//! What the prefix cache holds, published over ZeroMQ as vLLM publishes it: routers that know it send a request to the
//! replica that has its prefix.
//!
//! The engine hands over a batch of events a step and never waits: a batch that finds the queue full is lost, and its
//! sequence number with it, so that subscribers see the gap and ask for a replay.
//!
//! The two sockets that are needed, PUB and ROUTER, are a few hundred lines over TCP ([`zmtp`]); what else ZeroMQ has is
//! not.

mod address;
mod message;
mod publisher;
mod zmtp;

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use octavo_engine::{KvEvent, KvEventSink};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

pub use address::AddressError;
pub use message::Encoding;
pub use publisher::Publisher;

/// Where events go, and how. The defaults are vLLM's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// `tcp://*:5557`, `ipc://path`: listened on. `tcp://host:5557`: connected to.
    pub endpoint: String,
    /// Where missed batches are asked for.
    pub replay_endpoint: Option<String>,
    /// What every message begins with.
    pub topic: String,
    /// Batches that can be replayed.
    pub buffer_steps: usize,
    /// Batches that wait for a subscriber, at most; it misses what comes then.
    pub hwm: usize,
    /// Batches that wait to be published, at most.
    pub max_queue_size: usize,
    /// How events are written.
    pub encoding: Encoding,
    /// Hashes are their low 64 bits, as numbers.
    pub int_hashes: bool,
}

impl Default for KvEventsConfig {
    fn default() -> Self {
        Self {
            endpoint: "tcp://*:5557".into(),
            replay_endpoint: None,
            topic: String::new(),
            buffer_steps: 10_000,
            hwm: 100_000,
            max_queue_size: 100_000,
            encoding: Encoding::Maps,
            int_hashes: true,
        }
    }
}

/// Why events cannot be published.
#[derive(Debug, thiserror::Error)]
pub enum KvEventsError {
    /// An endpoint is not understood.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// An endpoint cannot be listened on.
    #[error("'{endpoint}' cannot be listened on: {error}")]
    Listen {
        /// The endpoint.
        endpoint: String,
        /// Why.
        error: std::io::Error,
    },
    /// The publisher's thread cannot be started.
    #[error("the publisher of KV events cannot be started: {0}")]
    Thread(std::io::Error),
}

/// A batch on its way to the publisher.
struct Batch {
    sequence: u64,
    /// Unix time, in seconds.
    time: f64,
    events: Vec<KvEvent>,
}

/// The engine's end: takes a batch a step.
#[derive(Debug)]
pub struct Sink {
    queue: mpsc::Sender<Batch>,
    next: u64,
    full: bool,
}

impl KvEventSink for Sink {
    fn publish(&mut self, events: Vec<KvEvent>) {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let sent = self.queue.try_send(Batch { sequence: self.next, time, events });
        self.next += 1;
        let full = matches!(sent, Err(TrySendError::Full(_)));
        if full && !self.full {
            tracing::warn!(sequence = self.next - 1, "KV events are lost: too many wait to be published");
        }
        self.full = full;
    }
}

/// The frames of a message, as they go out: each after its head.
type Frames = Bytes;
