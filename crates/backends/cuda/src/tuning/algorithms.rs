//! The choice among the algorithms that cuBLASLt offers for a product.
//!
//! The library orders them by times that it estimates. The first start on a device measures them for each shape and each number of
//! rows that the library plans, up to the largest step. That ends after the time of [`Tuning`](crate::Tuning): products that are left
//! over keep the library's first choice, in later starts too, so that their bits stay the same.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use octavo_ops::{BackendError, Rows};

use super::{MEASURED_ROWS, gains, measured_count};
use crate::forward::Machine;
use crate::libraries::cublaslt::{Algorithm, Operands, Shape, buckets};
use crate::lower::Stage;

/// Maximum number of algorithms that are measured for up to [`MEASURED_ROWS`] rows. Each loads a kernel on its first run.
const FEW_ROWS_ALGORITHMS: usize = 16;

/// Maximum number of algorithms that are measured for more rows, whose runs take longer.
const MANY_ROWS_ALGORITHMS: usize = 8;

/// Ratio to the least time so far beyond which an algorithm is measured once only.
const HOPELESS: u32 = 2;

/// Products by cuBLASLt with the weights of all layers.
struct LibraryProduct {
    shape: Shape,
    /// Number of planned rows.
    rows: u32,
    operands: Vec<Operands>,
}

impl LibraryProduct {
    /// Returns a text that tells shapes apart that have different plans.
    fn name(&self) -> String {
        let Shape { n, k, stride, out, bias, scaling, alignment } = self.shape;
        let bias = if bias { ", bias" } else { "" };
        let scaling =
            scaling.map_or_else(String::new, |scaling| format!(", e4m3 scaled by {scaling:?}").to_lowercase());
        format!("{n}x{k} to {} of {stride} aligned to {alignment}{bias}{scaling}", out.name())
    }

    /// Returns the place in the order of measurements: few rows come first, then the most, which prompts have.
    fn place(&self) -> (u32, String) {
        let place = if self.rows <= MEASURED_ROWS { self.rows } else { u32::MAX - self.rows };
        (place, self.name())
    }

    fn weight_bytes(&self, element: u64) -> u64 {
        let element = if self.shape.scaling.is_some() { 1 } else { element };
        u64::from(self.shape.n) * u64::from(self.shape.k) * element
    }
}

/// Returns the algorithm with the least time if that gains enough over the first one, which is the library's choice, and else the
/// first.
fn fastest(times: &[(Algorithm, Duration)]) -> Option<Algorithm> {
    let (first, least) = (times.first()?, times.iter().min_by_key(|(_, time)| *time)?);
    Some(if gains(least.1, first.1) { least.0 } else { first.0 })
}

impl Machine {
    /// Chooses the fastest algorithm for each product of cuBLASLt, from the table or by measurement.
    pub(super) fn choose_algorithms(
        &mut self,
        table: &mut BTreeMap<String, BTreeMap<u32, Option<Algorithm>>>,
        time: Duration,
        most: impl Fn(Rows) -> usize,
    ) -> Result<(), BackendError> {
        if self.launcher.cublaslt.is_none() {
            return Ok(());
        }
        let products = self.library_products(most);
        let (begun, mut measured, mut left) = (Instant::now(), 0, 0);
        for product in &products {
            let known = table.entry(product.name()).or_default();
            if known.contains_key(&product.rows) {
                continue;
            }
            let found = if begun.elapsed() < time {
                measured += 1;
                self.fastest_algorithm(product)?
            } else {
                left += 1;
                None
            };
            known.insert(product.rows, found);
        }
        let Some(library) = &mut self.launcher.cublaslt else { return Ok(()) };
        for product in &products {
            if let Some(algorithm) = table.get(&product.name()).and_then(|known| *known.get(&product.rows)?) {
                library.choose(algorithm, product.shape, product.rows, &product.operands[0]);
            }
        }
        let count = products.len();
        tracing::info!("products: the algorithms of cuBLASLt for {count} sizes are known, {measured} measured now");
        if left > 0 {
            let seconds = time.as_secs();
            tracing::info!(
                "products: {left} sizes keep the first choice of cuBLASLt, as measurements took {seconds} s"
            );
        }
        Ok(())
    }

    /// Returns what cuBLASLt computes in steps with at most the given number of rows of each kind, in the order of measurements.
    fn library_products(&self, most: impl Fn(Rows) -> usize) -> Vec<LibraryProduct> {
        let Some(library) = &self.launcher.cublaslt else { return Vec::new() };
        let mut found: HashMap<(Shape, u32), Vec<Operands>> = HashMap::new();
        for stage in &self.stages {
            let Stage::Product { product, rows: of } = stage else { continue };
            for part in &product.parts {
                for rows in buckets(most(*of) as u32) {
                    if let Some((shape, operands)) = part.by_library(library, rows, &self.scratch) {
                        found.entry((shape, rows)).or_default().push(operands);
                    }
                }
            }
        }
        let products = found.into_iter().map(|((shape, rows), operands)| LibraryProduct { shape, rows, operands });
        let mut products: Vec<_> = products.collect();
        products.sort_by_cached_key(LibraryProduct::place);
        products
    }

    /// Measures the algorithms for a product.
    fn fastest_algorithm(&self, product: &LibraryProduct) -> Result<Option<Algorithm>, BackendError> {
        let LibraryProduct { shape, rows, operands } = product;
        let Some(library) = &self.launcher.cublaslt else { return Ok(None) };
        let most = if *rows <= MEASURED_ROWS { FEW_ROWS_ALGORITHMS } else { MANY_ROWS_ALGORITHMS };
        let operands = &operands[..measured_count(operands.len(), product.weight_bytes(self.element), *rows)];
        let (mut times, mut least) = (Vec::new(), Duration::MAX);
        for algorithm in library.algorithms(*shape, *rows, most) {
            let run = || Ok(operands.iter().all(|operands| library.run_by(algorithm, *shape, *rows, operands)));
            if let Some(time) = self.measure(least.saturating_mul(HOPELESS), run)? {
                times.push((algorithm, time));
                least = least.min(time);
            }
        }
        Ok(fastest(&times))
    }
}

#[cfg(test)]
mod tests {
    use octavo_kernels::manifest::Dtype;

    use super::*;

    const SHAPE: Shape =
        Shape { n: 64, k: 32, stride: 64, out: Dtype::Bf16, bias: false, scaling: None, alignment: 256 };

    #[test]
    fn the_first_algorithm_stays_unless_another_gains_something() {
        let [first, second, third] = [Algorithm::of(1), Algorithm::of(2), Algorithm::of(3)];
        let chosen = |times: &[(Algorithm, u64)]| {
            let times: Vec<_> = times.iter().map(|(of, micros)| (*of, Duration::from_micros(*micros))).collect();
            fastest(&times)
        };
        assert_eq!(chosen(&[]), None);
        assert_eq!(chosen(&[(first, 100)]), Some(first));
        assert_eq!(chosen(&[(first, 100), (second, 98), (third, 99)]), Some(first));
        assert_eq!(chosen(&[(first, 100), (second, 96), (third, 90)]), Some(third));
        assert_eq!(chosen(&[(first, 100), (second, 96), (third, 96)]), Some(second));
    }

    #[test]
    fn decode_is_measured_first_and_then_the_largest_prompt() {
        let product = |rows| LibraryProduct { shape: SHAPE, rows, operands: Vec::new() };
        let mut products = [512, 16, 96, 8192, 64].map(product);
        products.sort_by_cached_key(LibraryProduct::place);
        assert_eq!(products.map(|product| product.rows), [16, 64, 8192, 512, 96]);
    }
}
