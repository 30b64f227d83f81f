//! The limits of one key and what counts against them.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue};
use octavo_telemetry::{KeyLimit, KeyMetrics};

use crate::error::ApiError;
use crate::keys::bucket::Bucket;
use crate::lock::lock;

/// The limits of an entry; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Requests per minute. After a pause, a minute's number may come at once.
    pub requests_per_minute: Option<NonZeroU32>,
    /// Tokens per minute: those of prompts when they are submitted, and generated ones when they are.
    pub tokens_per_minute: Option<NonZeroU32>,
    /// Requests at the same time, each until its last token is generated and its response is sent.
    pub parallel_requests: Option<NonZeroU32>,
}

/// Time after which a client may ask again if too many of its requests run; nobody knows when one ends.
const RETRY_PARALLEL: Duration = Duration::from_secs(1);

/// The headers of one allowance: its size, what is left of it, and the time until all of it is there.
type AllowanceHeaders = [HeaderName; 3];

/// OpenAI's headers.
const REQUEST_HEADERS: AllowanceHeaders = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKEN_HEADERS: AllowanceHeaders = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

/// The holder of an entry: the limits, their state and the counts of usage. It survives a reload of the file under its
/// name.
#[derive(Debug)]
pub(crate) struct Account {
    name: Arc<str>,
    metrics: KeyMetrics,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    parallel: Option<u32>,
    running: u32,
}

impl State {
    fn refill(&mut self, now: Instant) {
        [&mut self.requests, &mut self.tokens].into_iter().flatten().for_each(|bucket| bucket.refill(now));
    }
}

impl Account {
    pub(crate) fn new(name: &str, metrics: KeyMetrics, limits: KeyLimits, now: Instant) -> Self {
        let account = Self { name: name.into(), metrics, state: Mutex::default() };
        account.limit(limits, now);
        account
    }

    /// The name of the entry.
    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Changes the limits. What was used before still counts.
    pub(crate) fn limit(&self, limits: KeyLimits, now: Instant) {
        let mut state = lock(&self.state);
        state.refill(now);
        resize(&mut state.requests, limits.requests_per_minute, now);
        resize(&mut state.tokens, limits.tokens_per_minute, now);
        state.parallel = limits.parallel_requests.map(NonZeroU32::get);
    }

    /// Admits a request, which counts from here on.
    ///
    /// # Errors
    /// The key is over one of its limits, and the request counts against none.
    pub(crate) fn admit(self: &Arc<Self>, now: Instant) -> Result<Permit, ApiError> {
        self.metrics.received();
        let mut state = lock(&self.state);
        state.refill(now);
        if let Some(limit) = state.parallel.filter(|&limit| state.running >= limit) {
            return Err(self.refuse(KeyLimit::Parallel, &counted(limit, "parallel request"), RETRY_PARALLEL));
        }
        for (bucket, limit) in [(&state.requests, KeyLimit::Requests), (&state.tokens, KeyLimit::Tokens)] {
            let Some(bucket) = bucket else { continue };
            let wait = bucket.wait(1);
            if !wait.is_zero() {
                return Err(self.refuse(limit, &allowance(bucket, limit), wait));
            }
        }
        if let Some(requests) = &mut state.requests {
            requests.take(1);
        }
        state.running += 1;
        Ok(Permit { account: Arc::clone(self) })
    }

    /// Adds the headers that tell a client what is left.
    pub(crate) fn report(&self, headers: &mut HeaderMap, now: Instant) {
        let mut state = lock(&self.state);
        state.refill(now);
        for (bucket, [limit, left, reset]) in [(&state.requests, REQUEST_HEADERS), (&state.tokens, TOKEN_HEADERS)] {
            let Some(bucket) = bucket else { continue };
            headers.insert(limit, HeaderValue::from(bucket.per_minute()));
            headers.insert(left, HeaderValue::from(bucket.left()));
            // Digits and units are a valid value.
            if let Ok(value) = HeaderValue::from_str(&spelled(bucket.full_after())) {
                headers.insert(reset, value);
            }
        }
    }

    fn refuse(&self, limit: KeyLimit, over: &str, wait: Duration) -> ApiError {
        self.metrics.rejected(limit);
        let kind = if limit == KeyLimit::Tokens { "tokens" } else { "requests" };
        let message =
            format!("The API key '{}' is over its limit of {over}. Please try again in {}.", self.name, spelled(wait));
        ApiError::rate_limited(kind, message, wait)
    }
}

fn resize(bucket: &mut Option<Bucket>, per_minute: Option<NonZeroU32>, now: Instant) {
    match (bucket.as_mut(), per_minute) {
        (Some(bucket), Some(per_minute)) => bucket.resize(per_minute.get()),
        (_, per_minute) => *bucket = per_minute.map(|per_minute| Bucket::new(per_minute.get(), now)),
    }
}

fn allowance(bucket: &Bucket, limit: KeyLimit) -> String {
    let unit = if limit == KeyLimit::Tokens { "token" } else { "request" };
    format!("{} per minute", counted(bucket.per_minute(), unit))
}

fn counted(number: u32, unit: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {unit}{plural}")
}

/// A duration in OpenAI's spelling, rounded up to a millisecond: `120ms`, `8.64s`, `6m0s`.
fn spelled(duration: Duration) -> String {
    let milliseconds = duration.as_nanos().div_ceil(1_000_000);
    let (minutes, rest) = (milliseconds / 60_000, milliseconds % 60_000);
    let seconds = rest as f64 / 1000.0;
    match milliseconds {
        0..1000 => format!("{milliseconds}ms"),
        1000..60_000 => format!("{seconds}s"),
        _ => format!("{minutes}m{seconds}s"),
    }
}

/// An admitted request. It counts as running until it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    account: Arc<Account>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = lock(&self.account.state);
        state.running = state.running.saturating_sub(1);
    }
}

impl Permit {
    /// Takes the tokens of prompts. Prompts that the allowance cannot hold need all of it. A refused request has been
    /// tokenised, so it still counts as a request.
    fn charge(&self, tokens: u64, now: Instant) -> Result<(), ApiError> {
        let mut state = lock(&self.account.state);
        state.refill(now);
        let Some(bucket) = &mut state.tokens else { return Ok(()) };
        let wait = bucket.wait(tokens);
        if !wait.is_zero() {
            let limit = allowance(bucket, KeyLimit::Tokens);
            let over = format!("{limit}: {} are left, and the prompt has {tokens}", bucket.left());
            return Err(self.account.refuse(KeyLimit::Tokens, &over, wait));
        }
        bucket.take(tokens);
        Ok(())
    }

    fn refund(&self, tokens: u64) {
        if let Some(bucket) = &mut lock(&self.account.state).tokens {
            bucket.put_back(tokens);
        }
    }

    fn generated(&self, tokens: u64) {
        self.account.metrics.generation_tokens(tokens);
        if let Some(bucket) = &mut lock(&self.account.state).tokens {
            bucket.take(tokens);
        }
    }
}

/// Counts the tokens of a request for its key. Clones count for the same request; the default counts for nobody.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter(Option<Arc<Permit>>);

impl Meter {
    pub(crate) fn new(permit: Permit) -> Self {
        Self(Some(Arc::new(permit)))
    }

    /// Submits prompts of so many tokens if the key has them left. They count if the submission succeeds.
    ///
    /// # Errors
    /// The key is over its limit, or the submission fails.
    pub(crate) fn submit<T>(&self, tokens: usize, submit: impl FnOnce() -> Result<T, ApiError>) -> Result<T, ApiError> {
        let Some(permit) = &self.0 else { return submit() };
        permit.charge(tokens as u64, Instant::now())?;
        let submitted = submit();
        match &submitted {
            Ok(_) => permit.account.metrics.prompt_tokens(tokens as u64),
            Err(_) => permit.refund(tokens as u64),
        }
        submitted
    }

    /// Counts generated tokens.
    pub(crate) fn generated(&self, tokens: usize) {
        if let Some(permit) = &self.0
            && tokens > 0
        {
            permit.generated(tokens as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use octavo_telemetry::{Telemetry, TelemetryConfig};

    use super::*;

    /// An account that exists since `now`.
    fn account(limits: KeyLimits, now: Instant) -> (Arc<Account>, Telemetry) {
        let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 8 });
        (Arc::new(Account::new("team", telemetry.key("team"), limits, now)), telemetry)
    }

    fn limits(requests: u32, tokens: u32, parallel: u32) -> KeyLimits {
        KeyLimits {
            requests_per_minute: NonZeroU32::new(requests),
            tokens_per_minute: NonZeroU32::new(tokens),
            parallel_requests: NonZeroU32::new(parallel),
        }
    }

    #[test]
    fn durations_are_spelled_as_openai_does() {
        for (nanoseconds, text) in [
            (0, "0ms"),
            (1, "1ms"),
            (999_000_001, "1s"),
            (8_640_000_000, "8.64s"),
            (60_000_000_000, "1m0s"),
            (360_500_000_000, "6m0.5s"),
        ] {
            assert_eq!(spelled(Duration::from_nanos(nanoseconds)), text);
        }
    }

    #[test]
    fn a_refused_request_counts_against_no_limit() {
        let now = Instant::now();
        let (account, telemetry) = account(limits(2, 100, 1), now);
        let permit = account.admit(now).unwrap();
        let error = account.admit(now).unwrap_err();
        assert!(error.to_string().contains("limit of 1 parallel request."), "{error}");
        drop(permit);
        let second = account.admit(now).unwrap();
        second.charge(100, now).unwrap();
        drop(second);
        let error = account.admit(now).unwrap_err();
        assert!(error.to_string().contains("over its limit of 2 requests per minute"), "{error}");
        assert_eq!(error.retry_after(), Some(Duration::from_secs(30)));
        let later = now + Duration::from_secs(30);
        assert!(account.admit(later).is_ok());
        assert!(telemetry.render().contains("octavo_key_requests_total{key_name=\"team\"} 5\n"));
    }

    #[test]
    fn a_prompt_needs_its_tokens_and_generated_ones_become_a_debt() {
        let now = Instant::now();
        let (account, _telemetry) = account(limits(0, 60, 0), now);
        let permit = account.admit(now).unwrap();
        permit.charge(40, now).unwrap();
        let error = permit.charge(30, now).unwrap_err();
        assert!(error.to_string().contains("60 tokens per minute: 20 are left, and the prompt has 30"), "{error}");
        assert_eq!(error.retry_after(), Some(Duration::from_secs(10)));
        permit.generated(50);
        assert_eq!(account.admit(now).unwrap_err().retry_after(), Some(Duration::from_secs(31)));
        let later = now + Duration::from_secs(90);
        account.admit(later).unwrap().charge(1000, later).unwrap();
        assert!(account.admit(later).is_err());
    }

    #[test]
    fn a_failed_submission_gives_its_tokens_back() {
        let now = Instant::now();
        let (account, telemetry) = account(limits(0, 60, 0), now);
        let meter = Meter::new(account.admit(Instant::now()).unwrap());
        for _ in 0..3 {
            let failed: Result<(), _> = meter.submit(50, || Err(ApiError::internal()));
            assert_eq!(failed.unwrap_err(), ApiError::internal());
        }
        assert_eq!(meter.submit(50, || Ok(1)), Ok(1));
        assert!(meter.submit(50, || Ok(1)).is_err());
        assert!(telemetry.render().contains("octavo_key_prompt_tokens_total{key_name=\"team\"} 50\n"));
        assert_eq!(Meter::default().submit(usize::MAX, || Ok(2)), Ok(2));
    }

    #[test]
    fn new_limits_keep_what_was_used() {
        let now = Instant::now();
        let (account, _telemetry) = account(limits(2, 0, 2), now);
        let permits = [account.admit(now).unwrap(), account.admit(now).unwrap()];
        account.limit(limits(4, 0, 2), now);
        let error = account.admit(now).unwrap_err().to_string();
        assert!(error.contains("parallel"), "{error}");
        drop(permits);
        let error = account.admit(now).unwrap_err().to_string();
        assert!(error.contains("4 requests per minute"), "{error}");
        account.limit(KeyLimits::default(), now);
        assert!(account.admit(now).is_ok());
    }

    #[test]
    fn headers_tell_what_is_left_of_limits_that_exist() {
        let now = Instant::now();
        let (account, _telemetry) = account(limits(60, 0, 7), now);
        let _permit = account.admit(now).unwrap();
        let mut headers = HeaderMap::new();
        account.report(&mut headers, now);
        let values = REQUEST_HEADERS.map(|name| headers[name].to_str().unwrap().to_owned());
        assert_eq!((values, headers.len()), (["60", "59", "1s"].map(str::to_owned), 3));
    }
}
