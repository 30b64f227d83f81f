//! The body of POST /pooling.

use crate::api::pooling::request::encoding::alternatives;
use crate::api::pooling::request::{Encoding, Input, PoolingFields};
use crate::api::shared::fields::{JsonFields, request_fields, words};
use crate::error::ApiError;

/// The results that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PoolingTask {
    /// A vector of each prompt.
    Embed,
    /// The scores of each prompt.
    Classify,
    /// A vector of each token.
    TokenEmbed,
    /// The scores of each token.
    TokenClassify,
}

impl PoolingTask {
    const ALL: [Self; 4] = [Self::Embed, Self::Classify, Self::TokenEmbed, Self::TokenClassify];

    /// The name in requests.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Classify => "classify",
            Self::TokenEmbed => "token_embed",
            Self::TokenClassify => "token_classify",
        }
    }

    fn read(fields: &mut JsonFields<'_>) -> Option<Self> {
        let name: String = fields.get("task")?;
        let task = Self::ALL.into_iter().find(|task| task.name() == name);
        match (task, name.as_str()) {
            (Some(_), _) => {}
            (None, "score") => fields.value_error("task", "`score` task was removed; use `classify` instead."),
            (None, "encode") => {
                fields.value_error("task", "`encode` task was removed; use `token_embed` or `token_classify` instead.")
            }
            (None, _) => {
                let names = Self::ALL.map(|task| format!("'{}'", task.name()));
                fields.error("task", "literal_error", format!("Input should be {}", alternatives(&names)));
            }
        }
        task
    }
}

request_fields! {
    /// A well-formed pooling request.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct PoolingRequest |fields, common: PoolingFields, input: Input| {
        PoolingRequest {
            common: PoolingFields => (common),
            input: Input => (input),
            encoding: Encoding => (Encoding::read(fields)),
            /// The task, if not the model's.
            task: Option<PoolingTask> => (PoolingTask::read(fields)) {
                /// A result for each input or for each of its tokens; absent: for each input.
                task: Option<String> {"enum": words(PoolingTask::ALL.map(PoolingTask::name))},
            },
        }
    }
}

impl PoolingRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = JsonFields::parse(body)?;
        if fields.raw("dimensions").is_some() {
            fields.value_error("dimensions", "dimensions is currently not supported");
        }
        let common = PoolingFields::checked(&mut fields);
        let input = Input::read(&mut fields, body, false)?;
        let request = Self::read(&mut fields, common, input);
        fields.finish()?;
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_have_vllms_names() {
        let parse = |task: &str| PoolingRequest::parse(format!(r#"{{"input": "a", "task": {task}}}"#).as_bytes());
        assert_eq!(parse("null").unwrap().task, None);
        for task in PoolingTask::ALL {
            assert_eq!(parse(&format!("{:?}", task.name())).unwrap().task, Some(task));
        }
        for (task, message) in [
            (r#""score""#, "`score` task was removed; use `classify` instead."),
            (r#""encode""#, "`encode` task was removed"),
            (r#""plugin""#, "Input should be 'embed', 'classify', 'token_embed' or 'token_classify'"),
            ("1", "Input should be a valid string"),
        ] {
            let error = parse(task).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let error = PoolingRequest::parse(br#"{"input": "a", "dimensions": 2}"#).unwrap_err().to_string();
        assert!(error.contains("dimensions is currently not supported"), "{error}");
    }
}
