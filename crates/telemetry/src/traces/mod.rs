//! Traces: a span for each request, with vLLM's names, sent over OTLP.
//!
//! A span ends on an HTTP thread and waits in a bounded queue for the exporter's thread, so a slow or missing collector
//! never delays a request. Spans that find the queue full are dropped and counted.

mod config;
#[cfg(feature = "otlp")]
mod export;
#[cfg(not(feature = "otlp"))]
#[path = "no_export.rs"]
mod export;
#[cfg(feature = "otlp")]
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

/// Time limit for sending the last spans when the process ends.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Begins the spans of requests; clones share the exporter. The default tracer begins none.
#[derive(Clone, Debug, Default)]
pub struct Tracer {
    shared: Option<Arc<Shared>>,
}

#[derive(Debug)]
struct Shared {
    tracer: SdkTracer,
    /// Whether the stages of each sequence have spans.
    detailed: bool,
}

impl Tracer {
    /// Whether tracing is on.
    pub fn is_on(&self) -> bool {
        self.shared.is_some()
    }

    /// Begins the span of a request that has just arrived; `None` if tracing is off.
    pub fn begin(&self, parent: &TraceParent) -> Option<RequestSpan> {
        self.shared.as_ref().map(|shared| RequestSpan::begin(Arc::clone(shared), parent))
    }
}

/// The exporter. Dropping it sends the waiting spans, for a few seconds at most.
#[derive(Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: Tracer,
    /// The runtime of gRPC connections.
    runtime: Option<Runtime>,
}

impl Traces {
    pub(crate) fn start(config: &TraceConfig, registry: &Registry) -> Result<Self, TraceError> {
        let (provider, runtime) = export::provider(config, registry)?;
        let scope = InstrumentationScope::builder("octavo").with_version(env!("CARGO_PKG_VERSION")).build();
        let shared = Shared { tracer: provider.tracer_with_scope(scope), detailed: config.detailed };
        Ok(Self { provider, tracer: Tracer { shared: Some(Arc::new(shared)) }, runtime })
    }

    /// The tracer of this exporter.
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
