//! Compares hidden states with PyTorch's logits: the head has full column rank, so only one hidden state gives the
//! logits of a position.

use octavo_models::Checkpoint;
use octavo_ops::{StorageType, WeightSource};

use crate::support::{Golden, Session, checkpoint, relative_difference};

/// Tolerance, as in the comparison of logits.
const TOLERANCE: f32 = 2e-5;

/// Returns the rows of the head from the checkpoint's own tensor.
fn head(checkpoint: &Checkpoint) -> Vec<Vec<f64>> {
    let config = checkpoint.config();
    let name = if config.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
    let tensor = checkpoint.tensor(name).unwrap();
    assert_eq!(tensor.shape, [config.vocab_size, config.hidden_size]);
    let values: Vec<f64> = match tensor.storage {
        StorageType::F32 => tensor.bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        StorageType::BF16 => {
            let widened = |b: &[u8; 2]| f64::from(f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16));
            tensor.bytes.as_chunks().0.iter().map(widened).collect()
        }
        other => panic!("no test checkpoint has a head in {other}"),
    };
    values.chunks(config.hidden_size).map(<[f64]>::to_vec).collect()
}

fn check(name: &str) {
    let golden = Golden::read(name);
    let checkpoint = checkpoint(name);
    let head = head(&checkpoint);
    let mut session = Session::new(&checkpoint, golden.ids.len());
    for chunk in [golden.ids.len(), 7, 1] {
        session.restart();
        let mut found = Vec::new();
        for ids in golden.ids.chunks(chunk) {
            session.forward(ids);
            for hidden in session.embeddings().chunks(checkpoint.config().hidden_size) {
                let logit = |row: &Vec<f64>| row.iter().zip(hidden).map(|(w, h)| w * f64::from(*h)).sum::<f64>() as f32;
                found.extend(head.iter().map(logit));
            }
        }
        let difference = relative_difference(&found, &golden.logits);
        println!("{name}, chunks of {chunk}: largest difference {difference:.1e} of the largest logit");
        assert!(difference <= TOLERANCE, "{name}, chunks of {chunk}: {difference}");
    }
}

#[test]
fn llama() {
    check("llama");
}

#[test]
fn qwen3() {
    check("qwen3");
}

#[test]
fn mistral_with_a_sliding_window() {
    check("mistral");
}
