//! The metrics of named API keys.

use std::sync::Arc;

use metrics::Counter;

use crate::registry::Registry;

/// The limit of a key that refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyLimit {
    /// Requests per minute.
    Requests,
    /// Tokens per minute.
    Tokens,
    /// Parallel requests.
    Parallel,
}

/// Values of the label `limit`, in the order of [`KeyLimit`].
const LIMITS: [&str; 3] = ["requests_per_minute", "tokens_per_minute", "parallel_requests"];

/// The counts of one key; clones share them. The label `key_name` is a name from the operator's file, so clients cannot
/// create series.
#[derive(Clone, Debug)]
pub struct KeyMetrics {
    counts: Arc<Counts>,
}

#[derive(Debug)]
struct Counts {
    requests: Counter,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    rejections: [Counter; LIMITS.len()],
}

impl KeyMetrics {
    pub(crate) fn register(registry: &Registry, name: &str) -> Self {
        let counter = |metric, help| registry.counter(metric, help, &[("key_name", name)]);
        let rejections = LIMITS.map(|limit| {
            let help = "Requests refused because a key was over a limit, by key and limit.";
            registry.counter("octavo_key_rejections_total", help, &[("key_name", name), ("limit", limit)])
        });
        let counts = Counts {
            requests: counter(
                "octavo_key_requests_total",
                "Requests that count against the limits of their key, refused ones included, by key.",
            ),
            prompt_tokens: counter("octavo_key_prompt_tokens_total", "Prompt tokens of submitted requests, by key."),
            generation_tokens: counter("octavo_key_generation_tokens_total", "Generated tokens, by key."),
            rejections,
        };
        Self { counts: Arc::new(counts) }
    }

    /// Counts a request, whether or not a limit refuses it.
    pub fn received(&self) {
        self.counts.requests.increment(1);
    }

    /// Counts a request that a limit refused.
    pub fn rejected(&self, limit: KeyLimit) {
        self.counts.rejections[limit as usize].increment(1);
    }

    /// Counts the tokens of submitted prompts.
    pub fn prompt_tokens(&self, tokens: u64) {
        self.counts.prompt_tokens.increment(tokens);
    }

    /// Counts generated tokens.
    pub fn generation_tokens(&self, tokens: u64) {
        self.counts.generation_tokens.increment(tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_counted_by_name() {
        let registry = Registry::default();
        let key = KeyMetrics::register(&registry, "team-a");
        key.received();
        key.prompt_tokens(7);
        key.generation_tokens(5);
        key.rejected(KeyLimit::Tokens);
        KeyMetrics::register(&registry, "team-b").received();
        KeyMetrics::register(&registry, "team-a").received();
        let page = registry.render();
        for sample in [
            "octavo_key_requests_total{key_name=\"team-a\"} 2\n",
            "octavo_key_requests_total{key_name=\"team-b\"} 1\n",
            "octavo_key_prompt_tokens_total{key_name=\"team-a\"} 7\n",
            "octavo_key_generation_tokens_total{key_name=\"team-a\"} 5\n",
            "octavo_key_rejections_total{key_name=\"team-a\",limit=\"tokens_per_minute\"} 1\n",
            "octavo_key_rejections_total{key_name=\"team-a\",limit=\"parallel_requests\"} 0\n",
        ] {
            assert!(page.contains(sample), "{page}");
        }
    }
}
