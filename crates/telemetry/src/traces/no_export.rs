//! The place of the exporter in a build without it.

use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::runtime::Runtime;

use super::config::{TraceConfig, TraceError};
use crate::registry::Registry;

/// Refuses to export spans.
pub(super) fn provider(_: &TraceConfig, _: &Registry) -> Result<(SdkTracerProvider, Option<Runtime>), TraceError> {
    Err(TraceError::Exporter("the program was built without the feature otlp".to_owned()))
}
