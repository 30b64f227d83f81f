use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ExecutorMemory;
use super::*;
use crate::constraint::Anything;
use crate::inbox::Inbox;
use crate::kv::{Extras, SequenceKv, TokenHistory};
use crate::{
    Adapter, Constraint, InputToken, KvGroupSpec, KvKind, PlannedRow, Request, RowKind, SamplingParams, TableChange,
    stream,
};

/// A scheduler whose steps complete at once unless a test delays them.
pub(super) struct Rig {
    pub(super) scheduler: Scheduler,
    inbox: Arc<Inbox>,
    epoch: Instant,
    next_id: u64,
    step: StepId,
    pub(super) plan: StepPlan,
    pub(super) clock: Option<StepClock>,
    pub(super) client: crate::ClientId,
    /// Adapter of the next requests.
    pub(super) adapter: Option<Adapter>,
    /// Whether the next requests need masks.
    pub(super) constrained: bool,
}

pub(super) fn config() -> EngineConfig {
    EngineConfig { max_model_len: 64, max_num_seqs: 4, max_num_batched_tokens: 32, ..EngineConfig::default() }
}

impl Rig {
    /// Creates a scheduler with `blocks` usable blocks of 4 tokens.
    pub(super) fn new(config: EngineConfig, blocks: usize) -> Self {
        Self::with_groups(config, blocks, &[KvKind::Full])
    }

    /// Creates a scheduler with KV groups that share `blocks` usable blocks of 4 tokens.
    pub(super) fn with_groups(config: EngineConfig, blocks: usize, kinds: &[KvKind]) -> Self {
        let groups = kinds.iter().map(|&kind| KvGroupSpec { layers: 1, kind }).collect();
        let spec = KvCacheSpec { block_size: 4, block_bytes: 1, blocks: blocks + 1, groups };
        Self {
            inbox: Arc::new(Inbox::new(&config)),
            scheduler: Scheduler::new(
                config.clone(),
                ExecutorMemory { kv: &spec, images: None, adapters: 2 },
                config.max_num_seqs + 64,
            ),
            epoch: Instant::now(),
            next_id: 0,
            step: 0,
            plan: StepPlan::default(),
            clock: None,
            client: crate::ClientId::default(),
            adapter: None,
            constrained: false,
        }
    }

    /// Queues a request for `max_tokens` tokens after the prompt.
    pub(super) fn add(&mut self, prompt: impl IntoIterator<Item = u32>, max_tokens: u32, priority: i64) -> SequenceKey {
        self.add_with(prompt, SamplingParams { max_tokens, ..SamplingParams::default() }, priority)
    }

    pub(super) fn add_with(
        &mut self,
        prompt: impl IntoIterator<Item = u32>,
        params: SamplingParams,
        priority: i64,
    ) -> SequenceKey {
        let max_tokens = params.max_tokens;
        let id = self.next_id;
        self.next_id += 1;
        let request = Request {
            priority,
            arrival: self.epoch + Duration::from_millis(id),
            client: self.client,
            adapter: self.adapter.clone(),
            constraint: self.constrained.then(|| Box::new(Anything) as Box<dyn Constraint>),
            ..Request::new(id.to_string(), prompt.into_iter().collect::<Vec<_>>(), params)
        };
        let history = TokenHistory::new(request.prompt.clone());
        let kv = SequenceKv::new(
            self.scheduler.kv().layout(),
            &history,
            Extras { adapter: self.adapter.clone(), ..Extras::default() },
        );
        let limit = (history.len() + max_tokens as usize).min(self.scheduler.config.max_model_len);
        let (sender, _stream) = stream::mailbox(id, self.inbox.clone());
        self.scheduler.enqueue(Sequence::new(id, request, kv, sender, limit));
        self.scheduler.key(id).unwrap()
    }

    /// Plans a step and returns `(sequence id, tokens, whether it draws)` of each share.
    pub(super) fn plan(&mut self) -> (Vec<(u64, usize, bool)>, StepRecord) {
        self.step += 1;
        let mut record = StepRecord::default();
        self.scheduler.schedule(self.step, self.clock.as_ref(), &mut self.plan, &mut record);
        assert_eq!(self.scheduler.check_integrity(), Ok(()));
        let shown =
            |share: &Share| (self.scheduler.sequences.get(share.key).unwrap().id, share.tokens, share.rows.draws > 0);
        (record.shares.iter().map(shown).collect(), record)
    }

    /// Completes the step. Sampled sequences get token 7.
    pub(super) fn retire(&mut self, record: &StepRecord) {
        for share in &record.shares {
            if self.scheduler.retire(share, 0).is_some() && share.rows.draws > 0 {
                let sequence = self.scheduler.sequence_mut(share.key).unwrap();
                sequence.history.output.push(7);
                if sequence.full() {
                    self.scheduler.remove(share.key);
                }
            }
        }
        assert_eq!(self.scheduler.check_integrity(), Ok(()));
    }

    pub(super) fn step(&mut self) -> Vec<(u64, usize, bool)> {
        let (shares, record) = self.plan();
        self.retire(&record);
        shares
    }
}

pub(super) fn prompt(family: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| family * 1000 + i).collect()
}

#[test]
fn running_first_then_chunks_within_the_budget() {
    let mut rig = Rig::new(config(), 64);
    rig.add(prompt(1, 10), 5, 0);
    assert_eq!(rig.step(), [(0, 10, true)]);
    rig.add(prompt(2, 40), 5, 0);
    rig.add(prompt(3, 8), 5, 0);
    assert_eq!(rig.step(), [(0, 1, true), (1, 31, false)], "the budget is 32");
    assert_eq!(rig.step(), [(0, 1, true), (1, 9, true), (2, 8, true)]);
    assert_eq!(rig.step(), [(0, 1, true), (1, 1, true), (2, 1, true)]);
}

#[test]
fn positions_tables_and_joins_are_written() {
    let mut rig = Rig::new(EngineConfig { max_num_batched_tokens: 6, ..config() }, 16);
    rig.add(prompt(1, 9), 5, 0);
    rig.step();
    let joined = &rig.plan.joined[0];
    assert_eq!((joined.seat, joined.prompt.len(), joined.output.len()), (0, 9, 0));
    assert_eq!((rig.plan.step, rig.plan.blocks.as_slice()), (1, [1, 2].as_slice()));
    rig.step();
    let sequence = &rig.plan.sequences[0];
    assert_eq!((sequence.seat, sequence.first_position), (0, 6));
    assert_eq!(rig.plan.rows, [PlannedRow { sequence: 0, position: 8, kind: RowKind::Draw }]);
    assert_eq!(rig.plan.tokens, [1006, 1007, 1008].map(InputToken::Id));
    assert_eq!(rig.plan.tables, [TableChange { seat: 0, group: 0, start: 2, blocks: 0..1 }]);
    assert_eq!(rig.plan.blocks, [3]);
    assert!(rig.plan.joined.is_empty());
    rig.step();
    assert_eq!(rig.plan.tokens, [InputToken::Id(7)]);
    assert_eq!(rig.plan.rows[0].position, 9);
}

#[test]
fn without_chunks_a_prompt_waits_for_the_whole_budget() {
    let whole = EngineConfig { enable_chunked_prefill: false, max_num_batched_tokens: 64, ..config() };
    let mut rig = Rig::new(whole, 64);
    rig.add(prompt(1, 40), 5, 0);
    rig.add(prompt(2, 30), 5, 0);
    rig.add(prompt(3, 5), 5, 0);
    assert_eq!(rig.step(), [(0, 40, true)], "no later request passes the one at the head");
    assert_eq!(rig.step(), [(0, 1, true), (1, 30, true), (2, 5, true)]);
}

#[test]
fn the_threshold_bounds_prompts_that_are_not_alone() {
    let mut rig = Rig::new(EngineConfig { long_prefill_token_threshold: 8, ..config() }, 64);
    rig.add(prompt(1, 20), 5, 0);
    assert_eq!(rig.step(), [(0, 20, true)]);
    rig.add(prompt(2, 20), 5, 0);
    assert_eq!(rig.step(), [(0, 1, true), (1, 8, false)]);
    assert_eq!(rig.step(), [(0, 1, true), (1, 8, false)]);
    assert_eq!(rig.step(), [(0, 1, true), (1, 4, true)]);
}

#[test]
fn max_num_seqs_bounds_the_running_list_and_seats_are_stable() {
    let mut rig = Rig::new(EngineConfig { max_num_seqs: 2, ..config() }, 64);
    let first = rig.add(prompt(1, 4), 9, 0);
    rig.add(prompt(2, 4), 9, 0);
    rig.add(prompt(3, 4), 9, 0);
    rig.step();
    let seats = |rig: &Rig| rig.plan.sequences.iter().map(|s| s.seat).collect::<Vec<_>>();
    assert_eq!(seats(&rig), [0, 1]);
    rig.scheduler.remove(first);
    assert_eq!(rig.step(), [(1, 1, true), (2, 4, true)]);
    assert_eq!(seats(&rig), [1, 0]);
}

#[test]
fn admission_needs_blocks_for_the_whole_prompt() {
    let mut rig = Rig::new(EngineConfig { max_num_batched_tokens: 8, ..config() }, 16);
    let first = rig.add(prompt(1, 16), 30, 0);
    rig.step();
    rig.add(prompt(2, 56), 5, 0);
    rig.add(prompt(3, 4), 5, 0);
    assert_eq!(rig.step(), [(0, 8, true)]);
    assert_eq!(rig.step(), [(0, 1, true)], "11 blocks are free, 14 are needed, and nobody passes");
    rig.scheduler.remove(first);
    assert_eq!(rig.step(), [(1, 8, false)]);
}

#[test]
fn fcfs_preempts_the_last_admitted() {
    let mut rig = Rig::new(EngineConfig { enable_prefix_caching: false, ..config() }, 16);
    let keys = [1, 2, 3].map(|family| rig.add(prompt(family, 20), 40, 0));
    assert_eq!(rig.step(), [(0, 20, true), (1, 12, false)]);
    assert_eq!(rig.step(), [(0, 1, true), (1, 8, true), (2, 20, true)]);
    assert_eq!(rig.scheduler.kv().used(), 16);
    // The first and the second sequence take the last sequence's blocks when they fill their own.
    let mut victims = Vec::new();
    for _ in 0..3 {
        rig.step();
    }
    for key in keys {
        victims.push(rig.scheduler.sequences.get(key).unwrap().preemptions);
    }
    assert_eq!(victims, [0, 0, 1]);
    assert_eq!((rig.scheduler.running(), rig.scheduler.waiting(), rig.scheduler.waiting_preempted()), (2, 1, 1));
    assert_eq!(rig.scheduler.take_preempted(), 1);
    // A new request does not overtake it, although it would fit.
    rig.add(prompt(4, 2), 5, 0);
    rig.step();
    assert_eq!(rig.scheduler.waiting(), 2);
    rig.scheduler.remove(keys[0]);
    let shares = rig.step();
    assert_eq!(shares.iter().map(|share| share.0).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(shares[1].2 && shares[1].1 > 20, "prompt and generated tokens are computed again");
    assert_eq!(rig.plan.joined[0].output.len() + 20, shares[1].1);
}

#[test]
fn a_sequence_that_cannot_grow_preempts_itself() {
    let mut rig = Rig::new(EngineConfig { enable_prefix_caching: false, ..config() }, 16);
    rig.add(prompt(1, 30), 30, 0);
    let second = rig.add(prompt(2, 32), 30, 0);
    assert_eq!(rig.step(), [(0, 30, true), (1, 2, false)]);
    assert_eq!(rig.step(), [(0, 1, true), (1, 30, true)], "30 + 1 and 32 tokens fill 16 blocks");
    assert_eq!(rig.step(), [(0, 1, true)], "the last one has no block for its 33rd token");
    assert_eq!(rig.scheduler.sequences.get(second).unwrap().residence, Residence::Waiting);
    assert_eq!(rig.step(), [(0, 1, true)]);
}

#[test]
fn priority_admits_and_preempts_by_value_then_arrival() {
    let priority = EngineConfig {
        policy: SchedulingPolicy::Priority,
        enable_prefix_caching: false,
        max_num_seqs: 3,
        max_num_batched_tokens: 64,
        ..config()
    };
    let mut rig = Rig::new(priority, 16);
    rig.add(prompt(1, 20), 30, 5);
    rig.add(prompt(2, 20), 30, 1);
    rig.add(prompt(3, 20), 30, 3);
    rig.add(prompt(4, 4), 30, 1);
    assert_eq!(rig.step(), [(1, 20, true), (3, 4, true), (2, 20, true)]);
    assert_eq!(rig.scheduler.waiting(), 1);
    let least = rig.add(prompt(5, 4), 30, 0);
    rig.scheduler.remove(rig.scheduler.running[1]);
    assert_eq!(rig.step(), [(1, 1, true), (2, 1, true), (4, 4, true)], "the lowest value is admitted first");
    // The sequences need 6 + 6 + 1 blocks. The one with the highest value is preempted once the 16 are used up,
    // although it is not the last.
    while rig.scheduler.running() == 3 {
        rig.step();
    }
    let ranks: Vec<_> = rig.scheduler.running.iter().map(|&key| rig.scheduler.sequences.get(key).unwrap().id).collect();
    assert_eq!(ranks, [1, 4]);
    assert_eq!(rig.scheduler.sequences.get(least).unwrap().preemptions, 0);
}

#[test]
fn tokens_of_a_victim_return_to_the_budget() {
    let priority = EngineConfig {
        policy: SchedulingPolicy::Priority,
        enable_prefix_caching: false,
        max_num_batched_tokens: 4,
        long_prefill_token_threshold: 3,
        ..config()
    };
    let mut rig = Rig::new(priority, 16);
    let victim = rig.add(prompt(1, 4), 60, 9);
    rig.step();
    rig.add(prompt(2, 4), 60, 0);
    rig.add(prompt(3, 44), 20, 1);
    for _ in 0..14 {
        assert_eq!(rig.step()[0], (0, 1, true));
    }
    // The sequences hold 5 + 4 + 7 blocks. The first is chosen for its 19th token, then the second needs a block.
    assert_eq!(rig.step(), [(1, 1, true), (2, 3, false)], "the third gets the token that the first gave back");
    assert_eq!(rig.scheduler.sequences.get(victim).unwrap().preemptions, 1);
    assert_eq!(rig.plan.tokens.len(), 4);
}

#[test]
fn the_last_pending_token_plans_no_further_step() {
    let mut rig = Rig::new(config(), 64);
    let key = rig.add(prompt(1, 4), 2, 0);
    let (_, first) = rig.plan();
    let (shares, second) = rig.plan();
    assert_eq!(shares, [(0, 1, true)]);
    assert_eq!(rig.plan.rows[0].position, 4);
    rig.retire(&first);
    let (shares, _) = rig.plan();
    assert_eq!(shares, [], "the token in flight is the last one allowed");
    rig.retire(&second);
    assert!(rig.scheduler.sequences.get(key).is_none());
    assert_eq!(rig.scheduler.kv().used(), 0);
}

#[test]
fn a_row_from_before_a_preemption_gives_its_token_and_no_block() {
    let mut rig = Rig::new(config(), 16);
    let a = rig.add(prompt(1, 30), 30, 0);
    let b = rig.add(prompt(2, 32), 30, 0);
    rig.step();
    let (shares, in_flight) = rig.plan();
    assert_eq!(shares, [(0, 1, true), (1, 30, true)]);
    let (shares, next) = rig.plan();
    assert_eq!(shares, [(0, 1, true)], "the second was preempted while its first token is in flight");
    rig.retire(&in_flight);
    let sequence = rig.scheduler.sequences.get(b).unwrap();
    assert_eq!((sequence.history.output.len(), sequence.retired, sequence.pending), (1, 0, 0));
    rig.retire(&next);
    rig.scheduler.remove(a);
    let (shares, _) = rig.plan();
    assert_eq!(shares, [(1, 1, true)], "the blocks of the attempt are found");
}

/// Returns the positions that a sequence of the plan scores, which must follow each other.
fn scores(rig: &Rig, sequence: u32) -> Option<std::ops::Range<u32>> {
    let scored = |row: &&PlannedRow| (row.sequence, row.kind) == (sequence, RowKind::Score);
    let positions: Vec<u32> = rig.plan.rows.iter().filter(scored).map(|row| row.position).collect();
    let range = *positions.first()?..positions.last()? + 1;
    assert!(positions.iter().copied().eq(range.clone()));
    Some(range)
}

#[test]
fn a_step_scores_a_bounded_number_of_rows() {
    let config = EngineConfig { max_model_len: 400, max_num_batched_tokens: 1000, ..config() };
    let mut rig = Rig::new(config, 400);
    let scored = |max_tokens| SamplingParams { prompt_logprobs: Some(1), max_tokens, ..SamplingParams::default() };
    rig.add_with(prompt(1, 101), scored(5), 0);
    rig.add_with(prompt(2, 70), scored(0), 0);
    rig.add(prompt(3, 300), 5, 0);
    assert_eq!(rig.step(), [(0, 64, false), (2, 300, true)], "the second waits for rows and keeps nobody waiting");
    assert_eq!((scores(&rig, 0), scores(&rig, 1), rig.plan.token_rows()), (Some(0..64), None, 65));
    assert_eq!((rig.plan.joined.len(), rig.scheduler.running()), (2, 2), "no seat without tokens");
    assert_eq!(rig.step(), [(0, 37, true), (2, 1, true), (1, 28, false)]);
    assert_eq!([0, 1, 2].map(|sequence| scores(&rig, sequence)), [Some(64..100), None, Some(0..28)]);
    assert_eq!((rig.plan.joined.len(), rig.plan.token_rows()), (1, 66));
    assert_eq!(rig.step(), [(0, 1, true), (1, 42, false), (2, 1, true)]);
    assert_eq!(scores(&rig, 1), Some(28..69));
    assert_eq!(rig.plan.rows.len(), 2 + 41, "nothing is drawn for the second");
}

#[test]
fn a_prompt_that_is_scored_is_cut_even_without_chunks() {
    let whole =
        EngineConfig { enable_chunked_prefill: false, max_model_len: 100, max_num_batched_tokens: 100, ..config() };
    let mut rig = Rig::new(whole, 64);
    rig.add_with(prompt(1, 90), SamplingParams { prompt_logprobs: Some(0), ..SamplingParams::default() }, 0);
    assert_eq!(rig.step(), [(0, 64, false)]);
    assert_eq!(rig.step(), [(0, 26, true)]);
}

#[test]
fn only_rows_that_were_scored_may_come_from_the_cache() {
    let mut rig = Rig::new(config(), 16);
    let scored = SamplingParams { prompt_logprobs: Some(1), max_tokens: 30, ..SamplingParams::default() };
    rig.add(prompt(1, 30), 30, 0);
    let second = rig.add_with(prompt(2, 32), scored, 0);
    assert_eq!(rig.step(), [(0, 30, true), (1, 2, false)]);
    assert_eq!(rig.step(), [(0, 1, true), (1, 30, true)]);
    assert_eq!(scores(&rig, 1), Some(2..31));
    assert_eq!(rig.step(), [(0, 1, true)], "the second has no block for its token");
    let sequence = rig.scheduler.sequences.get(second).unwrap();
    assert_eq!((sequence.preemptions, sequence.may_be_cached()), (1, usize::MAX));
    rig.scheduler.remove(rig.scheduler.running[0]);
    rig.step();
    assert!(rig.plan.sequences[0].first_position > 0 && scores(&rig, 0).is_none(), "scored before, and found");
}
