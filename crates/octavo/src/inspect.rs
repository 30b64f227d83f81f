//! `octavo inspect`: a model's program, priced.

use anyhow::Result;
use octavo_models::{Checkpoint, InspectOptions, build_programs, inspect, inspect_encoder};

use crate::cli::InspectArgs;
use crate::pull;
use crate::serve::generation::Defaults;

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    let resolved = pull::resolve_shape(&args.model, &args.source)?;
    let checkpoint = Checkpoint::open_shape(&resolved.path)?;
    let programs = build_programs(&checkpoint)?;
    println!("model          {}", resolved.name);
    let catalog = resolved.entry.and_then(|entry| entry.sampling.as_ref());
    let defaults = Defaults::recommended(checkpoint.generation_config(), catalog);
    if defaults.origin.is_empty() {
        println!("sampling       no recommendation: the API's defaults");
    } else {
        println!("sampling       {} (from {})", defaults.sampling, defaults.origin);
    }
    let (config, options) = (checkpoint.config(), InspectOptions::default());
    print!("{}", inspect(config, &programs.decoder, &options));
    if let (Some(vision), Some(encoder)) = (&config.vision, &programs.encoder) {
        print!("\n{}", inspect_encoder(vision, encoder, &options));
    }
    Ok(())
}
