//! Flags of `octavo run-batch`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::model::ComposeArgs;

#[derive(Debug, Args)]
pub(crate) struct RunBatchArgs {
    /// Requests, one JSON object per line.
    ///
    /// The keys are custom_id, method, url and body, with traceparent and tracestate if the request is part of a trace.
    #[arg(short, long, value_name = "FILE", help_heading = "Batch")]
    pub(crate) input_file: PathBuf,

    /// Answers, one per line in the order of the requests.
    ///
    /// While the batch runs, the file is named FILE.partial. The same command resumes an interrupted batch.
    #[arg(short, long, value_name = "FILE", help_heading = "Batch")]
    pub(crate) output_file: PathBuf,

    /// Exit with status 1 if a request of the batch failed. The output is complete all the same.
    #[arg(long, help_heading = "Batch")]
    pub(crate) fail_on_error: bool,

    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
}
