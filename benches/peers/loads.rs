//! Conversion of a row to a load of the load generator, and of its report to a value.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use octavo_bench::load::{LoadConfig, Report, random_words};
use octavo_models::{Checkpoint, build_program};
use octavo_ops::{KvGroup, Program};

use super::rows::{Count, Load, Row};
use super::servers::{Instance, MODEL, Server, Weights};
use super::settings::Settings;
use super::words::one_token_words;

/// Seed of the prefix that requests share, which is the same in every round.
const PREFIX_SEED: u64 = 1 << 40;

/// Value added to the seed of requests that are not measured.
const WARM_UP_SEED: u64 = 1 << 41;

/// Time after which a request counts as failed.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Size of an element of every server's KV cache in bytes.
const KV_ELEMENT: u64 = 2;

/// Properties of the weights, read before they are served.
pub(super) struct Model {
    pub(super) weights: Weights,
    pub(super) program: Program,
    words: Arc<[String]>,
}

impl Model {
    pub(super) fn open(weights: Weights, settings: &Settings) -> Result<Self, Box<dyn Error>> {
        let path = weights.path(Server::Octavo, &settings.peers).ok_or("Octavo reads all weights")?;
        let program = build_program(&Checkpoint::open(&path)?)?;
        Ok(Self { weights, program, words: one_token_words(&weights.tokenizer(&settings.peers))? })
    }

    /// Returns the size of a token in the KV cache in bytes.
    pub(super) fn kv_per_token(&self) -> u64 {
        let elements: usize = self.program.kv_groups.iter().map(KvGroup::elements_per_token).sum();
        elements as u64 * KV_ELEMENT
    }

    /// Returns the load of a row, with prompts that only this round has and that are the same for every server.
    pub(super) fn measured(&self, row: Row, load: &Load, round: usize, instance: &Instance, url: &str) -> LoadConfig {
        self.config(load, seed(row, round), instance, url)
    }

    /// Returns the load that warms up a server: each concurrent request once, and the shared prefix in the cache. It
    /// runs twice, because a server may keep a cache per slot.
    pub(super) fn warm_up(&self, row: Row, load: &Load, round: usize, instance: &Instance, url: &str) -> LoadConfig {
        let waves = if load.prefix > 0 { 2 } else { 1 };
        let load = Load { requests: waves * load.at_a_time, ..*load };
        self.config(&load, seed(row, round) + WARM_UP_SEED, instance, url)
    }

    /// Returns a load that writes the whole KV cache of a server.
    pub(super) fn filling(&self, round: usize, instance: &Instance, url: &str) -> LoadConfig {
        const OUTPUT: u32 = 63;
        let load = Load {
            requests: instance.filling(self.kv_per_token()),
            at_a_time: instance.slots,
            prefix: 0,
            prompt: instance.context - OUTPUT as usize - 1,
            output: OUTPUT,
        };
        self.config(&load, seed(Row::Memory, round), instance, url)
    }

    /// Returns one request of a few words for one token.
    pub(super) fn first_token(&self, instance: &Instance, url: &str) -> LoadConfig {
        let load = Load { requests: 1, at_a_time: 1, prefix: 0, prompt: 8, output: 1 };
        self.config(&load, seed(Row::Start, 0), instance, url)
    }

    fn config(&self, load: &Load, seed: u64, instance: &Instance, url: &str) -> LoadConfig {
        LoadConfig {
            base_url: url.to_owned(),
            model: MODEL.into(),
            requests: load.requests,
            max_concurrency: Some(load.at_a_time),
            input_len: load.prompt,
            words: Arc::clone(&self.words),
            prefix: random_words(&self.words, PREFIX_SEED, 0, load.prefix).into(),
            output_len: load.output,
            seed,
            // llama-server closes a kept connection after a streamed answer without announcing it.
            reconnect: instance.server == Server::Llama,
            timeout: TIMEOUT,
            ..LoadConfig::default()
        }
    }
}

fn seed(row: Row, round: usize) -> u64 {
    let index = Row::ALL.iter().position(|&other| other == row).unwrap_or_default();
    (index as u64) << 16 | round as u64
}

/// Returns the value of a row from the report of its load.
pub(super) fn value(count: Count, report: &Report) -> f64 {
    match count {
        Count::OutputTokens => report.output_throughput,
        Count::InputTokens => report.total_input_tokens as f64 / report.duration,
        Count::Requests => report.request_throughput,
        Count::Seconds | Count::Memory => f64::NAN,
    }
}

/// Returns the value of a row whose load takes `seconds`.
pub(super) fn value_within(count: Count, load: &Load, seconds: f64) -> f64 {
    let each = match count {
        Count::OutputTokens => f64::from(load.output),
        Count::InputTokens => load.input() as f64,
        Count::Requests => 1.0,
        Count::Seconds | Count::Memory => f64::NAN,
    };
    each * load.requests as f64 / seconds
}

/// Describes unexpected counts in a report, if there are any: a server may have counted additional tokens, or ended
/// early.
pub(super) fn oddity(config: &LoadConfig, load_input: usize, report: &Report) -> Option<String> {
    let (input, output) =
        ((config.requests * load_input) as u64, config.requests as u64 * u64::from(config.output_len));
    let Report { total_input_tokens, total_output_tokens, .. } = *report;
    ((total_input_tokens, total_output_tokens) != (input, output)).then(|| {
        format!(
            "it counted {total_input_tokens} + {total_output_tokens} tokens where {input} + {output} were asked for"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn prompts_are_those_of_one_row_and_round() {
        let rounds = Row::ALL.iter().flat_map(|&row| (0..3).map(move |round| seed(row, round)));
        let seeds: HashSet<u64> = rounds.flat_map(|seed| [seed, seed + WARM_UP_SEED]).chain([PREFIX_SEED]).collect();
        assert_eq!(seeds.len(), Row::ALL.len() * 6 + 1);
    }

    #[test]
    fn a_row_counts_what_it_says() {
        let load = Row::Prefix.load().unwrap();
        assert_eq!(value_within(Count::Requests, &load, 4.0), 8.0);
        let load = Row::Prefill.load().unwrap();
        assert_eq!(value_within(Count::InputTokens, &load, 2.0), 3000.0);
        let load = Row::Requests(8).load().unwrap();
        assert_eq!(value_within(Count::OutputTokens, &load, 32.0), 128.0);
    }
}
