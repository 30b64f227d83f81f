//! `octavo inspect`: a model's program, priced.

use anyhow::Result;
use octavo_models::{Checkpoint, InspectOptions, build_program, inspect};

use crate::cli::InspectArgs;
use crate::pull;
use crate::serve::generation::Defaults;

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    let resolved = pull::resolve_shape(&args.model, &args.source)?;
    let checkpoint = Checkpoint::open_shape(&resolved.path)?;
    let program = build_program(&checkpoint)?;
    println!("model          {}", resolved.name);
    let catalog = resolved.entry.and_then(|entry| entry.sampling.as_ref());
    let defaults = Defaults::recommended(checkpoint.generation_config(), catalog);
    if defaults.origin.is_empty() {
        println!("sampling       no recommendation: the API's defaults");
    } else {
        println!("sampling       {} (from {})", defaults.sampling, defaults.origin);
    }
    print!("{}", inspect(checkpoint.config(), &program, &InspectOptions::default()));
    Ok(())
}
