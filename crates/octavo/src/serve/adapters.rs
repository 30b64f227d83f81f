//! Adapters that are served beside the model.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use octavo_engine::Adapter;
use octavo_models::{AdapterError, AdapterTargets, adapter_base, adapter_version};
use octavo_runner::{AdapterLimits, AdapterWeights};
use octavo_server::{AdapterLoadError, AdapterLoader, AdapterSource, Adapters};
use tracing::{info, warn};

use crate::cli::AdapterArgs;
use crate::serve::model::LoadedModel;
use crate::serve::settings::Settings;
use crate::system::human_bytes;

/// Largest rank that can be served.
const MAX_RANK: usize = 256;

/// The room for adapters, if they are enabled.
///
/// # Errors
/// Flags contradict each other, or ask for more than there is.
pub(crate) fn limits(args: &AdapterArgs) -> Result<Option<AdapterLimits>> {
    if !args.enable_lora {
        if !args.lora_modules.is_empty() {
            bail!("--lora-modules needs --enable-lora");
        }
        return Ok(None);
    }
    if args.max_lora_rank > MAX_RANK {
        bail!("--max-lora-rank {}: the largest rank is {MAX_RANK}", args.max_lora_rank);
    }
    if let Some(kept) = args.max_cpu_loras.filter(|kept| *kept < args.max_loras) {
        bail!("--max-cpu-loras {kept}: it must be at least --max-loras, {}", args.max_loras);
    }
    Ok(Some(AdapterLimits { slots: args.max_loras, rank: args.max_lora_rank }))
}

/// Loads adapters at the start. Returns all that may be served, if there is room for any.
///
/// # Errors
/// An adapter cannot be loaded.
pub(crate) fn start(
    args: &AdapterArgs,
    limits: Option<AdapterLimits>,
    settings: &Settings,
    model: &LoadedModel,
) -> Result<Option<Adapters>> {
    let Some(AdapterLimits { slots, rank }) = limits else { return Ok(None) };
    let targets = AdapterTargets::new(&model.checkpoint, &model.program);
    let kept = args.max_cpu_loras.unwrap_or(slots);
    info!("adapters: {slots} at a time, of rank {rank} at most; {kept} in memory");
    if settings.server.adapter_routes {
        warn!("adapters can be loaded and unloaded by requests: do not expose these routes");
    }
    let folder = settings.adapter_folder.clone();
    let names = settings.server.served_model_names.clone();
    let adapters = Adapters::new(Loader { targets, rank }, folder, names, kept);
    for module in &args.lora_modules {
        let loaded = adapters.load(&module.name, Path::new(&module.path), module.base.as_deref());
        loaded.map_err(|error| anyhow!("--lora-modules {}: {error}", module.name))?;
    }
    Ok(Some(adapters))
}

/// Reads adapters for a model.
struct Loader {
    targets: AdapterTargets,
    /// Largest rank.
    rank: usize,
}

impl AdapterLoader for Loader {
    fn load(&self, source: AdapterSource<'_>) -> Result<Adapter, AdapterLoadError> {
        let AdapterSource { name, path, number, origin } = source;
        let loaded = self.targets.load(path, self.rank).map_err(|error| match error {
            AdapterError::Absent(path) => AdapterLoadError::NotFound(path.display().to_string()),
            error => AdapterLoadError::Refused(error.to_string()),
        })?;
        info!("adapter {name}: {} of matrices from {}", human_bytes(loaded.bytes()), loaded.path().display());
        Ok(Adapter::new(number, name, origin, AdapterWeights(Arc::new(loaded))))
    }

    fn base_of(&self, path: &Path) -> Option<String> {
        adapter_base(path)
    }

    fn version_of(&self, path: &Path) -> Option<String> {
        adapter_version(path)
    }
}
