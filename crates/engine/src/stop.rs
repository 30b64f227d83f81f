//! When a sequence ends by itself.

use crate::{FinishReason, SamplingParams};

/// Whether `token`, just drawn, ends its sequence; `full` says that no further token fits.
///
/// End of sequence comes before stop ids, and both before length. `min_tokens` is not looked at: it keeps these ids from
/// being drawn.
pub(crate) fn stop_reason(params: &SamplingParams, token: u32, full: bool) -> Option<FinishReason> {
    if !params.ignore_eos && params.eos_token_ids.contains(&token) {
        Some(FinishReason::Stop { token: None })
    } else if params.stop_token_ids.contains(&token) {
        Some(FinishReason::Stop { token: Some(token) })
    } else if full {
        Some(FinishReason::Length)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_apply_in_order() {
        let mut params =
            SamplingParams { eos_token_ids: vec![1, 2], stop_token_ids: vec![2, 3], ..SamplingParams::default() };
        let eos = Some(FinishReason::Stop { token: None });
        assert_eq!(stop_reason(&params, 1, true), eos);
        assert_eq!(stop_reason(&params, 2, false), eos, "end of sequence before stop ids");
        assert_eq!(
            stop_reason(&params, 3, true),
            Some(FinishReason::Stop { token: Some(3) }),
            "stop ids before length"
        );
        assert_eq!(stop_reason(&params, 4, true), Some(FinishReason::Length));
        assert_eq!(stop_reason(&params, 4, false), None);

        params.ignore_eos = true;
        assert_eq!(stop_reason(&params, 1, false), None);
        assert_eq!(stop_reason(&params, 2, false), Some(FinishReason::Stop { token: Some(2) }));
    }
}
