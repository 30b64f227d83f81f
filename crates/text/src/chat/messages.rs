//! Normalisation of a request's messages to the form that templates expect.

use serde_json::{Map, Value, json};

use super::parts::{ImagePart, Part, PartError};
use super::{ContentFormat, TemplateError};

/// Converts messages to the form that the template expects, as vLLM does:
/// - content becomes a string (texts joined by a line feed, after a placeholder for each image) or a list of
///   `{"type": "text", "text": ...}` and `{"type": "image"}`; if the template takes either, only lists become lists, as
///   in transformers;
/// - `arguments` of tool calls, JSON in a string in the request, become objects;
/// - reasoning is provided as `reasoning`, as `reasoning_content` and as `thinking`, which GPT-OSS reads;
/// - fields that no template reads are dropped.
///
/// `image` is the placeholder of an image in a string, such as `<|vision_start|><|image_pad|><|vision_end|>`. A
/// placeholder that the client wrote into the text of a message stands for one of its images.
///
/// # Errors
/// Returns an error that names the message and the field if a message is not an object or has no role, a part is neither
/// text nor an image, a string has images without a placeholder or more placeholders than images, or the arguments of a
/// tool call are not JSON.
pub fn normalize_messages(
    messages: &[Value],
    format: ContentFormat,
    image: Option<&str>,
) -> Result<Vec<Value>, TemplateError> {
    messages.iter().enumerate().map(|(index, message)| Message { index, format, image }.normalize(message)).collect()
}

/// Returns the images of messages in order.
///
/// # Errors
/// Returns an error that names the message and the field if a part cannot be read or is neither text nor an image.
pub fn image_parts(messages: &[Value]) -> Result<Vec<ImagePart<'_>>, TemplateError> {
    let mut images = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let reader = Message { index, format: ContentFormat::OpenAi, image: None };
        images.extend(reader.parts(message.get("content"))?.into_iter().filter_map(|part| match part {
            Part::Image(image) => Some(image),
            Part::Text(_) => None,
        }));
    }
    Ok(images)
}

/// Returns whether normalised content has no text and no parts.
fn is_empty(content: &Value) -> bool {
    content.as_str().is_some_and(str::is_empty) || content.as_array().is_some_and(Vec::is_empty)
}

struct Message<'p> {
    index: usize,
    format: ContentFormat,
    image: Option<&'p str>,
}

impl Message<'_> {
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
            let calls = self.tool_calls(message.get("tool_calls"))?;
            let reasoning = ["reasoning", "reasoning_content"].into_iter().filter_map(|key| message.get(key));
            if let Some(reasoning) = reasoning.into_iter().find(|value| !value.is_null()) {
                // The template of GPT-OSS takes only one of content and `thinking` before a tool call.
                let thinks = calls.is_none() || is_empty(&out["content"]);
                let keys = ["reasoning", "reasoning_content"].into_iter().chain(thinks.then_some("thinking"));
                out.extend(keys.map(|key| (key.to_owned(), reasoning.clone())));
            }
            if let Some(calls) = calls {
                out.insert("tool_calls".to_owned(), calls);
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

    fn parts<'a>(&self, content: Option<&'a Value>) -> Result<Vec<Part<'a>>, TemplateError> {
        let read = |(at, part): (usize, &'a Value)| {
            Part::read(part).map_err(|error| match error {
                PartError::Field(name, reason) => self.error(format!(".content[{at}]{name}"), reason),
                PartError::Modality(modality) => TemplateError::Modality(modality),
            })
        };
        match content {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![Part::Text(text)]),
            Some(Value::Array(parts)) => parts.iter().enumerate().map(read).collect(),
            Some(_) => Err(self.error(".content", "must be a string, a list of parts or null")),
        }
    }

    fn content(&self, content: Option<&Value>) -> Result<Value, TemplateError> {
        let parts = self.parts(content)?;
        let part = |part| match part {
            Part::Text(text) => json!({"type": "text", "text": text}),
            Part::Image(_) => json!({"type": "image"}),
        };
        let is_list = content.is_some_and(Value::is_array);
        match self.format {
            ContentFormat::String => self.string(&parts).map(Value::from),
            ContentFormat::Either if !is_list => self.string(&parts).map(Value::from),
            ContentFormat::OpenAi | ContentFormat::Either => Ok(parts.into_iter().map(part).collect()),
        }
    }

    /// The texts of a message. Images without a placeholder in them get one in front, as in vLLM.
    fn string(&self, parts: &[Part<'_>]) -> Result<String, TemplateError> {
        let texts: Vec<&str> = parts
            .iter()
            .filter_map(|part| match part {
                Part::Text(text) => Some(*text),
                Part::Image(_) => None,
            })
            .collect();
        let (images, text) = (parts.len() - texts.len(), texts.join("\n"));
        if images == 0 {
            return Ok(text);
        }
        let image = self.image.ok_or_else(|| self.error(".content", "the chat template takes no images"))?;
        let written = text.matches(image).count();
        let missing = images
            .checked_sub(written)
            .ok_or_else(|| self.error(".content", format!("{written} placeholders for images, but {images} images")))?;
        let mut lines = vec![image; missing];
        lines.extend((!text.is_empty()).then_some(text.as_str()));
        Ok(lines.join("\n"))
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
    use super::super::parts::Modality;
    use super::*;

    fn string(message: Value) -> Result<Value, String> {
        let normalized =
            normalize_messages(&[json!({"role": "user", "content": ""}), message], ContentFormat::String, None);
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
        let normalized = normalize_messages(&messages, ContentFormat::OpenAi, None).unwrap();
        assert_eq!(normalized[0]["content"], json!([{"type": "text", "text": "hi"}]));
        assert_eq!(normalized[1]["content"], json!([{"type": "text", "text": "a"}]));
        assert_eq!(normalized[2]["content"], json!([]));
    }

    #[test]
    fn strings_stay_strings_if_the_template_takes_either() {
        let messages = [
            json!({"role": "user", "content": "hi"}),
            json!({"role": "user", "content": ["a", "b"]}),
            json!({"role": "assistant", "content": null}),
        ];
        let normalized = normalize_messages(&messages, ContentFormat::Either, None).unwrap();
        let text = |text: &str| json!({"type": "text", "text": text});
        let contents = normalized.iter().map(|message| &message["content"]);
        assert!(contents.eq(&[json!("hi"), json!([text("a"), text("b")]), json!("")]), "{normalized:?}");
    }

    fn image(url: &str) -> Value {
        json!({"type": "image_url", "image_url": {"url": url}})
    }

    fn with_images(parts: Value, format: ContentFormat) -> Result<Value, String> {
        let messages = [json!({"role": "user", "content": parts})];
        let normalized = normalize_messages(&messages, format, Some("<img>"));
        normalized.map(|messages| messages[0]["content"].clone()).map_err(|error| error.to_string())
    }

    #[test]
    fn images_stay_in_place_in_a_list_of_parts() {
        let parts = json!([{"type": "text", "text": "a"}, image("x"), "b", image("y")]);
        let expected = json!([
            {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"},
        ]);
        assert_eq!(with_images(parts, ContentFormat::OpenAi), Ok(expected));
    }

    #[test]
    fn images_of_a_string_have_placeholders_in_front_or_where_the_client_wrote_them() {
        for (parts, text) in [
            (json!(["a", image("x"), "b", image("y")]), "<img>\n<img>\na\nb"),
            (json!(["a <img> b", image("x")]), "a <img> b"),
            (json!(["a <img> b", image("x"), image("y")]), "<img>\na <img> b"),
            (json!([image("x")]), "<img>"),
            (json!(["a <img> b"]), "a <img> b"),
        ] {
            assert_eq!(with_images(parts.clone(), ContentFormat::String), Ok(text.into()), "{parts}");
        }
        let error = with_images(json!(["<img> <img>", image("x")]), ContentFormat::String).unwrap_err();
        assert_eq!(error, "messages[0].content: 2 placeholders for images, but 1 images");
    }

    #[test]
    fn images_of_all_messages_are_listed_in_order() {
        let messages = [
            json!({"role": "system", "content": "a"}),
            json!({"role": "user", "content": [image("x"), "b", image("y")]}),
            json!({"role": "assistant", "content": null}),
            json!({"role": "tool", "content": [image("z")]}),
        ];
        let urls: Vec<_> = image_parts(&messages).unwrap().iter().filter_map(|image| image.url).collect();
        assert_eq!(urls, ["x", "y", "z"]);
        let video = [json!({"role": "user", "content": [{"type": "video_url"}]})];
        assert!(matches!(image_parts(&video), Err(TemplateError::Modality(Modality::Video))));
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
        assert_eq!((&message["reasoning"], &message["thinking"]), (&json!("hm"), &json!("hm")));
        assert!(message.get("annotations").is_none());
        let spoken = string(
            json!({"role": "assistant", "content": "Wait.", "reasoning": "hm", "tool_calls": [call(json!({}))]}),
        )
        .unwrap();
        assert_eq!((&spoken["reasoning"], spoken.get("thinking")), (&json!("hm"), None));
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
                json!({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}),
                "messages[1].content[0]: a part of type \"input_file\" is not supported",
            ),
            (
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
                "messages[1].content[0].image_url.url: must be a string",
            ),
            (
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
                "messages[1].content: the chat template takes no images",
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
