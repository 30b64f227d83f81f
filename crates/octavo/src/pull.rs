//! `octavo pull`: a model into the cache.

use std::io::IsTerminal;

use anyhow::Result;
use octavo_models::{Checkpoint, Progress, ResolveOptions, ResolvedModel, catalog};

use crate::cli::{LoadFormat, PullArgs, SourceArgs};
use crate::signals;

pub(crate) fn run(args: &PullArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    signals::end_first_process()?;
    if args.list {
        print!("{}", listing());
        return Ok(());
    }
    let model = resolve(&args.model, &args.source, LoadFormat::Auto)?;
    println!("{}", model.path.display());
    Ok(())
}

/// From a name to a local file or directory, downloading if need be.
pub(crate) fn resolve(reference: &str, source: &SourceArgs, format: LoadFormat) -> Result<ResolvedModel> {
    let progress = progress();
    let mut options = ResolveOptions::from_env();
    options.revision.clone_from(&source.revision);
    options.offline |= source.offline;
    options.without_weights = format == LoadFormat::Dummy;
    if let Some(token) = &source.hf_token {
        options.hub.token = Some(token.clone());
    }
    if let Some(folder) = &source.download_dir {
        options.hub.cache_dir.clone_from(folder);
    }
    Ok(octavo_models::resolve(reference, &options, progress.as_ref())?)
}

/// A model to look at: no weights of a hub's repository are fetched for it, and of a folder none need be there.
pub(crate) fn open_shape(reference: &str, source: &SourceArgs) -> Result<Checkpoint> {
    Ok(Checkpoint::open_shape(&resolve(reference, source, LoadFormat::Dummy)?.path)?)
}

/// A bar on a terminal, log lines elsewhere.
pub(crate) fn progress() -> Box<dyn Progress> {
    octavo_models::progress_for(std::io::stderr().is_terminal())
}

fn listing() -> String {
    let mut text = String::new();
    for entry in catalog::entries() {
        let served = if entry.served { "" } else { "  (architecture not served yet)" };
        text.push_str(&format!("{:<28} {}{served}\n", entry.id, entry.name));
    }
    text
}
