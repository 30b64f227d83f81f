//! The `octavo` command: command line, configuration, composition.

mod batch;
mod bench;
mod cli;
mod client;
mod doctor;
mod health;
mod inspect;
mod kernels;
mod pull;
mod serve;
mod signals;
mod system;

use std::process::ExitCode;

use crate::cli::Command;

fn main() -> ExitCode {
    let cli = match cli::parse(std::env::args_os().skip(1).collect(), &|name| std::env::var(name).ok()) {
        Ok(cli) => cli,
        Err(failure) => return ExitCode::from(failure.report()),
    };
    let json = cli.command.logs_json();
    let result = match cli.command {
        Command::Serve(args) => serve::run(*args),
        Command::RunBatch(args) => batch::run(*args),
        Command::Chat(args) => client::chat(*args),
        Command::Complete(args) => client::complete(*args),
        Command::Bench(args) => bench::run(args),
        Command::Pull(args) => pull::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Health(args) => health::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Kernels(args) => kernels::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Also false if logging could not be set up.
            if json && tracing::enabled!(tracing::Level::ERROR) {
                tracing::error!("{error:#}");
            } else {
                eprintln!("octavo: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}
