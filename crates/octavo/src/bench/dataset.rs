//! The prompts of `octavo bench serve`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http::Method;
use http_body_util::{BodyExt, Limited};
use octavo_bench::load::{self, Endpoint, Exchange, Lengths, Prompt, Sample, WORDS, random_words, text_of_length};
use octavo_http_client::{Connection, Target};
use octavo_text::{ChatTemplate, ContentFormat, TemplateInput, Tokenizer, normalize_messages};
use serde_json::{Map, Value, json};
use tracing::info;

use crate::cli::{Dataset, DatasetArgs, LoadFormat, SourceArgs};
use crate::pull;
use crate::serve::model;

/// Maximum size of an answer of /tokenize in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// Time limit for an answer of /tokenize.
const TOKENIZE_TIMEOUT: Duration = Duration::from_secs(60);

/// Prompt index of the prefix that random prompts share.
const PREFIX: usize = usize::MAX;

/// The requests of a run. `target` and `model` identify the server, `endpoint` its route.
///
/// # Errors
/// A flag, the dataset or the tokenizer cannot be used, or the server does not tokenize.
pub(super) async fn samples(
    args: &DatasetArgs,
    target: &Target,
    model: &str,
    endpoint: Endpoint,
) -> Result<Vec<Sample>> {
    let tokenizer = args.tokenizer.as_deref().map(Local::open).transpose().context("--tokenizer")?;
    let name = match args.dataset_name {
        Dataset::Random => {
            ensure!(args.dataset_path.is_none(), "--dataset-path needs --dataset-name sharegpt or custom");
            return random(args, tokenizer.as_ref());
        }
        Dataset::ShareGpt => "sharegpt",
        Dataset::Custom => "custom",
    };
    let path = args.dataset_path.as_deref().with_context(|| format!("--dataset-name {name} needs --dataset-path"))?;
    let named = || format!("--dataset-path {}", path.display());
    let file = std::fs::read(path).with_context(named)?;
    let seed = (!args.disable_shuffle).then_some(args.seed);
    let mut counter = match tokenizer {
        Some(tokenizer) => Counter::Local(Box::new(tokenizer)),
        None => Counter::Server { connection: Box::new(Connection::new(target.clone())), model: model.to_owned() },
    };
    let mut samples = match args.dataset_name {
        Dataset::ShareGpt => sharegpt(args, load::sharegpt(&file, seed).with_context(named)?, &mut counter).await?,
        _ => {
            let prompts = load::custom(&String::from_utf8_lossy(&file), seed).with_context(named)?;
            custom(args, prompts, endpoint, &mut counter).await?
        }
    };
    ensure!(!samples.is_empty(), "{}: no conversation has a usable length", named());
    if samples.len() < args.num_prompts {
        let found = samples.len();
        if args.no_oversample {
            info!("the dataset has {found} usable prompts, so {found} requests are sent");
        } else {
            info!("the dataset has {found} usable prompts; some are repeated");
            load::oversample(&mut samples, args.num_prompts, args.seed);
        }
    }
    Ok(samples)
}

async fn sharegpt(args: &DatasetArgs, exchanges: Vec<Exchange>, counter: &mut Counter) -> Result<Vec<Sample>> {
    let fixed = args.output_len.or(args.sharegpt_output_len);
    let mut samples = Vec::new();
    for Exchange { prompt, answer } in exchanges {
        if samples.len() == args.num_prompts {
            break;
        }
        let prompt_len = counter.count(&prompt).await?;
        let output_len = match fixed {
            Some(tokens) => tokens as usize,
            None => counter.count(&answer).await?,
        };
        if load::sharegpt_keeps(prompt_len, output_len, fixed.is_some()) {
            samples.push(Sample { prompt: Prompt::Text(prompt), output_len: u32::try_from(output_len)? });
        }
    }
    Ok(samples)
}

async fn custom(
    args: &DatasetArgs,
    prompts: Vec<String>,
    endpoint: Endpoint,
    counter: &mut Counter,
) -> Result<Vec<Sample>> {
    let output_len = args.output_len.unwrap_or(args.custom_output_len);
    let mut samples = Vec::new();
    for prompt in prompts.into_iter().take(args.num_prompts) {
        // The chat route of the server applies the template itself.
        let prompt = match endpoint {
            Endpoint::Completions if !args.skip_chat_template => Prompt::Tokens(counter.chat(&prompt).await?),
            _ => Prompt::Text(prompt),
        };
        samples.push(Sample { prompt, output_len });
    }
    Ok(samples)
}

fn random(args: &DatasetArgs, local: Option<&Local>) -> Result<Vec<Sample>> {
    let input = args.input_len.unwrap_or(args.random_input_len);
    let output = args.output_len.unwrap_or(args.random_output_len);
    let special = local.map_or(Ok(0), |local| local.encode("", true).map(|ids| ids.len()))?;
    let ordinary = local.map(Local::ordinary).unwrap_or_default();
    let lengths = (input.saturating_sub(special), output);
    let lengths = load::random_lengths(args.num_prompts, lengths, args.random_range_ratio, ordinary.len(), args.seed)
        .context("--random-range-ratio")?;
    let shortest = args.random_prefix_len + lengths.iter().map(|lengths| lengths.input).min().unwrap_or_default();
    ensure!(shortest > 0, "--random-input-len {input}: a prompt must have at least one token");
    let prefix_words = random_words(&WORDS, args.seed, PREFIX, args.random_prefix_len);
    let prefix_ids = prefix_ids(&ordinary, args);
    let sample = |(index, &Lengths { input, output, offset }): (usize, &Lengths)| {
        let text = match local {
            None => {
                let own = random_words(&WORDS, args.seed, index, input);
                let parts = [prefix_words.as_str(), own.as_str()];
                parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
            }
            Some(local) => {
                let own = (0..input).map(|at| ordinary[(offset + index + at) % ordinary.len()]);
                let ids: Vec<u32> = prefix_ids.iter().copied().chain(own).collect();
                let target = ids.len();
                let seed = args.seed ^ index as u64;
                text_of_length(ids, target, &ordinary, seed, |ids| local.decode(ids), |text| local.encode(text, false))?
            }
        };
        Ok(Sample { prompt: Prompt::Text(text), output_len: output })
    };
    lengths.iter().enumerate().map(sample).collect()
}

/// The tokens that all random prompts begin with.
fn prefix_ids(ordinary: &[u32], args: &DatasetArgs) -> Vec<u32> {
    if ordinary.is_empty() {
        return vec![];
    }
    let begin = args.seed as usize;
    (0..args.random_prefix_len).map(|at| ordinary[begin.wrapping_add(at.wrapping_mul(7919)) % ordinary.len()]).collect()
}

/// Measures texts in tokens.
enum Counter {
    Local(Box<Local>),
    Server { connection: Box<Connection>, model: String },
}

impl Counter {
    /// The number of tokens of a prompt, special ones included.
    async fn count(&mut self, text: &str) -> Result<usize> {
        match self {
            Self::Local(local) => Ok(local.encode(text, true)?.len()),
            Self::Server { connection, model } => {
                Ok(tokenize(connection, json!({"model": model, "prompt": text})).await?.len())
            }
        }
    }

    /// The tokens of a chat with one message.
    async fn chat(&mut self, message: &str) -> Result<Vec<u32>> {
        let messages = json!([{"role": "user", "content": message}]);
        match self {
            Self::Local(local) => local.chat(&messages),
            Self::Server { connection, model } => {
                tokenize(connection, json!({"model": model, "messages": messages})).await
            }
        }
    }
}

/// Asks the server's /tokenize.
async fn tokenize(connection: &mut Connection, request: Value) -> Result<Vec<u32>> {
    let asked = async {
        let body = Bytes::from(request.to_string());
        let request = connection.target().request(Method::POST, "/tokenize", body)?;
        let response = connection.send(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!("the answer broke off: {error}"))?.to_bytes();
        if !status.is_success() {
            bail!("status {status}: {}", String::from_utf8_lossy(&body[..body.len().min(300)]));
        }
        let answer: Value = serde_json::from_slice(&body)?;
        Ok(serde_json::from_value(answer["tokens"].clone())?)
    };
    let answered = match tokio::time::timeout(TOKENIZE_TIMEOUT, asked).await {
        Ok(answered) => answered,
        Err(_) => Err(anyhow::anyhow!("no answer within {} s", TOKENIZE_TIMEOUT.as_secs())),
    };
    answered.context("the server's /tokenize cannot measure the prompts; name the model's tokenizer with --tokenizer")
}

/// A tokenizer of this process.
struct Local {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl Local {
    /// Opens the tokenizer of a model; no weights are fetched for it.
    fn open(reference: &str) -> Result<Self> {
        // A folder with a tokenizer but no model.
        let file = Path::new(reference).join("tokenizer.json");
        if file.is_file() && !Path::new(reference).join("config.json").is_file() {
            let tokenizer = Tokenizer::from_json(&std::fs::read(file)?, octavo_text::SpecialTokens::default())?;
            return Ok(Self { tokenizer, template: None });
        }
        let resolved = pull::resolve(reference, &SourceArgs::default(), LoadFormat::Dummy, pull::Wanted::Any)?;
        let checkpoint = octavo_models::Checkpoint::open_shape(&resolved.path)?;
        let tokenizer = model::tokenizer(checkpoint.tokenizer()?)?;
        let template = checkpoint.chat_template().map(|source| ChatTemplate::new(source, tokenizer.special()));
        Ok(Self { template: template.transpose()?, tokenizer })
    }

    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, special)?)
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        Ok(self.tokenizer.decode(ids, false)?)
    }

    /// The ids of whole characters, without special and unused ones: parts of characters do not survive a text.
    fn ordinary(&self) -> Vec<u32> {
        let is_text = |id: &u32| {
            let text = self.tokenizer.decode(&[*id], false).unwrap_or_default();
            !self.tokenizer.is_special(*id) && !text.is_empty() && !text.contains(char::REPLACEMENT_CHARACTER)
        };
        (0..u32::try_from(self.tokenizer.vocab_size()).unwrap_or(u32::MAX)).filter(is_text).collect()
    }

    fn chat(&self, messages: &Value) -> Result<Vec<u32>> {
        let template = self.template.as_ref().context(
            "the model of --tokenizer has no chat template; send the prompts as they are with --skip-chat-template",
        )?;
        let messages = normalize_messages(messages.as_array().map_or(&[], Vec::as_slice), ContentFormat::String, None)?;
        let kwargs = Map::new();
        let text = template.render(&TemplateInput {
            messages: &messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: &kwargs,
        })?;
        self.encode(&text, false)
    }
}

#[cfg(test)]
mod tests {
    use octavo_http_client::Certificates;

    use super::*;
    use crate::cli::{self, BenchArgs, BenchCommand, Command};

    /// A tokenizer of 320 tokens.
    const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/testdata/llama");

    fn args(line: &str) -> DatasetArgs {
        let line = ["bench", "serve"].into_iter().chain(line.split_whitespace()).map(Into::into).collect();
        let Command::Bench(BenchArgs { command: BenchCommand::Serve(args) }) =
            cli::parse(line, &|_| None).unwrap().command
        else {
            panic!("another command")
        };
        args.dataset
    }

    fn texts(samples: &[Sample]) -> Vec<String> {
        let text = |sample: &Sample| match &sample.prompt {
            Prompt::Text(text) => text.clone(),
            Prompt::Tokens(ids) => panic!("tokens: {ids:?}"),
        };
        samples.iter().map(text).collect()
    }

    async fn all(line: &str, endpoint: Endpoint) -> Result<Vec<Sample>> {
        // Nobody listens there.
        let target = Target::new("http://127.0.0.1:1", None, &Certificates::Trusted).unwrap();
        samples(&args(line), &target, "m", endpoint).await
    }

    #[tokio::test]
    async fn random_words_have_the_lengths_asked_for() {
        let found =
            all("--num-prompts 50 --input-len 20 --output-len 8 --random-range-ratio 0.5", Endpoint::Chat).await;
        let found = found.unwrap();
        let words: Vec<usize> = texts(&found).iter().map(|text| text.split(' ').count()).collect();
        assert!(words.iter().all(|words| (10..=30).contains(words)), "{words:?}");
        assert!(words.iter().any(|&count| count != words[0]));
        assert!(found.iter().all(|sample| (4..=12).contains(&sample.output_len)));
    }

    #[tokio::test]
    async fn random_prompts_share_their_prefix_alone() {
        for tokenizer in ["", &format!(" --tokenizer {TINY}")] {
            let line = format!("--num-prompts 4 --random-input-len 9 --random-prefix-len 12{tokenizer}");
            let found = all(&line, Endpoint::Completions).await.unwrap();
            let texts = texts(&found);
            let common = texts[0].bytes().zip(texts[1].bytes()).take_while(|(a, b)| a == b).count();
            assert!(common > 10 && texts[0] != texts[1], "{texts:?}");
        }
    }

    #[tokio::test]
    async fn random_tokens_have_an_exact_length() {
        let found =
            all(&format!("--num-prompts 6 --random-input-len 40 --tokenizer {TINY}"), Endpoint::Completions).await;
        let found = found.unwrap();
        let local = Local::open(TINY).unwrap();
        let special = local.encode("", true).unwrap().len();
        for text in texts(&found) {
            assert_eq!(local.encode(&text, true).unwrap().len(), 40, "{special} special, {text:?}");
        }
    }

    #[tokio::test]
    async fn sharegpt_is_measured_and_filtered() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let turn = |text: &str| json!({"from": "x", "value": text});
        let entries = json!([
            {"conversations": [turn("What is the capital of France?"), turn("It is the city of Paris, on the Seine.")]},
            {"conversations": [turn(""), turn("too short a prompt for this")]},
            {"conversations": [turn(&"long ".repeat(2000)), turn("too long a prompt for this")]},
        ]);
        std::fs::write(file.path(), entries.to_string()).unwrap();
        let path = file.path().display();
        let line = format!("--dataset-name sharegpt --dataset-path {path} --num-prompts 3 --tokenizer {TINY}");
        let found = all(&line, Endpoint::Chat).await.unwrap();
        assert_eq!(texts(&found), ["What is the capital of France?"; 3], "the only one is repeated");
        let answer = Local::open(TINY).unwrap().encode("It is the city of Paris, on the Seine.", true).unwrap();
        assert_eq!(found[0].output_len as usize, answer.len());
        let fixed = all(&format!("{line} --sharegpt-output-len 5 --no-oversample"), Endpoint::Chat).await.unwrap();
        assert_eq!((fixed.len(), fixed[0].output_len), (1, 5));
        let no_server = format!("--dataset-name sharegpt --dataset-path {path}");
        let error = format!("{:#}", all(&no_server, Endpoint::Chat).await.unwrap_err());
        assert!(error.contains("/tokenize") && error.contains("--tokenizer"), "{error}");
    }

    #[tokio::test]
    async fn custom_prompts_are_sent_as_chats_or_as_they_are() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{\"prompt\": \"Hello\"}\n").unwrap();
        let line = format!("--dataset-name custom --dataset-path {} --num-prompts 1", file.path().display());
        let chat = all(&line, Endpoint::Chat).await.unwrap();
        assert_eq!((texts(&chat), chat[0].output_len), (vec!["Hello".to_owned()], 256));
        let plain = all(&format!("{line} --skip-chat-template --output-len 3"), Endpoint::Completions).await.unwrap();
        assert_eq!((texts(&plain), plain[0].output_len), (vec!["Hello".to_owned()], 3));
        let templated = all(&format!("{line} --tokenizer {TINY}"), Endpoint::Completions).await;
        match Local::open(TINY).unwrap().template {
            Some(_) => assert!(matches!(templated.unwrap()[0].prompt, Prompt::Tokens(_))),
            None => assert!(format!("{:#}", templated.unwrap_err()).contains("--skip-chat-template")),
        }
    }

    #[tokio::test]
    async fn datasets_need_a_file_that_exists() {
        for (line, part) in [
            ("--dataset-name sharegpt", "needs --dataset-path"),
            ("--dataset-path x.json", "needs --dataset-name"),
            ("--dataset-name custom --dataset-path /no/such/file.jsonl", "/no/such/file.jsonl"),
            ("--tokenizer /no/such/folder", "--tokenizer"),
            ("--random-input-len 0", "at least one token"),
            ("--random-range-ratio 1", "--random-range-ratio"),
        ] {
            let error = format!("{:#}", all(line, Endpoint::Completions).await.unwrap_err());
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
