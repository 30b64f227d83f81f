//! The contents of `-h`, and hints for wrong command lines.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};
use clap::{Arg, Command};

pub(crate) const AFTER: &str = "\
Examples:
  octavo run                        Chat with the default model (98 MB)
  octavo serve qwen3-0.6b           Serve a model on port 8000
  octavo pull --list                List the catalog

`octavo COMMAND -h` shows the common flags of a command, `octavo COMMAND --help` all of them.";

pub(crate) const AFTER_SERVE: &str = "\
Examples:
  octavo serve qwen3-0.6b --max-model-len 8k --api-key KEY
  octavo serve ./model.gguf --host 127.0.0.1 --port 9000   (`octavo serve --help` lists all flags)";

pub(crate) const AFTER_SERVE_LONG: &str = "\
Flag names may be written with _ instead of -. A switch --x has the opposite --no-x. A JSON flag takes an object, or one \
key at a time: --override-generation-config.temperature 0.5. Every flag is also an environment variable \
(OCTAVO_MAX_NUM_SEQS for --max-num-seqs) and a key of the --config file. vLLM's other flags are accepted with a warning \
if they change nothing here, and refused otherwise.";

pub(crate) const AFTER_RUN: &str = "\
Examples:
  octavo run qwen3-0.6b
  octavo run qwen3-0.6b \"Summarize this text\" < notes.txt
  octavo run qwen3-vl-8b-instruct --image cat.jpg \"What is in this image?\"

`octavo run --help` also lists the flags of the model and the engine.";

pub(crate) const AFTER_CHAT: &str = "\
Examples:
  octavo chat --url http://127.0.0.1:8000 --temperature 0
  echo \"What is a KV cache?\" | octavo chat
  octavo chat --image cat.jpg --quick \"What is in this image?\"

`octavo chat --help` also lists the flags of the model and the engine, which need MODEL.";

pub(crate) const AFTER_COMPLETE: &str = "\
Examples:
  octavo complete --quick \"Once upon a time\" --max-tokens 50
  octavo complete smollm2-135m-instruct < beginning.txt

`octavo complete --help` also lists the flags of the model and the engine, which need MODEL.";

pub(crate) const AFTER_BATCH: &str = "\
Example:
  octavo run-batch -i requests.jsonl -o answers.jsonl --model qwen3-0.6b

`octavo run-batch --help` lists all flags.";

pub(crate) const AFTER_HEALTH: &str = "\
The variables of `octavo serve` (OCTAVO_HOST, OCTAVO_PORT, OCTAVO_UDS, OCTAVO_SSL_CERTFILE) apply here too. Use --url \
http://127.0.0.1:8000/live to check whether the process answers, ready or not.";

pub(crate) const AFTER_KEY: &str = "\
The entry goes to standard output and the key to standard error, so this adds a client to a file:
  octavo key team-a --requests-per-minute 600 >> keys.yaml";

pub(crate) const AFTER_MERGE: &str = "\
Example:
  octavo merge Qwen/Qwen3-8B ./adapter -o ./merged && octavo serve ./merged";

pub(crate) const AFTER_COMPLETIONS: &str = "\
Examples:
  octavo completions bash > ~/.local/share/bash-completion/completions/octavo
  octavo completions zsh > ~/.zfunc/_octavo
  octavo completions fish > ~/.config/fish/completions/octavo.fish";

/// The flags of `octavo serve` and `octavo run-batch` that `-h` shows.
const COMMON: [&str; 22] = [
    "input-file",
    "output-file",
    "served-model-name",
    "offline",
    "device",
    "dtype",
    "cpu-threads",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "enable-prefix-caching",
    "chat-template",
    "seed",
    "tool-call-parser",
    "reasoning-parser",
    "generation-config",
    "config",
    "host",
    "port",
    "api-key",
];

/// The headings of `chat`, `complete` and `run` that `-h` shows.
const OF_CONVERSATIONS: [&str; 2] = ["Conversation", SAMPLING];
const SAMPLING: &str = "Sampling";

/// Hides rarely used flags from `-h`.
pub(crate) fn shortened(command: Command) -> Command {
    let serve = |command: Command| command.mut_args(|arg| shown_if(arg, is_common));
    let conversation = |command: Command| {
        command.mut_args(|arg| if arg.get_id() == "seed" { request_seed(arg) } else { arg }).mut_args(|arg| {
            shown_if(arg, |arg| {
                arg.is_positional() || arg.get_help_heading().is_some_and(|heading| OF_CONVERSATIONS.contains(&heading))
            })
        })
    };
    let of = |command: Command, names: &[&str], shorten: fn(Command) -> Command| {
        names.iter().fold(command, |command, name| command.mut_subcommand(name, shorten))
    };
    of(of(command, &["serve", "run-batch"], serve), &["chat", "complete", "run"], conversation)
}

fn shown_if(arg: Arg, is_shown: impl Fn(&Arg) -> bool) -> Arg {
    let hidden = !is_shown(&arg);
    arg.hide_short_help(hidden)
}

fn is_common(arg: &Arg) -> bool {
    arg.is_positional() || arg.get_long().is_some_and(|name| COMMON.contains(&name))
}

/// In a conversation the engine's seed is that of the requests.
fn request_seed(arg: Arg) -> Arg {
    arg.help_heading(SAMPLING).value_name("N").help("Random seed: the same seed gives the same answer").long_help(None)
}

/// Replaces clap's suggestion if it is a flag that `-h` does not show: a user of a conversation does not mean the engine's
/// flags.
pub(crate) fn hinted(mut error: Error, command: &Command) -> Error {
    let Some(ContextValue::String(named)) = error.get(ContextKind::InvalidArg) else { return error };
    if error.kind() != ErrorKind::UnknownArgument || !["chat", "complete", "run"].contains(&command.get_name()) {
        return error;
    }
    let names_server = ["--port", "--host"].iter().any(|flag| named.starts_with(flag));
    let suggested = match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(flag)) => flag.trim_start_matches('-').to_owned(),
        _ => return error,
    };
    let is_hidden =
        command.get_arguments().any(|arg| arg.get_long() == Some(&suggested) && arg.is_hide_short_help_set());
    if is_hidden || names_server {
        error.remove(ContextKind::SuggestedArg);
        let usage = command.clone().bin_name(format!("octavo {}", command.get_name())).render_usage();
        error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
    }
    if names_server && command.get_name() != "run" {
        let tip = StyledStr::from("a running server is given as --url http://HOST:PORT");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
    error
}
