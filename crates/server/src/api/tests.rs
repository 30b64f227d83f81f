use octavo_text::GrammarSpec;
use serde_json::json;

use crate::api::chat::request::ChatRequest;
use crate::api::completions::request::{CompletionRequest, MAX_PROMPTS, Prompt};
use crate::api::messages::request::MessagesRequest;
use crate::api::responses::request::ResponsesRequest;
use crate::api::shared::common::{Side, StreamOptions, Truncation};
use crate::api::shared::tools::ToolChoice;

fn chat(body: &str) -> Result<ChatRequest, String> {
    ChatRequest::parse(body.as_bytes()).map_err(|e| e.to_string())
}

fn completion(body: &str) -> Result<CompletionRequest, String> {
    CompletionRequest::parse(body.as_bytes()).map_err(|e| e.to_string())
}

const HI: &str = r#""messages": [{"role": "user", "content": "hi"}]"#;

#[test]
fn a_chat_request_has_defaults_for_all_but_its_messages() {
    let request = chat(&format!("{{{HI}, \"user\": \"me\", \"store\": true, \"frobnicate\": 1}}")).unwrap();
    assert_eq!(request.messages, [json!({"role": "user", "content": "hi"})]);
    assert!(request.add_generation_prompt && !request.continue_final_message && !request.add_special_tokens);
    assert_eq!((request.logprobs, request.common.stream, request.common.n), (None, None, None));
    assert!(request.common.skip_special_tokens);
    assert!(chat("{}").unwrap_err().contains("'msg': 'Field required'"));
    assert!(chat(r#"{"messages": []}"#).unwrap().messages.is_empty());
}

#[test]
fn messages_need_a_role() {
    let bad = [
        (r#"{"messages": "hi"}"#, "('body', 'messages')"),
        (r#"{"messages": ["hi"]}"#, "('body', 'messages', 0)"),
        (r#"{"messages": [{"role": "user"}, {"content": "x"}]}"#, "('body', 'messages', 1, 'role')"),
        (r#"{"messages": [{"role": 7}]}"#, "('body', 'messages', 0, 'role')"),
    ];
    for (body, location) in bad {
        let error = chat(body).unwrap_err();
        assert!(error.contains(location), "{error}");
    }
}

#[test]
fn all_wrong_fields_are_told_at_once() {
    let error = chat(&format!("{{{HI}, \"temperature\": \"hot\", \"n\": [], \"tools\": [{{}}]}}")).unwrap_err();
    assert!(error.starts_with("3 validation errors:"), "{error}");
    for name in ["temperature", "'n'", "('body', 'tools', 0, 'function')"] {
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn stream_options_need_a_stream() {
    let options = |rest: &str| chat(&format!("{{{HI}, {rest}}}")).map(|r| r.common.stream);
    assert_eq!(options(r#""stream": true"#), Ok(Some(StreamOptions::default())));
    let both = StreamOptions { include_usage: true, continuous_usage: true };
    assert_eq!(
        options(r#""stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}"#),
        Ok(Some(both))
    );
    assert_eq!(
        options(r#""stream": true, "stream_options": {"continuous_usage_stats": true}"#),
        Ok(Some(StreamOptions::default())),
        "usage on every chunk needs usage"
    );
    assert_eq!(options(r#""stream_options": null"#), Ok(None));
    assert!(options(r#""stream_options": {}"#).unwrap_err().contains("`stream=True`"));
    assert!(options(r#""stream": true, "stream_options": []"#).unwrap_err().contains("('body', 'stream_options')"));
    let nested = options(r#""stream": true, "stream_options": {"include_usage": 3}"#).unwrap_err();
    assert!(nested.contains("('body', 'stream_options', 'include_usage')"), "{nested}");
}

#[test]
fn top_logprobs_need_logprobs() {
    let logprobs = |rest: &str| chat(&format!("{{{HI}, {rest}}}")).map(|r| r.logprobs);
    assert_eq!(logprobs(r#""logprobs": true"#), Ok(Some(0)));
    assert_eq!(logprobs(r#""logprobs": true, "top_logprobs": 5"#), Ok(Some(5)));
    assert_eq!(logprobs(r#""logprobs": true, "top_logprobs": null"#), Ok(Some(0)));
    assert_eq!(logprobs(r#""top_logprobs": 0"#), Ok(None));
    assert!(logprobs(r#""top_logprobs": 5"#).unwrap_err().contains("`logprobs` must be set to true"));
    assert!(logprobs(r#""logprobs": true, "top_logprobs": -2"#).is_err());
}

#[test]
fn stop_is_a_string_or_up_to_four() {
    let stop = |value: &str| chat(&format!("{{{HI}, \"stop\": {value}}}")).map(|r| r.common.stop);
    assert_eq!(stop(r#""a""#).unwrap(), ["a"]);
    assert_eq!(stop(r#"["a", "b", "c", "d"]"#).unwrap().len(), 4);
    assert!(stop(&serde_json::to_string(&vec!["x"; 10_000]).unwrap()).unwrap_err().contains("got 10000"));
    assert!(stop(r#"["a", ""]"#).unwrap_err().contains("empty string"));
    assert!(stop("[1]").is_err());
}

#[test]
fn the_prompts_end_is_one_thing_or_the_other() {
    let end =
        |rest: &str| chat(&format!("{{{HI}, {rest}}}")).map(|r| (r.add_generation_prompt, r.continue_final_message));
    assert_eq!(end(r#""continue_final_message": true, "add_generation_prompt": false"#), Ok((false, true)));
    assert_eq!(end(r#""add_generation_prompt": false"#), Ok((false, false)));
    for both in
        [r#""continue_final_message": true, "add_generation_prompt": true"#, r#""continue_final_message": true"#]
    {
        let error = end(both).unwrap_err();
        assert!(
            error.contains("Cannot set both `continue_final_message` and `add_generation_prompt` to True."),
            "{error}"
        );
    }
}

#[test]
fn reasoning_effort_reaches_the_template() {
    let kwargs = |rest: &str| chat(&format!("{{{HI}, {rest}}}")).map(|r| r.template_kwargs);
    let low = kwargs(r#""reasoning_effort": "low""#).unwrap();
    assert_eq!(json!(low), json!({"enable_thinking": true, "reasoning_effort": "low"}));
    let given = kwargs(r#""reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}"#).unwrap();
    assert_eq!(given["enable_thinking"], json!(true));
    assert!(kwargs(r#""reasoning_effort": "huge""#).is_err());
}

#[test]
fn prompts_come_in_four_forms() {
    let prompts = |value: &str| completion(&format!("{{\"prompt\": {value}}}")).map(|r| r.prompts);
    assert_eq!(prompts(r#""hi""#).unwrap(), [Prompt::Text("hi".into())]);
    assert_eq!(prompts(r#" [ "a" , "b"]"#).unwrap(), [Prompt::Text("a".into()), Prompt::Text("b".into())]);
    assert_eq!(prompts("[1, 2]").unwrap(), [Prompt::Tokens(vec![1, 2])]);
    assert_eq!(prompts("[[1], [2, 3]]").unwrap(), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]);
    for nothing in ["null", r#""""#, "[]", "[ ]"] {
        assert!(prompts(nothing).unwrap_err().contains("Either prompt or prompt_embeds"), "{nothing}");
    }
    for wrong in ["3", "{}", "[1.5]", "[1, \"a\"]", "[[1], 2]", "true", "[[[1]]]", "[null]"] {
        assert!(prompts(wrong).unwrap_err().contains("'type': 'union_type'"), "{wrong}");
    }
    let many = serde_json::to_string(&vec!["x"; MAX_PROMPTS + 1]).unwrap();
    assert!(prompts(&many).unwrap_err().contains("at most 1024 prompts"));
}

#[test]
fn chosen_tokens_need_logprobs() {
    for body in [
        r#"{"prompt": "a", "logprob_token_ids": [1]}"#,
        r#"{"prompt": "a", "logprobs": null, "logprob_token_ids": [1]}"#,
    ] {
        assert!(completion(body).unwrap_err().contains("'logprob_token_ids'"));
    }
    assert!(completion(r#"{"prompt": "a", "logprobs": 1, "logprob_token_ids": [1]}"#).is_ok());
}

#[test]
fn truncation_is_minus_one_or_positive() {
    let truncation = |rest: &str| completion(&format!("{{\"prompt\": \"a\", {rest}}}")).map(|r| r.common.truncation);
    let keep = Some(5);
    assert_eq!(truncation(r#""truncate_prompt_tokens": 5"#), Ok(Some(Truncation { tokens: keep, side: None })));
    let right = r#""truncate_prompt_tokens": -1, "truncation_side": "right""#;
    assert_eq!(truncation(right), Ok(Some(Truncation { tokens: None, side: Some(Side::Right) })));
    assert_eq!(truncation(r#""truncate_prompt_tokens": null"#), Ok(None));
    for bad in [r#""truncate_prompt_tokens": 0"#, r#""truncate_prompt_tokens": -2"#, r#""truncation_side": "up""#] {
        assert!(truncation(bad).is_err(), "{bad}");
    }
}

#[test]
fn an_output_has_at_most_one_form() {
    let grammar = |rest: &str| chat(&format!("{{{HI}, {rest}}}")).map(|r| r.common.grammar);
    assert_eq!(grammar(r#""response_format": {"type": "text"}"#), Ok(None));
    assert_eq!(grammar(r#""response_format": {"type": "json_object"}"#), Ok(Some(GrammarSpec::JsonObject)));
    assert_eq!(grammar(r#""structured_outputs": {"regex": "a+"}"#), Ok(Some(GrammarSpec::Regex("a+".into()))));
    assert_eq!(
        grammar(r#""structured_outputs": {"choice": ["a", "b"], "json_object": false}"#),
        Ok(Some(GrammarSpec::Choice(vec!["a".into(), "b".into()])))
    );
    let schema =
        r#""response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}"#;
    assert!(matches!(grammar(schema), Ok(Some(GrammarSpec::JsonSchema { .. }))));
    let deep = format!("{}true{}", "{\"not\":".repeat(65), "}".repeat(65));
    for (bad, place) in [
        (r#""response_format": {"type": "xml"}"#.to_owned(), "('body', 'response_format', 'type')"),
        (r#""response_format": {}"#.into(), "('body', 'response_format', 'type')"),
        (r#""response_format": {"type": "json_schema"}"#.into(), "'json_schema')"),
        (r#""response_format": {"type": "json_schema", "json_schema": {}}"#.into(), "'schema')"),
        (r#""structured_outputs": {"regex": "a", "choice": ["b"]}"#.into(), "but 2 are specified"),
        (r#""structured_outputs": {}"#.into(), "but 0 are specified"),
        (format!(r#""structured_outputs": {{"json": {deep}}}"#), "at most 64 levels"),
        (r#""structured_outputs": {"json": "{"}"#.into(), "'json')"),
        (r#""structured_outputs": {"choice": []}"#.into(), "at least one choice"),
        (r#""structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}"#.into(), "not both"),
    ] {
        let error = grammar(&bad).unwrap_err();
        assert!(error.contains(place), "{bad}: {error}");
    }
}

#[test]
fn tools_and_the_choice_among_them() {
    let tools = r#""tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]"#;
    let choice = |rest: &str| chat(&format!("{{{HI}, {rest}}}")).map(|r| r.tools.choice);
    assert_eq!(choice(r#""tools": null"#), Ok(ToolChoice::None));
    assert_eq!(choice(tools), Ok(ToolChoice::Auto));
    assert_eq!(choice(&format!(r#"{tools}, "tool_choice": "none""#)), Ok(ToolChoice::None));
    assert_eq!(choice(&format!(r#"{tools}, "tool_choice": "required""#)), Ok(ToolChoice::Required));
    let named =
        |name: &str| format!(r#"{tools}, "tool_choice": {{"type": "function", "function": {{"name": "{name}"}}}}"#);
    assert_eq!(choice(&named("f")), Ok(ToolChoice::Named("f".into())));
    assert_eq!(choice(r#""tool_choice": "none""#), Ok(ToolChoice::None));
    for (bad, word) in [
        (named("g"), "does not match any"),
        (r#""tool_choice": "auto""#.to_owned(), "`tools` must be set"),
        (r#""tools": []"#.into(), "('body', 'tools')"),
        (format!(r#"{tools}, "tool_choice": "sometimes""#), "('body', 'tool_choice')"),
        (r#""tools": [{"type": "function", "function": {"name": ""}}]"#.into(), "'name')"),
        (r#""tools": [{"type": "retrieval"}]"#.into(), "'type')"),
        (format!(r#"{}, "response_format": {{"type": "json_object"}}"#, named("f")), "cannot be combined"),
    ] {
        let error = choice(&bad).unwrap_err();
        assert!(error.contains(word), "{bad}: {error}");
    }
}

#[test]
fn repetition_detection_is_bounded() {
    let detection = |inner: &str| {
        completion(&format!("{{\"prompt\": \"a\", \"repetition_detection\": {inner}}}"))
            .map(|r| r.common.repetition_detection)
    };
    assert_eq!(detection(r#"{"max_pattern_size": 0}"#), Ok(None));
    let some = detection(r#"{"max_pattern_size": 8, "min_count": 3}"#).unwrap().unwrap();
    assert_eq!((some.max_pattern_size, some.min_pattern_size, some.min_count), (8, 1, 3));
    for bad in [r#"{"max_pattern_size": 100000, "min_count": 3}"#, r#"{"max_pattern_size": 8, "min_count": 1}"#, "[]"] {
        assert!(detection(bad).is_err(), "{bad}");
    }
}

#[test]
fn cache_salts_and_request_ids_are_bounded() {
    let salt = |salt: &str| chat(&format!("{{{HI}, \"cache_salt\": {}}}", json!(salt))).is_ok();
    assert!(salt("x") && salt(&"ä".repeat(128)));
    for bad in ["", "a@b", "a/b", "a\\b", "a\0b", &"x".repeat(129)] {
        assert!(!salt(bad), "{bad:?}");
    }
    assert!(chat(&format!("{{{HI}, \"request_id\": \"{}\"}}", "x".repeat(300))).is_err());
}

#[test]
fn every_api_has_its_own_form_of_tools() {
    let chat = r#"[{"type": "function", "function": {"name": "f"}}]"#;
    let responses = r#"[{"type": "function", "name": "f"}]"#;
    let messages = r#"[{"name": "f"}]"#;
    let read = |tools: &str, choice: &str| {
        let fields = |tools| format!(r#""tools": {tools}, "tool_choice": {choice}"#);
        [
            chat_tools(&format!("{{{HI}, {}}}", fields(if tools.is_empty() { chat } else { tools }))),
            responses_tools(&format!(
                r#"{{"input": "hi", {}}}"#,
                fields(if tools.is_empty() { responses } else { tools })
            )),
            messages_tools(&format!(
                r#"{{"max_tokens": 8, {HI}, {}}}"#,
                fields(if tools.is_empty() { messages } else { tools })
            )),
        ]
    };
    assert_eq!(read("", "null"), [Ok(ToolChoice::Auto), Ok(ToolChoice::Auto), Ok(ToolChoice::Auto)]);
    let named = [r#"{"function": {"name": "f"}}"#, r#"{"name": "f"}"#, r#"{"type": "tool", "name": "f"}"#];
    for (index, choice) in named.into_iter().enumerate() {
        assert_eq!(read("", choice)[index], Ok(ToolChoice::Named("f".into())), "{choice}");
    }
    for error in read("", r#"{"type": "tool", "name": "g", "function": {"name": "g"}}"#) {
        assert!(error.unwrap_err().contains("tool_choice"));
    }
    // Only the chat API needs tools for a choice.
    for tools in ["null", "[]"] {
        let [chat, responses, messages] = read(tools, r#"{"type": "tool", "name": "f", "function": {"name": "f"}}"#);
        assert!(chat.unwrap_err().contains("tools"), "{tools}");
        assert_eq!((responses, messages), (Ok(ToolChoice::None), Ok(ToolChoice::None)), "{tools}");
    }
}

fn chat_tools(body: &str) -> Result<ToolChoice, String> {
    chat(body).map(|request| request.tools.choice)
}

fn responses_tools(body: &str) -> Result<ToolChoice, String> {
    ResponsesRequest::parse(body.as_bytes()).map(|request| request.chat.tools.choice).map_err(|e| e.to_string())
}

fn messages_tools(body: &str) -> Result<ToolChoice, String> {
    MessagesRequest::parse(body.as_bytes()).map(|request| request.chat.tools.choice).map_err(|e| e.to_string())
}
