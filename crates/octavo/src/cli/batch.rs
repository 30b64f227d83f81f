//! Flags of `octavo run-batch`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::model::ComposeArgs;

#[derive(Debug, Args)]
pub(crate) struct RunBatchArgs {
    /// Requests, one JSON object a line: {custom_id, method, url, body}, and traceparent and tracestate if it belongs to
    /// a trace.
    #[arg(short, long, value_name = "FILE", help_heading = "Batch")]
    pub(crate) input_file: PathBuf,

    /// Answers, one a line in the order of the requests. While they are written the file is FILE.partial; the same
    /// command goes on where an interrupted one ended.
    #[arg(short, long, value_name = "FILE", help_heading = "Batch")]
    pub(crate) output_file: PathBuf,

    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
}
