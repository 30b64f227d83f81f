//! The configuration of traces, from a flag and OpenTelemetry's variables.

use std::path::PathBuf;
use std::time::Duration;

use http::Uri;

/// Default path of an HTTP endpoint.
const TRACES_PATH: &str = "/v1/traces";

/// Defaults of OpenTelemetry's specification.
const MAX_QUEUE: usize = 2048;
const TIMEOUT: Duration = Duration::from_secs(10);

/// Reads a variable.
pub(crate) type Environment<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// The transport of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Grpc,
    Http,
}

/// The destination and transport of traces. The exporter reads headers, sampling, batching and the resource from
/// OpenTelemetry's variables (`OTEL_EXPORTER_OTLP_TRACES_HEADERS`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_*`,
/// `OTEL_RESOURCE_ATTRIBUTES`, ...) when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceConfig {
    /// A URL with a scheme of the protocol.
    pub(super) endpoint: String,
    pub(super) protocol: Protocol,
    pub(super) detailed: bool,
    /// Maximum number of waiting spans.
    pub(super) max_queue: usize,
    /// Timeout of an export.
    pub(super) timeout: Duration,
    /// File of the authorities that sign the collector's certificate, in PEM format.
    pub(super) authorities: Option<PathBuf>,
}

/// The reason why traces cannot be exported.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// A variable has an invalid value.
    #[error("{name}='{value}' is not {expected}")]
    Variable {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        value: String,
        /// Description of valid values.
        expected: &'static str,
    },
    /// The endpoint is invalid.
    #[error("traces cannot be sent to '{endpoint}': {reason}")]
    Endpoint {
        /// The endpoint as given.
        endpoint: String,
        /// The reason.
        reason: String,
    },
    /// The exporter cannot be started.
    #[error("the trace exporter cannot be started: {0}")]
    Exporter(String),
}

impl TraceConfig {
    /// Reads the configuration. The endpoint is `endpoint`, else `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, else
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`. Without an endpoint or with `OTEL_SDK_DISABLED=true`, tracing is off. With `detailed`,
    /// the stages of each sequence have spans of their own.
    ///
    /// # Errors
    /// An endpoint or a variable is invalid.
    pub fn new(
        endpoint: Option<&str>,
        detailed: bool,
        environment: &Environment<'_>,
    ) -> Result<Option<Self>, TraceError> {
        let variable = |name: &str| environment(name).filter(|value| !value.trim().is_empty());
        let of_traces = |traces, common| variable(traces).or_else(|| variable(common));
        let is_true = |value: String| value.trim().eq_ignore_ascii_case("true");
        let disabled = variable("OTEL_SDK_DISABLED").is_some_and(is_true);
        if disabled || variable("OTEL_TRACES_EXPORTER").is_some_and(|name| name.trim() == "none") {
            return Ok(None);
        }
        let protocol = protocol(&variable)?;
        let given = endpoint.filter(|endpoint| !endpoint.is_empty()).map(str::to_owned);
        let given = given.or_else(|| variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"));
        let common = || {
            let base = variable("OTEL_EXPORTER_OTLP_ENDPOINT")?;
            // The paths of all signals are below the common endpoint.
            Some(if protocol == Protocol::Http { base.trim_end_matches('/').to_owned() + TRACES_PATH } else { base })
        };
        let Some(endpoint) = given.or_else(common) else { return Ok(None) };
        let insecure = of_traces("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE");
        let timeout = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
        let millis = timeout.into_iter().find_map(|name| Some((name, variable(name)?)));
        Ok(Some(Self {
            endpoint: address(endpoint.trim(), protocol, insecure.is_some_and(is_true))?,
            protocol,
            detailed,
            max_queue: number("OTEL_BSP_MAX_QUEUE_SIZE", variable("OTEL_BSP_MAX_QUEUE_SIZE"))?.unwrap_or(MAX_QUEUE),
            timeout: match millis {
                Some((name, value)) => {
                    number(name, Some(value))?.map_or(TIMEOUT, |ms| Duration::from_millis(ms as u64))
                }
                None => TIMEOUT,
            },
            authorities: of_traces("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE")
                .map(PathBuf::from),
        }))
    }

    /// The destination of traces.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }
}

fn protocol(variable: &dyn Fn(&str) -> Option<String>) -> Result<Protocol, TraceError> {
    let names = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
    let Some((name, value)) = names.into_iter().find_map(|name| Some((name, variable(name)?))) else {
        return Ok(Protocol::Grpc);
    };
    match value.trim() {
        "grpc" => Ok(Protocol::Grpc),
        "http/protobuf" => Ok(Protocol::Http),
        _ => Err(TraceError::Variable { name, value, expected: "grpc or http/protobuf" }),
    }
}

fn number(name: &'static str, value: Option<String>) -> Result<Option<usize>, TraceError> {
    let Some(value) = value else { return Ok(None) };
    match value.trim().parse() {
        Ok(number) if number > 0 => Ok(Some(number)),
        _ => Err(TraceError::Variable { name, value, expected: "a whole number above 0" }),
    }
}

/// Converts `endpoint` to a URL of the protocol. For gRPC, the scheme may be missing or `grpc`; for HTTP, the path may be
/// missing.
fn address(endpoint: &str, protocol: Protocol, insecure: bool) -> Result<String, TraceError> {
    let refused = |reason: &str| TraceError::Endpoint { endpoint: endpoint.to_owned(), reason: reason.to_owned() };
    let (scheme, rest) = endpoint.split_once("://").map_or(("", endpoint), |(scheme, rest)| (scheme, rest));
    let scheme = match (protocol, scheme.to_ascii_lowercase().as_str()) {
        (_, "http") => "http",
        (_, "https") | (Protocol::Grpc, "grpcs") => "https",
        (Protocol::Grpc, "grpc" | "") if insecure => "http",
        (Protocol::Grpc, "grpc" | "") => "https",
        (Protocol::Grpc, _) => return Err(refused("over gRPC it begins with http://, https:// or grpc://")),
        (Protocol::Http, _) => return Err(refused("over http/protobuf it begins with http:// or https://")),
    };
    let uri: Uri = format!("{scheme}://{rest}").parse().map_err(|error| refused(&format!("{error}")))?;
    if uri.host().is_none_or(str::is_empty) {
        return Err(refused("it names no host"));
    }
    let path = if protocol == Protocol::Http && rest.find('/').is_none_or(|slash| slash + 1 == rest.len()) {
        rest.trim_end_matches('/').to_owned() + TRACES_PATH
    } else {
        rest.to_owned()
    };
    Ok(format!("{scheme}://{path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<TraceConfig>, TraceError> {
        let find =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        TraceConfig::new(flag, false, &find)
    }

    fn endpoint(flag: Option<&str>, variables: &[(&str, &str)]) -> Option<String> {
        config(flag, variables).unwrap().map(|config| config.endpoint)
    }

    const HTTP: (&str, &str) = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf");
    const OF_TRACES: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    const COMMON: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

    #[test]
    fn nothing_is_exported_where_no_endpoint_is_set() {
        assert_eq!(config(None, &[]), Ok(None));
        assert_eq!(config(Some(""), &[HTTP, (OF_TRACES, ""), (COMMON, " ")]), Ok(None));
        let given = Some("http://c:4317");
        assert!(config(given, &[]).unwrap().is_some());
        assert_eq!(config(given, &[("OTEL_SDK_DISABLED", "TRUE")]), Ok(None));
        assert!(config(given, &[("OTEL_SDK_DISABLED", "1")]).unwrap().is_some(), "only the word counts");
        assert_eq!(config(given, &[("OTEL_TRACES_EXPORTER", "none")]), Ok(None));
    }

    #[test]
    fn the_flag_wins_over_the_variable_of_traces_and_that_over_the_common_one() {
        let variables = [(OF_TRACES, "http://b:1"), (COMMON, "http://c:1")];
        assert_eq!(endpoint(Some("http://a:1"), &variables).unwrap(), "http://a:1");
        assert_eq!(endpoint(None, &variables).unwrap(), "http://b:1");
        assert_eq!(endpoint(None, &variables[1..]).unwrap(), "http://c:1");
    }

    #[test]
    fn an_address_is_what_its_protocol_takes() {
        let insecure = ("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "true");
        let cases = [
            ("grpc://c:4317", vec![insecure], "http://c:4317"),
            ("grpc://c:4317", vec![], "https://c:4317"),
            ("c:4317", vec![insecure], "http://c:4317"),
            ("https://c:4317", vec![insecure], "https://c:4317"),
            ("http://c:4318", vec![HTTP], "http://c:4318/v1/traces"),
            ("http://c:4318/", vec![HTTP], "http://c:4318/v1/traces"),
            ("http://c:4318/otlp/v1/traces", vec![HTTP], "http://c:4318/otlp/v1/traces"),
        ];
        for (given, variables, expected) in cases {
            assert_eq!(endpoint(Some(given), &variables).as_deref(), Some(expected), "{given} {variables:?}");
        }
        assert_eq!(endpoint(None, &[HTTP, (COMMON, "http://c/otlp/")]).unwrap(), "http://c/otlp/v1/traces");
    }

    #[test]
    fn what_is_not_understood_is_told() {
        for (flag, variables, part) in [
            ("ftp://c", vec![], "gRPC"),
            ("c:4318", vec![HTTP], "http://"),
            ("http://", vec![], "'http://'"),
            ("http://c", vec![("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")], "grpc or http/protobuf"),
            ("http://c", vec![("OTEL_BSP_MAX_QUEUE_SIZE", "0")], "above 0"),
            ("http://c", vec![("OTEL_EXPORTER_OTLP_TIMEOUT", "1s")], "OTEL_EXPORTER_OTLP_TIMEOUT='1s'"),
        ] {
            let error = config(Some(flag), &variables).unwrap_err().to_string();
            assert!(error.contains(part), "{flag} {variables:?}: {error}");
        }
    }

    #[test]
    fn limits_are_those_of_the_specification_unless_they_are_set() {
        let read = |variables: &[(&str, &str)]| {
            let config = config(Some("http://c"), variables).unwrap().unwrap();
            (config.max_queue, config.timeout.as_millis())
        };
        assert_eq!(read(&[]), (2048, 10_000));
        let timeouts = [("OTEL_EXPORTER_OTLP_TIMEOUT", "5"), ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "70")];
        assert_eq!(read(&timeouts).1, 70);
        assert_eq!(read(&[timeouts[0], ("OTEL_BSP_MAX_QUEUE_SIZE", "3")]), (3, 5));
    }
}
