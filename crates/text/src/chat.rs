//! Chat messages to a prompt, the way the model's own Jinja template says.

mod content_format;
mod context;
mod json;
mod messages;
mod python;
mod strftime;
mod template;

pub use content_format::ContentFormat;
pub use messages::normalize_messages;
pub use template::{ChatTemplate, TemplateInput};

/// Why messages could not be turned into a prompt. All but [`Syntax`](Self::Syntax) and [`Missing`](Self::Missing)
/// are about one request.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The model came without a template.
    #[error(
        "this model has no chat template, so it cannot take messages; use /v1/completions, or give a chat template"
    )]
    Missing,
    /// The template does not parse.
    #[error("the chat template has a syntax error: {0}")]
    Syntax(String),
    /// The template refused the messages by `raise_exception`: its own words.
    #[error("the chat template refused the messages: {0}")]
    Raised(String),
    /// The template failed on these messages.
    #[error("the chat template failed: {0}")]
    Render(String),
    /// The template ran for too long.
    #[error("the chat template did not end within {0} steps")]
    TooManySteps(u64),
    /// The template wrote too much.
    #[error("the chat template wrote more than {0} bytes")]
    TooLong(usize),
    /// A message is not of a form that can be rendered.
    #[error("messages[{index}]{field}: {reason}")]
    Message {
        /// Which message.
        index: usize,
        /// What in it, as a path that starts with a dot or is empty.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// `continue_final_message` cannot be done.
    #[error("continue_final_message is set, but {0}")]
    ContinueFinalMessage(&'static str),
}
