use serde_json::json;

use super::chat::ChatRequest;
use super::common::StreamOptions;
use super::completion::{CompletionRequest, MAX_PROMPTS, Prompt};

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
    for name in ["temperature", "'n'", "`tools` is not supported"] {
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
    assert_eq!(end(r#""continue_final_message": true"#), Ok((false, true)));
    assert_eq!(end(r#""add_generation_prompt": false"#), Ok((false, false)));
    assert!(end(r#""continue_final_message": true, "add_generation_prompt": true"#).is_err());
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
fn echo_goes_without_logprobs() {
    assert!(completion(r#"{"prompt": "a", "echo": true}"#).unwrap().echo);
    assert!(completion(r#"{"prompt": "a", "echo": true, "logprobs": 1}"#).unwrap_err().contains("'echo'"));
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
