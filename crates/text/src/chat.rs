//! Conversion of chat messages to a prompt with the model's own Jinja template.

mod content_format;
mod context;
mod dialect;
mod json;
mod messages;
mod parts;
mod python;
mod strftime;
mod template;
mod untrusted;

pub use content_format::ContentFormat;
pub use messages::{image_parts, normalize_messages};
pub use parts::{ImagePart, Modality, Part};
pub use template::{ChatTemplate, TemplateInput};
pub use untrusted::{answer_untrusted, read_untrusted, untrusted_request};

/// Reason why messages could not be rendered as a prompt. All variants except [`Syntax`](Self::Syntax) and
/// [`Missing`](Self::Missing) concern one request.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The model has no template.
    #[error(
        "this model has no chat template, so it cannot take messages; use /v1/completions, or give a chat template"
    )]
    Missing,
    /// The template does not parse.
    #[error("the chat template has a syntax error: {0}")]
    Syntax(String),
    /// The template rejected the messages with `raise_exception`; contains its message.
    #[error("the chat template refused the messages: {0}")]
    Raised(String),
    /// The template failed on these messages.
    #[error("the chat template failed: {0}")]
    Render(String),
    /// The template ran too long.
    #[error("the chat template did not end within {0} steps")]
    TooManySteps(u64),
    /// The output of the template is too long.
    #[error("the chat template wrote more than {0} bytes")]
    TooLong(usize),
    /// A client's template is too long.
    #[error("the chat template of the request has more than {0} bytes")]
    SourceTooLong(usize),
    /// The process that rendered a client's template was stopped.
    #[error("the chat template of the request needed too much memory, stack or time")]
    Stopped,
    /// Another error of a client's template.
    #[error("{0}")]
    Untrusted(String),
    /// A message has an invalid form.
    #[error("messages[{index}]{field}: {reason}")]
    Message {
        /// Index of the message.
        index: usize,
        /// Path in the message, which starts with a dot or is empty.
        field: String,
        /// Description of the defect.
        reason: String,
    },
    /// A message has content of a kind that no model takes.
    #[error("{} content is not supported", .0.name())]
    Modality(Modality),
    /// `continue_final_message` is not possible.
    #[error("continue_final_message is set, but {0}")]
    ContinueFinalMessage(&'static str),
}
