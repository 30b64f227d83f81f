//! Templates of clients, which another process renders.
//!
//! A template is a program. The limits of [`ChatTemplate`] on steps and output stop one that is wrong, but not one that is
//! hostile: the parser recurses over chains of operators, a comparison of nested lists is one step, and a string can be
//! doubled until memory ends. Only a process with limits of the operating system can be stopped in all cases. This module
//! has both ends of the conversation with it, as bytes; the caller starts the process.

use serde_json::{Map, Value as Json, json};

use super::template::{ChatTemplate, TemplateInput};
use super::{TemplateError, normalize_messages};
use crate::tokenizer::SpecialTokens;

/// Maximum length of a client's template in bytes. The longest of known models has about 30 KB.
const MAX_SOURCE: usize = 256 << 10;

/// First byte of an answer that is a prompt.
const PROMPT: u8 = b'+';

/// Returns the request to render `input` with a client's template. The messages are as the client sent them.
///
/// # Errors
/// The template is too long.
pub fn untrusted_request(
    source: &str,
    special: &SpecialTokens,
    input: &TemplateInput<'_>,
) -> Result<Vec<u8>, TemplateError> {
    if source.len() > MAX_SOURCE {
        return Err(TemplateError::SourceTooLong(MAX_SOURCE));
    }
    let request = json!({
        "source": source,
        "special": [special.bos, special.eos, special.unk, special.pad],
        "messages": input.messages,
        "tools": input.tools,
        "documents": input.documents,
        "add_generation_prompt": input.add_generation_prompt,
        "continue_final_message": input.continue_final_message,
        "kwargs": input.kwargs,
    });
    Ok(request.to_string().into_bytes())
}

/// Answers a request of [`untrusted_request`]. It may need any amount of stack, memory and time.
pub fn answer_untrusted(request: &[u8]) -> Vec<u8> {
    match render(request) {
        Ok(prompt) => [&[PROMPT], prompt.as_bytes()].concat(),
        Err(error) => match error {
            TemplateError::Message { index, field, reason } => {
                json!({"kind": "message", "index": index, "field": field, "text": reason})
            }
            TemplateError::Syntax(text) => json!({"kind": "syntax", "text": text}),
            error => json!({"kind": "other", "text": error.to_string()}),
        }
        .to_string()
        .into_bytes(),
    }
}

/// Reads the answer of the process: the prompt. An answer that is incomplete or missing means that the process was
/// stopped.
///
/// # Errors
/// The error of the template, or [`TemplateError::Stopped`].
pub fn read_untrusted(answer: Vec<u8>) -> Result<String, TemplateError> {
    if answer.first() == Some(&PROMPT) {
        let mut prompt = String::from_utf8(answer).map_err(|_| TemplateError::Stopped)?;
        prompt.remove(0);
        return Ok(prompt);
    }
    let error: Json = serde_json::from_slice(&answer).map_err(|_| TemplateError::Stopped)?;
    let text = |key: &str| error[key].as_str().unwrap_or_default().to_owned();
    Err(match error["kind"].as_str() {
        Some("message") => TemplateError::Message {
            index: error["index"].as_u64().and_then(|index| usize::try_from(index).ok()).unwrap_or(0),
            field: text("field"),
            reason: text("text"),
        },
        Some("syntax") => TemplateError::Syntax(text("text")),
        _ => TemplateError::Untrusted(text("text")),
    })
}

fn render(request: &[u8]) -> Result<String, TemplateError> {
    let request: Json = serde_json::from_slice(request).map_err(|error| TemplateError::Untrusted(error.to_string()))?;
    let special = |index: usize| request["special"][index].as_str().map(str::to_owned);
    let special = SpecialTokens {
        bos: special(0),
        eos: special(1),
        unk: special(2),
        pad: special(3),
        ..SpecialTokens::default()
    };
    let template = ChatTemplate::new(request["source"].as_str().unwrap_or_default(), &special)?;
    let list = |key: &str| request[key].as_array().map(Vec::as_slice);
    let flag = |key: &str| request[key].as_bool().unwrap_or(false);
    let none = Map::new();
    template.render(&TemplateInput {
        messages: &normalize_messages(list("messages").unwrap_or_default(), template.content_format(), None)?,
        tools: list("tools"),
        documents: list("documents"),
        add_generation_prompt: flag("add_generation_prompt"),
        continue_final_message: flag("continue_final_message"),
        kwargs: request["kwargs"].as_object().unwrap_or(&none),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchanged(source: &str, messages: &[Json]) -> Result<String, TemplateError> {
        let kwargs = json!({"x": 1.5}).as_object().unwrap().clone();
        let tools = [json!({"name": "f"})];
        let input = TemplateInput {
            messages,
            tools: Some(&tools),
            documents: None,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: &kwargs,
        };
        let special = SpecialTokens { bos: Some("<s>".into()), ..SpecialTokens::default() };
        read_untrusted(answer_untrusted(&untrusted_request(source, &special, &input)?))
    }

    #[test]
    fn everything_of_the_input_arrives() {
        let source = "{{ bos_token }}{{ x }}{{ messages[0].content }}{{ tools[0].name }}{{ documents }}{{ add_generation_prompt }}";
        assert_eq!(exchanged(source, &[json!({"role": "user", "content": "+ğ"})]).unwrap(), "<s>1.5+ğfNoneTrue");
    }

    #[test]
    fn errors_come_back_as_they_are() {
        let user = [json!({"role": "user", "content": "hi"})];
        assert!(matches!(exchanged("{% if %}", &user), Err(TemplateError::Syntax(_))));
        let error = exchanged("{{ raise_exception('no') }}", &user).unwrap_err();
        assert_eq!(error.to_string(), "the chat template refused the messages: no");
        let unnamed = exchanged("", &[json!({"content": "hi"})]).unwrap_err();
        assert!(matches!(&unnamed, TemplateError::Message { index: 0, .. }), "{unnamed}");
        assert!(matches!(exchanged(&" ".repeat(MAX_SOURCE + 1), &user), Err(TemplateError::SourceTooLong(_))));
    }

    #[test]
    fn an_answer_that_is_cut_is_no_prompt() {
        for cut in [&b""[..], b"{\"kind\": \"oth", b"+\xc4"] {
            assert!(matches!(read_untrusted(cut.to_vec()), Err(TemplateError::Stopped)), "{cut:?}");
        }
    }
}
