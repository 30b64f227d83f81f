use super::*;
use crate::{Joined, TableChange};

fn plan(step: StepId, tokens: &[InputToken], first_position: u32, blocks: &[u32]) -> StepPlan {
    let sequence = PlannedSequence { seat: 0, tokens: 0..tokens.len(), first_position, ..PlannedSequence::default() };
    let mut plan = StepPlan { step, ..StepPlan::default() };
    plan.tokens.extend(tokens);
    plan.sequences.push(sequence);
    plan.rows.push(row(first_position + tokens.len() as u32 - 1, RowKind::Draw));
    plan.tables.push(TableChange { seat: 0, group: 0, start: 0, blocks: 0..blocks.len() });
    plan.blocks.extend(blocks);
    plan
}

fn row(position: u32, kind: RowKind) -> PlannedRow {
    PlannedRow { sequence: 0, position, kind }
}

fn join(mut plan: StepPlan, prompt: &[u32]) -> StepPlan {
    plan.joined.push(Joined::new(0, prompt, SamplingParams::default()));
    plan
}

fn run(mock: &mut MockExecutor, plan: StepPlan) -> Result<u32, ExecutorError> {
    let step = plan.step;
    mock.submit(plan)?;
    mock.sample(step, StepMasks::default())?;
    Ok(mock.wait()?.tokens[0].id)
}

fn small() -> MockExecutor {
    MockExecutor::new(MockConfig { block_size: 2, blocks: 9, verify: true, ..MockConfig::default() })
}

const PROMPT: [u32; 3] = [4, 5, 6];
const INPUT: [InputToken; 3] = [InputToken::Id(4), InputToken::Id(5), InputToken::Id(6)];

#[test]
fn tokens_follow_from_the_blocks() {
    let mut mock = small();
    let expected = MockConfig::default().expected_output(&PROMPT, &SamplingParams::default(), 100);
    assert_eq!(run(&mut mock, join(plan(1, &INPUT, 0, &[3, 7]), &PROMPT)).unwrap(), expected[0]);
    let next = plan(2, &[InputToken::Id(expected[0])], 3, &[3, 7]);
    assert_eq!(run(&mut mock, next).unwrap(), expected[1]);
}

#[test]
fn a_wrong_table_is_found_out() {
    for blocks in [[3, 8], [7, 3], [3, 0]] {
        let mut mock = small();
        let first = run(&mut mock, join(plan(1, &INPUT, 0, &[3, 7]), &PROMPT)).unwrap();
        let error = run(&mut mock, plan(2, &[InputToken::Id(first)], 3, &blocks)).unwrap_err();
        assert!(error.fatal, "{error}");
    }
}

#[test]
fn a_token_that_was_not_drawn_is_found_out() {
    let mut mock = small();
    run(&mut mock, join(plan(1, &INPUT, 0, &[3, 7]), &PROMPT)).unwrap();
    assert!(run(&mut mock, plan(2, &[InputToken::Drawn { row: 1 }], 3, &[3, 7])).unwrap_err().fatal);
}

#[test]
fn the_script_the_end_and_the_seed_are_obeyed() {
    let config = MockConfig { script: Some([7, 8].into()), eos_after: Some(3), ..MockConfig::default() };
    let params = SamplingParams { eos_token_ids: vec![2], ..SamplingParams::default() };
    assert_eq!(config.expected_output(&[1], &params, 100), [7, 8, 7, 2]);

    let config = MockConfig::default();
    let hot = |seed| SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
    assert_eq!(config.expected_output(&[1], &hot(1), 100), config.expected_output(&[1], &hot(1), 100));
    assert_ne!(config.expected_output(&[1], &hot(1), 100), config.expected_output(&[1], &hot(2), 100));
}

#[test]
fn scores_and_embeddings_follow_from_the_blocks() {
    let mut mock = small();
    let config = MockConfig { block_size: 2, blocks: 9, ..MockConfig::default() };
    let mut first = plan(1, &INPUT, 0, &[3, 7]);
    let params = SamplingParams { prompt_logprobs: Some(2), ..SamplingParams::default() };
    first.joined.push(Joined::new(0, PROMPT, params));
    first.rows = vec![row(0, RowKind::Score), row(1, RowKind::Score), row(2, RowKind::Pool)];
    mock.submit(first).unwrap();
    mock.sample(1, StepMasks::default()).unwrap();
    let output = mock.wait().unwrap();
    assert_eq!(output.tokens.iter().map(|token| token.id).collect::<Vec<_>>(), PROMPT[1..]);
    let logprobs: Vec<_> = output.tokens.into_iter().filter_map(|token| token.logprobs).collect();
    assert_eq!(logprobs, config.expected_prompt_logprobs(&PROMPT, 2));
    assert_eq!(output.vectors, config.expected_embedding(&PROMPT));
    assert_ne!(config.expected_embedding(&[5, 4, 6]), config.expected_embedding(&PROMPT), "the order counts");
}

/// The token that the mock samples greedily is the one it scores as the most likely.
#[test]
fn scores_agree_with_draws() {
    let config = MockConfig::default();
    let params = SamplingParams { logprobs: Some(3), ..SamplingParams::default() };
    let output = config.expected_output(&PROMPT, &params, 100);
    let forced = [PROMPT.as_slice(), output.as_slice()].concat();
    let scored = config.expected_prompt_logprobs(&forced, 3);
    for (score, &id) in scored[PROMPT.len() - 1..].iter().zip(&output) {
        assert_eq!(Some(score), token::logprobs(&config, &params, id).as_ref());
    }
}

#[test]
fn chosen_ids_are_reported_in_order() {
    let params =
        SamplingParams { logprobs: Some(1), logprob_token_ids: vec![5, 1000, 7, 3, 5], ..SamplingParams::default() };
    let top = token::logprobs(&MockConfig::default(), &params, 4).unwrap().top;
    assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), [5, 7, 3, 1000]);
    assert!(top.is_sorted_by(|a, b| a.1 >= b.1) && top[3].1 == f32::NEG_INFINITY);
}

#[test]
fn logprobs_come_when_asked_for() {
    let params = SamplingParams { logprobs: Some(2), ..SamplingParams::default() };
    let logprobs = token::logprobs(&MockConfig::default(), &params, 999).unwrap();
    assert_eq!(logprobs.top.iter().map(|top| top.0).collect::<Vec<_>>(), [999, 0]);
    assert_eq!((logprobs.rank, logprobs.logprob), (1, logprobs.top[0].1));
    assert_eq!(token::logprobs(&MockConfig::default(), &SamplingParams::default(), 1), None);
}
