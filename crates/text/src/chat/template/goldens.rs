//! Compares renderings of realistic templates with transformers (tests/data/generate_templates.py).

use jiff::civil::date;
use serde_json::{Map, Value as Json, json};

use super::*;
use crate::{GgufVocabulary, Tokenizer, normalize_messages};

/// Returns 2024-02-29 12:34:56, as in the generator.
fn clock() -> DateTime {
    date(2024, 2, 29).at(12, 34, 56, 0)
}

fn source(template: &str) -> &'static str {
    match template {
        "smollm2" => include_str!("../../../tests/data/templates/smollm2.jinja"),
        "chatml" => include_str!("../../../tests/data/templates/chatml.jinja"),
        "llama3" => include_str!("../../../tests/data/templates/llama3.jinja"),
        "mistral" => include_str!("../../../tests/data/templates/mistral.jinja"),
        "qwen3" => include_str!("../../../tests/data/templates/qwen3.jinja"),
        "parts" => include_str!("../../../tests/data/templates/parts.jinja"),
        "printing" => include_str!("../../../tests/data/templates/printing.jinja"),
        "gemma2" => include_str!("../../../tests/data/templates/gemma2.jinja"),
        "gemma3" => include_str!("../../../tests/data/templates/gemma3.jinja"),
        "phi3" => include_str!("../../../tests/data/templates/phi3.jinja"),
        "phi4" => include_str!("../../../tests/data/templates/phi4.jinja"),
        "phi4-mini" => include_str!("../../../tests/data/templates/phi4-mini.jinja"),
        "granite" => include_str!("../../../tests/data/templates/granite.jinja"),
        "olmo2" => include_str!("../../../tests/data/templates/olmo2.jinja"),
        "mixtral" => include_str!("../../../tests/data/templates/mixtral.jinja"),
        "gpt-oss" => include_str!("../../../tests/data/templates/gpt-oss.jinja"),
        "qwen3.5" => include_str!("../../../tests/data/templates/qwen3.5.jinja"),
        "deepseek-v3" => include_str!("../../../tests/data/templates/deepseek-v3.jinja"),
        "llama3.2" => include_str!("../../../tests/data/templates/llama3.2.jinja"),
        "mistral-v7" => include_str!("../../../tests/data/templates/mistral-v7.jinja"),
        "command-r" => include_str!("../../../tests/data/templates/command-r.jinja"),
        "glm4.5" => include_str!("../../../tests/data/templates/glm4.5.jinja"),
        "kimi-k2" => include_str!("../../../tests/data/templates/kimi-k2.jinja"),
        "minimax-m2" => include_str!("../../../tests/data/templates/minimax-m2.jinja"),
        "zephyr" => include_str!("../../../tests/data/templates/zephyr.jinja"),
        "vicuna" => include_str!("../../../tests/data/templates/vicuna.jinja"),
        "smollm3" => include_str!("../../../tests/data/templates/smollm3.jinja"),
        "hermes3" => include_str!("../../../tests/data/templates/hermes3.jinja"),
        "formats" => include_str!("../../../tests/data/templates/formats.jinja"),
        "filters" => include_str!("../../../tests/data/templates/filters.jinja"),
        other => panic!("no template {other}"),
    }
}

fn compiled(template: &str) -> Result<ChatTemplate, TemplateError> {
    let special =
        SpecialTokens { bos: Some("<s>".to_owned()), eos: Some("</s>".to_owned()), ..SpecialTokens::default() };
    ChatTemplate::with_clock(source(template), &special, clock)
}

fn render(case: &Json) -> Result<String, TemplateError> {
    let messages = case["input"]["messages"].as_array().unwrap();
    render_messages(case, messages, &compiled(case["template"].as_str().unwrap())?)
}

fn render_messages(case: &Json, messages: &[Json], template: &ChatTemplate) -> Result<String, TemplateError> {
    let input = &case["input"];
    let none = Map::new();
    let list = |key: &str| input[key].as_array().map(Vec::as_slice);
    let flag = |key: &str| input[key].as_bool().unwrap_or(false);
    template.render(&TemplateInput {
        messages,
        tools: list("tools"),
        documents: list("documents"),
        add_generation_prompt: flag("add_generation_prompt"),
        continue_final_message: flag("continue_final_message"),
        kwargs: input["kwargs"].as_object().unwrap_or(&none),
    })
}

#[test]
fn templates_render_as_in_transformers() {
    let cases: Json = serde_json::from_str(include_str!("../../../tests/data/templates.json")).unwrap();
    let cases = cases["cases"].as_array().unwrap();
    assert!(cases.len() >= 300);
    let mut wrong = String::new();
    for case in cases {
        let result = render(case);
        let right = match (&result, case.get("output"), case.get("raised")) {
            (Ok(output), Some(expected), _) => output == expected.as_str().unwrap(),
            (Err(TemplateError::Raised(message)), _, Some(expected)) => message == expected.as_str().unwrap(),
            (Err(TemplateError::Raised(_)), ..) => false,
            (Err(_), None, None) => true,
            _ => false,
        };
        if !right {
            let expected = case.get("output").or(case.get("raised"));
            wrong += &format!("{} {}\n  expected {expected:?}\n  got {result:?}\n", case["template"], case["name"]);
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// The server normalises the messages of its requests.
#[test]
fn texts_of_requests_render_as_in_transformers() {
    let cases: Json = serde_json::from_str(include_str!("../../../tests/data/templates.json")).unwrap();
    let plain =
        ["one", "prompt", "system", "unicode", "tools", "tool_turns", "two_calls", "no_thinking", "three_turns"];
    let mut compared = 0;
    for case in cases["cases"].as_array().unwrap().iter().filter(|case| plain.iter().any(|name| case["name"] == *name))
    {
        let Some(expected) = case.get("output") else { continue };
        let template = compiled(case["template"].as_str().unwrap()).unwrap();
        let messages = case["input"]["messages"].as_array().unwrap();
        let messages = normalize_messages(messages, template.content_format(), None).unwrap();
        let rendered = render_messages(case, &messages, &template).unwrap();
        assert_eq!(rendered, expected.as_str().unwrap(), "{} {}", case["template"], case["name"]);
        compared += 1;
    }
    assert!(compared >= 120, "{compared}");
}

#[test]
fn content_formats_of_real_structures() {
    for (template, format) in [
        ("smollm2", ContentFormat::String),
        ("chatml", ContentFormat::String),
        ("llama3", ContentFormat::String),
        ("mistral", ContentFormat::String),
        ("qwen3", ContentFormat::String),
        ("parts", ContentFormat::Either),
        ("gemma2", ContentFormat::String),
        ("gemma3", ContentFormat::Either),
        ("granite", ContentFormat::String),
        ("gpt-oss", ContentFormat::String),
        ("qwen3.5", ContentFormat::Either),
        ("glm4.5", ContentFormat::Either),
        ("mistral-v7", ContentFormat::Either),
    ] {
        let template = ChatTemplate::new(source(template), &SpecialTokens::default()).unwrap();
        assert_eq!(template.content_format(), format);
    }
    let only_parts = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}";
    let template = ChatTemplate::new(only_parts, &SpecialTokens::default()).unwrap();
    assert_eq!(template.content_format(), ContentFormat::OpenAi);
}

/// Returns a tokenizer of a SentencePiece vocabulary that adds `<s>`, as those of Gemma do.
fn tokenizer() -> Tokenizer {
    let specials = ["<unk>", "<s>", "</s>"].map(|token| (token.to_owned(), 3));
    let bytes = (0..=u8::MAX).map(|byte| (format!("<0x{byte:02X}>"), 6));
    let (tokens, token_types): (Vec<String>, Vec<i32>) = specials.into_iter().chain(bytes).unzip();
    let vocabulary = GgufVocabulary {
        model: "llama".to_owned(),
        scores: vec![0.0; tokens.len()],
        tokens: tokens.iter().map(String::as_str).collect(),
        token_types,
        bos_id: Some(1),
        eos_id: Some(2),
        unk_id: Some(0),
        add_bos: Some(true),
        ..GgufVocabulary::default()
    };
    Tokenizer::from_gguf(&vocabulary).unwrap()
}

/// A chat prompt is encoded without special tokens, because the template writes them.
#[test]
fn the_beginning_of_a_sequence_is_not_doubled() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.encode("", true).unwrap(), [1]);
    for template in ["gemma2", "gemma3", "olmo2", "mixtral"] {
        let messages = [json!({"role": "user", "content": "Hi"})];
        let prompt = ChatTemplate::new(source(template), tokenizer.special()).unwrap().render(&TemplateInput {
            messages: &messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: &Map::new(),
        });
        let ids = tokenizer.encode(&prompt.unwrap(), false).unwrap();
        assert_eq!(ids[0], 1, "{template}");
        assert!(!ids[1..].contains(&1), "{template}");
    }
}

/// OpenAI clients send the reasoning before a tool call back in `reasoning_content`.
#[test]
fn harmony_keeps_the_reasoning_before_a_tool_call() {
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}});
    let messages = [
        json!({"role": "user", "content": "Hi"}),
        json!({"role": "assistant", "content": null, "reasoning_content": "Call f.", "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": "1", "content": "2"}),
    ];
    let messages = normalize_messages(&messages, ContentFormat::String, None).unwrap();
    let prompt = ChatTemplate::new(source("gpt-oss"), &SpecialTokens::default()).unwrap().render(&TemplateInput {
        messages: &messages,
        tools: None,
        documents: None,
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: &Map::new(),
    });
    let (_, turns) = prompt.as_deref().unwrap().split_once("<|start|>user").unwrap();
    assert_eq!(
        turns,
        "<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Call f.<|end|>\
         <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{\"x\": 1}<|call|>\
         <|start|>functions.f to=assistant<|channel|>commentary<|message|>\"2\"<|end|><|start|>assistant"
    );
}
