//! The `octavo` command: command line, configuration, composition.

mod cli;
mod doctor;
mod inspect;
mod pull;
mod serve;
mod system;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse_from(cli::normalise_flags(std::env::args_os()));
    let result = match cli.command {
        Command::Serve(args) => serve::run(*args),
        Command::Pull(args) => pull::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Doctor(args) => doctor::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("octavo: {error:#}");
            ExitCode::FAILURE
        }
    }
}
