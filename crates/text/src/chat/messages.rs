//! Normalisation of a request's messages to the form that templates expect.

use serde_json::{Map, Value, json};

use super::{ContentFormat, TemplateError};

/// Converts messages to the form that the template expects, as vLLM does:
/// - content becomes a string (parts joined by a line feed) or a list of `{"type": "text", "text": ...}`;
/// - `arguments` of tool calls, JSON in a string in the request, become objects;
/// - reasoning is provided as `reasoning` and as `reasoning_content`;
/// - fields that no template reads are dropped.
///
/// # Errors
/// Returns an error that names the message and the field if a message is not an object or has no role, a part is not
/// text (models here take text only) or has no type, or the arguments of a tool call are not JSON.
pub fn normalize_messages(messages: &[Value], format: ContentFormat) -> Result<Vec<Value>, TemplateError> {
    messages.iter().enumerate().map(|(index, message)| Message { index, format }.normalize(message)).collect()
}

struct Message {
    index: usize,
    format: ContentFormat,
}

impl Message {
    fn error(&self, field: impl Into<String>, reason: impl Into<String>) -> TemplateError {
        TemplateError::Message { index: self.index, field: field.into(), reason: reason.into() }
    }

    fn normalize(&self, message: &Value) -> Result<Value, TemplateError> {
        let message = message.as_object().ok_or_else(|| self.error("", "a message must be an object"))?;
        let role =
            message.get("role").and_then(Value::as_str).ok_or_else(|| self.error(".role", "must be a string"))?;
        let mut out = Map::new();
        out.insert("role".to_owned(), role.into());
        out.insert("content".to_owned(), self.content(message.get("content"))?);
        if role == "assistant" {
            if let Some(calls) = self.tool_calls(message.get("tool_calls"))? {
                out.insert("tool_calls".to_owned(), calls);
            }
            let reasoning = ["reasoning", "reasoning_content"].into_iter().filter_map(|key| message.get(key));
            if let Some(reasoning) = reasoning.into_iter().find(|value| !value.is_null()) {
                out.insert("reasoning".to_owned(), reasoning.clone());
                out.insert("reasoning_content".to_owned(), reasoning.clone());
            }
        }
        for (key, roles) in [("tool_call_id", &["tool"][..]), ("tools", &["developer"]), ("name", &[])] {
            if let Some(value) = message.get(key).filter(|value| !value.is_null())
                && (roles.is_empty() || roles.contains(&role))
            {
                out.insert(key.to_owned(), value.clone());
            }
        }
        Ok(Value::Object(out))
    }

    fn content(&self, content: Option<&Value>) -> Result<Value, TemplateError> {
        let texts = match content {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::String(text)) => vec![text.as_str()],
            Some(Value::Array(parts)) => {
                parts.iter().enumerate().map(|(at, part)| self.part(at, part)).collect::<Result<_, _>>()?
            }
            Some(_) => return Err(self.error(".content", "must be a string, a list of parts or null")),
        };
        Ok(match self.format {
            ContentFormat::String => texts.join("\n").into(),
            ContentFormat::OpenAi => texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect(),
        })
    }

    fn part<'a>(&self, at: usize, part: &'a Value) -> Result<&'a str, TemplateError> {
        let field = |name: &str| format!(".content[{at}]{name}");
        if let Some(text) = part.as_str() {
            return Ok(text);
        }
        let kind = part
            .get("type")
            .and_then(Value::as_str)
            .ok_or_else(|| self.error(field(".type"), "a content part must have a type"))?;
        let key = match kind {
            "text" | "input_text" | "output_text" => "text",
            "refusal" => "refusal",
            "thinking" => "thinking",
            _ => {
                let reason = format!("this model takes text only, but the part is of type \"{kind}\"");
                return Err(self.error(field(""), reason));
            }
        };
        part.get(key).and_then(Value::as_str).ok_or_else(|| self.error(field(&format!(".{key}")), "must be a string"))
    }

    /// Converts tool calls. Returns `None` without calls, because an empty list would send some templates down the
    /// wrong branch.
    fn tool_calls(&self, calls: Option<&Value>) -> Result<Option<Value>, TemplateError> {
        let calls = match calls {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Array(calls)) if calls.is_empty() => return Ok(None),
            Some(Value::Array(calls)) => calls,
            Some(_) => return Err(self.error(".tool_calls", "must be a list")),
        };
        let mut out = Vec::with_capacity(calls.len());
        for (at, call) in calls.iter().enumerate() {
            let field = |name: &str| format!(".tool_calls[{at}]{name}");
            let mut call = call.clone();
            let function = call
                .get_mut("function")
                .and_then(Value::as_object_mut)
                .ok_or_else(|| self.error(field(".function"), "must be an object"))?;
            if !function.get("name").is_some_and(Value::is_string) {
                return Err(self.error(field(".function.name"), "must be a string"));
            }
            let arguments = match function.get("arguments") {
                None | Some(Value::Null) => json!({}),
                Some(Value::String(text)) if text.is_empty() => json!({}),
                Some(Value::String(text)) => serde_json::from_str(text)
                    .map_err(|error| self.error(field(".function.arguments"), format!("is not JSON: {error}")))?,
                Some(value @ (Value::Object(_) | Value::Array(_))) => value.clone(),
                Some(_) => return Err(self.error(field(".function.arguments"), "must be JSON in a string")),
            };
            function.insert("arguments".to_owned(), arguments);
            out.push(call);
        }
        Ok(Some(out.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn string(message: Value) -> Result<Value, String> {
        let normalized = normalize_messages(&[json!({"role": "user", "content": ""}), message], ContentFormat::String);
        normalized.map(|mut messages| messages.remove(1)).map_err(|error| error.to_string())
    }

    #[test]
    fn content_becomes_a_string() {
        for (content, text) in [
            (json!("hi"), "hi"),
            (json!(null), ""),
            (json!([]), ""),
            (json!([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]), "a\nb\nc"),
            (json!([{"type": "refusal", "refusal": "no"}]), "no"),
        ] {
            assert_eq!(
                string(json!({"role": "user", "content": content})).unwrap(),
                json!({"role": "user", "content": text})
            );
        }
        assert_eq!(string(json!({"role": "anyone"})).unwrap(), json!({"role": "anyone", "content": ""}));
    }

    #[test]
    fn content_becomes_parts() {
        let messages = [
            json!({"role": "user", "content": "hi"}),
            json!({"role": "user", "content": [{"type": "output_text", "text": "a", "extra": 1}]}),
            json!({"role": "assistant", "content": null}),
        ];
        let normalized = normalize_messages(&messages, ContentFormat::OpenAi).unwrap();
        assert_eq!(normalized[0]["content"], json!([{"type": "text", "text": "hi"}]));
        assert_eq!(normalized[1]["content"], json!([{"type": "text", "text": "a"}]));
        assert_eq!(normalized[2]["content"], json!([]));
    }

    #[test]
    fn tool_calls_get_objects() {
        let call = |arguments: Value| json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let message = string(json!({
            "role": "assistant", "content": null, "reasoning_content": "hm", "annotations": [], "tool_calls":
            [call(json!("{\"b\": 1, \"a\": [2]}")), call(json!("")), call(json!(null)), call(json!({"x": 1}))]
        }))
        .unwrap();
        let arguments = |at: usize| message["tool_calls"][at]["function"]["arguments"].to_string();
        assert_eq!([0, 1, 2, 3].map(arguments), [r#"{"b":1,"a":[2]}"#, "{}", "{}", r#"{"x":1}"#]);
        assert_eq!(message["reasoning"], "hm");
        assert!(message.get("annotations").is_none());
        assert_eq!(
            string(json!({"role": "assistant", "content": "", "tool_calls": []})).unwrap(),
            json!({"role": "assistant", "content": ""})
        );
        assert_eq!(
            string(json!({"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"})).unwrap(),
            json!({"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"})
        );
    }

    #[test]
    fn errors_name_the_place() {
        for (message, start) in [
            (json!("hi"), "messages[1]: "),
            (json!({"content": "hi"}), "messages[1].role: "),
            (json!({"role": 1}), "messages[1].role: "),
            (json!({"role": "user", "content": 7}), "messages[1].content: "),
            (json!({"role": "user", "content": ["a", {"text": "b"}]}), "messages[1].content[1].type: "),
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text: "),
            (
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
                "messages[1].content[0]: this model takes text only, but the part is of type \"image_url\"",
            ),
            (json!({"role": "assistant", "tool_calls": {}}), "messages[1].tool_calls: "),
            (json!({"role": "assistant", "tool_calls": [{}]}), "messages[1].tool_calls[0].function: "),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
                "messages[1].tool_calls[0].function.arguments: is not JSON: ",
            ),
        ] {
            let error = string(message).unwrap_err();
            assert!(error.starts_with(start), "{error}");
        }
    }
}
