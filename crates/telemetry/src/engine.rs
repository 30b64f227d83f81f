//! The metrics of the engine.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::Telemetry;
use crate::series::{EngineSeries, SpeculationSeries};

/// The work of a step and the state after it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepStats {
    /// Sequences in the running list.
    pub running: usize,
    /// Sequences that wait for capacity.
    pub waiting: usize,
    /// Waiting sequences that were skipped because they are not ready.
    pub deferred: usize,
    /// Used share of the KV blocks, 0 to 1; evictable blocks count as free.
    pub kv_usage: f64,
    /// Sequences preempted in this step.
    pub preempted: u64,
    /// Prompt tokens computed in this step.
    pub prompt_tokens: u64,
    /// Tokens generated in this step.
    pub generated_tokens: u64,
}

/// A finished sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FinishedRequest {
    /// `stop`, `length`, `abort`, `error` or `repetition`; anything else counts as `error`.
    pub reason: &'static str,
    /// Time from the arrival in the front end to the end.
    pub e2e: Duration,
    /// Time from entering the queue to the first schedule; `None` if it was never scheduled.
    pub queue: Option<Duration>,
    /// Time from the first schedule to the first token; `None` without a token.
    pub prefill: Option<Duration>,
    /// Time from the first to the last token, which is zero for one token; `None` without a token.
    pub decode: Option<Duration>,
    /// Number of prompt tokens.
    pub prompt_tokens: u64,
    /// Number of generated tokens.
    pub generated_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// The effective limit on generated tokens.
    pub max_tokens: u64,
    /// `n` of the API request, set for the first of its sequences only.
    pub n: Option<u32>,
    /// Number of preemptions.
    pub preemptions: u64,
}

/// The engine's handle on its metrics. Every method but [`EngineMetrics::adapters`] is wait-free and does not allocate;
/// clones share the series.
#[derive(Clone, Debug, Default)]
pub struct EngineMetrics {
    /// The metrics; `None` if nothing is observed.
    telemetry: Option<Telemetry>,
    /// Series of speculation, if it is on.
    speculation: Option<Arc<SpeculationSeries>>,
}

impl EngineMetrics {
    /// A handle that observes nothing.
    pub fn disabled() -> Self {
        Self::default()
    }

    pub(crate) fn new(telemetry: &Telemetry, speculation: Option<Arc<SpeculationSeries>>) -> Self {
        Self { telemetry: Some(telemetry.clone()), speculation }
    }

    fn series(&self) -> Option<&EngineSeries> {
        Some(&self.telemetry.as_ref()?.inner.engine)
    }

    /// Sets the names of the adapters of running and of waiting sequences, and the number of adapters that may run at once.
    pub fn adapters(&self, limit: usize, running: &[Arc<str>], waiting: &[Arc<str>]) {
        if let Some(telemetry) = &self.telemetry {
            telemetry.set_adapters(limit, running, waiting);
        }
    }

    /// Observes a step and the state after it. A call without tokens updates the gauges but does not count as a step, so that
    /// an engine can report that it is idle.
    pub fn step(&self, stats: &StepStats) {
        let Some(s) = self.series() else { return };
        s.state.running.set(stats.running as f64);
        s.state.waiting.set((stats.waiting + stats.deferred) as f64);
        s.state.waiting_capacity.set(stats.waiting as f64);
        s.state.waiting_deferred.set(stats.deferred as f64);
        s.state.kv_usage.set(stats.kv_usage);
        s.counts.preemptions.increment(stats.preempted);
        let tokens = stats.prompt_tokens + stats.generated_tokens;
        if tokens > 0 {
            s.sizes.step_tokens.observe(tokens);
        }
    }

    /// Sets whether the engine is awake.
    pub fn awake(&self, awake: bool) {
        let Some(s) = self.series() else { return };
        s.state.awake.set(f64::from(u8::from(awake)));
    }

    /// Observes the prefix-cache lookup at the first admission of a sequence.
    pub fn prefix_lookup(&self, queried_tokens: u64, hit_tokens: u64) {
        let Some(s) = self.series() else { return };
        s.counts.prefix_requests.fetch_add(1, Relaxed);
        s.counts.prefix_queries.increment(queried_tokens);
        s.counts.prefix_hits.increment(hit_tokens);
        s.counts.cached_from_device.increment(hit_tokens);
    }

    /// Observes lookups of images in the cache of processed images, in front of the engine.
    pub fn media_lookup(&self, queried_images: u64, hit_images: u64) {
        let Some(s) = self.series() else { return };
        s.counts.media_queries.increment(queried_images);
        s.counts.media_hits.increment(hit_images);
    }

    /// Observes lookups of images in the encoder cache.
    pub fn encoder_lookup(&self, queried_images: u64, hit_images: u64) {
        let Some(s) = self.series() else { return };
        s.counts.encoder_queries.increment(queried_images);
        s.counts.encoder_hits.increment(hit_images);
    }

    /// Observes a sequence's first token: `ttft` from its arrival in the front end, its prompt tokens, and the prompt tokens
    /// found in the prefix cache.
    pub fn first_token(&self, ttft: Duration, prompt_tokens: u64, cached_tokens: u64) {
        let Some(s) = self.series() else { return };
        s.times.ttft.observe_duration(ttft);
        s.counts.prompt_tokens.increment(prompt_tokens);
        s.counts.prompt_cached.increment(cached_tokens);
        s.counts.prompt_from_cache.increment(cached_tokens);
        s.counts.prompt_computed.increment(prompt_tokens.saturating_sub(cached_tokens));
    }

    /// Observes a later output of a sequence, `gap` after the previous one.
    pub fn next_token(&self, gap: Duration) {
        let Some(s) = self.series() else { return };
        s.times.inter_token.observe_duration(gap);
    }

    /// Observes that a step has verified drafts of a sequence and accepted the first of them, before any end cuts them.
    pub fn verified(&self, drafts: usize, accepted: usize) {
        let Some(s) = &self.speculation else { return };
        s.drafts.increment(1);
        s.draft_tokens.increment(drafts as u64);
        s.accepted_tokens.increment(accepted as u64);
        s.accepted_at.iter().take(accepted).for_each(|counter| counter.increment(1));
    }

    /// Counts generated tokens.
    pub fn generated(&self, tokens: u64) {
        let Some(s) = self.series() else { return };
        s.counts.generation_tokens.increment(tokens);
    }

    /// Observes the end of a sequence. One that was aborted is counted and enters no histogram, as in vLLM: its times and
    /// sizes are those of its caller's patience.
    pub fn finished(&self, request: &FinishedRequest) {
        let Some(s) = self.series() else { return };
        s.counts.success(request.reason).increment(1);
        if request.reason == "abort" {
            return;
        }
        s.times.e2e.observe_duration(request.e2e);
        if let Some(queue) = request.queue {
            s.times.queue.observe_duration(queue);
        }
        if let (Some(prefill), Some(decode)) = (request.prefill, request.decode) {
            s.times.prefill.observe_duration(prefill);
            s.times.decode.observe_duration(decode);
            s.times.inference.observe_duration(prefill + decode);
            let gaps = u32::try_from(request.generated_tokens.saturating_sub(1)).unwrap_or(u32::MAX);
            s.times.per_token.observe_duration(decode.checked_div(gaps).unwrap_or_default());
        }
        s.sizes.prompt.observe(request.prompt_tokens);
        s.sizes.generation.observe(request.generated_tokens);
        s.sizes.prefill_computed.observe(request.prompt_tokens.saturating_sub(request.cached_tokens));
        s.sizes.max_tokens.observe(request.max_tokens);
        s.sizes.preemptions.observe(request.preemptions);
        if let Some(n) = request.n {
            s.sizes.n.observe(u64::from(n));
        }
        if request.n == Some(1) {
            s.sizes.max_generation.observe(request.generated_tokens);
        }
    }

    /// Observes the end of an API request with `n` > 1: the most tokens that any of its sequences generated. For
    /// `n` = 1, [`EngineMetrics::finished`] does it.
    pub fn parent_finished(&self, most_generated_tokens: u64) {
        let Some(s) = self.series() else { return };
        s.sizes.max_generation.observe(most_generated_tokens);
    }
}
