//! Tests of pause, freeze, resume and the reset of the prefix cache.

use std::sync::{Arc, Mutex};

use super::tests::{Rig, both_depths, ids, read, request, tokens};
use crate::inbox::Command;
use crate::mock::MockConfig;
use crate::{EngineConfig, FinishReason, KvEvent, KvEventSink, SamplingParams, SubmitError};

/// The results of commands, in the order of their replies.
#[derive(Clone, Default)]
struct Results(Arc<Mutex<Vec<bool>>>);

impl Results {
    fn reply(&self) -> Box<dyn FnOnce(bool) + Send> {
        let results = self.clone();
        Box::new(move |result| results.0.lock().unwrap().push(result))
    }

    fn take(&self) -> Vec<bool> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

fn command(rig: &Rig, command: Command) {
    rig.manual.shared.inbox.command(command);
}

fn reset(rig: &Rig, preempt: bool, results: &Results) {
    command(rig, Command::ResetPrefixCache { preempt, reply: results.reply() });
}

fn long() -> SamplingParams {
    SamplingParams { ignore_eos: true, ..tokens(40) }
}

fn prompt() -> Vec<u32> {
    (0..50).collect()
}

/// Runs a request of one token to its end.
fn serve(rig: &mut Rig, prompt: &[u32]) {
    let mut stream = rig.submit(prompt, &tokens(1));
    rig.run();
    assert!(read(&mut stream).1);
}

#[test]
fn a_frozen_engine_keeps_its_requests_and_continues_with_the_same_tokens() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock.clone(), EngineConfig::default());
        let results = Results::default();
        let mut stream = rig.submit(&prompt(), &long());
        for _ in 0..10 {
            assert!(rig.manual.turn());
        }
        command(&rig, Command::Freeze(true));
        command(&rig, Command::WhenIdle(results.reply()));
        rig.run();
        assert_eq!(results.take(), [true], "the step in flight is done");
        let (before, ended) = read(&mut stream);
        assert!(!ended && (1..40).contains(&ids(&before).len()));
        let mut late = rig.submit(&[7, 8, 9], &tokens(3));
        rig.run();
        assert_eq!((read(&mut stream).0.len(), read(&mut late).0.len()), (0, 0), "nothing runs while frozen");
        assert!(rig.metric("num_requests_running") == 1.0 && rig.metric("num_requests_waiting") == 1.0);

        command(&rig, Command::Freeze(false));
        rig.run();
        let (after, ended) = read(&mut stream);
        assert!(ended);
        let all: Vec<u32> = ids(&before).into_iter().chain(ids(&after)).collect();
        assert_eq!(all, mock.expected_output(&prompt(), &long(), 2048));
        assert!(read(&mut late).1);
    });
}

#[test]
fn a_paused_engine_drains_or_aborts_and_refuses_new_requests() {
    for abort in [false, true] {
        both_depths(|mock| {
            let mut rig = Rig::new(mock, EngineConfig::default());
            let results = Results::default();
            let mut stream = rig.submit(&prompt(), &long());
            for _ in 0..5 {
                rig.manual.turn();
            }
            let inbox = rig.manual.shared.inbox.clone();
            inbox.pause(abort);
            command(&rig, Command::WhenIdle(results.reply()));
            let refused = rig.manual.submit(request(&[1], &tokens(1)));
            assert!(matches!(refused, Err(SubmitError::Paused)));
            rig.run();
            assert_eq!(results.take(), [true]);
            let (events, ended) = read(&mut stream);
            let expected = if abort { FinishReason::Abort } else { FinishReason::Length };
            assert_eq!((ended, events.last().unwrap().finish.clone()), (true, Some(expected)));
            inbox.resume();
            serve(&mut rig, &[1]);
        });
    }
}

#[test]
fn the_prefix_cache_is_forgotten_only_when_no_block_is_used() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock.clone(), EngineConfig::default());
        let results = Results::default();
        let hits = |rig: &Rig| rig.metric("prefix_cache_hits_total");
        serve(&mut rig, &prompt());
        let mut stream = rig.submit(&prompt(), &long());
        for _ in 0..5 {
            rig.manual.turn();
        }
        let cached = hits(&rig);
        assert!(cached > 0.0);
        reset(&rig, false, &results);
        rig.manual.turn();
        assert_eq!(results.take(), [false], "a request runs");
        reset(&rig, true, &results);
        rig.run();
        assert_eq!(results.take(), [true], "the request gave up its blocks");
        let (events, ended) = read(&mut stream);
        assert!(ended);
        assert_eq!(ids(&events), mock.expected_output(&prompt(), &long(), 2048), "and was computed again");
        reset(&rig, false, &results);
        rig.run();
        assert_eq!(results.take(), [true]);
        serve(&mut rig, &prompt());
        assert_eq!(hits(&rig), cached, "the prefix is unknown again");
        serve(&mut rig, &prompt());
        assert!(hits(&rig) > cached, "and stored again");
    });
}

/// Collects the hashes that are stored and not removed.
#[derive(Clone, Default)]
struct Stored(Arc<Mutex<Vec<[u8; 32]>>>);

impl KvEventSink for Stored {
    fn publish(&mut self, events: Vec<KvEvent>) {
        let mut stored = self.0.lock().unwrap();
        for event in events {
            match event {
                KvEvent::Stored { hashes, .. } => stored.extend(hashes),
                KvEvent::Removed { hashes } => stored.retain(|hash| !hashes.contains(hash)),
            }
        }
    }
}

#[test]
fn routers_learn_that_prefixes_are_forgotten() {
    let stored = Stored::default();
    let mut rig = Rig::with_events(MockConfig::default(), EngineConfig::default(), Box::new(stored.clone()));
    serve(&mut rig, &prompt());
    assert!(!stored.0.lock().unwrap().is_empty());
    reset(&rig, false, &Results::default());
    rig.run();
    assert!(stored.0.lock().unwrap().is_empty());
}
