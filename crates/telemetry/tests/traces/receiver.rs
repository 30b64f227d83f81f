//! A collector of traces in this process, over HTTP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;

/// Spans and the attributes of what sent them, as they arrive.
pub struct Collected {
    pub endpoint: String,
    pub exports: mpsc::Receiver<ExportTraceServiceRequest>,
}

/// Listens on a free port and takes whatever is posted.
pub fn over_http() -> Collected {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (send, exports) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let send = send.clone();
            std::thread::spawn(move || while take(&stream, &send).is_some() {});
        }
    });
    Collected { endpoint, exports }
}

/// Reads one request and answers it; `None` when the connection ends.
fn take(mut stream: &TcpStream, send: &mpsc::Sender<ExportTraceServiceRequest>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    reader.read_line(&mut first).ok().filter(|bytes| *bytes > 0)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let line = line.trim().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    assert_eq!(first.trim(), "POST /v1/traces HTTP/1.1");
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    send.send(ExportTraceServiceRequest::decode(&body[..]).unwrap()).ok()?;
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n").ok()
}

impl Collected {
    /// The spans of all exports, until `count` are there.
    pub fn spans(&self, count: usize) -> Vec<Span> {
        let mut spans: Vec<Span> = vec![];
        while spans.len() < count {
            let export = self.exports.recv_timeout(Duration::from_secs(20)).expect("more spans");
            let scopes = export.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
            spans.extend(scopes.flat_map(|scope| scope.spans));
        }
        spans
    }
}

/// An attribute's value.
pub fn value(attributes: &[KeyValue], name: &str) -> Option<Value> {
    attributes.iter().find(|attribute| attribute.key == name)?.value.clone()?.value
}

/// A text, or the texts of a list separated by commas.
pub fn text(attributes: &[KeyValue], name: &str) -> Option<String> {
    match value(attributes, name)? {
        Value::StringValue(text) => Some(text),
        Value::ArrayValue(list) => {
            let texts = list.values.into_iter().filter_map(|AnyValue { value }| match value? {
                Value::StringValue(text) => Some(text),
                _ => None,
            });
            Some(texts.collect::<Vec<_>>().join(","))
        }
        _ => None,
    }
}

/// A whole number.
pub fn integer(attributes: &[KeyValue], name: &str) -> Option<i64> {
    match value(attributes, name)? {
        Value::IntValue(number) => Some(number),
        _ => None,
    }
}

/// A number.
pub fn number(attributes: &[KeyValue], name: &str) -> Option<f64> {
    match value(attributes, name)? {
        Value::DoubleValue(number) => Some(number),
        _ => None,
    }
}
