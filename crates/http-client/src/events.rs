//! A parser for the server-sent events of OpenAI's API.

/// Splits a byte stream into the payloads of its `data:` lines, independently of its chunks.
#[derive(Debug, Default)]
pub struct EventReader {
    /// The beginning of an incomplete line.
    partial: Vec<u8>,
}

impl EventReader {
    /// Calls `event` with every payload that `bytes` completes.
    pub fn push(&mut self, bytes: &[u8], mut event: impl FnMut(&[u8])) {
        let mut lines = bytes.split(|&b| b == b'\n');
        let last = lines.next_back().unwrap_or_default();
        for line in lines {
            if self.partial.is_empty() {
                data(line, &mut event);
            } else {
                self.partial.extend_from_slice(line);
                data(&self.partial, &mut event);
                self.partial.clear();
            }
        }
        self.partial.extend_from_slice(last);
    }
}

fn data(line: &[u8], event: &mut impl FnMut(&[u8])) {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    if let Some(payload) = line.strip_prefix(b"data:") {
        event(payload.strip_prefix(b" ").unwrap_or(payload));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn events(chunks: &[&[u8]]) -> Vec<String> {
        let mut reader = EventReader::default();
        let mut found = Vec::new();
        for chunk in chunks {
            reader.push(chunk, |payload| found.push(String::from_utf8_lossy(payload).into_owned()));
        }
        found
    }

    const TEXT: &[u8] =
        b": comment\ndata: {\"a\":1}\n\ndata:[x]\r\n\r\nevent: ping\ndata: \n\ndata: [DONE]\n\ndata: cut";

    #[test]
    fn only_whole_data_lines_are_events() {
        assert_eq!(events(&[TEXT]), ["{\"a\":1}", "[x]", "", "[DONE]"]);
    }

    proptest! {
        #[test]
        fn any_chunking_gives_the_same_events(mut cuts in prop::collection::vec(0..TEXT.len(), 0..12)) {
            cuts.extend([0, TEXT.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|pair| &TEXT[pair[0]..pair[1]]).collect();
            prop_assert_eq!(events(&chunks), events(&[TEXT]));
        }
    }
}
