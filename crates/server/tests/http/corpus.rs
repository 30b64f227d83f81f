//! Requests that clients really send, mutated: whatever comes of them, the answer is well formed and the server lives.
//!
//! `OCTAVO_FUZZ_SECONDS` says for how long (2 without it), `OCTAVO_FUZZ_SEED` where to begin.

use std::time::{Duration, Instant};

use futures::StreamExt;
use octavo_server::Activation;
use octavo_telemetry::{LogConfig, init_logging};
use octavo_text::{ReasoningSyntax, ToolSyntax};
use reqwest::Response;
use serde_json::{Map, Value, json};

use crate::support::{Setup, TestServer};

/// A line for each request: its path and its body.
const CORPUS: &str = include_str!("data/corpus.jsonl");

/// What the models "say": reasoning and calls of the syntaxes, some of them broken.
const SAID: [&str; 6] = [
    "<think>\nWell \u{1f600}\n</think>\nI will look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>",
    "<think><tool_call>{\"name\": \"f\", \"arguments\": [1, {\"a\": \"\\ud83d\"",
    "[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {}}]",
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call> and <function=",
    "[weather(city='Rome'), f(a=[1, None])] {\"name\": \"f\", \"parameters\": {}}",
    "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}><\u{ff5c}tool\u{2581}call\u{2581}begin\u{ff5c}>function<\u{ff5c}tool\u{2581}sep\u{ff5c}>f\n```json\n{}\n```",
];

const SYNTAXES: [ToolSyntax; 6] = [
    ToolSyntax::Hermes,
    ToolSyntax::Hermes,
    ToolSyntax::Mistral,
    ToolSyntax::Qwen3Coder,
    ToolSyntax::Pythonic,
    ToolSyntax::DeepSeekV3,
];

/// Random choices: what failed is found again from its seed.
struct Rng(fastrand::Rng);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    fn below(&mut self, end: usize) -> usize {
        self.0.usize(..end.max(1))
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// Every value inside of `value`, itself first.
fn nodes<'a>(value: &'a Value, out: &mut Vec<&'a Value>) {
    out.push(value);
    match value {
        Value::Array(items) => items.iter().for_each(|item| nodes(item, out)),
        Value::Object(members) => members.values().for_each(|member| nodes(member, out)),
        _ => {}
    }
}

/// The `at`th of those, to be changed.
fn node_mut<'a>(value: &'a mut Value, at: &mut usize) -> Option<&'a mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| node_mut(item, at)),
        Value::Object(members) => members.values_mut().find_map(|member| node_mut(member, at)),
        _ => None,
    }
}

/// A value that is unlike what stands in the corpus.
fn odd(rng: &mut Rng) -> Value {
    match rng.below(12) {
        0 => Value::Null,
        1 => json!(rng.next() as i64),
        2 => json!(-1),
        3 => json!(1e308),
        4 => json!(0),
        5 => json!(""),
        6 => json!("\u{0}\u{fffd}\u{1f468}\u{200d}\u{1f469}<|im_end|>"),
        7 => json!("x".repeat(rng.below(3000))),
        8 => json!([]),
        9 => json!({}),
        10 => json!(true),
        _ => (0..rng.below(150)).fold(json!("deep"), |inner, _| json!([inner])),
    }
}

fn mutate(body: &mut Value, corpus: &[(String, Value)], rng: &mut Rng) {
    let mut other = Vec::new();
    nodes(&rng.pick(corpus).1, &mut other);
    let donor = (*rng.pick(&other)).clone();
    let mut count = Vec::new();
    nodes(body, &mut count);
    let mut at = rng.below(count.len());
    let Some(node) = node_mut(body, &mut at) else { return };
    match (rng.below(5), &mut *node) {
        (0, Value::Object(members)) if !members.is_empty() => {
            let key = members.keys().nth(rng.below(members.len())).cloned().unwrap_or_default();
            members.shift_remove(&key);
        }
        (0, Value::Array(items)) if !items.is_empty() => drop(items.remove(rng.below(items.len()))),
        (1, Value::Object(members)) => {
            if let Value::Object(more) = &rng.pick(corpus).1 {
                members.extend(
                    more.iter()
                        .filter(|_| rng.below(3) == 0)
                        .map(|(k, v)| (k.clone(), v.clone()))
                        .collect::<Map<_, _>>(),
                );
            }
        }
        (1, Value::Array(items)) => items.extend(items.clone()),
        (2, _) => *node = odd(rng),
        _ => *node = donor,
    }
}

/// A request, as bytes that are mostly JSON still.
fn request(corpus: &[(String, Value)], rng: &mut Rng) -> (String, Vec<u8>) {
    let (path, mut body) = rng.pick(corpus).clone();
    for _ in 0..rng.below(4) {
        mutate(&mut body, corpus, rng);
    }
    let mut bytes = body.to_string().into_bytes();
    for _ in 0..rng.below(16).saturating_sub(12) {
        let at = rng.below(bytes.len());
        match rng.below(4) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, rng.next() as u8),
            2 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
            _ => {
                let again: Vec<u8> = bytes[at..].iter().copied().take(rng.below(200)).collect();
                bytes.extend(again);
            }
        }
    }
    (path, bytes)
}

/// Reads the whole answer and returns whether the request was served; an error says what is wrong with the answer.
async fn check(response: Response) -> Result<bool, String> {
    let status = response.status();
    let kind =
        response.headers().get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default().to_owned();
    if kind == "application/octet-stream" {
        return response.bytes().await.map(|_| true).map_err(|error| error.to_string());
    }
    let text = response.text().await.map_err(|error| error.to_string())?;
    let json = |text: &str| serde_json::from_str::<Value>(text).map_err(|error| format!("{error} in {text}"));
    if status.is_server_error() {
        return Err(format!("{status}: {text}"));
    }
    if !status.is_success() {
        let message = json(&text)?["error"]["message"].as_str().map(str::len);
        return message.is_some_and(|length| length > 0).then_some(false).ok_or(format!("no message: {text}"));
    }
    if !kind.starts_with("text/event-stream") {
        // The first server's streams are a JSON value a line.
        return text.lines().try_for_each(|line| json(line).map(drop)).map(|()| true);
    }
    for event in text.split_terminator("\n\n") {
        for line in event.lines() {
            let data = line.strip_prefix("data: ").or(line.strip_prefix("event: ").map(|_| "[DONE]"));
            match data {
                Some("[DONE]") => {}
                Some(data) => drop(json(data)?),
                None => return Err(format!("neither data nor event: {line}")),
            }
        }
    }
    text.ends_with("\n\n").then_some(true).ok_or(format!("cut: {text}"))
}

/// The model of a server.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Model {
    /// Generates the text of this index.
    Generative(usize),
    Embedder,
    Classifier,
}

impl Model {
    fn all() -> impl Iterator<Item = Self> + Clone {
        (0..SAID.len()).map(Self::Generative).chain([Self::Embedder, Self::Classifier])
    }

    /// Whether it has the route.
    fn serves(self, path: &str) -> bool {
        match path {
            "/v1/embeddings" => self != Self::Classifier,
            "/v2/embed" => self == Self::Embedder,
            "/classify" => self == Self::Classifier,
            "/pooling" | "/score" | "/rerank" => !matches!(self, Self::Generative(_)),
            "/tokenize" | "/detokenize" => true,
            _ => matches!(self, Self::Generative(_)),
        }
    }

    /// The requests of the corpus that it serves: their paths and bodies.
    fn corpus(self) -> Vec<(String, Value)> {
        let all = CORPUS.lines().map(|line| serde_json::from_str::<(String, Value)>(line).unwrap());
        all.filter(|(path, _)| self.serves(path)).collect()
    }

    async fn start(self) -> TestServer {
        let mut setup = match self {
            Self::Generative(said) => Setup::writing(SAID[said]),
            Self::Embedder => Setup::embedder(),
            Self::Classifier => Setup::classifier(&["only"], Activation::Sigmoid),
        };
        if let Self::Generative(said) = self {
            (setup.config.api.tools, setup.config.api.reasoning) = (Some(SYNTAXES[said]), Some(ReasoningSyntax::Qwen3));
        }
        (setup.config.max_model_len, setup.engine.max_model_len) = (256, 256);
        setup.start().await
    }
}

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name}={value}")))
}

/// Requests of a round, to one server.
const ROUND: usize = 100;

/// Every model has a round, and more of them while there is time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mutated_requests_are_answered_and_break_nothing() {
    if std::env::var_os("OCTAVO_FUZZ_SECONDS").is_some() {
        // This test runs alone then, and the log says why an engine has failed.
        drop(init_logging(&LogConfig { level: Some("error".into()), ..LogConfig::default() }));
    }
    let mut rng = Rng(fastrand::Rng::with_seed(from_environment("OCTAVO_FUZZ_SEED", 0)));
    let until = Instant::now() + Duration::from_secs(from_environment("OCTAVO_FUZZ_SECONDS", 2));
    let models = Model::all().count();
    for (round, model) in Model::all().cycle().enumerate() {
        if round >= models && Instant::now() >= until {
            println!("{} requests", round * ROUND);
            break;
        }
        let served = run_round(model, &mut rng).await;
        assert!(
            served > ROUND / 10,
            "{model:?}: too few mutants are valid ({served}) to reach what is behind the checks"
        );
        assert!(served < ROUND, "{model:?}: no mutant is refused");
    }
}

/// Sends mutants to a server and returns the number of those that were served.
async fn run_round(model: Model, rng: &mut Rng) -> usize {
    let (server, corpus) = (model.start().await, model.corpus());
    let requests: Vec<_> = (0..ROUND).map(|_| request(&corpus, rng)).collect();
    let exchanges = requests.iter().map(|(path, body)| {
        let post = server.client.post(format!("{}{path}", server.url)).header("content-type", "application/json");
        async move {
            let exchange =
                async { check(post.body(body.clone()).send().await.map_err(|error| error.to_string())?).await };
            let checked = tokio::time::timeout(Duration::from_secs(60), exchange).await;
            let checked = checked.unwrap_or_else(|_| Err("no end after a minute".to_owned()));
            checked.map_err(|wrong| format!("{path} {}\n{wrong}", String::from_utf8_lossy(body)))
        }
    });
    let checked: Vec<Result<bool, String>> = futures::stream::iter(exchanges).buffer_unordered(8).collect().await;
    let wrong: Vec<&str> = checked.iter().filter_map(|checked| checked.as_ref().err().map(String::as_str)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    server.idle().await;
    checked.iter().filter(|checked| **checked == Ok(true)).count()
}

/// Without it the mutants would be refused for what the seeds have in common, and prove little.
#[tokio::test]
async fn the_seeds_are_served() {
    for model in [Model::Generative(0), Model::Embedder, Model::Classifier] {
        let server = model.start().await;
        for (path, body) in model.corpus() {
            let response = server.post(&path, &body).send().await.unwrap();
            let refused = body.get("suffix").is_some();
            let status = response.status();
            let text = response.text().await.unwrap_or_default();
            assert_eq!(status.is_success(), !refused, "{model:?} {path} {body}\n{text}");
        }
    }
}
