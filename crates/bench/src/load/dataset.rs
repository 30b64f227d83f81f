//! Prompts from files and the lengths of random prompts, sampled and filtered as `vllm bench serve` does.

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use serde::Deserialize;

use super::LoadError;

/// Minimum number of tokens of a ShareGPT prompt and of its answer.
const SHAREGPT_LEAST: usize = 4;

/// Maximum number of tokens of a ShareGPT prompt.
const SHAREGPT_PROMPT: usize = 1024;

/// Maximum number of tokens of a ShareGPT prompt and its answer together.
const SHAREGPT_TOTAL: usize = 2048;

/// The prompt of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// A text, which the server tokenizes.
    Text(String),
    /// Token ids, for the completions route only.
    Tokens(Vec<u32>),
}

/// A request to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The prompt.
    pub prompt: Prompt,
    /// Maximum number of generated tokens.
    pub output_len: u32,
}

/// The first two turns of a ShareGPT conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The first turn.
    pub prompt: String,
    /// The second turn. Its length is the length of the answer that is asked for.
    pub answer: String,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    conversations: Vec<Turn>,
}

#[derive(Deserialize)]
struct Turn {
    value: String,
}

#[derive(Deserialize)]
struct Line {
    prompt: String,
}

/// Reads a ShareGPT file: the conversations of at least two turns, shuffled by `seed` if there is one.
///
/// # Errors
/// The file is not a JSON list of conversations, or has none of two turns.
pub fn sharegpt(file: &[u8], seed: Option<u64>) -> Result<Vec<Exchange>, LoadError> {
    let entries: Vec<Entry> = serde_json::from_slice(file)
        .map_err(|error| LoadError::Dataset(format!("it is not a JSON list of conversations: {error}")))?;
    let exchange = |entry: Entry| {
        let mut turns = entry.conversations.into_iter().map(|turn| turn.value);
        Some(Exchange { prompt: turns.next()?, answer: turns.next()? })
    };
    let mut exchanges: Vec<_> = entries.into_iter().filter_map(exchange).collect();
    if exchanges.is_empty() {
        return Err(LoadError::Dataset("it has no conversation of at least two turns".into()));
    }
    shuffle(&mut exchanges, seed);
    Ok(exchanges)
}

/// Whether vLLM keeps a ShareGPT conversation of these lengths in tokens. With `fixed_output`, where the user chose the
/// length of answers, an answer may be short.
pub fn sharegpt_keeps(prompt_len: usize, output_len: usize, fixed_output: bool) -> bool {
    prompt_len >= SHAREGPT_LEAST
        && (fixed_output || output_len >= SHAREGPT_LEAST)
        && prompt_len <= SHAREGPT_PROMPT
        && prompt_len + output_len <= SHAREGPT_TOTAL
}

/// Reads a custom dataset: JSON lines with a `prompt` each, shuffled by `seed` if there is one.
///
/// # Errors
/// A line is not such an object, or there is none.
pub fn custom(file: &str, seed: Option<u64>) -> Result<Vec<String>, LoadError> {
    let lines = file.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let prompt = |(index, line): (usize, &str)| {
        let line: Line = serde_json::from_str(line)
            .map_err(|error| LoadError::Dataset(format!("line {} is not {{\"prompt\": TEXT}}: {error}", index + 1)))?;
        Ok(line.prompt)
    };
    let mut prompts = lines.map(prompt).collect::<Result<Vec<_>, LoadError>>()?;
    if prompts.is_empty() {
        return Err(LoadError::Dataset("it has no line".into()));
    }
    shuffle(&mut prompts, seed);
    Ok(prompts)
}

fn shuffle<T>(items: &mut [T], seed: Option<u64>) {
    if let Some(seed) = seed {
        items.shuffle(&mut StdRng::seed_from_u64(seed));
    }
}

/// Fills `samples` up to `count` with random ones of its own.
pub fn oversample(samples: &mut Vec<Sample>, count: usize, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let missing = count.saturating_sub(samples.len());
    let more: Vec<_> = (0..missing).filter_map(|_| samples.choose(&mut random).cloned()).collect();
    samples.extend(more);
}

/// The lengths of a random prompt and its answer, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Length of the prompt after its prefix.
    pub input: usize,
    /// Length of the answer.
    pub output: u32,
    /// Position in the vocabulary at which the prompt's tokens begin.
    pub offset: usize,
}

/// Samples the lengths of `count` random prompts uniformly between `length · (1 - ratio)` and `length · (1 + ratio)`,
/// with at least one token of answer. Offsets are below `vocab_size`.
///
/// # Errors
/// The ratio is not at least 0 and below 1.
pub fn random_lengths(
    count: usize,
    (input, output): (usize, u32),
    ratio: f64,
    vocab_size: usize,
    seed: u64,
) -> Result<Vec<Lengths>, LoadError> {
    if !(0.0..1.0).contains(&ratio) {
        return Err(LoadError::Config("the range ratio must be at least 0 and below 1"));
    }
    let low = |length: f64| (length * (1.0 - ratio)).floor();
    let high = |length: f64| (length * (1.0 + ratio)).ceil();
    let (inputs, outputs) = (low(input as f64) as usize..=high(input as f64) as usize, {
        let (low, high) = (low(f64::from(output)).max(1.0), high(f64::from(output)).max(1.0));
        low as u32..=high as u32
    });
    let mut random = StdRng::seed_from_u64(seed);
    let mut draw = || Lengths {
        input: random.random_range(inputs.clone()),
        output: random.random_range(outputs.clone()),
        offset: random.random_range(0..vocab_size.max(1)),
    };
    Ok((0..count).map(|_| draw()).collect())
}

/// Makes a text of exactly `target` tokens from `ids`, as vLLM does: it decodes and encodes them, then truncates or adds
/// `filler` tokens, up to ten times. If no attempt has the length, the last one is returned.
///
/// # Errors
/// `decode` or `encode` fails.
pub fn text_of_length<E>(
    mut ids: Vec<u32>,
    target: usize,
    filler: &[u32],
    seed: u64,
    decode: impl Fn(&[u32]) -> Result<String, E>,
    encode: impl Fn(&str) -> Result<Vec<u32>, E>,
) -> Result<String, E> {
    const ATTEMPTS: usize = 10;
    let mut random = StdRng::seed_from_u64(seed);
    let mut text = decode(&ids)?;
    for _ in 0..ATTEMPTS {
        ids = encode(&text)?;
        if ids.len() == target {
            break;
        }
        ids.truncate(target);
        while ids.len() < target {
            match filler.choose(&mut random) {
                Some(id) => ids.push(*id),
                None => return Ok(text),
            }
        }
        text = decode(&ids)?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sharegpt_has_the_first_two_turns_of_each_conversation() {
        let file = br#"[
            {"id": "a", "conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "q"}, {"value": "r"}]},
            {"conversations": [{"from": "human", "value": "alone"}]},
            {"id": "nothing"},
            {"conversations": [{"value": "x"}, {"value": "y"}]}
        ]"#;
        let exchange = |prompt: &str, answer: &str| Exchange { prompt: prompt.into(), answer: answer.into() };
        assert_eq!(sharegpt(file, None).unwrap(), [exchange("p", "q"), exchange("x", "y")]);
        assert!(sharegpt(b"[]", None).unwrap_err().to_string().contains("two turns"));
        assert!(sharegpt(b"{}", None).unwrap_err().to_string().contains("JSON list"));
    }

    #[test]
    fn sharegpt_is_filtered_as_vllm_does() {
        assert!(sharegpt_keeps(4, 4, false) && sharegpt_keeps(1024, 1024, false));
        for (prompt, output) in [(3, 100), (100, 3), (1025, 10), (1000, 1049)] {
            assert!(!sharegpt_keeps(prompt, output, false), "{prompt} + {output}");
        }
        assert!(sharegpt_keeps(100, 1, true) && !sharegpt_keeps(3, 1, true));
    }

    #[test]
    fn custom_prompts_are_lines() {
        let file = "{\"prompt\": \"a\"}\n\n{\"prompt\": \"b\", \"other\": 1}\n";
        assert_eq!(custom(file, None).unwrap(), ["a", "b"]);
        assert!(custom("{\"prompt\": \"a\"}\n{}", None).unwrap_err().to_string().contains("line 2"));
        assert!(custom("", None).is_err());
    }

    #[test]
    fn a_shuffle_depends_on_the_seed_alone() {
        let file: String = (0..50).map(|index| format!("{{\"prompt\": \"{index}\"}}\n")).collect();
        let (first, again, other) = (custom(&file, Some(1)), custom(&file, Some(1)), custom(&file, Some(2)));
        assert_eq!(first.as_ref().unwrap(), &again.unwrap());
        assert_ne!(first.unwrap(), other.unwrap());
    }

    #[test]
    fn few_samples_are_repeated() {
        let sample = |name: &str| Sample { prompt: Prompt::Text(name.into()), output_len: 1 };
        let mut samples = vec![sample("a"), sample("b")];
        oversample(&mut samples, 9, 0);
        assert_eq!(samples.len(), 9);
        assert!(samples[..2] == [sample("a"), sample("b")]);
        assert!(samples.iter().all(|one| [sample("a"), sample("b")].contains(one)));
        oversample(&mut samples, 3, 0);
        assert_eq!(samples.len(), 9, "nothing is removed");
    }

    #[test]
    fn lengths_lie_in_the_range_that_was_asked_for() {
        let lengths = random_lengths(1000, (100, 10), 0.25, 50, 3).unwrap();
        let inputs = |wanted: usize| lengths.iter().any(|lengths| lengths.input == wanted);
        assert!(lengths.iter().all(|one| (75..=125).contains(&one.input) && (7..=13).contains(&one.output)));
        assert!(inputs(75) && inputs(125) && lengths.iter().all(|one| one.offset < 50));
        assert!(random_lengths(5, (8, 1), 0.0, 9, 0).unwrap().iter().all(|one| (one.input, one.output) == (8, 1)));
        assert!(random_lengths(5, (8, 1), 0.9, 9, 0).unwrap().iter().all(|one| one.output >= 1));
        for bad in [-0.1, 1.0, f64::NAN] {
            assert!(random_lengths(1, (8, 1), bad, 9, 0).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_text_is_cut_or_filled_to_its_length() {
        // Two ids of 1 merge into one of 2; every id is a letter.
        let decode = |ids: &[u32]| -> Result<String, ()> {
            Ok(ids.iter().map(|id| if *id == 2 { "aa" } else { ["", "a", "", "b"][*id as usize] }).collect())
        };
        let encode = |text: &str| -> Result<Vec<u32>, ()> {
            Ok(text
                .replace("aa", "2")
                .chars()
                .map(|c| match c {
                    '2' => 2,
                    'a' => 1,
                    _ => 3,
                })
                .collect())
        };
        for target in [1, 2, 5] {
            let text = text_of_length(vec![1; 4], target, &[3], 0, decode, encode).unwrap();
            assert_eq!(encode(&text).unwrap().len(), target, "{text}");
        }
        assert_eq!(text_of_length(vec![1; 4], 9, &[], 0, decode, encode).unwrap(), "aaaa", "nothing to fill with");
    }
}
