//! Tests of what the metrics say about requests that fail.

use super::tests::{Rig, both_depths, read, tokens};
use crate::mock::{FailurePoint, MockConfig, MockFailure};
use crate::{EngineConfig, FinishReason};

/// As in vLLM, a failed request ends in the histograms of its sizes and of the times that it has reached.
#[test]
fn a_request_that_fails_in_its_first_step_has_no_times_of_tokens() {
    both_depths(|mock| {
        let failures = vec![MockFailure { step: 1, at: FailurePoint::Wait, fatal: false }];
        let mut rig = Rig::new(MockConfig { failures, ..mock }, EngineConfig::default());
        let mut stream = rig.submit(&[1, 2], &tokens(8));
        rig.run();
        assert!(matches!(read(&mut stream).0[0].finish, Some(FinishReason::Error(_))));
        assert_eq!(rig.metric(r#"request_success_total{finished_reason="error"}"#), 1.0);
        for (histogram, count) in [
            ("e2e_request_latency_seconds", 1.0),
            ("request_queue_time_seconds", 1.0),
            ("request_prompt_tokens", 1.0),
            ("request_generation_tokens", 1.0),
            ("time_to_first_token_seconds", 0.0),
            ("inter_token_latency_seconds", 0.0),
            ("request_prefill_time_seconds", 0.0),
            ("request_decode_time_seconds", 0.0),
            ("request_inference_time_seconds", 0.0),
            ("request_time_per_output_token_seconds", 0.0),
        ] {
            assert_eq!(rig.metric(&format!("{histogram}_count")), count, "{histogram}");
        }
    });
}
