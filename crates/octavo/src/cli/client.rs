//! Flags of the commands that talk with a model: `chat`, `complete`, `run`; and of `ps`.

use clap::Args;
use serde_json::Value;

use crate::cli::model::ComposeArgs;
use crate::client::parameters;

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// Send this message, print the answer and exit.
    #[arg(short, long, value_name = "MESSAGE", help_heading = "Conversation")]
    pub(crate) quick: Option<String>,

    #[command(flatten)]
    pub(crate) style: ChatStyleArgs,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) request: RequestArgs,
    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CompleteArgs {
    /// Continue this text, print the continuation and exit.
    #[arg(short, long, value_name = "PROMPT", help_heading = "Conversation")]
    pub(crate) quick: Option<String>,

    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) request: RequestArgs,
    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) compose: ComposeArgs,

    /// Answer this prompt and exit.
    ///
    /// Text from a pipe goes in front of it: `octavo run MODEL "Summarize this" < notes.txt`.
    #[arg(value_name = "PROMPT", help_heading = "Conversation", allow_negative_numbers = true)]
    pub(crate) prompt: Vec<String>,

    #[command(flatten)]
    pub(crate) style: ChatStyleArgs,
    #[command(flatten)]
    pub(crate) request: RequestArgs,
}

/// How a conversation begins and is remembered.
#[derive(Debug, Args)]
#[command(next_help_heading = "Conversation")]
pub(crate) struct ChatStyleArgs {
    /// System prompt: instructions that precede the conversation.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system_prompt: Option<String>,

    /// Put an image in front of the first message: a file, or a URL that the server fetches. May be repeated.
    ///
    /// Files are PNG, JPEG, WebP or GIF, whatever their names are.
    #[arg(long, value_name = "FILE_OR_URL")]
    pub(crate) image: Vec<String>,

    /// Keep typed lines in a history file; --no-history does not.
    ///
    /// The file is $XDG_STATE_HOME/octavo/history, or ~/.local/state/octavo/history. Only its owner can read it.
    #[arg(long, default_value_t = true)]
    pub(crate) history: bool,
}

/// A running server.
#[derive(Debug, Args)]
#[command(next_help_heading = "Conversation")]
pub(crate) struct ServerArgs {
    /// Use a running server [default without MODEL: http://127.0.0.1:8000].
    #[arg(long, conflicts_with_all = ["positional", "named"])]
    pub(crate) url: Option<String>,

    /// Name of the model in requests [default: the server's first model].
    #[arg(long, value_name = "NAME")]
    pub(crate) model_name: Option<String>,

    /// API key of the server.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,

    /// Accept any certificate of an https:// server, as curl does with this flag.
    ///
    /// Without it, the certificate must be one of a public authority, or of an authority in the PEM file that the variable
    /// SSL_CERT_FILE names.
    #[arg(long)]
    pub(crate) insecure: bool,
}

/// Parameters of every request. What is left out is left to the model's defaults.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct RequestArgs {
    /// Randomness, from 0 (always the most likely token) to 2.
    #[arg(long, value_name = "T", value_parser = |text: &str| parameters::value("temperature", text))]
    pub(crate) temperature: Option<Value>,

    /// Sample from the most likely tokens that add up to this probability.
    #[arg(long, value_name = "P", value_parser = |text: &str| parameters::value("top_p", text))]
    pub(crate) top_p: Option<Value>,

    /// Sample from this many of the most likely tokens; 0 sets no limit.
    #[arg(long, value_name = "K", value_parser = |text: &str| parameters::value("top_k", text))]
    pub(crate) top_k: Option<Value>,

    /// Minimum probability of a token, relative to the most likely one.
    #[arg(long, value_name = "P", value_parser = |text: &str| parameters::value("min_p", text))]
    pub(crate) min_p: Option<Value>,

    /// Penalty on tokens of the prompt and the answer; 1 turns it off.
    #[arg(long, value_name = "X", value_parser = |text: &str| parameters::value("repetition_penalty", text))]
    pub(crate) repetition_penalty: Option<Value>,

    /// Penalty on tokens that the answer contains, from -2 to 2.
    #[arg(long, value_name = "X", allow_negative_numbers = true,
          value_parser = |text: &str| parameters::value("presence_penalty", text))]
    pub(crate) presence_penalty: Option<Value>,

    /// Penalty on tokens by their number in the answer, from -2 to 2.
    #[arg(long, value_name = "X", allow_negative_numbers = true,
          value_parser = |text: &str| parameters::value("frequency_penalty", text))]
    pub(crate) frequency_penalty: Option<Value>,

    /// Maximum length of an answer.
    #[arg(long, value_name = "TOKENS", value_parser = |text: &str| parameters::value("max_tokens", text))]
    pub(crate) max_tokens: Option<Value>,

    /// Text that ends an answer.
    #[arg(long, value_name = "TEXT", value_parser = |text: &str| parameters::value("stop", text))]
    pub(crate) stop: Option<Value>,
}

impl RequestArgs {
    /// The parameters that were given, under their names in a request.
    pub(crate) fn given(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        let Self { temperature, top_p, top_k, min_p, .. } = self;
        let Self { repetition_penalty, presence_penalty, frequency_penalty, max_tokens, stop, .. } = self;
        let pairs = [
            ("temperature", temperature),
            ("top_p", top_p),
            ("top_k", top_k),
            ("min_p", min_p),
            ("repetition_penalty", repetition_penalty),
            ("presence_penalty", presence_penalty),
            ("frequency_penalty", frequency_penalty),
            ("max_tokens", max_tokens),
            ("stop", stop),
        ];
        pairs.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)))
    }
}

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// URL of the server.
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub(crate) url: String,

    /// API key of the server.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,

    /// Accept any certificate of an https:// server, as curl does with this flag.
    ///
    /// Without it, the certificate must be one of a public authority, or of an authority in the PEM file that the variable
    /// SSL_CERT_FILE names.
    #[arg(long)]
    pub(crate) insecure: bool,
}
