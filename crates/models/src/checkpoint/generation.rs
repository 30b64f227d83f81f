//! Generation defaults.

/// Sampling defaults recommended by the checkpoint's publisher, and the ids that end a generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Temperature.
    pub temperature: Option<f32>,
    /// Nucleus probability.
    pub top_p: Option<f32>,
    /// Number of most likely tokens kept; 0 keeps all.
    pub top_k: Option<u32>,
    /// Minimum probability relative to the most likely token.
    pub min_p: Option<f32>,
    /// Penalty for tokens already seen; 1 turns it off.
    pub repetition_penalty: Option<f32>,
    /// Maximum number of generated tokens.
    pub max_new_tokens: Option<u32>,
    /// Ids that end a generation. The first is the actual end-of-sequence token.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationConfig {
    /// Adds an id unless it is already there.
    pub(crate) fn add_eos(&mut self, id: Option<u32>) {
        if let Some(id) = id
            && !self.eos_token_ids.contains(&id)
        {
            self.eos_token_ids.push(id);
        }
    }

    /// Drops invalid defaults with a warning, so that a bad recommendation does not fail every request.
    pub(crate) fn checked(mut self) -> Self {
        fn keep(value: &mut Option<f32>, name: &str, valid: impl Fn(f32) -> bool) {
            if let Some(x) = value.take_if(|x| !valid(*x)) {
                tracing::warn!("the checkpoint's default {name} of {x} is out of range and ignored");
            }
        }
        keep(&mut self.temperature, "temperature", |x| (0.0..=100.0).contains(&x));
        keep(&mut self.top_p, "top_p", |x| x > 0.0 && x <= 1.0);
        keep(&mut self.min_p, "min_p", |x| (0.0..=1.0).contains(&x));
        keep(&mut self.repetition_penalty, "repetition_penalty", |x| x > 0.0 && x.is_finite());
        self
    }
}
