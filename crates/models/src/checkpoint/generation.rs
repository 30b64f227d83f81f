//! Generation defaults.

use crate::catalog::RecommendedSampling;

/// What the checkpoint's publisher recommends for sampling, and the ids that end a generation.
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
    /// Whether it recommends anything for sampling.
    pub fn recommends(&self) -> bool {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, .. } = self;
        let numbers = [temperature, top_p, min_p, repetition_penalty];
        numbers.into_iter().any(Option::is_some) || top_k.is_some()
    }

    /// Takes the catalog's recommendation, unless the checkpoint has one of its own. The two are never mixed: a mixture is
    /// one that nobody has tested.
    #[must_use]
    pub fn or(self, catalog: Option<&RecommendedSampling>) -> Self {
        let Some(catalog) = catalog.filter(|_| !self.recommends()) else { return self };
        let &RecommendedSampling { temperature, top_p, top_k, min_p, repetition_penalty, .. } = catalog;
        Self { temperature, top_p, top_k, min_p, repetition_penalty, ..self }
    }

    /// Adds an id unless it is there.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoints_own_recommendation_wins_as_a_whole() {
        let catalog = RecommendedSampling {
            temperature: Some(0.2),
            top_p: Some(0.9),
            top_k: None,
            min_p: None,
            repetition_penalty: None,
            source: "https://example.org".to_owned(),
        };
        let eos = GenerationConfig { eos_token_ids: vec![2], max_new_tokens: Some(9), ..GenerationConfig::default() };
        let completed = eos.clone().or(Some(&catalog));
        assert_eq!((completed.temperature, completed.top_p), (Some(0.2), Some(0.9)));
        assert_eq!((&completed.eos_token_ids, completed.max_new_tokens), (&eos.eos_token_ids, eos.max_new_tokens));
        let own = GenerationConfig { top_k: Some(20), ..eos };
        assert_eq!(own.clone().or(Some(&catalog)), own);
        assert_eq!(own.clone().or(None), own);
    }
}
