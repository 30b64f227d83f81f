//! Tests of requests with images.

use std::sync::Arc;
use std::time::Duration;

use super::tests::{Rig, both_depths, ids, read, request, tokens};
use super::*;
use crate::mock::{FailurePoint, MockConfig, MockFailure};
use crate::{ImageHash, ImageInput, ImageSpan, PromptImage, Request, RequestStream, SamplingParams, SubmitError};

/// Returns an image of one row whose patches all are `content`.
fn image(content: u8, start: u32, tokens: u32) -> PromptImage {
    let patches = Box::new(vec![content; 4 * tokens as usize]);
    let input = Arc::new(ImageInput { rows: 2, cols: 2 * tokens, patches });
    PromptImage { span: ImageSpan { start, rows: 1, cols: tokens }, hash: ImageHash([content; 32]), input }
}

/// A prompt of ten tokens of text, images, and three tokens of text, and the tokens that a request for four gets.
struct Case {
    prompt: Vec<u32>,
    images: Vec<PromptImage>,
    expected: Vec<u32>,
}

impl Case {
    fn new(text: u32, images: &[(u8, u32)]) -> Self {
        let mut prompt: Vec<u32> = (text..text + 10).collect();
        let place = |&(content, tokens): &(u8, u32)| {
            let image = image(content, prompt.len() as u32, tokens);
            prompt.extend(vec![300; tokens as usize]);
            image
        };
        let images: Vec<_> = images.iter().map(place).collect();
        prompt.extend([7, 8, 9]);
        let mock = MockConfig::default();
        let expected = mock.expected_output(&mock.with_images(&prompt, &images), &tokens(4), 2048);
        Self { prompt, images, expected }
    }

    fn request(&self) -> Request {
        Request { images: self.images.as_slice().into(), ..request(&self.prompt, &tokens(4)) }
    }

    fn submit(&self, rig: &Rig) -> RequestStream {
        rig.manual.submit(self.request()).unwrap()
    }

    /// Runs the request alone and returns the number of prompt tokens found in the prefix cache.
    fn run(&self, rig: &mut Rig) -> u32 {
        let mut stream = self.submit(rig);
        rig.run();
        self.check(&mut stream)
    }

    fn check(&self, stream: &mut RequestStream) -> u32 {
        let (events, ended) = read(stream);
        assert!(ended);
        assert_eq!(ids(&events), self.expected);
        events[0].cached_tokens.unwrap()
    }
}

fn config(tokens: usize) -> EngineConfig {
    EngineConfig { max_num_batched_tokens: tokens, max_num_encoder_tokens: 20, ..EngineConfig::default() }
}

fn rig(mock: &MockConfig, rows: usize, config: EngineConfig) -> Rig {
    Rig::new(MockConfig { media_rows: rows, block_size: 4, ..mock.clone() }, config)
}

#[test]
fn an_image_changes_the_output_and_is_encoded_once_in_any_chunks() {
    both_depths(|mock| {
        let case = Case::new(0, &[(1, 9), (2, 3)]);
        assert_ne!(case.expected, Case::new(0, &[(2, 9), (1, 3)]).expected);
        for chunk in [1, 2, 7, 11, 100] {
            let mut rig = rig(&mock, 12, config(chunk));
            case.run(&mut rig);
            assert_eq!(rig.counters.encoded_images(), 2, "chunks of {chunk}");
        }
    });
}

#[test]
fn a_prefix_hit_needs_no_encoder() {
    both_depths(|mock| {
        let mut rig = rig(&mock, 9, config(100));
        let case = Case::new(0, &[(1, 9)]);
        assert_eq!(case.run(&mut rig), 0);
        // The other image takes all rows of the encoder cache.
        Case::new(100, &[(2, 9)]).run(&mut rig);
        let lookups = rig.metric("encoder_cache_queries_total");
        assert_eq!(case.run(&mut rig), 20);
        assert_eq!(rig.counters.encoded_images(), 2);
        assert_eq!(rig.metric("encoder_cache_queries_total"), lookups, "nor a lookup");
        // A prompt that ends soon after the image leaves some of the image to compute.
        let (mut prompt, images) = (case.prompt.clone(), case.images.clone());
        prompt.truncate(19);
        let short = Case { expected: Vec::new(), prompt, images };
        let mut stream = short.submit(&rig);
        rig.run();
        let (events, _) = read(&mut stream);
        let mock = MockConfig::default();
        let expected = mock.expected_output(&mock.with_images(&short.prompt, &short.images), &tokens(4), 2048);
        assert_eq!((ids(&events), events[0].cached_tokens), (expected, Some(16)));
        assert_eq!(rig.counters.encoded_images(), 3);
    });
}

#[test]
fn requests_share_an_image() {
    both_depths(|mock| {
        let mut rig = rig(&mock, 30, EngineConfig { enable_prefix_caching: false, ..config(100) });
        let cases = [0, 100, 200].map(|text| Case::new(text, &[(1, 9)]));
        let mut streams = [cases[0].submit(&rig), cases[1].submit(&rig)];
        rig.run();
        for (stream, case) in streams.iter_mut().zip(&cases) {
            case.check(stream);
        }
        cases[2].run(&mut rig);
        assert_eq!(rig.counters.encoded_images(), 1, "in one step and in a later one");
        assert_eq!(rig.metric("encoder_cache_queries_total"), 3.0);
        assert_eq!(rig.metric("encoder_cache_hits_total"), 2.0);
    });
}

#[test]
fn images_share_the_budget_and_the_cache_in_turn() {
    both_depths(|mock| {
        // Two images fit the budget of a step, one and a half the cache.
        let mut rig = rig(&mock, 14, EngineConfig { max_num_batched_tokens: 15, ..config(100) });
        let cases = [0, 1, 2, 3].map(|n: u8| Case::new(100 * u32::from(n), &[(n, 9), (10 + n, 5), (20 + n, 10)]));
        let mut streams = cases.each_ref().map(|case| case.submit(&rig));
        rig.run();
        for (stream, case) in streams.iter_mut().zip(&cases) {
            case.check(stream);
        }
        assert_eq!(rig.counters.encoded_images(), 12);
        assert!(rig.counters.most_encoded_tokens() <= 14);
    });
}

#[test]
fn a_prompt_is_cut_at_images_that_exceed_the_budget_together() {
    both_depths(|mock| {
        for chunked in [true, false] {
            let config = EngineConfig { enable_chunked_prefill: chunked, ..config(4096) };
            let mut rig = rig(&mock, 100, config);
            Case::new(0, &[(1, 15), (2, 15), (3, 15)]).run(&mut rig);
            assert_eq!((rig.counters.encoded_images(), rig.counters.most_encoded_tokens()), (3, 15));
        }
    });
}

#[test]
fn a_request_whose_image_waits_for_a_step_lets_others_pass() {
    both_depths(|mock| {
        let mut rig = rig(&mock, 40, config(100));
        let images = [1, 2].map(|n: u8| {
            let (prompt, images) = ([vec![300; 15], vec![7, 8, 9]].concat(), vec![image(n, 0, 15)]);
            let expected = mock.expected_output(&mock.with_images(&prompt, &images), &tokens(4), 2048);
            Case { prompt, images, expected }
        });
        let mut streams = images.each_ref().map(|case| case.submit(&rig));
        let text = Case::new(300, &[]);
        let mut passing = text.submit(&rig);
        rig.manual.turn();
        assert_eq!(rig.manual.engine.scheduler.running(), 2, "the second image exceeds the budget of the step");
        rig.run();
        text.check(&mut passing);
        for (stream, case) in streams.iter_mut().zip(&images) {
            case.check(stream);
        }
    });
}

#[test]
fn preempted_requests_with_images_come_back() {
    both_depths(|mock| {
        for enable_prefix_caching in [true, false] {
            let mock = MockConfig { media_rows: 20, block_size: 4, blocks: 17, ..mock.clone() };
            let config = EngineConfig { max_model_len: 64, enable_prefix_caching, ..config(6) };
            let mut rig = Rig::new(mock.clone(), config);
            let params = tokens(30);
            let cases = [1, 2, 3].map(|n: u8| Case::new(100 * u32::from(n), &[(n, 9)]));
            let submit = |case: &Case| Request { params: Arc::new(params.clone()), ..case.request() };
            let mut streams = cases.each_ref().map(|case| rig.manual.submit(submit(case)).unwrap());
            rig.run();
            for (stream, case) in streams.iter_mut().zip(&cases) {
                let contents = mock.with_images(&case.prompt, &case.images);
                assert_eq!(ids(&read(stream).0), mock.expected_output(&contents, &params, 64));
            }
            assert!(rig.metric("num_preemptions_total") > 0.0);
        }
    });
}

#[test]
fn an_abort_in_the_middle_of_an_image_leaves_nothing_held() {
    both_depths(|mock| {
        let mut rig = rig(&mock, 9, config(13));
        let (gone, next) = (Case::new(0, &[(1, 9)]), Case::new(100, &[(2, 9)]));
        let stream = gone.submit(&rig);
        rig.manual.turn();
        let mut other = next.submit(&rig);
        rig.manual.turn();
        drop(stream);
        rig.run();
        next.check(&mut other);
    });
}

#[test]
fn an_image_of_a_failed_step_is_encoded_again() {
    for at in [FailurePoint::Submit, FailurePoint::Sample, FailurePoint::Wait] {
        both_depths(|mock| {
            let mock = MockConfig { failures: vec![MockFailure { step: 1, at, fatal: false }], ..mock };
            let config = EngineConfig { enable_prefix_caching: false, max_num_seqs: 1, ..config(100) };
            let mut rig = rig(&mock, 30, config);
            let mut lost = Case::new(0, &[(1, 9)]).submit(&rig);
            let case = Case::new(100, &[(1, 9)]);
            case.run(&mut rig);
            assert!(matches!(read(&mut lost).0.last().unwrap().finish, Some(FinishReason::Error(_))));
            assert_eq!(rig.counters.encoded_images(), 2, "at {at:?}");
        });
    }
}

/// The mock fails a step that ends in an image.
#[test]
fn an_image_that_is_seen_whole_is_computed_in_one_step() {
    both_depths(|mock| {
        let mock = MockConfig { seen_whole: true, ..mock };
        let case = Case::new(0, &[(1, 9), (2, 3), (3, 8)]);
        for (tokens, threshold) in [(9, 0), (11, 0), (100, 0), (100, 4)] {
            let limits = EngineConfig { max_num_seqs: 1, long_prefill_token_threshold: threshold, ..config(tokens) };
            case.run(&mut rig(&mock, 20, limits));
        }
        // Beside sequences that decode, each image waits for a step that has room for it.
        let cases = [0, 1, 2, 3].map(|n: u8| Case::new(100 * u32::from(n), &[(n, 9), (10 + n, 9)]));
        let limits = EngineConfig { max_num_seqs: 4, long_prefill_token_threshold: 5, ..config(12) };
        let mut rig = rig(&mock, 30, limits);
        let mut streams = cases.each_ref().map(|case| case.submit(&rig));
        rig.run();
        for (stream, case) in streams.iter_mut().zip(&cases) {
            case.check(stream);
        }
    });
}

#[test]
fn an_image_that_is_seen_whole_takes_the_time_that_it_takes() {
    both_depths(|mock| {
        let mock = MockConfig { seen_whole: true, token_latency: Duration::from_micros(100), ..mock };
        let limits = EngineConfig { max_step: Some(Duration::from_micros(300)), ..config(4096) };
        Case::new(0, &[(1, 20), (2, 20)]).run(&mut rig(&mock, 40, limits));
    });
}

#[test]
fn impossible_images_that_are_seen_whole_are_refused() {
    let mock = MockConfig { seen_whole: true, ..MockConfig::default() };
    let rig = rig(&mock, 30, EngineConfig { max_num_seqs: 4, ..config(12) });
    let submit = |request: Request| rig.manual.submit(request).err();
    let error = submit(Case::new(0, &[(1, 10)]).request()).unwrap().to_string();
    assert_eq!(error, "image 1 takes 10 tokens, but at most 9 fit one image: send a smaller image");
    let params = SamplingParams { prompt_logprobs: Some(1), ..tokens(4) };
    let scored = |images: &[(u8, u32)]| Request { params: Arc::new(params.clone()), ..Case::new(0, images).request() };
    assert_eq!(submit(scored(&[(1, 9)])), Some(SubmitError::ScoredImages));
    assert_eq!(submit(scored(&[])), None);
}

#[test]
fn impossible_images_are_refused() {
    let text = Rig::new(MockConfig::default(), EngineConfig::default());
    let refused = |rig: &Rig, images: &[(u8, u32)]| rig.manual.submit(Case::new(0, images).request()).err();
    assert_eq!(refused(&text, &[(1, 2)]), Some(SubmitError::NoImages));
    let small = rig(&MockConfig::default(), 30, config(100));
    let error = refused(&small, &[(1, 2), (1, 21)]).unwrap().to_string();
    assert_eq!(error, "image 2 takes 21 tokens, but at most 20 fit one image: send a smaller image");
    assert_eq!(refused(&small, &[(1, 20), (2, 20)]), None);
}
