//! The engine's side of the device thread.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use octavo_engine::{
    Executor, ExecutorError, ImageSpec, KvCacheSpec, StepCost, StepId, StepMasks, StepOutput, StepPlan, TokenOutput,
};
use octavo_ops::cost::{Peaks, StepPricer};
use octavo_ops::{Backend, Program};
use octavo_telemetry::{DeviceConfig, DeviceMemory, DeviceMetrics};

use crate::adapters::AdapterLimits;
use crate::cost::ProgramCost;
use crate::device::{Command, Device, StepResult};
use crate::images::{ImageConfig, Images};
use crate::memory::{MemoryPlan, RunnerConfig, RunnerError, max_rows};
use crate::meter::StepMeter;

/// Runs the steps of one model on one backend, on a thread named `octavo-device`.
///
/// A step that the backend refuses is lost and the runner continues. A backend that panics is not used again. Dropping
/// the runner ends the thread after its current step.
pub struct Runner {
    images: Option<ImageSpec>,
    memory: MemoryPlan,
    vocab_size: usize,
    max_rows: usize,
    adapter_slots: usize,
    max_in_flight: usize,
    pricer: StepPricer,
    /// Peak rates of the device, if they are known.
    peaks: Option<Peaks>,
    /// Channel to the device thread; `None` while the runner is being dropped.
    commands: Option<SyncSender<Command>>,
    results: Receiver<StepResult>,
    spare_tokens: Vec<Vec<TokenOutput>>,
    spare_masks: Vec<StepMasks>,
    /// Memory for the next plan. A step is waited for before each one that is submitted.
    spare_plan: Option<Box<StepPlan>>,
    thread: Option<JoinHandle<()>>,
}

impl Runner {
    /// Allocates the KV cache of a backend that has `program` loaded, and starts the device thread.
    pub fn new(backend: Box<dyn Backend>, program: Arc<Program>, config: RunnerConfig) -> Result<Runner, RunnerError> {
        Self::observed(backend, program, config, None, |_| DeviceMetrics::disabled())
    }

    /// Creates a runner like [`Runner::new`], with metrics of device utilisation: `register` creates them from the
    /// device's properties. With `images`, the backend must have the model's encoder loaded.
    pub fn observed(
        mut backend: Box<dyn Backend>,
        program: Arc<Program>,
        config: RunnerConfig,
        images: Option<&ImageConfig>,
        register: impl FnOnce(&DeviceConfig) -> DeviceMetrics,
    ) -> Result<Runner, RunnerError> {
        for (limit, name) in [
            (config.max_num_seqs, "max_num_seqs"),
            (config.max_num_batched_tokens, "max_num_batched_tokens"),
            (config.max_model_len, "max_model_len"),
        ] {
            if limit == 0 {
                return Err(RunnerError::ZeroLimit(name));
            }
        }
        let media_rows = images.map_or(0, |images| images.media_rows);
        let memory = MemoryPlan::new(backend.as_ref(), &program, &config, media_rows)?;
        if let Some(AdapterLimits { slots, rank }) = config.adapters {
            backend.allocate_adapters(slots, rank)?;
        }
        backend.allocate_kv(config.block_size, memory.kv.blocks)?;
        if let Some(images) = images {
            backend.allocate_media(images.media_rows)?;
        }
        let max_in_flight = match config.async_scheduling {
            Some(two) => 1 + usize::from(two),
            None => backend.max_in_flight().clamp(1, 2),
        };
        // A step has three commands, and one more step may be abandoned before its wait, so the engine thread never
        // blocks on sending.
        let (commands, receiver) = sync_channel(3 * max_in_flight + 1);
        let (sender, results) = sync_channel(max_in_flight);
        let profile = backend.device_profile();
        let metrics = register(&DeviceConfig {
            memory: profile.memory.map(|(total, workspace)| DeviceMemory {
                total,
                weights: memory.weight_bytes,
                kv_cache: memory.kv_bytes,
                workspace,
            }),
            peaks: profile.peaks.map(|peaks| (peaks.bandwidth, peaks.flops)),
            records_steps: backend.step_counts().is_some(),
        });
        let image_spec = images.map(ImageConfig::spec);
        let rank = config.adapters.map_or(0, |limits| limits.rank);
        let pricer = StepPricer::new(&program, profile.elements).with_rank(rank);
        let meter = StepMeter::new(pricer.clone(), metrics, max_in_flight);
        let device = Device::new(backend, &program, &config, images.map(Images::new), meter);
        let thread = std::thread::Builder::new().name("octavo-device".into());
        let thread = thread.spawn(move || device.run(&receiver, &sender))?;
        tracing::debug!(
            blocks = memory.kv.blocks,
            groups = memory.kv.groups.len(),
            max_in_flight,
            "the device thread runs"
        );
        Ok(Runner {
            images: image_spec,
            memory,
            vocab_size: program.vocab_size,
            max_rows: max_rows(config.max_num_seqs, program.vocab_size),
            adapter_slots: config.adapters.map_or(0, |limits| limits.slots),
            max_in_flight,
            pricer,
            peaks: profile.peaks,
            commands: Some(commands),
            results,
            spare_tokens: Vec::with_capacity(max_in_flight + 1),
            spare_masks: Vec::with_capacity(max_in_flight + 1),
            spare_plan: None,
            thread: Some(thread),
        })
    }

    /// Returns the memory plan.
    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.memory
    }

    fn send(&self, command: Command) -> Result<(), ExecutorError> {
        let sent = self.commands.as_ref().is_some_and(|commands| commands.send(command).is_ok());
        if sent { Ok(()) } else { Err(gone()) }
    }
}

fn gone() -> ExecutorError {
    ExecutorError { message: "the device thread has ended".into(), fatal: true }
}

impl Executor for Runner {
    fn kv_cache_spec(&self) -> &KvCacheSpec {
        &self.memory.kv
    }

    fn image_spec(&self) -> Option<ImageSpec> {
        self.images
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_rows(&self) -> usize {
        self.max_rows
    }

    fn adapter_slots(&self) -> usize {
        self.adapter_slots
    }

    fn max_in_flight(&self) -> usize {
        self.max_in_flight
    }

    fn step_cost(&self) -> Option<Box<dyn StepCost>> {
        Some(Box::new(ProgramCost::new(self.pricer.clone(), self.peaks)))
    }

    fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        let mut memory = self.spare_plan.take().unwrap_or_default();
        *memory = plan;
        self.send(Command::Forward(memory))
    }

    fn sample(&mut self, _step: StepId, masks: StepMasks) -> Result<(), ExecutorError> {
        let tokens = self.spare_tokens.pop().unwrap_or_default();
        self.send(Command::Sample { masks, tokens })
    }

    fn wait(&mut self) -> Result<StepOutput, ExecutorError> {
        // If the device thread has ended, its last result may still be in the channel.
        let _ = self.send(Command::Deliver);
        let StepResult { output, masks, plan } = self.results.recv().map_err(|_| gone())?;
        if !masks.rows.is_empty() && self.spare_masks.len() < self.spare_masks.capacity() {
            self.spare_masks.push(masks);
        }
        self.spare_plan = Some(plan);
        output
    }

    fn spare_masks(&mut self) -> StepMasks {
        self.spare_masks.pop().unwrap_or_default()
    }

    fn recycle(&mut self, tokens: Vec<TokenOutput>) {
        if self.spare_tokens.len() < self.spare_tokens.capacity() {
            self.spare_tokens.push(tokens);
        }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the device thread panicked");
        }
    }
}
