//! Flags of `octavo key`.

use clap::Args;

use crate::cli::values;
use crate::serve::keys::check_name;

#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    /// Name of the client in metrics and logs: 1 to 64 letters, digits and characters of `._-@/+`.
    #[arg(value_parser = name)]
    pub(crate) name: String,

    /// Maximum number of requests per minute.
    #[arg(long, value_parser = values::small_count, value_name = "N")]
    pub(crate) requests_per_minute: Option<u32>,

    /// Maximum number of tokens per minute, of prompts and answers together.
    #[arg(long, value_parser = values::small_count, value_name = "N")]
    pub(crate) tokens_per_minute: Option<u32>,

    /// Maximum number of requests at the same time.
    #[arg(long, value_parser = values::small_count, value_name = "N")]
    pub(crate) parallel_requests: Option<u32>,
}

fn name(text: &str) -> Result<String, String> {
    check_name(text).map(|()| text.to_owned())
}
