//! A server on a port of its own, and what tests ask of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use octavo_engine::mock::{MockConfig, MockExecutor};
use octavo_engine::{
    Engine, EngineConfig, EngineHandle, Executor, ExecutorError, ImageSpec, KvCacheSpec, StepCost, StepId, StepMasks,
    StepOutput, StepPlan, TokenOutput,
};
use octavo_server::{
    Activation, Adapters, ApiKeys, Matryoshka, PairFormat, PoolingConfig, PoolingKind, Server, ServerConfig,
    ServerError, Shutdown, TextModel,
};
use octavo_telemetry::{Telemetry, TelemetryConfig, TraceConfig, Traces};
use octavo_text::{ChatTemplate, ReasoningSyntax, SpecialTokens, Tokenizer, ToolSyntax};
use reqwest::{Client, RequestBuilder, Response};
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::adapters::FakeLoader;
pub use crate::vocabulary::{IM_END, VOCAB, WORDS, id, tokenizer};
use crate::vocabulary::{TEMPLATE, build};

/// The ids of words.
pub fn script(words: &[&str]) -> Option<Arc<[u32]>> {
    Some(words.iter().map(|word| id(word)).collect())
}

/// Lets steps end one by one; dropped, it lets them all.
pub struct Gate(Sender<()>);

impl Gate {
    /// Lets the oldest step end.
    pub fn step(&self) {
        self.0.send(()).unwrap();
    }
}

/// A prompt and the position of its second text.
pub type Seen = (Vec<u32>, Option<u32>);

/// A mock that remembers its prompts, and whose steps end when the test says so.
struct Watched {
    inner: MockExecutor,
    gate: Option<Receiver<()>>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Executor for Watched {
    fn kv_cache_spec(&self) -> &KvCacheSpec {
        self.inner.kv_cache_spec()
    }

    fn adapter_slots(&self) -> usize {
        self.inner.adapter_slots()
    }

    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn max_rows(&self) -> usize {
        self.inner.max_rows()
    }

    fn image_spec(&self) -> Option<ImageSpec> {
        self.inner.image_spec()
    }

    fn max_in_flight(&self) -> usize {
        self.inner.max_in_flight()
    }

    fn step_cost(&self) -> Option<Box<dyn StepCost>> {
        self.inner.step_cost()
    }

    fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        let joined = plan.joined.iter().map(|joined| (joined.prompt.to_vec(), joined.second_text));
        self.seen.lock().unwrap().extend(joined);
        self.inner.submit(plan)
    }

    fn sample(&mut self, step: StepId, masks: StepMasks) -> Result<(), ExecutorError> {
        self.inner.sample(step, masks)
    }

    fn wait(&mut self) -> Result<StepOutput, ExecutorError> {
        if let Some(gate) = &self.gate {
            // An error says that the gate is gone: it stays open.
            let _ = gate.recv();
        }
        self.inner.wait()
    }

    fn recycle(&mut self, rows: Vec<TokenOutput>) {
        self.inner.recycle(rows);
    }

    fn spare_masks(&mut self) -> StepMasks {
        self.inner.spare_masks()
    }
}

/// What a test server is made of; the default says "Hello world!" and ends.
pub struct Setup {
    pub mock: MockConfig,
    pub engine: EngineConfig,
    pub config: ServerConfig,
    /// Tokens beside words and specials.
    more_tokens: &'static [&'static str],
    /// A tokenizer with other rules.
    pub tokenizer: Option<Tokenizer>,
    /// The chat template.
    pub template: &'static str,
    gate: Option<Receiver<()>>,
    traces: Option<TraceConfig>,
    adapters: Option<Adapters>,
}

/// Maximum number of running sequences, unless a test sets another.
const MAX_NUM_SEQS: usize = 512;

impl Default for Setup {
    fn default() -> Self {
        Self {
            mock: MockConfig {
                vocab_size: VOCAB,
                tokens: 256..256 + WORDS.len() as u32,
                script: script(&["Hello", " world", "!", "<|im_end|>"]),
                blocks: 8193,
                max_rows: MAX_NUM_SEQS + 64,
                verify: false,
                ..MockConfig::default()
            },
            engine: EngineConfig { max_model_len: 4096, max_num_seqs: MAX_NUM_SEQS, ..EngineConfig::default() },
            config: ServerConfig {
                served_model_names: vec!["mock".into(), "alias".into()],
                model_root: "root/of/mock".into(),
                max_model_len: 4096,
                vocab_size: VOCAB,
                embedding_size: MockConfig::default().hidden_size,
                eos_token_ids: vec![IM_END],
                version: "0.0.0".into(),
                shutdown_lag: Duration::ZERO,
                ..ServerConfig::default()
            },
            more_tokens: &[],
            tokenizer: None,
            template: TEMPLATE,
            gate: None,
            traces: None,
            adapters: None,
        }
    }
}

impl Setup {
    /// Generates these words, over and over.
    pub fn saying(words: &[&str]) -> Self {
        let mut setup = Self::default();
        setup.mock.script = script(words);
        setup
    }

    /// Generates this text, a byte a token, and ends.
    pub fn writing(text: &str) -> Self {
        let mut setup = Self::default();
        setup.mock.script = Some(text.bytes().map(u32::from).chain([IM_END]).collect());
        setup
    }

    /// Generates this text, a byte a token, in which the markers are special tokens, and ends.
    pub fn marked(markers: &'static [&'static str], text: &str) -> Self {
        let mut setup = Self::default();
        let (mut script, mut rest) = (Vec::new(), text);
        while let Some(&byte) = rest.as_bytes().first() {
            let marker = markers.iter().position(|marker| rest.starts_with(marker));
            script.push(marker.map_or(byte.into(), |index| (VOCAB + index) as u32));
            rest = &rest[marker.map_or(1, |index| markers[index].len())..];
        }
        setup.mock.script = Some(script.into_iter().chain([IM_END]).collect());
        setup.more_tokens = markers;
        (setup.mock.vocab_size, setup.config.vocab_size) = (VOCAB + markers.len(), VOCAB + markers.len());
        setup
    }

    /// Generates this text after this reasoning, whose markers are tokens.
    pub fn reasoning(reasoning: &str, text: &str) -> Self {
        let mut setup = Self::marked(&["<think>", "</think>"], &format!("<think>{reasoning}</think>{text}"));
        setup.config.api.reasoning = Some(ReasoningSyntax::Qwen3);
        setup
    }

    /// Generates this text of gpt-oss.
    pub fn gpt_oss(text: &str) -> Self {
        let markers =
            &["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];
        let mut setup = Self::marked(markers, text);
        (setup.config.api.tools, setup.config.api.reasoning) =
            (Some(ToolSyntax::OpenAi), Some(ReasoningSyntax::OpenAiGptOss));
        setup
    }

    /// Generates words that depend on everything before, and on the seed.
    pub fn varied() -> Self {
        let mut setup = Self::default();
        setup.mock.script = None;
        setup
    }

    /// Serves adapters: the mock has room for one at a time. A folder `good` has one, `bad` a damaged one.
    pub fn adapted() -> Self {
        let mut setup = Self::varied();
        setup.mock.adapter_slots = 1;
        setup.config.adapter_routes = true;
        let folder = Some(PathBuf::from("/adapters"));
        setup.adapters = Some(Adapters::new(FakeLoader, folder, setup.config.served_model_names.clone(), 8));
        setup
    }

    /// Talks for longer than any test lasts, 20 ms a token.
    pub fn endless() -> Self {
        let mut setup = Self::saying(&[" one", " two"]);
        setup.mock.step_latency = Duration::from_millis(20);
        setup
    }

    /// Returns vectors of eight elements.
    pub fn embedder() -> Self {
        Self::pooling(PoolingKind::Embedder { normalise: true, matryoshka: Matryoshka::Any })
    }

    /// Returns a score for each label.
    pub fn classifier(labels: &[&str], activation: Activation) -> Self {
        let labels: Vec<String> = labels.iter().map(|&label| label.to_owned()).collect();
        let mut setup = Self::pooling(PoolingKind::Classifier { labels: labels.clone(), activation });
        setup.mock.hidden_size = labels.len();
        setup
    }

    fn pooling(kind: PoolingKind) -> Self {
        let mut setup = Self { tokenizer: Some(encoder_tokenizer()), ..Self::default() };
        let pairs = PairFormat::Template { token_types: true };
        setup.config.pooling =
            Some(PoolingConfig { kind, tokens: true, pairs, lowercase: false, prompts: BTreeMap::new() });
        setup
    }

    /// The configuration of a pooling model.
    pub fn pools(&mut self) -> &mut PoolingConfig {
        self.config.pooling.as_mut().unwrap()
    }

    /// Draws no token before it is told to.
    pub fn gated(mut self) -> (Self, Gate) {
        let (open, gate) = channel();
        self.gate = Some(gate);
        (self, Gate(open))
    }

    /// Sends traces there over HTTP.
    pub fn traced(mut self, endpoint: &str) -> Self {
        let variable = |name: &str| (name == "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL").then(|| "http/protobuf".into());
        self.traces = TraceConfig::new(Some(endpoint), false, &variable).unwrap();
        self
    }

    /// Everything but the socket.
    pub fn compose(self) -> (Server, Engine, Telemetry) {
        let (server, engine, telemetry, _) = self.compose_watched();
        (server, engine, telemetry)
    }

    fn compose_watched(self) -> (Server, Engine, Telemetry, Arc<Mutex<Vec<Seen>>>) {
        let max_model_len = self.config.max_model_len;
        let telemetry = Telemetry::new(TelemetryConfig { model_name: "mock".into(), engine: 0, max_model_len });
        let seen = Arc::new(Mutex::new(vec![]));
        let executor = Watched { inner: MockExecutor::new(self.mock), gate: self.gate, seen: Arc::clone(&seen) };
        let engine = Engine::spawn(Box::new(executor), self.engine, telemetry.engine()).unwrap();
        let tokenizer = Arc::new(self.tokenizer.unwrap_or_else(|| tokenizer(self.more_tokens)));
        let template = ChatTemplate::new(self.template, tokenizer.special()).unwrap();
        let text = TextModel { tokenizer, template: Some(Arc::new(template)), images: None };
        (Server::new(engine.handle(), text, telemetry.clone(), self.config, self.adapters), engine, telemetry, seen)
    }

    /// Serves on a free port.
    pub async fn start(self) -> TestServer {
        let config = self.traces.clone();
        let (server, engine, telemetry, seen) = self.compose_watched();
        let traces = config.map(|config| telemetry.start_traces(&config).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = Shutdown::new();
        let keys = server.keys();
        let task = tokio::spawn(server.serve(listener, shutdown.clone()));
        let url = format!("http://{address}");
        let client = Client::builder().no_proxy().build().unwrap();
        let handle = engine.handle();
        TestServer { url, client, telemetry, keys, shutdown, task, traces, handle, seen, _engine: engine }
    }
}

/// A running server; gone when dropped.
pub struct TestServer {
    pub url: String,
    pub client: Client,
    pub telemetry: Telemetry,
    pub keys: ApiKeys,
    pub shutdown: Shutdown,
    pub task: JoinHandle<Result<(), ServerError>>,
    /// Sends the last spans when taken and dropped.
    pub traces: Option<Traces>,
    pub handle: EngineHandle,
    /// The prompts that the engine has begun, in their order.
    pub seen: Arc<Mutex<Vec<Seen>>>,
    _engine: Engine,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl TestServer {
    pub fn address(&self) -> &str {
        self.url.trim_start_matches("http://")
    }

    pub async fn get(&self, path: &str) -> Response {
        self.client.get(format!("{}{path}", self.url)).send().await.unwrap()
    }

    pub fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.url)).header("x-request-id", "r").json(body)
    }

    /// A chat request with `rest` beside its message.
    pub fn chat(&self, rest: Value) -> RequestBuilder {
        self.post("/v1/chat/completions", &with(json!({"messages": [{"role": "user", "content": "hi"}]}), rest))
    }

    /// A completion request with `rest`.
    pub fn completion(&self, rest: Value) -> RequestBuilder {
        self.post("/v1/completions", &with(json!({"prompt": "hi"}), rest))
    }

    /// A request for far more tokens than a test waits for.
    pub fn long(&self, stream: bool) -> RequestBuilder {
        self.chat(json!({"max_tokens": 4000, "ignore_eos": true, "stream": stream}))
    }

    /// Waits until the engine has nothing left: no request and no block.
    pub async fn idle(&self) {
        self.until("the engine is idle", |server| {
            let status = server.handle.status();
            (status.running, status.waiting, status.blocks_used) == (0, 0, 0)
        })
        .await;
    }

    /// Waits until the engine has begun a prompt.
    pub async fn begun(&self) {
        self.until("a prompt is begun", |server| !server.seen.lock().unwrap().is_empty()).await;
    }

    /// Waits until `sequences` run.
    pub async fn running(&self, sequences: usize) {
        self.until("sequences run", |server| server.handle.status().running == sequences).await;
    }

    /// Waits for something that happens on another thread without telling.
    pub async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let mut tick = tokio::time::interval(Duration::from_millis(1));
        let wait = async {
            while !condition(self) {
                tick.tick().await;
            }
        };
        let status = || self.handle.status();
        tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("{what}: {:?}", status()));
    }

    /// The value of a series.
    pub fn metric(&self, series: &str) -> f64 {
        let text = self.telemetry.render();
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no series {series} in {text}")).parse().unwrap()
    }
}

/// The keys of both; those of `rest` win.
pub fn with(mut base: Value, rest: Value) -> Value {
    let object = base.as_object_mut().unwrap();
    for (key, value) in rest.as_object().unwrap() {
        object.insert(key.clone(), value.clone());
    }
    base
}

/// The JSON body of a response that must be 200.
pub async fn ok(request: RequestBuilder) -> Value {
    let response = request.send().await.unwrap();
    let status = response.status();
    let text = response.text().await.unwrap();
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// The text of a response that must be 200, with its time of creation zeroed.
pub async fn text(request: RequestBuilder) -> String {
    let response = request.send().await.unwrap();
    let status = response.status();
    let text = response.text().await.unwrap();
    assert_eq!(status, 200, "{text}");
    without_time(&text)
}

/// Reads a stream whose every step must send exactly `expected`, one entry a step.
pub async fn step_by_step(request: RequestBuilder, gate: &Gate, expected: &[String]) {
    let mut steps = expected.iter();
    gate.step();
    let mut response = request.send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(response.headers()["x-accel-buffering"], "no");
    let mut wanted = steps.next().unwrap().clone();
    let mut sent = String::new();
    loop {
        while without_time(&sent).len() < wanted.len() {
            let Some(chunk) = response.chunk().await.unwrap() else { break };
            sent.push_str(std::str::from_utf8(&chunk).unwrap());
        }
        assert_eq!(without_time(&sent), wanted);
        sent.clear();
        let Some(next) = steps.next() else { break };
        wanted.clone_from(next);
        gate.step();
    }
    assert_eq!(response.chunk().await.unwrap(), None, "the stream is over");
}

/// Zeroes every `created`.
pub fn without_time(text: &str) -> String {
    let mut parts = text.split("\"created\":");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push_str("\"created\":0");
        out.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    out
}

/// The events of a stream that must end as it should.
pub async fn events(request: RequestBuilder) -> Vec<Value> {
    parse_events(&text(request).await)
}

pub fn parse_events(text: &str) -> Vec<Value> {
    let mut events: Vec<&str> = text.split_terminator("\n\n").collect();
    assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
    let event = |event: &str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
    events.into_iter().map(event).collect()
}

/// What a stream's chunks add up to, for one choice.
pub fn joined(events: &[Value], index: u64) -> String {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    let own = choices.filter(|choice| choice["index"] == index);
    own.map(|choice| choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap()).collect()
}

/// The usual tokenizer, which puts a text between `<|im_start|>` and `<|im_end|>` and adds another `<|im_end|>` after the
/// second text of a pair, as BERT does it with `[CLS]` and `[SEP]`.
fn encoder_tokenizer() -> Tokenizer {
    let special = |token: &str, kind: u32| json!({"SpecialToken": {"id": token, "type_id": kind}});
    let text = |name: &str, kind: u32| json!({"Sequence": {"id": name, "type_id": kind}});
    let single = [special("<|im_start|>", 0), text("A", 0), special("<|im_end|>", 0)];
    let second = [text("B", 1), special("<|im_end|>", 1)];
    let tokens = ["<|im_start|>", "<|im_end|>"]
        .map(|token| (token.to_owned(), json!({"id": token, "ids": [id(token)], "tokens": [token]})));
    let (pair, tokens) = ([&single[..], &second[..]].concat(), Map::from_iter(tokens));
    let template = json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens});
    build(&[], &template, SpecialTokens { pad: Some("<|endoftext|>".into()), ..SpecialTokens::default() })
}
