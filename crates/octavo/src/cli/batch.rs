//! Flags of `octavo run-batch`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::model::ComposeArgs;

#[derive(Debug, Args)]
pub(crate) struct RunBatchArgs {
    /// File of requests, one JSON object per line.
    ///
    /// Keys: custom_id, method, url and body, and traceparent and tracestate for a request that belongs to a trace.
    #[arg(short, long, value_name = "FILE", help_heading = "Batch")]
    pub(crate) input_file: PathBuf,

    /// File for the answers, in the order of the requests.
    ///
    /// Until the batch is complete the file is called FILE.partial. The same command resumes an interrupted run.
    #[arg(short, long, value_name = "FILE", help_heading = "Batch")]
    pub(crate) output_file: PathBuf,

    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
}
