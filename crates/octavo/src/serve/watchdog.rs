//! Detection of a device that hangs.

use std::time::Duration;

use octavo_engine::EngineHandle;

/// Time between two looks at the engine.
const PERIOD: Duration = Duration::from_millis(500);

/// Number of looks in a row that must find the engine stuck. A process that was suspended finds itself stuck when it goes
/// on, and makes progress soon.
const LOOKS: usize = 5;

/// Waits until the engine is stuck for good. Returns the time since its last progress.
///
/// Nothing but a new process helps then: the call into the device does not return, so requests can neither finish nor be
/// ended, and the engine cannot be joined.
pub(super) async fn hung(engine: EngineHandle) -> Duration {
    let mut found = 0;
    loop {
        tokio::time::sleep(PERIOD).await;
        let status = engine.status();
        found = if status.stuck() { found + 1 } else { 0 };
        if found == LOOKS {
            return status.last_step_age;
        }
    }
}

#[cfg(test)]
mod tests {

    use std::sync::mpsc::{Receiver, channel};

    use octavo_engine::mock::{MockConfig, MockExecutor};
    use octavo_engine::{
        Engine, EngineConfig, Executor, ExecutorError, KvCacheSpec, Request, SamplingParams, StepId, StepMasks,
        StepOutput, StepPlan,
    };
    use octavo_telemetry::EngineMetrics;

    use super::*;

    /// An executor whose steps end when the sender is dropped.
    struct Hangs(MockExecutor, Receiver<()>);

    impl Executor for Hangs {
        fn kv_cache_spec(&self) -> &KvCacheSpec {
            self.0.kv_cache_spec()
        }

        fn vocab_size(&self) -> usize {
            self.0.vocab_size()
        }

        fn max_rows(&self) -> usize {
            self.0.max_rows()
        }

        fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
            self.0.submit(plan)
        }

        fn sample(&mut self, step: StepId, masks: StepMasks) -> Result<(), ExecutorError> {
            self.0.sample(step, masks)
        }

        fn wait(&mut self) -> Result<StepOutput, ExecutorError> {
            let _ = self.1.recv();
            self.0.wait()
        }
    }

    #[tokio::test]
    async fn a_device_that_hangs_is_given_up_and_a_busy_or_idle_one_is_not() {
        let (open, gate) = channel();
        let config = EngineConfig { stuck_after: Duration::from_millis(100), ..EngineConfig::default() };
        let executor = Box::new(Hangs(MockExecutor::new(MockConfig::default()), gate));
        let engine = Engine::spawn(executor, config, EngineMetrics::disabled()).unwrap();
        let handle = engine.handle();
        let long = PERIOD * (LOOKS as u32 + 2);
        assert!(tokio::time::timeout(long, hung(handle.clone())).await.is_err(), "idle");

        let _stream = handle.submit(Request::new("r", [1], SamplingParams::default())).unwrap();
        let age = tokio::time::timeout(long * 4, hung(handle)).await.expect("it hangs");
        assert!(age >= Duration::from_millis(100), "{age:?}");
        drop(open);
        engine.join();
    }
}
