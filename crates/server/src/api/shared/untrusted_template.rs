//! Chat templates of requests, which a process of their own renders.

use std::io::{self, Read, Write};
use std::process::{Command, Stdio};

use octavo_text::{TemplateError, TemplateInput};

use crate::app::AppState;
use crate::config::TemplateHelper;
use crate::error::ApiError;

/// Maximum length of an answer in bytes, beyond what a template may write.
const MAX_ANSWER: u64 = 32 << 20;

/// Renders the messages of a request with its own template, if the operator allows it.
pub(crate) fn render(state: &AppState, source: &str, input: &TemplateInput<'_>) -> Result<String, ApiError> {
    let helper = state.config.api.template_helper.as_ref().ok_or_else(|| {
        let message = "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request with untrusted chat template.";
        ApiError::bad_request(message).with_param("chat_template")
    })?;
    let request = octavo_text::untrusted_request(source, state.text.tokenizer.special(), input);
    let request = request.map_err(|error| refused(&error))?;
    let answer = state.workers.elsewhere(|| exchange(helper, &request))?.map_err(|error| {
        tracing::error!(%error, program = %helper.program.display(), "a chat template of a request could not be rendered");
        ApiError::internal()
    })?;
    octavo_text::read_untrusted(answer).map_err(|error| refused(&error))
}

fn refused(error: &TemplateError) -> ApiError {
    match error {
        TemplateError::Syntax(_) | TemplateError::SourceTooLong(_) | TemplateError::Stopped => {
            ApiError::bad_request(error.to_string()).with_param("chat_template")
        }
        error => ApiError::from_template(error),
    }
}

/// The answer of a new process, which is empty or incomplete if the process was stopped.
fn exchange(helper: &TemplateHelper, request: &[u8]) -> io::Result<Vec<u8>> {
    let mut command = Command::new(&helper.program);
    command.args(&helper.args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    // The process reads all of the request before it answers. One that was stopped reads no more.
    if let Some(mut input) = child.stdin.take() {
        let _ = input.write_all(request);
    }
    let mut answer = Vec::new();
    let read = child.stdout.take().map(|output| output.take(MAX_ANSWER).read_to_end(&mut answer));
    // It has ended, unless its answer is too long.
    let _ = child.kill();
    let ended = child.wait()?;
    read.transpose()?;
    Ok(if ended.success() { answer } else { vec![] })
}
