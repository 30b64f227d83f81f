//! `octavo merge`: an adapter into the weights of its model.

use anyhow::Result;
use octavo_models::{MergeOptions, merge};

use crate::cli::{LoadFormat, MergeArgs};
use crate::pull::{self, Wanted};
use crate::signals;
use crate::system::human_bytes;

pub(crate) fn run(args: &MergeArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    signals::end_first_process()?;
    let base = pull::resolve(&args.base, &args.source, LoadFormat::Auto, Wanted::Served)?;
    let options = MergeOptions { base: &base.path, adapter: &args.adapter, output: &args.output };
    let merged = merge(options, pull::progress().as_ref())?;
    let unpacked = match merged.unpacked {
        0 => String::new(),
        count => {
            let [before, now] = merged.unpacked_bytes.map(human_bytes);
            format!("; {count} quantised weights were unpacked: {now} in place of {before}")
        }
    };
    eprintln!("{} weights changed, {} written{unpacked}", merged.changed, human_bytes(merged.bytes));
    println!("{}", args.output.display());
    Ok(())
}
