//! Compares renderings of realistic templates with transformers (tests/data/generate_templates.py).

use std::time::{Duration, SystemTime};

use serde_json::{Map, Value as Json};

use super::*;

/// Returns 2024-02-29 12:34:56, as in the generator.
fn clock() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_709_210_096)
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
        other => panic!("no template {other}"),
    }
}

fn render(case: &Json) -> Result<String, TemplateError> {
    let special =
        SpecialTokens { bos: Some("<s>".to_owned()), eos: Some("</s>".to_owned()), ..SpecialTokens::default() };
    let input = &case["input"];
    let none = Map::new();
    let list = |key: &str| input[key].as_array().map(Vec::as_slice);
    let flag = |key: &str| input[key].as_bool().unwrap_or(false);
    ChatTemplate::with_clock(source(case["template"].as_str().unwrap()), &special, clock)?.render(&TemplateInput {
        messages: list("messages").unwrap(),
        tools: list("tools"),
        documents: list("documents"),
        add_generation_prompt: flag("add_generation_prompt"),
        continue_final_message: flag("continue_final_message"),
        kwargs: input["kwargs"].as_object().unwrap_or(&none),
    })
}

#[test]
fn templates_render_as_in_transformers() {
    let cases: Vec<Json> = serde_json::from_str(include_str!("../../../tests/data/templates.json")).unwrap();
    assert!(cases.len() >= 50);
    let mut wrong = String::new();
    for case in &cases {
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

#[test]
fn content_formats_of_real_structures() {
    for (template, format) in [
        ("smollm2", ContentFormat::String),
        ("chatml", ContentFormat::String),
        ("llama3", ContentFormat::String),
        ("mistral", ContentFormat::String),
        ("qwen3", ContentFormat::String),
        ("parts", ContentFormat::OpenAi),
    ] {
        let template = ChatTemplate::new(source(template), &SpecialTokens::default()).unwrap();
        assert_eq!(template.content_format(), format);
    }
}
