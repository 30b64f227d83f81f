//! Publishes the content of the prefix cache over ZeroMQ, like vLLM. Routers use it to send a request to the replica
//! that has its prefix.
//!
//! The engine hands over one batch of events per step and never waits. A batch that finds the queue full is lost
//! together with its sequence number, so that subscribers see the gap and request a replay.
//!
//! The two sockets that are needed, PUB and ROUTER, are a few hundred lines over TCP ([`zmtp`]). The rest of ZeroMQ is
//! not implemented.

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

/// Destination and format of the events. The defaults are vLLM's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Endpoint of the publisher: `tcp://*:5557` and `ipc://path` listen, `tcp://host:5557` connects.
    pub endpoint: String,
    /// Endpoint on which missed batches are requested.
    pub replay_endpoint: Option<String>,
    /// Topic with which every message begins.
    pub topic: String,
    /// Number of batches that can be replayed.
    pub buffer_steps: usize,
    /// Maximum number of batches that wait for a subscriber. It misses batches beyond that.
    pub hwm: usize,
    /// Maximum number of batches that wait to be published.
    pub max_queue_size: usize,
    /// Encoding of the events.
    pub encoding: Encoding,
    /// Sends the low 64 bits of hashes as integers.
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

/// Reason why events cannot be published.
#[derive(Debug, thiserror::Error)]
pub enum KvEventsError {
    /// The endpoint is not supported.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The publisher cannot listen on the endpoint.
    #[error("'{endpoint}' cannot be listened on: {error}")]
    Listen {
        /// The endpoint.
        endpoint: String,
        /// Error of the system.
        error: std::io::Error,
    },
    /// The publisher's thread cannot be started.
    #[error("the publisher of KV events cannot be started: {0}")]
    Thread(std::io::Error),
}

/// A batch for the publisher.
struct Batch {
    sequence: u64,
    /// Unix time in seconds.
    time: f64,
    events: Vec<KvEvent>,
}

/// The engine's end of the queue, which takes one batch per step.
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

/// Encoded frames of a message, each after its header.
type Frames = Bytes;
