//! Measurement of the machine's limits: the read bandwidth of memory and the peak rates of its compute units.
//!
//! With the cost of a program ([`octavo_ops::cost`]) they give the roofline limit of any implementation, with which a
//! step is compared. All threads work at the same time, as in a step.

#[cfg(target_arch = "x86_64")]
mod x86;

use std::hint::black_box;
use std::time::{Duration, Instant};

use octavo_ops::BackendError;

use crate::failed;
use crate::isa::{Isa, per_isa};
use crate::memory::{Lines, Shared};
use crate::pool::{Pool, available_threads};

/// Number of elements in a piece of memory that a thread reads: a huge page.
const PIECE: usize = (2 << 20) / size_of::<u32>();

/// Number of parts of a piece that are read concurrently, so that more requests are in flight than for one, as in a
/// product.
const STREAMS: usize = 4;

/// Number of measurements, of which the best counts.
const MEASUREMENTS: usize = 7;

/// A compute unit, by its instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Multiply-adds of f32 vectors.
    Fma,
    /// Dot products of pairs of bf16 in vectors (AVX-512 BF16).
    Bf16,
    /// Dot products of four 8-bit integers in vectors (AVX-512 VNNI).
    Vnni,
    /// Tiles of bf16.
    AmxBf16,
    /// Tiles of 8-bit integers.
    AmxInt8,
}

impl Unit {
    /// All units.
    pub const ALL: [Self; 5] = [Self::Fma, Self::Bf16, Self::Vnni, Self::AmxBf16, Self::AmxInt8];

    /// Returns the name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fma => "f32 FMA",
            Self::Bf16 => "bf16 vectors",
            Self::Vnni => "VNNI",
            Self::AmxBf16 => "AMX bf16",
            Self::AmxInt8 => "AMX int8",
        }
    }

    /// Returns whether it multiplies integers.
    pub const fn is_integer(self) -> bool {
        matches!(self, Self::Vnni | Self::AmxInt8)
    }

    /// Returns the code that keeps it busy, if this machine has the unit.
    fn kernel(self) -> Option<Kernel> {
        #[cfg(target_arch = "x86_64")]
        return x86::kernel(self);
        #[cfg(not(target_arch = "x86_64"))]
        None
    }
}

/// Code that only computes.
struct Kernel {
    /// Runs the given number of rounds.
    run: fn(usize),
    /// Number of operations of a round; a multiply-add is two.
    operations: f64,
}

/// Size and duration of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeConfig {
    /// Number of bytes of memory to read. It must be far larger than the caches, which would be measured instead.
    pub bytes: usize,
    /// Duration of one measurement of a unit.
    pub window: Duration,
}

impl Default for ProbeConfig {
    /// Returns 1 GiB and 100 ms.
    fn default() -> Self {
        Self { bytes: 1 << 30, window: Duration::from_millis(100) }
    }
}

/// Limits of the machine with all threads together.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Number of threads.
    pub threads: usize,
    /// Read bandwidth of memory in bytes per second.
    pub read_bandwidth: f64,
    /// Operations per second of the machine's units; a multiply-add is two.
    pub peaks: Vec<(Unit, f64)>,
}

impl Limits {
    /// Measures the limits with one thread for each processor that this process may use. Takes a few seconds.
    ///
    /// # Errors
    /// Returns an error if there is no memory for the buffer or the threads cannot be started.
    pub fn measure(config: &ProbeConfig) -> Result<Self, BackendError> {
        let mut pool = Pool::new(available_threads()).map_err(failed)?;
        let read_bandwidth = read_bandwidth(&mut pool, config.bytes)?;
        let peaks =
            Unit::ALL.into_iter().filter_map(|unit| Some((unit, peak(&mut pool, &unit.kernel()?, config.window))));
        let peaks = peaks.collect();
        Ok(Self { threads: pool.threads(), read_bandwidth, peaks })
    }

    /// Returns the operations per second of a unit, if the machine has it.
    pub fn peak(&self, unit: Unit) -> Option<f64> {
        self.peaks.iter().find(|(of, _)| *of == unit).map(|&(_, peak)| peak)
    }
}

/// Measures bytes per second.
fn read_bandwidth(pool: &mut Pool, bytes: usize) -> Result<f64, BackendError> {
    let pieces = (bytes / (PIECE * size_of::<u32>())).max(1);
    let mut buffer = Lines::<u32>::zeroed(pieces * PIECE, || "the measurement of the memory".into())?;
    let shared = Shared::new(&mut buffer);
    // Memory that was never written is mapped to one page of zeros, which stays in the cache.
    pool.run(&|worker| {
        worker.share(pieces, |piece| {
            // SAFETY: every piece belongs to one thread, and the buffer outlives the region.
            unsafe { shared.part(piece * PIECE, PIECE) }.fill(piece as u32 + 1);
        });
    });
    let isa = Isa::detect();
    let pass = |pool: &mut Pool| {
        pool.run(&|worker| {
            let mut sum = 0;
            worker.share(pieces, |piece| {
                // SAFETY: no thread writes, and the buffer outlives the region.
                isa.add_up(unsafe { shared.view(piece * PIECE, PIECE) }, &mut sum);
            });
            black_box(sum);
        });
    };
    let seconds = best(|| pass(pool));
    Ok((pieces * PIECE * size_of::<u32>()) as f64 / seconds)
}

/// Measures operations per second.
fn peak(pool: &mut Pool, kernel: &Kernel, window: Duration) -> f64 {
    let mut run = |rounds: usize| {
        let started = Instant::now();
        pool.run(&|_| (kernel.run)(rounds));
        started.elapsed()
    };
    let mut rounds = 1 << 10;
    // The processor's clock frequency settles in the meantime.
    while run(rounds) < window {
        rounds *= 2;
    }
    let seconds = best(|| {
        run(rounds);
    });
    pool.threads() as f64 * kernel.operations * rounds as f64 / seconds
}

/// Returns the seconds of the fastest run.
fn best(mut run: impl FnMut()) -> f64 {
    let timed = |_| {
        let started = Instant::now();
        run();
        started.elapsed().as_secs_f64()
    };
    (0..MEASUREMENTS).map(timed).fold(f64::INFINITY, f64::min)
}

per_isa! {
    plain;
    /// Adds all elements of a piece to `sum`.
    fn add_up(piece: &[u32], sum: &mut u32);
}

mod plain {
    use super::STREAMS;

    /// Number of elements in the cache lines that are added at once.
    const LINES: usize = 16 * 4;

    #[inline(always)]
    pub(super) fn add_up<const FMA: bool>(piece: &[u32], sum: &mut u32) {
        let (chunks, _) = piece.as_chunks::<LINES>();
        let streams = chunks.len() / STREAMS;
        let mut sums = [0u32; LINES];
        for index in 0..streams {
            for stream in 0..STREAMS {
                for (sum, &x) in sums.iter_mut().zip(&chunks[stream * streams + index]) {
                    *sum = sum.wrapping_add(x);
                }
            }
        }
        *sum = sums.iter().fold(*sum, |sum, &x| sum.wrapping_add(x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_isa_reads_all_of_a_piece() {
        let piece: Vec<u32> = (0..PIECE as u32).collect();
        let expected = piece.iter().fold(5, |sum: u32, &x| sum.wrapping_add(x));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let mut sum = 5;
            isa.add_up(&piece, &mut sum);
            assert_eq!(sum, expected, "{isa}");
        }
    }

    #[test]
    fn what_the_machine_has_is_measured() {
        let config = ProbeConfig { bytes: 8 << 20, window: Duration::from_micros(200) };
        let limits = Limits::measure(&config).unwrap();
        assert!(limits.threads >= 1 && limits.read_bandwidth > 0.0);
        assert!(limits.peaks.iter().all(|&(_, peak)| peak > 0.0 && peak.is_finite()), "{limits:?}");
        let found = |unit| limits.peak(unit).is_some();
        assert_eq!(found(Unit::Fma), Isa::Avx2.is_available());
        assert_eq!(found(Unit::Vnni), Isa::Avx512.is_available());
        assert_eq!([Unit::AmxInt8, Unit::AmxBf16].map(found), [Isa::Amx.is_available(); 2]);
    }
}
