//! Times the algorithms of cuBLASLt, then the ways to compute dense products of few rows, and keeps the fastest.
//!
//! Each shape of a weight is timed once on a device, with the weights of all layers in turn, so that they come from memory as in a
//! step. The choices are kept in a file beside the compiled kernels. Its name has a hash of everything on which the times depend:
//! the device, the driver, cuBLASLt and our kernels.

mod algorithms;

use std::collections::HashMap;
use std::collections::btree_map::{BTreeMap, Entry};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use cudarc::driver::sys::CUdevice_attribute;
use octavo_kernels::manifest::{self, Dtype, Target};
use octavo_kernels::sources;
use octavo_ops::{BackendError, Rows};
use serde::{Deserialize, Serialize};

use crate::Tuning;
use crate::cache::{KernelCache, Key, hash};
use crate::dense::{Choice, TUNED_ROWS, Way};
use crate::driver::Event;
use crate::forward::Machine;
use crate::libraries::cublaslt::{Algorithm, CublasLt};
use crate::linear::ProductPart;
use crate::loaded::Opened;
use crate::lower::Stage;

/// Number of measurements of a product, of which the least counts: what disturbs one adds time to it.
const MEASUREMENTS: usize = 3;

/// Number of bytes of weights after which a measurement of up to [`MEASURED_ROWS`] rows ends: more than the second-level cache of any
/// device. With more rows, a measurement ends earlier, so that it multiplies about as many pairs of numbers.
const MEASURED_BYTES: u64 = 512 << 20;

/// Maximum number of rows of which all of [`MEASURED_BYTES`] are multiplied.
const MEASURED_ROWS: u32 = TUNED_ROWS[TUNED_ROWS.len() - 1];

/// Share of the time of the usual choice that another one must save, because equal ones differ as much between measurements.
const LEAST_GAIN: f64 = 0.03;

/// Returns whether products are to be measured.
pub(crate) fn is_wanted(opened: &Opened<'_>) -> bool {
    let config = opened.config;
    let has_choice = opened.dtype != Dtype::F32 && !config.batch_invariant;
    // A device without a clock is an emulation, whose times have no meaning.
    let has_clock = opened.gpu.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE) > 0;
    config.tuning.is_some() && has_choice && has_clock
}

/// Choices by the shape of a product.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Table {
    /// Ways to compute dense products.
    ways: BTreeMap<String, Choice>,
    /// Algorithms of cuBLASLt by the number of rows; `None` is its first choice.
    algorithms: BTreeMap<String, BTreeMap<u32, Option<Algorithm>>>,
}

/// Times of the ways for each of [`TUNED_ROWS`].
type Times = [HashMap<Way, Duration>; TUNED_ROWS.len()];

/// The file of choices.
pub(crate) struct TuningFile {
    folder: PathBuf,
    name: String,
    /// Time after which no further algorithms are measured.
    time: Duration,
}

impl TuningFile {
    /// Returns the file for the device, the driver, cuBLASLt and our kernels; `None` if nothing is to be measured.
    pub(crate) fn of(opened: &Opened<'_>, library: Option<&CublasLt>) -> Option<Self> {
        let tuning = opened.config.tuning.as_ref().filter(|_| is_wanted(opened))?;
        let info = opened.gpu.info();
        let products = [sources::GEMV, sources::GEMM_SKINNY, sources::GEMM_MMA];
        let instances = manifest::all(info.chip).into_iter().filter(|instance| products.contains(&instance.source));
        let keys: Vec<_> = instances.map(|instance| Key::new(&instance, Target::Code(info.chip))).collect();
        let library = library.map_or_else(|| "no cuBLASLt".to_owned(), CublasLt::release);
        let [processors, driver] = [info.processors.to_string(), opened.driver.to_string()];
        let kernels = Key::digest(&keys);
        let depends = [info.name.as_str(), &processors, &driver, &library, opened.dtype.name(), &kernels];
        Some(Self::new(tuning, depends))
    }

    /// Names the file for everything that these texts tell.
    fn new<'a>(tuning: &Tuning, depends: impl IntoIterator<Item = &'a str>) -> Self {
        let name = format!("products-{}.json", hash(depends));
        Self { folder: tuning.folder.clone(), name, time: tuning.time }
    }

    /// Returns the known choices. A file that cannot be read counts as missing.
    fn read(&self) -> Table {
        let path = self.folder.join(&self.name);
        let Ok(text) = fs::read(&path) else { return Table::default() };
        serde_json::from_slice(&text).unwrap_or_else(|error| {
            tracing::warn!(path = %path.display(), %error, "the times of products are measured again");
            Table::default()
        })
    }

    fn write(&self, table: &Table) {
        let text = serde_json::to_vec_pretty(table).unwrap_or_default();
        if let Err(error) = KernelCache::new(&self.folder).write(&self.name, &[&text]) {
            tracing::warn!(folder = %self.folder.display(), %error, "products are measured at every start");
        }
    }
}

/// Returns whether a time saves [`LEAST_GAIN`] of that of the usual choice.
fn gains(time: Duration, usual: Duration) -> bool {
    time.as_secs_f64() < usual.as_secs_f64() * (1.0 - LEAST_GAIN)
}

/// Returns the way for each number of rows: the usual one, unless another saves [`LEAST_GAIN`] of its time. A way without a time is
/// not chosen.
fn fastest(usual: Choice, times: &Times) -> Choice {
    let mut choice = usual;
    for (way, times) in choice.ways.iter_mut().zip(times) {
        let usual = times.get(way);
        // The order of the ways decides between equal times.
        let timed = Way::ALL.into_iter().filter_map(|way| Some((way, *times.get(&way)?)));
        let faster = timed.filter(|(_, time)| usual.is_none_or(|usual| gains(*time, *usual)));
        let least = faster.min_by_key(|(_, time)| *time);
        *way = least.map_or(*way, |(way, _)| way);
    }
    choice
}

impl Machine {
    /// Chooses the fastest algorithm of cuBLASLt and the fastest way for each product, from the file or by measurement. `most` is the
    /// maximum number of rows of a kind. What the products write to the buffers of a step has no meaning.
    pub(crate) fn tune(&mut self, file: &TuningFile, most: impl Fn(Rows) -> usize) -> Result<(), BackendError> {
        let known = file.read();
        let mut table = known.clone();
        // The library competes with the other ways by its fastest algorithm.
        self.choose_algorithms(&mut table.algorithms, file.time, &most)?;
        self.choose_ways(&mut table.ways, &most)?;
        if table != known {
            file.write(&table);
        }
        Ok(())
    }

    fn choose_ways(
        &mut self,
        table: &mut BTreeMap<String, Choice>,
        most: impl Fn(Rows) -> usize,
    ) -> Result<(), BackendError> {
        let known = table.len();
        let shapes = self.shapes(most);
        let count = shapes.len();
        for (name, (parts, rows)) in shapes {
            if let Entry::Vacant(unknown) = table.entry(name) {
                let times = self.times(&parts, rows)?;
                unknown.insert(fastest(parts[0].dense.choice, &times));
            }
        }
        let measured = table.len() - known;
        tracing::info!("products: the kernels for few rows of {count} shapes are known, {measured} measured now");
        for stage in &mut self.stages {
            let Stage::Product { product, .. } = stage else { continue };
            for part in product.parts.iter_mut().filter(|part| part.is_dense()) {
                part.dense.choice = *table.get(&part.shape_name()).unwrap_or(&part.dense.choice);
            }
        }
        Ok(())
    }

    /// Returns the dense products of each shape, and the maximum number of their rows.
    fn shapes(&self, most: impl Fn(Rows) -> usize) -> BTreeMap<String, (Vec<&ProductPart>, usize)> {
        let mut shapes: BTreeMap<String, (Vec<&ProductPart>, usize)> = BTreeMap::new();
        for stage in &self.stages {
            let Stage::Product { product, rows: of } = stage else { continue };
            for part in product.parts.iter().filter(|part| part.is_dense()) {
                let (parts, rows) = shapes.entry(part.shape_name()).or_default();
                parts.push(part);
                *rows = (*rows).max(most(*of));
            }
        }
        shapes
    }

    /// Returns the time of each way for each number of rows, as far as steps have as many.
    fn times(&self, parts: &[&ProductPart], most: usize) -> Result<Times, BackendError> {
        let mut times = Times::default();
        for (times, rows) in times.iter_mut().zip(TUNED_ROWS).filter(|(_, rows)| *rows as usize <= most) {
            for way in Way::ALL {
                if let Some(time) = self.time(parts, rows, way)? {
                    times.insert(way, time);
                }
            }
        }
        Ok(times)
    }

    /// Returns the time of the products of `rows` rows with these weights; `None` if there is no such way.
    fn time(&self, parts: &[&ProductPart], rows: u32, way: Way) -> Result<Option<Duration>, BackendError> {
        let parts = &parts[..measured_count(parts.len(), parts[0].weight_bytes(), rows)];
        self.measure(Duration::MAX, || {
            for part in parts {
                if !self.dense_by(part, rows, part.params.weight, way)? {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    /// Returns the least time of some measurements of `run` after a first run; `None` if that returns `false`. What has taken longer
    /// than `hopeless` is not measured again.
    fn measure(
        &self,
        hopeless: Duration,
        run: impl Fn() -> Result<bool, BackendError>,
    ) -> Result<Option<Duration>, BackendError> {
        if !run()? {
            return Ok(None);
        }
        let (begin, end) = (Event::timed(&self.launcher.gpu)?, Event::timed(&self.launcher.gpu)?);
        let mut least = Duration::MAX;
        for _ in 0..MEASUREMENTS {
            begin.record()?;
            run()?;
            end.record()?;
            end.wait()?;
            least = least.min(end.since(&begin)?);
            if least > hopeless {
                break;
            }
        }
        Ok(Some(least))
    }
}

/// Returns how many of `count` weights of a size a measurement of so many rows multiplies.
fn measured_count(count: usize, weight_bytes: u64, rows: u32) -> usize {
    let bytes = MEASURED_BYTES / u64::from(rows.div_ceil(MEASURED_ROWS).max(1));
    (bytes / weight_bytes.max(1) + 1).min(count as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(of: [&[(Way, u64)]; TUNED_ROWS.len()]) -> Times {
        of.map(|ways| ways.iter().map(|(way, micros)| (*way, Duration::from_micros(*micros))).collect())
    }

    #[test]
    fn the_fastest_way_is_chosen_if_it_gains_something() {
        use Way::{Library, Skinny, Tiles, Vectors};
        let usual = Choice { ways: [Vectors, Vectors, Vectors, Skinny, Skinny, Skinny, Library] };
        let found = fastest(
            usual,
            &times([
                &[(Vectors, 100), (Skinny, 99)],
                &[(Vectors, 100), (Skinny, 90), (Library, 80)],
                &[(Skinny, 100), (Library, 110)],
                &[],
                &[(Vectors, 50), (Skinny, 50), (Library, 50), (Tiles, 50)],
                &[(Skinny, 100), (Tiles, 96)],
                &[(Library, 100), (Skinny, 98)],
            ]),
        );
        assert_eq!(found.ways, [Vectors, Library, Skinny, Skinny, Skinny, Tiles, Library]);
    }

    #[test]
    fn choices_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let tuning = Tuning::new(folder.path());
        let file = TuningFile::new(&tuning, ["H200", "12.9"]);
        assert_eq!(file.read(), Table::default());
        let ways = Choice { ways: [Way::Skinny; TUNED_ROWS.len()] };
        let algorithms = BTreeMap::from([(16, None), (8192, Some(Algorithm::of(7)))]);
        let table = Table {
            ways: BTreeMap::from([("64x32".to_owned(), ways)]),
            algorithms: BTreeMap::from([("64x32".to_owned(), algorithms)]),
        };
        file.write(&table);
        assert_eq!(file.read(), table);
        assert_eq!(TuningFile::new(&tuning, ["H200", "13.0"]).read(), Table::default(), "another library");
        let written = fs::read_to_string(folder.path().join(&file.name)).unwrap();
        let short = written.replacen("\"skinny\",", "", 1);
        for spoiled in ["{", "[]", "{\"ways\":{}}", "{\"ways\":7,\"algorithms\":{}}", &short] {
            fs::write(folder.path().join(&file.name), spoiled).unwrap();
            assert_eq!(file.read(), Table::default(), "{spoiled}");
        }
    }

    #[test]
    fn a_measurement_exceeds_the_caches_and_ends() {
        const MIB: u64 = 1 << 20;
        assert_eq!(measured_count(32, 100 * MIB, 1), 6);
        assert_eq!(measured_count(32, 100 * MIB, 64), 6);
        assert_eq!(measured_count(4, 100 * MIB, 64), 4, "there are no more weights");
        assert_eq!(measured_count(32, 100 * MIB, 128), 3);
        assert_eq!(measured_count(32, 100 * MIB, 8192), 1);
        assert_eq!(measured_count(32, 0, 8192), 32);
    }
}
