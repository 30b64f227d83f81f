//! `octavo inspect`: a model's program, priced.

use anyhow::Result;
use octavo_models::{Checkpoint, InspectOptions, build_program, inspect};

use crate::cli::{InspectArgs, LoadFormat};
use crate::pull;

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    let resolved = pull::resolve(&args.model, &args.source, LoadFormat::Auto)?;
    let checkpoint = Checkpoint::open(&resolved.path)?;
    let program = build_program(&checkpoint)?;
    print!("{}", inspect(checkpoint.config(), &program, &InspectOptions::default()));
    Ok(())
}
