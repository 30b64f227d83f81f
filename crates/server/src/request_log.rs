//! Logging of requests, where the operator enables it.

use octavo_engine::Request;
use octavo_text::OutputDelta;

use crate::api::shared::response::Finish;
use crate::app::App;
use crate::choices::Output;
use crate::config::RequestLog;

/// Logs a request when the first of its sequences is submitted: one line, however many sequences it has. `id` is the id
/// of the whole request, and `prompts` are all of its prompts, which are logged at the level `debug`.
pub(crate) fn received<'a>(
    app: &App,
    id: &str,
    n: u32,
    first: &Request,
    prompts: impl Iterator<Item = &'a [u32]> + Clone,
) {
    let RequestLog { requests, max_len, .. } = app.config.log;
    if !requests {
        return;
    }
    let (count, prompt_tokens) = prompts.clone().fold((0_usize, 0), |(count, sum), one| (count + 1, sum + one.len()));
    let Request { params, task, priority, .. } = first;
    tracing::info!(id, prompts = count, n, prompt_tokens, priority, ?task, ?params, "received a request");
    if tracing::enabled!(tracing::Level::DEBUG) {
        for (index, prompt) in prompts.enumerate() {
            let tokens = &prompt[..max_len.map_or(prompt.len(), |most| most.min(prompt.len()))];
            let mut text = app.text.tokenizer.decode(tokens, false).unwrap_or_default();
            append(&mut text, "", max_len);
            let tokens = format!("{tokens:?}");
            tracing::debug!(id, index, prompt = text, tokens, "a request's prompt");
        }
    }
}

/// The texts of a request's choices, until they are logged.
pub(crate) struct OutputLog {
    request_id: String,
    max_len: Option<usize>,
    choices: Vec<Logged>,
}

#[derive(Clone, Default)]
struct Logged {
    text: String,
    tokens: usize,
}

impl OutputLog {
    /// `None` if outputs are not logged.
    pub(crate) fn new(config: RequestLog, request_id: &str, choices: usize) -> Option<Self> {
        config.outputs.then(|| Self {
            request_id: request_id.to_owned(),
            max_len: config.max_len,
            choices: vec![Logged::default(); choices],
        })
    }

    /// Adds an output to its choice, and logs the choice at its end.
    pub(crate) fn add(&mut self, output: &Output) {
        let Some(logged) = self.choices.get_mut(output.index as usize) else { return };
        logged.tokens += output.tokens.len();
        for part in &output.parts {
            let (OutputDelta::Reasoning(text)
            | OutputDelta::Content(text)
            | OutputDelta::ToolCall { name: text, .. }
            | OutputDelta::Arguments { fragment: text, .. }) = part;
            append(&mut logged.text, text, self.max_len);
        }
        if let Some(finish) = &output.finish {
            let Logged { text, tokens } = std::mem::take(logged);
            let (id, reason) = (&self.request_id, Finish::reason(finish));
            tracing::info!(id, index = output.index, tokens, finish_reason = reason, text, "generated a response");
        }
    }
}

/// Appends to a text up to a maximum number of characters.
fn append(text: &mut String, more: &str, max_len: Option<usize>) {
    text.push_str(more);
    if let Some((end, _)) = max_len.and_then(|most| text.char_indices().nth(most)) {
        text.truncate(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_between_characters() {
        let mut text = String::new();
        for more in ["a\u{11f}", "\u{11f}b", "c"] {
            append(&mut text, more, Some(3));
        }
        assert_eq!(text, "a\u{11f}\u{11f}");
        append(&mut text, "bc", None);
        assert_eq!(text, "a\u{11f}\u{11f}bc");
        append(&mut text, "", Some(0));
        assert_eq!(text, "");
    }

    #[test]
    fn outputs_are_kept_only_where_they_are_logged() {
        let config = RequestLog { requests: true, outputs: false, max_len: None };
        assert!(OutputLog::new(config, "r", 1).is_none());
        let mut log = OutputLog::new(RequestLog { outputs: true, max_len: Some(4), ..config }, "r", 2).unwrap();
        let content = |text: &str| vec![OutputDelta::Content(text.into())];
        log.add(&Output { index: 1, parts: content("Hello"), ..Output::default() });
        assert_eq!((log.choices[0].text.as_str(), log.choices[1].text.as_str()), ("", "Hell"));
        log.add(&Output { index: 1, parts: content("!"), finish: Some(Finish::Length), ..Output::default() });
        assert_eq!(log.choices[1].text, "", "it is logged");
    }
}
