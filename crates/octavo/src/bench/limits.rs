//! `octavo bench limits`: the ceilings of a GPU, in a file that the other benches compare their times with.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use octavo_backend_cuda::{Ceilings, CeilingsBench};
use octavo_ops::cost::Peaks;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{kernels, write_json};
use crate::cli::{BenchLimitsArgs, Dtype};
use crate::serve::device::described;

pub(super) fn run(args: &BenchLimitsArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    let backend = kernels::open(kernels::config(Dtype::Auto)?)?;
    let bench = CeilingsBench {
        copy_bytes: args.copy_bytes as u64,
        product_size: args.product_size,
        min_time: Duration::from_secs_f64(args.min_time),
    };
    let device = described(backend.device());
    let ceilings = backend.measure_ceilings(&bench)?;
    let stated = backend.stated_peaks();
    println!("{device}");
    print!("{}", report(&ceilings, stated, args.product_size));
    match &args.output_json {
        Some(path) => write_json(path, &to_json(&device, &ceilings, stated, args.product_size)),
        None => Ok(()),
    }
}

/// A line for each rate, with its share of the stated limit.
fn report(ceilings: &Ceilings, stated: Option<Peaks>, size: u32) -> String {
    // A rate in a unit, with its share of the limit.
    let rate = |rate: f64, limit: Option<f64>, unit: f64, name: &str| {
        let share = |limit: f64| format!(", {:.1} % of the stated {:.1}", 100.0 * rate / limit, limit / unit);
        format!("{:.1} {name}{}", rate / unit, limit.map(share).unwrap_or_default())
    };
    let bandwidth = rate(ceilings.bandwidth, stated.map(|peaks| peaks.bandwidth), 1e9, "GB/s read and written");
    let mut text = format!("copy: {bandwidth}\n");
    for product in &ceilings.products {
        let rate = match &product.flops {
            Ok(flops) => rate(*flops, stated.map(|peaks| peaks.flops), 1e12, "TFLOP/s"),
            Err(reason) => reason.to_string(),
        };
        text += &format!("product of {size} x {size} x {size}, {}: {rate}\n", product.dtype);
    }
    text
}

fn to_json(device: &str, ceilings: &Ceilings, stated: Option<Peaks>, size: u32) -> Value {
    let products = ceilings.products.iter().map(|product| match &product.flops {
        Ok(flops) => json!({"dtype": product.dtype, "flops_per_second": flops}),
        Err(reason) => json!({"dtype": product.dtype, "error": reason.to_string()}),
    });
    json!({
        "device": device,
        "bandwidth_bytes_per_second": ceilings.bandwidth,
        "product_size": size,
        "products": products.collect::<Vec<_>>(),
        "stated": stated.map(|peaks| json!({
            "bandwidth_bytes_per_second": peaks.bandwidth,
            "flops_per_second": peaks.flops,
        })),
    })
}

/// The part of the file that is read back.
#[derive(Deserialize)]
struct Measured {
    device: String,
    bandwidth_bytes_per_second: f64,
    products: Vec<MeasuredProduct>,
}

#[derive(Deserialize)]
struct MeasuredProduct {
    dtype: String,
    flops_per_second: Option<f64>,
}

/// The ceilings for an element type from the file of an earlier run on the same device. `None` where products of that type were not
/// measured.
///
/// # Errors
/// The file cannot be read, or is of another device.
pub(super) fn read(path: &Path, device: &str, dtype: &str) -> Result<Option<Peaks>> {
    let context = || format!("--limits {}", path.display());
    let measured: Measured =
        serde_json::from_slice(&std::fs::read(path).with_context(context)?).with_context(context)?;
    ensure!(
        device.starts_with(&measured.device),
        "--limits {}: the limits are those of {}, and this device is {device}",
        path.display(),
        measured.device
    );
    let product = measured.products.iter().find(|product| product.dtype == dtype);
    let flops = product.and_then(|product| product.flops_per_second);
    if flops.is_none() {
        tracing::warn!(
            "--limits {}: no product of {dtype} was measured, so no share of the ceilings is reported",
            path.display()
        );
    }
    Ok(flops.map(|flops| Peaks { bandwidth: measured.bandwidth_bytes_per_second, flops }))
}

#[cfg(test)]
mod tests {
    use octavo_backend_cuda::{ProductRate, Unmeasured};

    use super::*;

    fn ceilings() -> Ceilings {
        let refused = Unmeasured::Missing("cuBLASLt");
        Ceilings {
            bandwidth: 4.3e12,
            products: vec![
                ProductRate { dtype: "bfloat16", flops: Ok(780e12) },
                ProductRate { dtype: "float16", flops: Err(refused) },
            ],
        }
    }

    const STATED: Peaks = Peaks { bandwidth: 4.8e12, flops: 989.5e12 };

    #[test]
    fn rates_are_printed_with_their_share() {
        assert_eq!(
            report(&ceilings(), Some(STATED), 8192),
            "copy: 4300.0 GB/s read and written, 89.6 % of the stated 4800.0\n\
             product of 8192 x 8192 x 8192, bfloat16: 780.0 TFLOP/s, 78.8 % of the stated 989.5\n\
             product of 8192 x 8192 x 8192, float16: cuBLASLt is missing\n"
        );
    }

    #[test]
    fn a_file_is_read_back_on_the_same_device_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("limits.json");
        let json = to_json("NVIDIA H200 (sm_90a, 139.80 GiB)", &ceilings(), Some(STATED), 8192);
        std::fs::write(&path, json.to_string()).unwrap();
        let here = "NVIDIA H200 (sm_90a, 139.80 GiB), bfloat16";
        let peaks = Peaks { bandwidth: 4.3e12, flops: 780e12 };
        assert_eq!(read(&path, here, "bfloat16").unwrap(), Some(peaks));
        assert_eq!(read(&path, here, "float16").unwrap(), None);
        let error = read(&path, "NVIDIA L40S (sm_89, 44.40 GiB)", "bfloat16").unwrap_err().to_string();
        assert!(error.contains("and this device is NVIDIA L40S"), "{error}");
        assert!(read(&folder.path().join("none"), here, "bfloat16").is_err());
    }
}
