//! Compares the default model with PyTorch on its dequantised weights, teacher-forced over varied prompts.

use octavo_backend_cpu::Isa;
use octavo_models::catalog::DEFAULT_MODEL;
use octavo_models::{Checkpoint, InspectOptions, build_program, inspect, testing};
use safetensors::SafeTensors;

use crate::support::{Session, instruction_sets, testdata, words};

/// Number of log-probabilities stored per position.
const TOP: usize = 8;
/// Difference of the log-probabilities of the two most likely tokens above which the first must be the same.
const CLEAR_MARGIN: f32 = 0.1;
/// Minimum share of clear positions with the same first token: in f32, and with 12-bit activations and a bf16 cache.
const AGREEMENT: [f64; 2] = [0.995, 0.99];
/// Maximum median difference of log-probabilities, in the same order.
const MEDIAN: [f64; 2] = [0.01, 0.03];
/// Number of texts for slow comparisons, unless this variable is set.
const FEW: usize = 4;
const ALL: &str = "OCTAVO_PARITY_ALL";

/// Content of `models/testdata/smollm2.safetensors`: N positions of several texts, concatenated.
struct Reference {
    ids: Vec<u32>,
    /// Start of each text: text t is `starts[t] .. starts[t + 1]`.
    starts: Vec<u32>,
    /// Most likely ids, `[N, TOP]`, in descending order.
    top_ids: Vec<u32>,
    /// Their log-probabilities, `[N, TOP]`.
    top_logprobs: Vec<f32>,
}

impl Reference {
    fn read() -> Self {
        let bytes = std::fs::read(testdata("smollm2.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let ids = |name| words(&file, name, u32::from_le_bytes);
        let top_logprobs = words(&file, "top_logprobs", f32::from_le_bytes);
        Self { ids: ids("ids"), starts: ids("starts"), top_ids: ids("top_ids"), top_logprobs }
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

    fn assert_parity(mut self, name: &str, least_agreement: f64, most_difference: f64) {
        assert!(self.differences.iter().all(|d| d.is_finite()));
        self.differences.sort_by(f64::total_cmp);
        let quantile = |q: f64| self.differences[((self.differences.len() - 1) as f64 * q) as usize];
        let agreement = self.agreeing as f64 / self.clear as f64;
        println!(
            "{DEFAULT_MODEL} on {name} against PyTorch: {} positions; top-1 the same at {} of the {} with a margin above {CLEAR_MARGIN} \
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
fn smollm2_q4_1_agrees_with_pytorch() {
    let Some(path) = testing::default_model() else { return };
    let reference = Reference::read();
    let texts: Vec<_> = reference.starts.windows(2).map(|w| w[0] as usize..w[1] as usize).collect();
    assert!(texts.len() >= 20);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let vocab = checkpoint.config().vocab_size;
    let program = build_program(&checkpoint).unwrap();
    let text = inspect(checkpoint.config(), &program, &InspectOptions::default());
    println!("{text}");
    assert!(text.contains("\n30 times:\n"), "the layers are alike");
    let capacity = texts.iter().map(ExactSizeIterator::len).max().unwrap();
    let tally = |mut session: Session, texts: &[std::ops::Range<usize>]| {
        let mut tally = Tally::default();
        for text in texts {
            session.restart();
            let logits = session.forward(&reference.ids[text.clone()]);
            for (row, position) in logits.chunks(vocab).zip(text.clone()) {
                let top = position * TOP..(position + 1) * TOP;
                tally.add(row, &reference.top_ids[top.clone()], &reference.top_logprobs[top]);
            }
        }
        tally
    };
    let few = if std::env::var_os(ALL).is_some() { &texts[..] } else { &texts[..FEW] };
    tally(Session::new(&checkpoint, capacity), few).assert_parity("candle", AGREEMENT[0], MEDIAN[0]);
    // The portable instruction set is slow, and its integers equal those of the others.
    for isa in instruction_sets().filter(|&isa| isa != Isa::Portable) {
        let session = Session::on_cpu(isa, &checkpoint, capacity);
        let texts = if isa >= Isa::Avx512 { &texts } else { few };
        tally(session, texts).assert_parity(isa.name(), AGREEMENT[1], MEDIAN[1]);
    }
}
