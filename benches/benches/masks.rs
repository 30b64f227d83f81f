//! What grammars cost a step: some rows write JSON that follows a schema, beside one row without a grammar, which waits for
//! their masks in every step.
//!
//! `cargo bench -p octavo-benches --bench masks -- [MODEL.gguf]`
//!
//! The vocabulary is that of `MODEL`, by default the default model, and the same vocabulary with longer tokens that are made
//! of it. The device is simulated: a step takes its time by the data sheet, and the engine waits for it. The time of a step
//! with masks is compared with that without, and with the device's own. Rows with a grammar take turns if their masks take longer
//! than the device.

use std::collections::HashSet;
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use octavo_bench::{Clock, Device, SimulatedExecutor, SimulatorConfig};
use octavo_engine::internals::ManualEngine;
use octavo_engine::{
    Constraint, EngineConfig, Executor, ExecutorError, KvCacheSpec, Request, SamplingParams, StepId, StepMasks,
    StepOutput, StepPlan, TokenOutput,
};
use octavo_models::{Checkpoint, GgufTokenizer, TokenizerData, build_program};
use octavo_ops::Program;
use octavo_telemetry::EngineMetrics;
use octavo_text::{GgufVocabulary, Grammar, GrammarCompiler, GrammarLimits, GrammarSpec, Tokenizer};
use serde_json::{Value, json};

/// Numbers of rows with a grammar.
const ROWS: [usize; 3] = [1, 32, 256];
/// Rows that begin together. The others begin later, so that the rows of a step are at different places of their texts.
const TOGETHER: usize = 4;
/// Number of tokens that the rows with a grammar write, in the mean, before steps count.
const BEFORE: usize = 80;
/// Number of steps that count.
const STEPS: usize = 120;
/// Number of tokens of the row without a grammar, which is in every step.
const MOST: u32 = 4000;
const PROMPT: u32 = 64;

/// A model whose steps are simulated.
struct Model {
    name: &'static str,
    vocab_size: usize,
    /// Hidden size, size of the gated activation, layers, query heads, KV heads.
    shape: [usize; 5],
}

const MODELS: [Model; 2] = [
    Model { name: "SmolLM2-135M", vocab_size: 49_152, shape: [576, 1536, 30, 9, 3] },
    Model { name: "Llama-3.1-8B", vocab_size: 128_256, shape: [4096, 14_336, 32, 32, 8] },
];

impl Model {
    fn program(&self) -> Result<Program, Box<dyn Error>> {
        let [hidden, inner, layers, heads, kv_heads] = self.shape;
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "vocab_size": self.vocab_size, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu", "tie_word_embeddings": true,
            "bos_token_id": 1, "eos_token_id": 2,
        });
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(self.name);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("config.json"), config.to_string())?;
        Ok(build_program(&Checkpoint::open_without_weights(&folder)?)?)
    }
}

/// Work of all constraints, in nanoseconds.
#[derive(Default)]
struct Work {
    fill: AtomicU64,
    accept: AtomicU64,
}

/// A constraint whose work is added up.
struct Timed {
    inner: Box<dyn Constraint>,
    work: Arc<Work>,
}

impl Constraint for Timed {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        let begun = Instant::now();
        self.inner.fill_mask(mask);
        self.work.fill.fetch_add(begun.elapsed().as_nanos() as u64, Relaxed);
    }

    fn accept(&mut self, token: u32) -> bool {
        let begun = Instant::now();
        let accepted = self.inner.accept(token);
        self.work.accept.fetch_add(begun.elapsed().as_nanos() as u64, Relaxed);
        accepted
    }

    fn rollback(&mut self, tokens: usize) {
        self.inner.rollback(tokens);
    }
}

/// The simulated device, whose rows draw the tokens of a text.
struct Scripted {
    inner: SimulatedExecutor,
    script: Arc<[u32]>,
    spare_masks: Vec<StepMasks>,
    in_use: Vec<StepMasks>,
    /// Steps that were complete.
    ends: Arc<Mutex<Vec<End>>>,
}

/// The end of a step.
struct End {
    at: Instant,
    /// Time that the device worked on the step.
    busy: Duration,
    /// Number of its rows with masks.
    masked: usize,
}

impl Executor for Scripted {
    fn kv_cache_spec(&self) -> &KvCacheSpec {
        self.inner.kv_cache_spec()
    }

    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn max_rows(&self) -> usize {
        self.inner.max_rows()
    }

    fn max_in_flight(&self) -> usize {
        self.inner.max_in_flight()
    }

    fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        self.inner.submit(plan)
    }

    fn sample(&mut self, step: StepId, masks: StepMasks) -> Result<(), ExecutorError> {
        self.in_use.push(masks);
        // What the simulator draws under masks is replaced, so it need not look for tokens that they allow.
        self.inner.sample(step, StepMasks::default())
    }

    fn wait(&mut self) -> Result<StepOutput, ExecutorError> {
        let mut output = self.inner.wait()?;
        for (row, token) in output.plan.rows.iter().zip(&mut output.tokens) {
            // The row without a grammar writes more than the text.
            token.id = self.script.get((row.position + 1 - PROMPT) as usize).copied().unwrap_or(PROMPT);
        }
        let masked = self.in_use.iter().map(|masks| masks.rows.len()).sum();
        self.spare_masks.append(&mut self.in_use);
        let end = End { at: Instant::now(), busy: output.busy, masked };
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).push(end);
        Ok(output)
    }

    fn spare_masks(&mut self) -> StepMasks {
        self.spare_masks.pop().unwrap_or_default()
    }

    fn recycle(&mut self, tokens: Vec<TokenOutput>) {
        self.inner.recycle(tokens);
    }
}

/// A vocabulary and what is written in it.
struct Text {
    grammar: Grammar,
    script: Arc<[u32]>,
}

impl Text {
    fn new(vocabulary: GgufTokenizer, vocab_size: usize) -> Result<Self, Box<dyn Error>> {
        let eos = vocabulary.eos_id.ok_or("the vocabulary has no end")?;
        let tokenizer = tokenizer(vocabulary)?;
        let compiler = GrammarCompiler::new(&tokenizer, vocab_size, &[eos], GrammarLimits::default())?;
        let spec = GrammarSpec::JsonSchema {
            schema: schema(),
            disable_any_whitespace: false,
            whitespace_pattern: None,
            disable_additional_properties: false,
        };
        let script: Arc<[u32]> = tokenizer.encode(&document(), false)?.into();
        if script.len() < BEFORE + STEPS + 2 {
            return Err(format!("the text has {} tokens, too few", script.len()).into());
        }
        Ok(Self { grammar: compiler.compile(&spec)?, script })
    }
}

fn schema() -> Value {
    let string = json!({"type": "string"});
    let address = json!({
        "type": "object",
        "properties": {"street": string, "city": string, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
        "required": ["street", "city", "zip"], "additionalProperties": false,
    });
    let person = json!({
        "type": "object",
        "properties": {
            "id": {"type": "integer"}, "name": string, "role": {"enum": ["admin", "editor", "viewer"]},
            "score": {"type": "number"}, "active": {"type": "boolean"}, "tags": {"type": "array", "items": string},
            "address": address,
        },
        "required": ["id", "name", "role", "score", "active", "tags", "address"], "additionalProperties": false,
    });
    json!({"type": "array", "items": person})
}

fn document() -> String {
    let people =
        [("Ada Lovelace", "London"), ("Grace Hopper", "New York"), ("Katherine Johnson", "White Sulphur Springs")];
    let roles = ["admin", "editor", "viewer"];
    let mut out = String::from("[");
    for (number, (name, city)) in people.iter().cycle().take(9).enumerate() {
        let separator = if number == 0 { "" } else { ", " };
        let role = roles[number % roles.len()];
        let _ = write!(
            out,
            "{separator}{{\"id\": {number}, \"name\": \"{name}\", \"role\": \"{role}\", \"score\": {number}.75, \
             \"active\": true, \"tags\": [\"mathematics\", \"early computing\"], \"address\": {{\"street\": \
             \"{number}7 Long Garden Street\", \"city\": \"{city}\", \"zip\": \"1000{number}\"}}}}"
        );
    }
    out + "]"
}

fn tokenizer(data: GgufTokenizer<'_>) -> Result<Tokenizer, Box<dyn Error>> {
    Ok(Tokenizer::from_gguf(&GgufVocabulary {
        model: data.model,
        pre: data.pre,
        tokens: data.tokens,
        scores: data.scores,
        token_types: data.token_types,
        merges: data.merges,
        bos_id: data.bos_id,
        eos_id: data.eos_id,
        unk_id: data.unk_id,
        pad_id: data.pad_id,
        add_bos: data.add_bos,
        add_eos: data.add_eos,
        add_space_prefix: data.add_space_prefix,
    })?)
}

/// Returns tokens that are two of the vocabulary put together, as many as are missing from a number of tokens.
fn missing(vocabulary: &GgufTokenizer<'_>, vocab_size: usize) -> Vec<String> {
    let own = vocabulary.tokens.len();
    let mut known: HashSet<String> = vocabulary.tokens.iter().map(|&token| token.into()).collect();
    let normal = |id: usize| vocabulary.token_types.get(id).is_none_or(|kind| *kind == 1);
    let (mut added, mut at) = (Vec::new(), 0);
    while own + added.len() < vocab_size {
        // Two strides that are prime to the size visit pairs of all kinds of tokens.
        let (first, second) = (at * 7919 % own, (at * 104_729 + at / own) % own);
        at += 1;
        let token = format!("{}{}", vocabulary.tokens[first], vocabulary.tokens[second]);
        if normal(first) && normal(second) && known.insert(token.clone()) {
            added.push(token);
        }
    }
    added
}

/// Adds tokens to a vocabulary.
fn extended<'a>(mut vocabulary: GgufTokenizer<'a>, added: &'a [String]) -> GgufTokenizer<'a> {
    vocabulary.tokens.extend(added.iter().map(String::as_str));
    let size = vocabulary.tokens.len();
    if !vocabulary.token_types.is_empty() {
        vocabulary.token_types.resize(size, 1);
    }
    if !vocabulary.scores.is_empty() {
        vocabulary.scores.resize(size, 0.0);
    }
    vocabulary
}

/// Steps of a number of rows, beside one without a grammar.
struct Run {
    /// Times of steps, ascending.
    steps: Vec<Duration>,
    /// Mean time that the device works on a step.
    busy: Duration,
    /// Median of the time of a step beyond that of the device, in times of the latter.
    beyond: f64,
    /// Number of rows with masks in all steps.
    masked: usize,
    /// Work of all constraints.
    fill: Duration,
    accept: Duration,
}

impl Run {
    fn new(program: &Arc<Program>, text: &Text, rows: usize, masked: bool) -> Result<Self, Box<dyn Error>> {
        let clock = Clock::Real { speed_up: 1.0 };
        let config = SimulatorConfig { clock, max_num_seqs: rows + 1, ..SimulatorConfig::default() };
        let inner = SimulatedExecutor::new(program.clone(), Device::H100, config)?;
        let ends = Arc::<Mutex<Vec<End>>>::default();
        let (script, spare_masks, in_use) = (text.script.clone(), Vec::new(), Vec::new());
        let executor = Scripted { inner, script, spare_masks, in_use, ends: ends.clone() };
        let config = EngineConfig { max_num_seqs: rows + 1, max_model_len: 8192, ..EngineConfig::default() };
        let mut engine = ManualEngine::new(Box::new(executor), config, EngineMetrics::disabled())?;
        let work = Arc::new(Work::default());
        let mut streams = Vec::new();
        for number in 0..=rows {
            let max_tokens = if number == 0 { MOST } else { (BEFORE + STEPS + 1) as u32 };
            let params = SamplingParams { max_tokens, ..SamplingParams::default() };
            let constraint = (masked && number > 0).then(|| {
                Box::new(Timed { inner: text.grammar.constraint(), work: work.clone() }) as Box<dyn Constraint>
            });
            let prompt: Arc<[u32]> = (0..PROMPT).map(|place| place + 5 * number as u32 + 100).collect();
            let request = Request { constraint, ..Request::new(number.to_string(), prompt, params) };
            streams.push(engine.submit(request)?);
            if number % TOGETHER == 0 {
                engine.turn();
            }
        }
        // Steps, and rows with masks in them.
        let count = || {
            let ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
            (ends.len(), ends.iter().map(|end| end.masked).sum::<usize>())
        };
        let least = if masked { BEFORE * rows } else { 0 };
        Self::turns(&mut engine, || count().0 > BEFORE && count().1 >= least)?;
        let first = count().0;
        work.fill.store(0, Relaxed);
        work.accept.store(0, Relaxed);
        Self::turns(&mut engine, || count().0 >= first + STEPS)?;
        let ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Self::of(&ends[first - 1..], &work))
    }

    /// Sums up steps, of which the first only begins the others.
    fn of(ends: &[End], work: &Work) -> Self {
        let mut steps: Vec<Duration> = ends.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
        let ends = &ends[1..];
        let beyond = |(step, end): (&Duration, &End)| step.as_secs_f64() / end.busy.as_secs_f64() - 1.0;
        let mut all_beyond: Vec<f64> = steps.iter().zip(ends).map(beyond).collect();
        all_beyond.sort_unstable_by(f64::total_cmp);
        steps.sort_unstable();
        let of = |nanos: &AtomicU64| Duration::from_nanos(nanos.load(Relaxed));
        Self {
            beyond: all_beyond[all_beyond.len() / 2],
            busy: ends.iter().map(|end| end.busy).sum::<Duration>() / ends.len() as u32,
            masked: ends.iter().map(|end| end.masked).sum(),
            steps,
            fill: of(&work.fill),
            accept: of(&work.accept),
        }
    }

    fn turns(engine: &mut ManualEngine, done: impl Fn() -> bool) -> Result<(), Box<dyn Error>> {
        while !done() {
            if !engine.turn() {
                return Err("the engine has nothing to do".into());
            }
        }
        Ok(())
    }

    fn at(&self, share: f64) -> f64 {
        self.steps[((self.steps.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3
    }
}

fn run(path: &Path) -> Result<(), Box<dyn Error>> {
    let checkpoint = Checkpoint::open(path)?;
    let TokenizerData::Gguf(vocabulary) = checkpoint.tokenizer()? else {
        return Err(format!("{}: not a GGUF file", path.display()).into());
    };
    let threads = available_parallelism().map_or(1, usize::from);
    println!("milliseconds of a step, its median and its 90th percentile; {threads} processors");
    for model in MODELS {
        let program = Arc::new(model.program()?);
        let added = missing(&vocabulary, model.vocab_size);
        let text = Text::new(extended(vocabulary.clone(), &added), model.vocab_size)?;
        println!("\n{} on one H100, {} tokens of vocabulary", model.name, model.vocab_size);
        println!(
            "rows | without masks: step, of the device | with masks: step, of the device, beyond it | rows, a second | fill, accept (µs)"
        );
        for rows in ROWS {
            let plain = Run::new(&program, &text, rows, false)?;
            let masked = Run::new(&program, &text, rows, true)?;
            let each = |time: Duration| time.as_secs_f64() * 1e6 / masked.masked.max(1) as f64;
            let seconds = masked.steps.iter().sum::<Duration>().as_secs_f64();
            println!(
                "{rows:4} | {plain} | {masked}, {:5.2} of its time | {:.1}, {:.0} | {:.1}, {:.1}",
                masked.beyond,
                masked.masked as f64 / masked.steps.len() as f64,
                masked.masked as f64 / seconds,
                each(masked.fill),
                each(masked.accept),
            );
        }
    }
    Ok(())
}

impl std::fmt::Display for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:6.2} to {:6.2}, {:6.2}", self.at(0.5), self.at(0.9), self.busy.as_secs_f64() * 1e3)
    }
}

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test` also builds and runs benches, but only for their smoke tests; this one has none.
    let Some(at) = arguments.iter().position(|argument| argument == "--bench") else { return ExitCode::SUCCESS };
    arguments.remove(at);
    let path = arguments.into_iter().next().map_or_else(octavo_models::testing::default_model, PathBuf::from);
    match run(&path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
