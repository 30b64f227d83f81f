//! Prompts and arrival times from a seed.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Endpoint, LoadConfig};
use crate::simulator::mix;

/// Words that common tokenizers hold as one token each, with the space before it.
pub const WORDS: [&str; 64] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money",
    "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side",
    "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law",
    "car",
];

/// The prompt of request `index`: no two of a run share more than a chance prefix.
pub(crate) fn text(config: &LoadConfig, index: usize) -> String {
    let own = match &*config.words {
        [] => random_words(&WORDS, config.seed, index, config.input_len),
        words => random_words(words, config.seed, index, config.input_len),
    };
    match &*config.prefix {
        "" => own,
        prefix => format!("{prefix} {own}"),
    }
}

/// `count` of the words, separated by spaces, drawn anew for each seed and index; empty where there are none to draw from.
pub fn random_words(words: &[impl AsRef<str>], seed: u64, index: usize, count: usize) -> String {
    let mut state = mix(seed ^ mix(index as u64));
    let mut out = String::with_capacity(count * 7);
    let count = if words.is_empty() { 0 } else { count };
    for _ in 0..count {
        state = mix(state);
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(words[(state % words.len() as u64) as usize].as_ref());
    }
    out
}

/// The JSON body of request `index`.
pub(crate) fn body(config: &LoadConfig, index: usize) -> Vec<u8> {
    let prompt = text(config, index);
    let mut body = json!({
        "model": config.model,
        "max_tokens": config.output_len,
        "temperature": config.temperature,
        "ignore_eos": true,
        "stream": config.stream,
    });
    match config.endpoint {
        Endpoint::Completions => body["prompt"] = Value::from(prompt),
        Endpoint::Chat => body["messages"] = json!([{"role": "user", "content": prompt}]),
    }
    if config.stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    body.to_string().into_bytes()
}

/// When each request may start: exponential gaps with the mean of `rate` a second, or all at once.
pub(crate) fn arrivals(config: &LoadConfig) -> Vec<Duration> {
    let Some(rate) = config.request_rate else { return vec![Duration::ZERO; config.requests] };
    let mut state = mix(config.seed ^ 0x61_72_72_69_76_61_6c_73);
    let mut at = 0.0;
    let mut next = || {
        state = mix(state);
        // In (0, 1]: 53 random bits, never zero.
        let uniform = ((state >> 11) + 1) as f64 / (1u64 << 53) as f64;
        let now = at;
        at -= uniform.ln() / rate;
        Duration::from_secs_f64(now)
    };
    (0..config.requests).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn prompts_differ_by_request_and_repeat_by_seed() {
        let text = |seed, index, words| random_words(&WORDS, seed, index, words);
        assert_eq!(text(1, 2, 5).split(' ').count(), 5);
        assert_eq!(text(1, 2, 50), text(1, 2, 50));
        assert_ne!(text(1, 2, 50), text(1, 3, 50));
        assert_ne!(text(1, 2, 50), text(2, 2, 50));
        assert_eq!(text(1, 2, 0), "");
        assert_eq!(random_words(&[] as &[&str], 1, 2, 5), "");
    }

    #[test]
    fn prompts_have_the_words_and_the_beginning_that_were_asked_for() {
        let words: Arc<[String]> = ["one".to_owned(), "two".to_owned()].into();
        let config = LoadConfig { input_len: 40, words, ..LoadConfig::default() };
        let own = text(&config, 3);
        assert!(own.split(' ').count() == 40 && own.split(' ').all(|word| word == "one" || word == "two"), "{own}");
        let shared = LoadConfig { prefix: "the same".into(), ..config };
        assert_eq!(text(&shared, 3), format!("the same {own}"));
    }

    #[test]
    fn arrivals_have_the_rate_asked_for() {
        let config = LoadConfig { requests: 20_000, request_rate: Some(50.0), ..LoadConfig::default() };
        let at = arrivals(&config);
        assert_eq!(at[0], Duration::ZERO);
        assert!(at.windows(2).all(|pair| pair[0] <= pair[1]));
        let rate = at.len() as f64 / at[at.len() - 1].as_secs_f64();
        assert!((rate - 50.0).abs() < 1.5, "{rate}");
        let all_at_once = arrivals(&LoadConfig { request_rate: None, ..config });
        assert!(all_at_once.iter().all(Duration::is_zero));
    }

    #[test]
    fn the_body_follows_the_endpoint() {
        let config = LoadConfig { model: "m".into(), input_len: 3, ..LoadConfig::default() };
        let parsed = |config: &LoadConfig| -> Value { serde_json::from_slice(&body(config, 0)).unwrap() };
        let completion = parsed(&config);
        assert!(completion["prompt"].is_string() && completion["stream_options"]["include_usage"] == true);
        let chat = parsed(&LoadConfig { endpoint: Endpoint::Chat, stream: false, ..config });
        assert_eq!(chat["messages"][0]["role"], "user");
        assert!(chat.get("stream_options").is_none() && chat["ignore_eos"] == true);
    }
}
