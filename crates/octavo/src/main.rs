//! The `octavo` command: command line, configuration, composition.

mod batch;
mod bench;
mod cli;
mod client;
mod doctor;
mod health;
mod inspect;
mod kernels;
mod key;
mod merge;
mod pull;
mod report;
mod serve;
mod signals;
mod system;
mod table;
mod template_helper;
mod yaml;

use std::process::ExitCode;

use crate::cli::Command;

fn main() -> ExitCode {
    if template_helper::is_asked_for() {
        return template_helper::run();
    }
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
        Command::Run(args) => client::run(*args),
        Command::Ps(args) => client::ps(&args),
        Command::Bench(args) => bench::run(args),
        Command::Pull(args) => pull::run(&args),
        Command::List(args) => pull::list(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Merge(args) => merge::run(&args),
        Command::Health(args) => health::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Key(args) => {
            key::run(&args);
            Ok(())
        }
        Command::Completions(args) => cli::completions(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Also false if logging could not be set up.
            if json && tracing::enabled!(tracing::Level::ERROR) {
                tracing::error!("{}", report::sentence(&error));
            } else {
                eprintln!("octavo: {}", report::sentence(&error));
            }
            ExitCode::FAILURE
        }
    }
}
