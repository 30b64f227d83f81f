//! The rows of the tables.

/// A load of identical requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    /// Total number of requests, a multiple of the number of concurrent ones, so that the last batch is full.
    pub(super) requests: usize,
    pub(super) at_a_time: usize,
    /// Number of tokens with which all prompts begin.
    pub(super) prefix: usize,
    /// Number of further tokens of a prompt.
    pub(super) prompt: usize,
    /// Number of tokens of an answer.
    pub(super) output: u32,
}

impl Load {
    /// Returns the number of tokens of a prompt.
    pub(super) fn input(&self) -> usize {
        self.prefix + self.prompt
    }
}

/// Servers that run at the same time, although only one of them is under load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// A separate process for each measurement of start and memory.
    Fresh,
    /// The loads of SmolLM2.
    Model,
    /// The loads of the tiny model.
    Stack,
}

impl Phase {
    pub(super) const ALL: [Self; 3] = [Self::Fresh, Self::Model, Self::Stack];
}

/// A row of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Row {
    /// This number of concurrent requests, with 128 prompt tokens and 128 new ones.
    Requests(usize),
    /// A long prompt and one token.
    Prefill,
    /// A long prefix that is in the prefix cache.
    Prefix,
    /// Time from process start to first token.
    Start,
    /// Resident memory without the KV cache.
    Memory,
    /// This number of connections to the tiny model.
    Stack(usize),
}

/// Unit of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Count {
    /// Generated tokens per second.
    OutputTokens,
    /// Prompt tokens per second.
    InputTokens,
    /// Requests per second.
    Requests,
    /// Seconds; less is better.
    Seconds,
    /// MiB; less is better.
    Memory,
}

impl Count {
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::OutputTokens => "output tokens/s",
            Self::InputTokens => "prompt tokens/s",
            Self::Requests => "requests/s",
            Self::Seconds => "s, less is better",
            Self::Memory => "MiB, less is better",
        }
    }

    pub(super) fn less_is_better(self) -> bool {
        matches!(self, Self::Seconds | Self::Memory)
    }
}

impl Row {
    pub(super) const ALL: [Self; 11] = [
        Self::Requests(1),
        Self::Requests(8),
        Self::Requests(32),
        Self::Prefill,
        Self::Prefix,
        Self::Start,
        Self::Memory,
        Self::Stack(1),
        Self::Stack(64),
        Self::Stack(256),
        Self::Stack(500),
    ];

    /// Returns the name in `OCTAVO_PEERS_ONLY` and in the file.
    pub(super) fn name(self) -> String {
        match self {
            Self::Requests(count) => format!("requests-{count}"),
            Self::Prefill => "prefill".into(),
            Self::Prefix => "prefix".into(),
            Self::Start => "start".into(),
            Self::Memory => "memory".into(),
            Self::Stack(connections) => format!("stack-{connections}"),
        }
    }

    /// Returns the title in tables.
    pub(super) fn title(self) -> String {
        match self {
            Self::Requests(1) => "1 request".into(),
            Self::Requests(count) => format!("{count} requests"),
            Self::Prefill => "prefill of 1500 tokens".into(),
            Self::Prefix => "8 requests, shared prefix of 1000 tokens, warm".into(),
            Self::Start => "process start to first token".into(),
            Self::Memory => "resident after the load, less the KV cache".into(),
            Self::Stack(1) => "1 connection".into(),
            Self::Stack(connections) => format!("{connections} connections"),
        }
    }

    pub(super) fn count(self) -> Count {
        match self {
            Self::Requests(_) | Self::Stack(_) => Count::OutputTokens,
            Self::Prefill => Count::InputTokens,
            Self::Prefix => Count::Requests,
            Self::Start => Count::Seconds,
            Self::Memory => Count::Memory,
        }
    }

    pub(super) fn phase(self) -> Phase {
        match self {
            Self::Start | Self::Memory => Phase::Fresh,
            Self::Requests(_) | Self::Prefill | Self::Prefix => Phase::Model,
            Self::Stack(_) => Phase::Stack,
        }
    }

    /// Returns the load of the row; `None` if time or memory of a fresh process is measured.
    pub(super) fn load(self) -> Option<Load> {
        let (requests, at_a_time, prefix, prompt, output) = match self {
            Self::Requests(1) => (6, 1, 0, 128, 128),
            Self::Requests(count) => ((2 * count).max(32), count, 0, 128, 128),
            Self::Prefill => (4, 1, 0, 1500, 1),
            Self::Prefix => (32, 8, 1000, 64, 32),
            Self::Stack(1) => (50, 1, 0, 9, 64),
            Self::Stack(connections) => ((12 * connections).max(1920), connections, 0, 9, 64),
            Self::Start | Self::Memory => return None,
        };
        Some(Load { requests, at_a_time, prefix, prompt, output })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_row_has_a_name_of_its_own() {
        let names: HashSet<String> = Row::ALL.map(Row::name).into();
        let titles: HashSet<String> = Row::ALL.map(Row::title).into();
        assert_eq!((names.len(), titles.len()), (Row::ALL.len(), Row::ALL.len()));
    }

    #[test]
    fn loads_keep_all_places_busy() {
        for row in Row::ALL {
            let Some(load) = row.load() else { continue };
            assert_eq!(load.requests % load.at_a_time, 0, "{}", row.name());
            assert!(load.input() + load.output as usize <= 2048);
        }
        assert_eq!(Row::Prefix.load().unwrap().input(), 1064);
    }
}
