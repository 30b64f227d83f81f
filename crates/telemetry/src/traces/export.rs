//! The export of spans to a collector: a bounded queue, a thread, and counts of exported and dropped spans.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use metrics::Counter;
use opentelemetry::{Context, Key, KeyValue};
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig};
use opentelemetry_otlp::{Protocol as OtlpProtocol, WithExportConfig, WithHttpConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider, Span, SpanData, SpanExporter, SpanProcessor,
};
use tokio::runtime::Runtime;

use super::config::{Protocol, TraceConfig, TraceError};
use super::http_client::BlockingClient;
use crate::registry::Registry;

/// Default service name of the resource.
const NAMELESS: &str = "unknown_service";

/// Creates the exporter that `config` describes, and the runtime of its connections, if they need one.
pub(super) fn provider(
    config: &TraceConfig,
    registry: &Registry,
) -> Result<(SdkTracerProvider, Option<Runtime>), TraceError> {
    let (exporter, runtime) = exporter(config).map_err(TraceError::Exporter)?;
    let counts = Arc::new(Counts::register(registry));
    let exporter = Counted { next: exporter, counts: Arc::clone(&counts), failing: AtomicBool::new(false) };
    let batches = BatchConfigBuilder::default().with_max_queue_size(config.max_queue).build();
    let next = BatchSpanProcessor::builder(exporter).with_batch_config(batches).build();
    let bounded = Bounded { next, counts, limit: config.max_queue };
    let provider = SdkTracerProvider::builder().with_resource(resource()).with_span_processor(bounded).build();
    Ok((provider, runtime))
}

fn exporter(config: &TraceConfig) -> Result<(opentelemetry_otlp::SpanExporter, Option<Runtime>), String> {
    let builder = opentelemetry_otlp::SpanExporter::builder();
    match config.protocol {
        Protocol::Http => {
            let builder = builder.with_http().with_http_client(BlockingClient::new(config)?);
            let builder = builder.with_protocol(OtlpProtocol::HttpBinary).with_endpoint(&config.endpoint);
            let exporter = builder.with_timeout(config.timeout).build();
            Ok((exporter.map_err(|error| error.to_string())?, None))
        }
        Protocol::Grpc => {
            // A separate runtime, so that the last spans are sent after the HTTP runtime has stopped.
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime.worker_threads(1).enable_all().thread_name("octavo-otlp");
            let runtime = runtime.build().map_err(|error| error.to_string())?;
            let entered = runtime.enter();
            let mut builder = builder.with_tonic().with_endpoint(&config.endpoint).with_timeout(config.timeout);
            if config.endpoint.starts_with("https://") {
                builder = builder.with_tls_config(tls(config)?);
            }
            let exporter = builder.build().map_err(|error| error.to_string())?;
            drop(entered);
            Ok((exporter, Some(runtime)))
        }
    }
}

fn tls(config: &TraceConfig) -> Result<ClientTlsConfig, String> {
    let tls = ClientTlsConfig::new();
    let Some(file) = &config.authorities else { return Ok(tls.with_enabled_roots()) };
    let pem = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(tls.ca_certificate(Certificate::from_pem(pem)))
}

/// The resource from `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`, with defaults.
fn resource() -> Resource {
    let given = Resource::builder().build();
    let attribute = |name: &'static str| given.get(&Key::from(name)).map(|value| value.to_string());
    // Added attributes override given ones.
    let mut builder = Resource::builder();
    if attribute("service.version").is_none() {
        builder = builder.with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    }
    // The specification gives the variable precedence over the attributes, which the builder reads last.
    match std::env::var("OTEL_SERVICE_NAME") {
        Ok(name) if !name.is_empty() => builder = builder.with_service_name(name),
        _ if attribute("service.name").is_none_or(|name| name.starts_with(NAMELESS)) => {
            builder = builder.with_service_name("octavo");
        }
        _ => {}
    }
    builder.build()
}

/// Counts of waiting, exported and dropped spans.
#[derive(Debug)]
struct Counts {
    waiting: AtomicUsize,
    exported: Counter,
    failed: Counter,
    dropped: Counter,
    told: AtomicBool,
}

impl Counts {
    fn register(registry: &Registry) -> Self {
        let counter = |result| {
            let help = "Spans of traces: exported, failed to be, or dropped because too many waited.";
            registry.counter("octavo_trace_spans_total", help, &[("result", result)])
        };
        Self {
            waiting: AtomicUsize::new(0),
            exported: counter("exported"),
            failed: counter("failed"),
            dropped: counter("dropped"),
            told: AtomicBool::new(false),
        }
    }
}

/// Limits the queue to `limit` spans and counts dropped ones. The processor behind it drops spans without a count.
#[derive(Debug)]
struct Bounded {
    next: BatchSpanProcessor,
    counts: Arc<Counts>,
    limit: usize,
}

impl SpanProcessor for Bounded {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        let counts = &self.counts;
        if counts.waiting.fetch_add(1, Ordering::AcqRel) < self.limit {
            self.next.on_end(span);
            return;
        }
        counts.waiting.fetch_sub(1, Ordering::AcqRel);
        counts.dropped.increment(1);
        if !counts.told.swap(true, Ordering::Relaxed) {
            let limit = self.limit;
            tracing::warn!(limit, "dropping spans: too many wait for the collector (see octavo_trace_spans_total)");
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.next.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.next.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.next.set_resource(resource);
    }
}

/// Counts exported spans, and logs when the collector becomes unreachable and reachable again. The processor would log
/// every batch.
#[derive(Debug)]
struct Counted {
    next: opentelemetry_otlp::SpanExporter,
    counts: Arc<Counts>,
    failing: AtomicBool,
}

impl SpanExporter for Counted {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let result = self.next.export(batch).await;
        self.counts.waiting.fetch_sub(spans, Ordering::AcqRel);
        match result {
            Ok(()) => {
                self.counts.exported.increment(spans as u64);
                if self.failing.swap(false, Ordering::Relaxed) {
                    tracing::info!("exporting traces again");
                }
            }
            Err(error) => {
                self.counts.failed.increment(spans as u64);
                if !self.failing.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "cannot export traces");
                }
            }
        }
        Ok(())
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.next.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.next.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.next.set_resource(resource);
    }
}
