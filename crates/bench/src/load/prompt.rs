//! The bodies of requests, and random prompts from a seed.

use serde_json::json;

use super::{Endpoint, LoadConfig, Prompt};
use crate::simulator::mix;

/// Words that are one token each in common tokenizers, including the space before the word.
pub const WORDS: [&str; 64] = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money",
    "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side",
    "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law",
    "car",
];

/// The prompt of request `index`. Two prompts of a run share a prefix only by chance.
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

/// `count` random words, separated by spaces, which depend on seed and index; empty if there are no words.
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
    let (prompt, output_len) = match &*config.samples {
        [] => (Prompt::Text(text(config, index)), config.output_len),
        samples => {
            let sample = &samples[index % samples.len()];
            (sample.prompt.clone(), sample.output_len)
        }
    };
    let mut body = json!({
        "model": config.model,
        "max_tokens": output_len,
        "temperature": config.temperature,
        "stream": config.stream,
    });
    if config.ignore_eos {
        body["ignore_eos"] = true.into();
    }
    match (config.endpoint, prompt) {
        (Endpoint::Completions, Prompt::Text(text)) => body["prompt"] = text.into(),
        (Endpoint::Completions, Prompt::Tokens(ids)) => body["prompt"] = ids.into(),
        (Endpoint::Chat, Prompt::Text(text)) => body["messages"] = json!([{"role": "user", "content": text}]),
        // Refused before the run.
        (Endpoint::Chat, Prompt::Tokens(_)) => {}
    }
    if config.stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    for (key, value) in &config.extra_body {
        body[key] = value.clone();
    }
    body.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::Value;

    use super::*;
    use crate::load::Sample;

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
    fn the_body_follows_the_endpoint() {
        let config = LoadConfig { model: "m".into(), input_len: 3, ..LoadConfig::default() };
        let parsed = |config: &LoadConfig| -> Value { serde_json::from_slice(&body(config, 0)).unwrap() };
        let completion = parsed(&config);
        assert!(completion["prompt"].is_string() && completion["stream_options"]["include_usage"] == true);
        let chat = parsed(&LoadConfig { endpoint: Endpoint::Chat, stream: false, ..config });
        assert_eq!(chat["messages"][0]["role"], "user");
        assert!(chat.get("stream_options").is_none() && chat["ignore_eos"] == true);
    }

    #[test]
    fn samples_and_further_fields_are_sent_as_they_are() {
        let sample = |prompt, output_len| Sample { prompt, output_len };
        let samples = [sample(Prompt::Text("a".into()), 7), sample(Prompt::Tokens(vec![4, 5]), 8)];
        let extra_body = json!({"top_p": 0.5, "temperature": 0.25}).as_object().cloned().unwrap();
        let config = LoadConfig { samples: samples.into(), ignore_eos: false, extra_body, ..LoadConfig::default() };
        let parsed = |index| -> Value { serde_json::from_slice(&body(&config, index)).unwrap() };
        let (first, second) = (parsed(0), parsed(1));
        assert_eq!((&first["prompt"], &first["max_tokens"]), (&json!("a"), &json!(7)));
        assert_eq!((&second["prompt"], &second["max_tokens"]), (&json!([4, 5]), &json!(8)));
        assert_eq!((&first["top_p"], &first["temperature"]), (&json!(0.5), &json!(0.25)));
        assert!(first.get("ignore_eos").is_none());
        assert_eq!(parsed(2), first, "warm-up requests are among the samples");
    }
}
