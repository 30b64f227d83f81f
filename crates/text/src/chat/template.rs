//! Jinja templates of Hugging Face models.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value, escape_formatter};
use serde_json::{Map, Value as Json, json};

use super::content_format::{self, ContentFormat};
use super::context::{to_template_list, to_template_value};
use super::json::tojson;
use super::{TemplateError, dialect, python, strftime};
use crate::tokenizer::SpecialTokens;

const NAME: &str = "chat_template";
/// Maximum number of instructions of one rendering. A long conversation takes some hundred per message.
const MAX_STEPS: u64 = 20_000_000;
/// Maximum output of one rendering in bytes: some million tokens.
const MAX_OUTPUT: usize = 16 << 20;
/// Mark at the end of the final message. It ends with a space, so that a template that trims is detected.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Input of a template.
#[derive(Clone, Copy, Debug)]
pub struct TemplateInput<'a> {
    /// Messages from [`normalize_messages`](crate::normalize_messages).
    pub messages: &'a [Json],
    /// Tool definitions; `None` becomes Jinja's `none`.
    pub tools: Option<&'a [Json]>,
    /// Documents to answer from.
    pub documents: Option<&'a [Json]>,
    /// Whether the prompt ends with the start of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends inside the last message, so that the model continues it.
    pub continue_final_message: bool,
    /// Additional variables (`chat_template_kwargs`, `reasoning_effort`). They may override `bos_token` and similar
    /// variables, but not the fields above.
    pub kwargs: &'a Map<String, Json>,
}

/// A compiled chat template.
///
/// Rendering follows `apply_chat_template` of transformers: the same whitespace rules, functions and filters, and
/// Python's string conversion. `{% generation %}` is accepted and has no effect; `strftime_now` returns the local time.
/// Rendering is limited in steps and in output for any template and any messages, and can be interrupted whenever it
/// writes. It is limited neither in stack nor in the memory and time of a single step, because templates come from the
/// operator of the server; for those of clients, see [`untrusted_request`](crate::untrusted_request).
pub struct ChatTemplate {
    source: String,
    environment: Environment<'static>,
    special: Vec<(&'static str, String)>,
    content_format: ContentFormat,
    mentions_content: bool,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("content_format", &self.content_format).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template. `special` provides `bos_token` and the other special tokens.
    ///
    /// # Errors
    /// Returns an error if the template has a syntax error; the message contains its position.
    pub fn new(source: &str, special: &SpecialTokens) -> Result<Self, TemplateError> {
        Self::with_clock(source, special, strftime::local_time)
    }

    fn with_clock(source: &str, special: &SpecialTokens, now: fn() -> DateTime) -> Result<Self, TemplateError> {
        let mut environment = environment(now)?;
        environment
            .add_template_owned(NAME, dialect::translate(source))
            .map_err(|error| TemplateError::Syntax(describe(&error)))?;
        let named = [
            ("bos_token", &special.bos),
            ("eos_token", &special.eos),
            ("unk_token", &special.unk),
            ("pad_token", &special.pad),
        ];
        let template = Self {
            source: source.to_owned(),
            environment,
            special: named.into_iter().filter_map(|(name, token)| Some((name, token.clone()?))).collect(),
            content_format: content_format::detect(source),
            mentions_content: source.contains("content"),
        };
        Ok(match template.content_format {
            ContentFormat::OpenAi if template.writes_strings() => template.with_content_format(ContentFormat::Either),
            _ => template,
        })
    }

    /// Whether the template writes content that is a string, of a user and of a system message if it takes one. One that
    /// only loops over parts writes nothing of it.
    fn writes_strings(&self) -> bool {
        const PROBE: &str = "One string.";
        let written = |roles: &[&str]| {
            let messages: Vec<Json> = roles.iter().map(|role| json!({"role": role, "content": PROBE})).collect();
            let prompt = self.render(&TemplateInput {
                messages: &messages,
                tools: None,
                documents: None,
                add_generation_prompt: true,
                continue_final_message: false,
                kwargs: &Map::new(),
            });
            prompt.map(|prompt| prompt.matches(PROBE).count() >= roles.len())
        };
        written(&["user"]).unwrap_or(false) && written(&["system", "user"]).unwrap_or(true)
    }

    /// Returns the source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the form of `content` that the template expects.
    pub fn content_format(&self) -> ContentFormat {
        self.content_format
    }

    /// Returns the template with this form of content instead of the detected one.
    #[must_use]
    pub fn with_content_format(self, content_format: ContentFormat) -> Self {
        Self { content_format, ..self }
    }

    /// Does the same as [`render_in_turns`](Self::render_in_turns) without pauses.
    ///
    /// # Errors
    /// See there.
    pub fn render(&self, input: &TemplateInput) -> Result<String, TemplateError> {
        self.render_in_turns(input, || Ok(()))
    }

    /// Renders the prompt. `pause` is called whenever the template writes, and may end the work with an error.
    ///
    /// # Errors
    /// Returns the error of `pause`, or an error if the template rejects the messages, fails on them or exceeds a limit,
    /// or if `continue_final_message` is not possible.
    pub fn render_in_turns<E: From<TemplateError>>(
        &self,
        input: &TemplateInput,
        pause: impl FnMut() -> Result<(), E>,
    ) -> Result<String, E> {
        if !input.continue_final_message {
            return self.render_messages(to_template_list(input.messages), input, pause);
        }
        if input.add_generation_prompt {
            return Err(TemplateError::ContinueFinalMessage("add_generation_prompt is set too").into());
        }
        if !self.mentions_content {
            return Err(TemplateError::ContinueFinalMessage("the chat template does not render content").into());
        }
        let mut messages = input.messages.to_vec();
        let text = final_text(&mut messages)?;
        let wanted = text.trim().to_owned();
        text.push_str(CONTINUE_TAG);
        let prompt = self.render_messages(to_template_list(&messages), input, pause)?;
        Ok(cut_at_tag(prompt, &wanted)?)
    }

    fn render_messages<E: From<TemplateError>>(
        &self,
        messages: Value,
        input: &TemplateInput,
        mut pause: impl FnMut() -> Result<(), E>,
    ) -> Result<String, E> {
        let list = |items: Option<&[Json]>| items.map_or(Value::from(()), to_template_list);
        let mut variables: Vec<(&str, Value)> = Vec::with_capacity(self.special.len() + input.kwargs.len() + 4);
        variables.extend(self.special.iter().map(|(name, token)| (*name, Value::from(token.as_str()))));
        variables.extend(input.kwargs.iter().map(|(name, value)| (name.as_str(), to_template_value(value))));
        variables.push(("messages", messages));
        variables.push(("tools", list(input.tools)));
        variables.push(("documents", list(input.documents)));
        variables.push(("add_generation_prompt", Value::from(input.add_generation_prompt)));

        let template = self.environment.get_template(NAME).map_err(|error| TemplateError::Syntax(describe(&error)))?;
        let mut interrupted = None;
        let mut go_on = || pause().map_err(|error| interrupted = Some(error)).is_ok();
        let mut output = Output { bytes: vec![], full: false, go_on: &mut go_on };
        let variables = Value::from_pairs(variables);
        // The library panics at some slices, such as `[][::-1]`.
        let rendered =
            catch_unwind(AssertUnwindSafe(|| template.render_captured_to(variables, &mut output).map(|_| ())));
        let Output { bytes, full, .. } = output;
        if let Some(error) = interrupted {
            return Err(error);
        }
        let Ok(rendered) = rendered else {
            return Err(TemplateError::Render("the template engine panicked; the log has the reason".to_owned()).into());
        };
        Ok(match rendered {
            Ok(()) => String::from_utf8(bytes).map_err(|error| TemplateError::Render(error.to_string())),
            Err(_) if full => Err(TemplateError::TooLong(MAX_OUTPUT)),
            Err(error) => Err(render_error(&error)),
        }?)
    }
}

/// Returns the text that `continue_final_message` continues.
fn final_text(messages: &mut [Json]) -> Result<&mut String, TemplateError> {
    let message = messages.last_mut().ok_or(TemplateError::ContinueFinalMessage("there are no messages"))?;
    match message.get_mut("content") {
        Some(Json::String(text)) => Ok(text),
        Some(Json::Array(parts)) => parts
            .iter_mut()
            .rev()
            .find_map(|part| match part.get_mut("text") {
                Some(Json::String(text)) => Some(text),
                _ => None,
            })
            .ok_or(TemplateError::ContinueFinalMessage("the final message has no text")),
        _ => Err(TemplateError::ContinueFinalMessage("the final message has no content")),
    }
}

/// Truncates the prompt at the end of the final message.
fn cut_at_tag(mut prompt: String, wanted: &str) -> Result<String, TemplateError> {
    let tag = prompt
        .rfind(CONTINUE_TAG.trim_end())
        .filter(|_| prompt.contains(wanted))
        .ok_or(TemplateError::ContinueFinalMessage("the chat template does not render the final message as it is"))?;
    let trimmed = !prompt[tag..].starts_with(CONTINUE_TAG);
    prompt.truncate(tag);
    if trimmed {
        prompt.truncate(prompt.trim_end().len());
    }
    Ok(prompt)
}

/// Creates the template environment of transformers.
fn environment(now: fn() -> DateTime) -> Result<Environment<'static>, TemplateError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|error| TemplateError::Syntax(describe(&error)))?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_debug(false);
    environment.set_fuel(Some(MAX_STEPS));
    environment.set_unknown_method_callback(python::method);
    environment.set_formatter(|out, state, value| {
        if python::prints_differently(value) {
            out.write_str(&python::to_str(value)?).map_err(Error::from)
        } else {
            escape_formatter(out, state, value)
        }
    });
    environment.add_test("sequence", python::is_sequence);
    environment.add_test("iterable", python::is_iterable);
    environment.add_filter("tojson", tojson);
    environment.add_filter("length", python::length);
    environment.add_filter("count", python::length);
    environment.add_filter("string", |value: &Value| python::to_str(value));
    environment.add_filter("format", python::format);
    environment.add_filter("indent", python::indent);
    environment.add_filter("replace", python::replace);
    environment.add_filter(dialect::FORMAT, python::percent);
    environment.add_filter(dialect::CATCH, dialect::catching);
    environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
        let raised = Raised(python::to_str(message)?);
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception was called").with_source(raised))
    });
    environment.add_function("strftime_now", move |format: &str| strftime::strftime(now(), format));
    Ok(environment)
}

/// Error of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn causes<'a>(error: &'a Error) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |error| error.source())
}

fn render_error(error: &Error) -> TemplateError {
    for cause in causes(error) {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        if cause.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return TemplateError::TooManySteps(MAX_STEPS);
        }
    }
    TemplateError::Render(describe(error))
}

/// Formats the error with its line and its causes.
fn describe(error: &Error) -> String {
    causes(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Collects text up to the limit.
struct Output<'a> {
    bytes: Vec<u8>,
    full: bool,
    /// Pauses; `false` ends the rendering.
    go_on: &'a mut dyn FnMut() -> bool,
}

impl io::Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !(self.go_on)() {
            return Err(io::Error::from(io::ErrorKind::ConnectionAborted));
        }
        if self.bytes.len() + bytes.len() > MAX_OUTPUT {
            self.full = true;
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod goldens;
#[cfg(test)]
mod tests;
