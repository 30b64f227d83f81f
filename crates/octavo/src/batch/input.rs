//! The requests of a batch.

use std::collections::HashSet;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// Maximum size of a line in bytes: a body of the server and its envelope.
const MAX_LINE: usize = 33 << 20;

/// Number of duplicates that are named.
const NAMED_DUPLICATES: usize = 10;

/// A line of the input with its number, from 1.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) number: usize,
    /// The id of the request, if it can be read, which the answer repeats.
    pub(crate) custom_id: Option<String>,
    /// The request, or the reason why it is invalid.
    pub(crate) request: Result<Request, String>,
}

/// A request.
#[derive(Debug)]
pub(crate) struct Request {
    /// A path.
    pub(crate) url: String,
    /// A JSON object.
    pub(crate) body: Box<RawValue>,
    /// Headers of the trace that the request belongs to, by name and value.
    pub(crate) trace: Vec<(&'static str, String)>,
}

/// A summary of the whole input.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Survey {
    pub(crate) requests: usize,
    /// The first repeated ids with their lines.
    pub(crate) duplicates: Vec<(String, usize)>,
    pub(crate) more_duplicates: usize,
}

/// The lines of a file in order. Blank lines are skipped.
pub(crate) struct Input {
    reader: BufReader<File>,
    number: usize,
}

impl Input {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { reader: BufReader::with_capacity(1 << 20, File::open(path)?), number: 0 })
    }

    /// Reads the whole file.
    pub(crate) fn survey(self) -> io::Result<Survey> {
        let mut survey = Survey::default();
        // Hashes keep the memory of a long input small; a collision is practically impossible.
        let (hasher, mut seen) = (RandomState::new(), HashSet::new());
        for line in self {
            let line = line?;
            survey.requests += 1;
            let Some(id) = line.custom_id else { continue };
            if !seen.insert(hasher.hash_one(&id)) {
                match survey.duplicates.len() {
                    NAMED_DUPLICATES => survey.more_duplicates += 1,
                    _ => survey.duplicates.push((id, line.number)),
                }
            }
        }
        Ok(survey)
    }

    /// The bytes of the next line without its end; `None` at the end of the file. Lines that are too long are truncated.
    fn next_bytes(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = vec![];
        let limit = MAX_LINE as u64 + 1;
        if self.reader.by_ref().take(limit).read_until(b'\n', &mut bytes)? == 0 {
            return Ok(None);
        }
        self.number += 1;
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
        } else if bytes.len() > MAX_LINE {
            self.reader.skip_until(b'\n')?;
        }
        Ok(Some(bytes))
    }
}

impl Iterator for Input {
    type Item = io::Result<Line>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let bytes = match self.next_bytes() {
                Ok(bytes) => bytes?,
                Err(error) => return Some(Err(error)),
            };
            if !bytes.iter().all(u8::is_ascii_whitespace) {
                return Some(Ok(Line::parse(self.number, &bytes)));
            }
        }
    }
}

/// The fields of a line, of any type.
#[derive(Deserialize)]
struct Fields {
    custom_id: Option<Value>,
    method: Option<Value>,
    url: Option<Value>,
    body: Option<Box<RawValue>>,
    traceparent: Option<Value>,
    tracestate: Option<Value>,
}

/// The fields of a body that matter for a batch.
#[derive(Deserialize)]
struct BodyFields {
    stream: Option<Value>,
}

impl Line {
    fn parse(number: usize, bytes: &[u8]) -> Self {
        if bytes.len() > MAX_LINE {
            let why = format!("line {number} has more than {MAX_LINE} bytes");
            return Self { number, custom_id: None, request: Err(why) };
        }
        let fields = match serde_json::from_slice::<Fields>(bytes) {
            Ok(fields) => fields,
            Err(error) => {
                let why = format!("line {number} is not a JSON object {{custom_id, method, url, body}}: {error}");
                return Self { number, custom_id: None, request: Err(why) };
            }
        };
        let custom_id = fields.custom_id.as_ref().and_then(Value::as_str).map(str::to_owned);
        let request = Request::from_fields(fields).map_err(|why| format!("line {number}: {why}"));
        Self { number, custom_id, request }
    }
}

impl Request {
    fn from_fields(fields: Fields) -> Result<Self, String> {
        match &fields.custom_id {
            Some(Value::String(_)) => {}
            _ => return Err("custom_id is missing or not a text".into()),
        }
        if !fields.method.as_ref().is_some_and(|method| method == "POST") {
            return Err("method must be POST".into());
        }
        let url = match fields.url {
            Some(Value::String(url)) if url.starts_with('/') => url,
            _ => return Err("url must be a path such as /v1/chat/completions".into()),
        };
        let body = fields.body.ok_or("body is missing")?;
        let shape: BodyFields =
            serde_json::from_str(body.get()).map_err(|error| format!("body is not a JSON object: {error}"))?;
        if shape.stream.is_some_and(|stream| stream != Value::Bool(false)) {
            return Err("stream: an answer in a batch is whole; leave it out".into());
        }
        let trace = [("traceparent", fields.traceparent), ("tracestate", fields.tracestate)];
        let text = |(name, value)| if let Some(Value::String(text)) = value { Some((name, text)) } else { None };
        Ok(Self { url, body, trace: trace.into_iter().filter_map(text).collect() })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn file(text: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        file
    }

    fn lines(text: &[u8]) -> Vec<Line> {
        Input::open(file(text).path()).unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn a_request_is_taken_apart_and_its_body_kept() {
        let text = br#"{"custom_id":"a","method":"POST","url":"/v1/x","body":{"b": 0.1}}"#;
        let lines = lines(text);
        let request = lines[0].request.as_ref().unwrap();
        assert_eq!((request.url.as_str(), request.body.get()), ("/v1/x", r#"{"b": 0.1}"#));
        assert_eq!((lines.len(), lines[0].custom_id.as_deref()), (1, Some("a")));
        assert!(request.trace.is_empty());
    }

    #[test]
    fn a_request_may_belong_to_a_trace() {
        let text =
            br#"{"custom_id":"a","method":"POST","url":"/x","body":{},"traceparent":"00-1-2-01","tracestate":7}"#;
        let request = lines(text).remove(0).request.unwrap();
        assert_eq!(request.trace, [("traceparent", "00-1-2-01".to_owned())], "what is no text is nobody's trace");
    }

    #[test]
    fn an_invalid_line_keeps_its_id_and_says_what_is_wrong() {
        for (line, id, part) in [
            ("nonsense", None, "not a JSON object"),
            ("[1]", None, "not a JSON object"),
            (r#"{"custom_id":1,"method":"POST","url":"/x","body":{}}"#, None, "custom_id"),
            (r#"{"custom_id":"a","method":"GET","url":"/x","body":{}}"#, Some("a"), "method"),
            (r#"{"custom_id":"a","method":"POST","url":"http://x/","body":{}}"#, Some("a"), "url"),
            (r#"{"custom_id":"a","method":"POST","url":"/x"}"#, Some("a"), "body is missing"),
            (r#"{"custom_id":"a","method":"POST","url":"/x","body":"{}"}"#, Some("a"), "body is not"),
            (r#"{"custom_id":"a","method":"POST","url":"/x","body":{"stream":true}}"#, Some("a"), "stream"),
        ] {
            let lines = lines(format!("\n{line}\n").as_bytes());
            let error = lines[0].request.as_ref().unwrap_err();
            assert!(error.starts_with("line 2") && error.contains(part), "{line}: {error}");
            assert_eq!(lines[0].custom_id.as_deref(), id, "{line}");
        }
    }

    #[test]
    fn a_line_too_long_is_an_error_and_the_next_is_read() {
        let mut text = vec![b'x'; MAX_LINE + (1 << 20)];
        text.extend(b"\n{}\n");
        let lines = lines(&text);
        assert_eq!(lines.len(), 2);
        assert!(lines[0].request.as_ref().unwrap_err().contains("more than"), "{:?}", lines[0]);
        assert_eq!(lines[1].number, 2);
    }

    #[test]
    fn duplicates_are_found() {
        let line = |id: &str| format!("{{\"custom_id\":\"{id}\"}}\n");
        let mut text = line("a") + &line("b") + "\n" + &line("a");
        let survey = |text: &str| Input::open(file(text.as_bytes()).path()).unwrap().survey().unwrap();
        let expected = Survey { requests: 3, duplicates: vec![("a".into(), 4)], more_duplicates: 0 };
        assert_eq!(survey(&text), expected);
        text += &line("b").repeat(20);
        let many = survey(&text);
        assert_eq!((many.requests, many.duplicates.len(), many.more_duplicates), (23, NAMED_DUPLICATES, 11));
    }

    proptest! {
        #[test]
        fn every_line_that_is_not_blank_is_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let expected = bytes.split(|&b| b == b'\n').filter(|line| !line.iter().all(u8::is_ascii_whitespace)).count();
            prop_assert_eq!(lines(&bytes).len(), expected);
        }
    }
}
