//! Requests of POST /generate.

use crate::api::completions::request::{CompletionRequest, Prompt};
use crate::api::generate::stream::GenerateFormat;
use crate::api::shared::convert::Prepared;
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::size::ResponseSize;
use crate::api::shared::staged::Staged;
use crate::app::AppState;
use crate::choices::Submission;
use crate::error::ApiError;

use crate::api::completions::convert::prepare;

/// Prepares a request of POST /generate: one prompt, which its texts begin with.
pub(crate) fn legacy(
    state: &AppState,
    body: &[u8],
    headers: &RequestHeaders,
) -> Result<Staged<Prepared<GenerateFormat>>, ApiError> {
    let request = CompletionRequest::parse(body)?;
    let [Prompt::Text(prompt)] = &request.prompts[..] else {
        return Err(ApiError::bad_request("prompt must be one string.").with_param("prompt"));
    };
    let prompt = prompt.clone();
    let Prepared { submission, format, stream, grammar } = prepare(state, request, headers)?;
    check_repeats(state, &prompt, &submission, stream.is_some())?;
    let format = GenerateFormat { prompt_tokens: format.prompts[0].len(), texts: vec![prompt; format.n as usize] };
    Ok(Staged::Ready(Prepared { submission, format, stream, grammar }))
}

/// Refuses a request of POST /generate whose response would be too large: every line of a stream repeats the prompt.
fn check_repeats(state: &AppState, prompt: &str, submission: &Submission, stream: bool) -> Result<usize, ApiError> {
    let tokens = submission.prompts[0].max_tokens as usize;
    let lines = if stream { tokens } else { 1 };
    ResponseSize::new(submission.sampling.n).texts("prompt", std::iter::repeat_n(prompt, lines)).check(state)
}
