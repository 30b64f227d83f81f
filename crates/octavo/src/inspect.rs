//! `octavo inspect`: a model's program, priced.

use anyhow::Result;
use octavo_models::{InspectOptions, build_program, inspect};

use crate::cli::InspectArgs;
use crate::pull;

pub(crate) fn run(args: &InspectArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    let checkpoint = pull::open_shape(&args.model, &args.source)?;
    let program = build_program(&checkpoint)?;
    print!("{}", inspect(checkpoint.config(), &program, &InspectOptions::default()));
    Ok(())
}
