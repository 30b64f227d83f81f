//! Flags of `octavo chat` and `octavo complete`.

use clap::Args;

use crate::cli::model::ComposeArgs;

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// Send this one message, print the answer and end.
    #[arg(short, long, value_name = "MESSAGE", help_heading = "Conversation")]
    pub(crate) quick: Option<String>,

    /// First message, with the role `system`.
    #[arg(long, value_name = "TEXT", help_heading = "Conversation")]
    pub(crate) system_prompt: Option<String>,

    #[command(flatten)]
    pub(crate) client: ClientArgs,
    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CompleteArgs {
    /// Continue this one text and end.
    #[arg(short, long, value_name = "PROMPT", help_heading = "Conversation")]
    pub(crate) quick: Option<String>,

    #[command(flatten)]
    pub(crate) client: ClientArgs,
    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
}

/// Whom to ask, and how much.
#[derive(Debug, Args)]
#[command(next_help_heading = "Conversation")]
pub(crate) struct ClientArgs {
    /// A running server, in place of a model that is loaded here [default: http://127.0.0.1:8000/v1 if no model is
    /// named].
    #[arg(long, conflicts_with_all = ["positional", "named"])]
    pub(crate) url: Option<String>,

    /// Name of the model in requests; the server's first by default.
    #[arg(long, value_name = "NAME")]
    pub(crate) model_name: Option<String>,

    /// Key for the server.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,

    /// Longest answer.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_tokens: Option<u32>,
}
