//! Traces: a span for each request, named as vLLM names them, sent over OTLP.
//!
//! A span ends on a thread of HTTP and waits in a queue of bounded length for the exporter's own thread: no collector, be
//! it slow or gone, is ever waited for. What finds the queue full is dropped and counted.

mod config;
mod export;
mod http_client;
mod request;

use std::sync::Arc;
use std::time::Duration;

use opentelemetry::InstrumentationScope;
use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tokio::runtime::Runtime;

use crate::registry::Registry;

pub use config::{TraceConfig, TraceError};
pub use request::{HttpOutcome, RequestSpan, SequenceTimes, TraceParent, TracedRequest, TracedSequence};

/// How long the last spans have to leave when the process ends.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Begins the spans of requests; clones share the exporter. The default one begins none.
#[derive(Clone, Debug, Default)]
pub struct Tracer {
    shared: Option<Arc<Shared>>,
}

#[derive(Debug)]
struct Shared {
    tracer: SdkTracer,
    /// The stages of each sequence get spans too.
    detailed: bool,
}

impl Tracer {
    /// Whether spans are begun at all.
    pub fn is_on(&self) -> bool {
        self.shared.is_some()
    }

    /// The span of a request that arrives now; `None` if there is no tracing.
    pub fn begin(&self, parent: &TraceParent) -> Option<RequestSpan> {
        self.shared.as_ref().map(|shared| RequestSpan::begin(Arc::clone(shared), parent))
    }
}

/// The exporter. Dropped, it sends what waits, for a few seconds at most.
#[derive(Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: Tracer,
    /// The connections of gRPC live there.
    runtime: Option<Runtime>,
}

impl Traces {
    pub(crate) fn start(config: &TraceConfig, registry: &Registry) -> Result<Self, TraceError> {
        let (provider, runtime) = export::provider(config, registry)?;
        let scope = InstrumentationScope::builder("octavo").with_version(env!("CARGO_PKG_VERSION")).build();
        let shared = Shared { tracer: provider.tracer_with_scope(scope), detailed: config.detailed };
        Ok(Self { provider, tracer: Tracer { shared: Some(Arc::new(shared)) }, runtime })
    }

    /// What begins spans that this exporter sends.
    pub fn tracer(&self) -> Tracer {
        self.tracer.clone()
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT) {
            tracing::warn!(%error, "the last traces may be lost");
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
