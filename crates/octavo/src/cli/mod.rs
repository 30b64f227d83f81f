//! The command line. Flags that vLLM has keep their names, forms and defaults.
//!
//! A flag of vLLM is supported (the argument structs), accepted with a warning or refused with a reason ([`compat`]), or
//! unknown. The command line takes precedence over `--config`, the environment and the defaults, in this order
//! ([`layers`]).

mod adapters;
mod argv;
mod batch;
mod bench;
mod client;
mod compat;
mod health;
mod help;
mod kernels;
mod key;
mod layers;
mod media;
mod model;
mod serve;
mod values;
mod variables;
mod vectors;

use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use octavo_backend_cpu::Isa;
use octavo_telemetry::LogFormat;

pub(crate) use adapters::AdapterArgs;
pub(crate) use batch::RunBatchArgs;
pub(crate) use bench::{
    BatchArgs, BenchArgs, BenchCommand, BenchKernelsArgs, BenchLatencyArgs, BenchLimitsArgs, BenchRooflineArgs,
    BenchServeArgs, BenchThroughputArgs, BodyArgs, Dataset, DatasetArgs, ReportArgs, RequestsArgs, SizesArgs,
    TrafficArgs,
};
pub(crate) use client::{ChatArgs, CompleteArgs, PsArgs, RequestArgs, RunArgs, ServerArgs};
pub(crate) use health::HealthArgs;
pub(crate) use kernels::{KernelsArgs, KernelsBuildArgs, KernelsCommand};
pub(crate) use key::KeyArgs;
pub(crate) use layers::{Environment, LOCKS, nearest, variable};
pub(crate) use media::MediaArgs;
pub(crate) use model::{ChatFormatArgs, ComposeArgs, EngineArgs, ModelArgs, ObserveArgs, SamplingArgs, SourceArgs};
pub(crate) use serve::{NetworkArgs, ServeArgs};
pub(crate) use values::{
    Device, Dtype, GenerationSource, JsonObject, LoadFormat, MaxModelLen, Numa, TextList, small_count,
};
pub(crate) use variables::unknown as unknown_variables;
pub(crate) use vectors::{Convert, VectorArgs};

/// The model that `octavo serve` loads by default.
pub(crate) const DEFAULT_MODEL: &str = "smollm2-135m-instruct";

/// The value name that marks flags which accept dotted names.
const JSON: &str = "JSON";

/// An OpenAI-compatible LLM inference server.
#[derive(Debug, Parser)]
#[command(name = "octavo", version, max_term_width = 100, args_override_self = true)]
#[command(after_help = help::AFTER)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model over HTTP.
    #[command(after_help = help::AFTER_SERVE, after_long_help = help::AFTER_SERVE_LONG)]
    Serve(Box<ServeArgs>),
    /// Load a model and chat with it in the terminal.
    #[command(after_help = help::AFTER_RUN)]
    Run(Box<RunArgs>),
    /// Chat with a running server, or with a model that is loaded for it.
    #[command(after_help = help::AFTER_CHAT)]
    Chat(Box<ChatArgs>),
    /// Continue texts with a running server, or with a model that is loaded for it.
    #[command(after_help = help::AFTER_COMPLETE)]
    Complete(Box<CompleteArgs>),
    /// Download a model and print its path.
    Pull(PullArgs),
    /// List the models on disk.
    List(ListArgs),
    /// Show the models, requests and KV cache of a running server.
    Ps(PsArgs),
    /// Check whether a server is ready: exit code 0 or 1.
    #[command(after_help = help::AFTER_HEALTH)]
    Health(HealthArgs),
    /// Run a file of requests in OpenAI's batch format, without a server.
    #[command(after_help = help::AFTER_BATCH, after_long_help = help::AFTER_SERVE_LONG)]
    RunBatch(Box<RunBatchArgs>),
    /// Measure a running server, or a model that is loaded for it.
    Bench(BenchArgs),
    /// Print a model's size, sampling defaults and ops with their bytes and FLOPs.
    Inspect(InspectArgs),
    /// Merge a LoRA adapter into its model.
    #[command(after_help = help::AFTER_MERGE)]
    Merge(MergeArgs),
    /// Check hardware and dependencies.
    Doctor(DoctorArgs),
    /// Compile the GPU kernels ahead of time.
    Kernels(KernelsArgs),
    /// Create an API key and its entry for --api-keys-file.
    #[command(after_help = help::AFTER_KEY)]
    Key(KeyArgs),
    /// Print a completion script for a shell.
    #[command(after_help = help::AFTER_COMPLETIONS)]
    Completions(CompletionsArgs),
}

impl Command {
    /// Whether the command logs JSON; its failure is then a line of the log as well.
    pub(crate) fn logs_json(&self) -> bool {
        let observe = match self {
            Self::Serve(args) => &args.compose.observe,
            Self::RunBatch(args) => &args.compose.observe,
            _ => return false,
        };
        matches!(observe.log_format, LogFormat::Json)
    }
}

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    /// Catalog name, hub id (`org/name`, `org/name:file.gguf`) or path. Without it, the default model.
    pub(crate) model: Option<String>,

    /// List the catalog by family: download sizes, and which models are on disk or gated.
    ///
    /// With a name, show that model: its size, context, licence, sources, and the flags to serve it on common GPUs.
    #[arg(long)]
    pub(crate) list: bool,

    /// Download a model even if this version cannot serve it.
    #[arg(long)]
    pub(crate) force: bool,

    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Folder of downloads from the hub, instead of HF_HUB_CACHE.
    #[arg(long, value_name = "DIR")]
    pub(crate) download_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to complete in.
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Catalog name, hub id or path.
    ///
    /// A folder with a config.json is enough. Of a model on the hub, no weights are downloaded.
    #[arg(default_value = DEFAULT_MODEL)]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// Model: catalog name, hub id or path of a Hugging Face directory, quantised or not.
    pub(crate) base: String,

    /// Folder with the adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.
    pub(crate) adapter: PathBuf,

    /// Folder to write, which must not exist or be empty.
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: PathBuf,

    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Model to look for in the cache.
    #[arg(default_value = DEFAULT_MODEL)]
    pub(crate) model: String,

    /// Instruction set of the CPU kernels: on x86-64 portable, avx2, avx-vnni, avx512, avx512-bf16 or amx, on AArch64
    /// portable, neon, dotprod, i8mm or i8mm-bf16 [default: the best that the processor supports].
    #[arg(long, value_name = "ISA", env = "OCTAVO_CPU_ISA")]
    pub(crate) cpu_isa: Option<Isa>,

    /// Folder of kernels that `octavo kernels build` compiled.
    #[arg(long, value_name = "DIR", env = "OCTAVO_KERNEL_PACK")]
    pub(crate) kernel_pack: Option<PathBuf>,
}

/// The reason why there is no command to run.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line is wrong or asks for help; `note` names the origin of a wrong value.
    Usage { error: clap::Error, note: Option<String> },
    /// The configuration is wrong; the text is a sentence.
    Config(String),
}

impl Failure {
    /// Prints the failure and returns the exit code.
    pub(crate) fn report(&self) -> u8 {
        match self {
            Self::Usage { error, note } => {
                // Printing fails where standard error is closed.
                let _ = error.print();
                if let Some(note) = note {
                    eprintln!("\nnote: {note}");
                }
                u8::try_from(error.exit_code()).unwrap_or(2)
            }
            Self::Config(message) => {
                eprintln!("octavo: {message}");
                2
            }
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage { error, note: None } => write!(f, "{error}"),
            Self::Usage { error, note: Some(note) } => write!(f, "{error}\nnote: {note}"),
            Self::Config(message) => f.write_str(message),
        }
    }
}

impl From<clap::Error> for Failure {
    fn from(error: clap::Error) -> Self {
        Self::Usage { error, note: None }
    }
}

/// Parses the command from `args`, without the program's name, and `environment`.
pub(crate) fn parse(args: Vec<OsString>, environment: &Environment<'_>) -> Result<Cli, Failure> {
    let command = command();
    let args = argv::entry(args);
    let (subcommand, names) = subcommand(&command, &args);
    if names == 0 {
        return Ok(cli(&command, &args)?);
    }
    let mut spelled = args[..names].to_vec();
    spelled.extend(argv::spell(args[names..].to_vec(), subcommand).map_err(Failure::Config)?);
    let matches = matches(&command, &spelled).map_err(|error| help::hinted(error, subcommand))?;
    let mut given = &matches;
    while let Some((_, inner)) = given.subcommand() {
        given = inner;
    }
    let settings = layers::settings(subcommand, given, environment).map_err(Failure::Config)?;
    if settings.is_empty() {
        return Ok(Cli::from_arg_matches(&matches)?);
    }
    let tokens = settings.iter().flat_map(layers::Setting::tokens);
    spelled.splice(names..names, tokens);
    cli(&command, &spelled).map_err(|error| Failure::Usage { note: layers::origin(&settings, &error), error })
}

/// The subcommand that the first arguments name, and the number of these arguments.
fn subcommand<'a>(command: &'a clap::Command, args: &[OsString]) -> (&'a clap::Command, usize) {
    let (mut found, mut names) = (command, 0);
    while let Some(next) = args.get(names).and_then(|arg| found.find_subcommand(arg)) {
        (found, names) = (next, names + 1);
    }
    (found, names)
}

fn cli(command: &clap::Command, args: &[OsString]) -> Result<Cli, clap::Error> {
    Cli::from_arg_matches(&matches(command, args)?)
}

fn matches(command: &clap::Command, args: &[OsString]) -> Result<ArgMatches, clap::Error> {
    let program = OsString::from("octavo");
    command.clone().try_get_matches_from(std::iter::once(&program).chain(args))
}

/// The definition, in which every switch can be switched off as well.
fn command() -> clap::Command {
    help::shortened(Cli::command().mut_subcommands(with_switches))
}

/// Prints a completion script for the shell.
pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    // A closed pipe cannot be told.
    let _ = std::io::stdout().write_all(&completion_script(args.shell));
    Ok(())
}

fn completion_script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut visible(&command()), "octavo", &mut script);
    script
}

/// The definition without the flags that are only accepted.
fn visible(command: &clap::Command) -> clap::Command {
    let args = command.get_arguments().filter(|arg| !arg.is_hide_set()).cloned();
    let copy = clap::Command::new(command.get_name().to_owned()).args(args);
    let copy = copy.subcommands(command.get_subcommands().map(visible));
    match command.get_about() {
        Some(about) => copy.about(about.clone()),
        None => copy,
    }
}

fn with_switches(command: clap::Command) -> clap::Command {
    command.mut_args(switch).mut_subcommands(with_switches)
}

/// Lets a switch take `--x` and `--x=false`, which `--no-x` is rewritten to.
fn switch(arg: Arg) -> Arg {
    if !matches!(arg.get_action(), ArgAction::SetTrue) {
        return arg;
    }
    let default =
        if arg.get_default_values().is_empty() { "false".into() } else { arg.get_default_values()[0].clone() };
    // A variable such as HF_HUB_OFFLINE keeps the parser of the program that defines it.
    let arg = if arg.get_env().is_some() { arg } else { arg.value_parser(BoolishValueParser::new()) };
    arg.action(ArgAction::Set)
        .num_args(0..=1)
        .require_equals(true)
        .value_name("BOOL")
        .default_missing_value("true")
        .default_value(default)
        .hide_default_value(true)
        .hide_possible_values(true)
}

fn is_switch(arg: &Arg) -> bool {
    arg.is_require_equals_set()
}

fn is_json(arg: &Arg) -> bool {
    arg.get_value_names().is_some_and(|names| names.first().is_some_and(|name| name == JSON))
}

/// Whether a flag was given on the command line or added by [`layers`].
fn is_given(matches: &ArgMatches, id: &str) -> bool {
    matches.value_source(id) == Some(ValueSource::CommandLine)
}

#[cfg(test)]
mod tests;
