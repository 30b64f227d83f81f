//! `octavo run-batch`: answers the requests in a file through the server's routes, without a socket.
//!
//! Answers are written in the order of the requests, so the output is always a prefix of the complete one. Counting its
//! lines is therefore enough to resume an interrupted batch.

mod answer;
mod failures;
mod input;
mod output;
mod progress;

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use axum::Router;
use futures::{StreamExt, stream};
use tokio::sync::Semaphore;
use tracing::{info, warn};

use crate::batch::failures::Failures;
use crate::batch::input::Input;
use crate::batch::output::{Opened, Output};
use crate::batch::progress::Progress;
use crate::cli::{ComposeArgs, RunBatchArgs};
use crate::serve::settings::log_config;
use crate::serve::{self, Composed};
use crate::signals;

/// Maximum number of answers that wait for an earlier one, per running request.
const REORDERED: usize = 4;

pub(crate) fn run(args: RunBatchArgs) -> Result<()> {
    octavo_telemetry::init_logging(&log_config(&args.compose.observe, None))?;
    let mut batch = match Batch::open(&args.input_file, &args.output_file)? {
        Opened::Unfinished(batch) => batch,
        Opened::Complete(failures) => {
            info!("{} is already complete", args.output_file.display());
            return report(&failures, args.fail_on_error);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("octavo-batch").build()?;
    let concurrency = args.compose.engine.max_num_seqs;
    let (composed, answered) = runtime.block_on(async {
        let mut interrupted = std::pin::pin!(signals::interrupted()?);
        let composed = tokio::select! {
            loaded = load(args.compose) => loaded?,
            _ = &mut interrupted => bail!("interrupted before the model was loaded"),
        };
        let router = composed.server.router();
        let answered = tokio::select! {
            answered = batch.answer(router, concurrency) => answered,
            _ = interrupted => Err(anyhow!("interrupted: {} The same command resumes the batch", batch.kept())),
        };
        Ok((composed, answered))
    })?;
    composed.engine.join();
    answered?;
    report(&batch.finish()?, args.fail_on_error)
}

/// Names the requests that failed. With `fail`, they are an error.
fn report(failures: &Failures, fail: bool) -> Result<()> {
    if failures.count() == 0 {
        return Ok(());
    }
    if fail {
        bail!("{failures}");
    }
    warn!("{failures}");
    Ok(())
}

/// Loads the model in a separate thread, so that signals are handled meanwhile.
async fn load(compose: ComposeArgs) -> Result<Composed> {
    let (loaded, load) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("octavo-load".into()).spawn(move || {
        // The receiver is gone after a signal.
        let _ = loaded.send(serve::compose_in_process(&compose));
    })?;
    load.await.context("the thread that loads the model panicked")?
}

/// An unfinished batch: the position in the input and the output.
struct Batch {
    input: Input,
    output: Output,
    progress: Progress,
}

impl Batch {
    /// Checks both files and resumes after the answers that are there.
    ///
    /// # Errors
    /// A file cannot be used, or the output answers other requests than these.
    fn open(input_path: &Path, output_path: &Path) -> Result<Opened<Self>> {
        let named = || format!("--input-file {}", input_path.display());
        let survey = Input::open(input_path).with_context(named)?.survey().with_context(named)?;
        for (id, lines) in &survey.duplicates {
            warn!("{}: line {lines} repeats the custom_id '{id}'", named());
        }
        if survey.more_duplicates > 0 {
            warn!("{}: {} more lines repeat a custom_id", named(), survey.more_duplicates);
        }
        let mut input = Input::open(input_path).with_context(named)?;
        let output = match Output::open(output_path, &mut input, survey.requests)? {
            Opened::Unfinished(output) => output,
            Opened::Complete(failures) => return Ok(Opened::Complete(failures)),
        };
        if output.answers() > 0 {
            info!("resuming after the {} answers in {}", output.answers(), output.partial().display());
        }
        let progress = Progress::new(survey.requests, output.answers(), output.failures().count());
        Ok(Opened::Unfinished(Self { input, output, progress }))
    }

    /// Answers the remaining requests, `concurrency` at a time. Dropping the future keeps all answers that are written.
    ///
    /// # Errors
    /// A file can no longer be read or written. A failed request is an answer, not an error.
    async fn answer(&mut self, router: Router, concurrency: usize) -> Result<()> {
        let running = Semaphore::new(concurrency);
        let asked = self.input.by_ref().map(|line| {
            let (router, running) = (&router, &running);
            async move {
                let line = line.context("the input can no longer be read")?;
                let _running = running.acquire().await?;
                anyhow::Ok(answer::answer(router, &line).await)
            }
        });
        let mut answers = stream::iter(asked).buffered(concurrency.saturating_mul(REORDERED));
        while let Some(answer) = answers.next().await {
            let answer = answer?;
            let ok = answer.failure.is_none();
            self.output.append(answer)?;
            self.progress.advance(ok);
        }
        Ok(())
    }

    /// Makes the output final and returns the requests that failed.
    fn finish(self) -> Result<Failures> {
        self.progress.finish();
        self.output.finish()
    }

    /// A sentence about what an interruption leaves.
    fn kept(&self) -> String {
        format!("{} answers are in {}.", self.output.answers(), self.output.partial().display())
    }
}

#[cfg(test)]
mod tests;
