//! Tests of the output of model families and its expected parsing.

use serde_json::{Value, json};

use super::*;

mod families;
mod harmony;

/// A whole message.
#[derive(Debug, Default, PartialEq)]
struct Message {
    reasoning: String,
    content: String,
    /// Names and arguments.
    calls: Vec<(String, String)>,
}

fn tools() -> Vec<Value> {
    let weather = json!({
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
        "options": {"type": "object"}, "note": {"type": ["string", "null"]},
    });
    vec![
        json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": weather}}}),
        json!({"type": "function", "function": {"name": "now"}}),
    ]
}

/// Joins neighbouring deltas.
fn joined(deltas: Vec<OutputDelta>) -> Vec<OutputDelta> {
    let mut out: Vec<OutputDelta> = Vec::new();
    for delta in deltas {
        match (out.last_mut(), delta) {
            (Some(OutputDelta::Reasoning(text)), OutputDelta::Reasoning(more))
            | (Some(OutputDelta::Content(text)), OutputDelta::Content(more)) => text.push_str(&more),
            (
                Some(OutputDelta::Arguments { index, fragment }),
                OutputDelta::Arguments { index: of, fragment: more },
            ) => {
                assert_eq!(*index, of);
                fragment.push_str(&more);
            }
            (_, delta) => out.push(delta),
        }
    }
    out
}

type Parsers = (Option<ReasoningSyntax>, Option<ToolSyntax>);

fn parse<'a>(parsers: Parsers, prompt: &str, pieces: impl IntoIterator<Item = &'a str>) -> Vec<OutputDelta> {
    let tools = tools();
    let mut parser = OutputParser::new(parsers.0, parsers.1.map(|syntax| (syntax, &tools[..])), prompt);
    let mut deltas = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut deltas);
    }
    parser.finish(&mut deltas);
    joined(deltas)
}

/// Parses the message and checks that the result does not depend on how the text is divided.
fn message(parsers: Parsers, prompt: &str, text: &str) -> Message {
    let whole = parse(parsers, prompt, [text]);
    assert_eq!(parse(parsers, prompt, text.split_inclusive(|_| true)), whole, "by characters: {text:?}");
    for (at, _) in text.char_indices() {
        assert_eq!(parse(parsers, prompt, [&text[..at], &text[at..]]), whole, "cut at {at}: {text:?}");
    }
    let mut message = Message::default();
    for delta in whole {
        match delta {
            OutputDelta::Reasoning(text) => message.reasoning.push_str(&text),
            OutputDelta::Content(text) => message.content.push_str(&text),
            OutputDelta::ToolCall { index, name } => {
                assert_eq!(index as usize, message.calls.len());
                assert!(!name.is_empty());
                message.calls.push((name, String::new()));
            }
            OutputDelta::Arguments { index, fragment } => {
                assert_eq!(index as usize + 1, message.calls.len());
                message.calls[index as usize].1.push_str(&fragment);
            }
        }
    }
    message
}

/// Checks the calls of a complete message, whose arguments are objects.
fn calls(syntax: ToolSyntax, text: &str, content: &str, calls: &[(&str, &str)]) {
    let message = message((None, Some(syntax)), "", text);
    for (name, arguments) in &message.calls {
        let value: Value =
            serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{name} {arguments}: {error}"));
        assert!(value.is_object(), "{text:?}");
    }
    let calls = calls.iter().map(|&(name, arguments)| (name.to_owned(), arguments.to_owned())).collect();
    assert_eq!(message, Message { content: content.to_owned(), calls, ..Message::default() }, "{text:?}");
}

/// Checks that text without calls is content, to the last character.
fn no_calls(syntax: ToolSyntax, texts: &[&str]) {
    for text in texts {
        calls(syntax, text, text, &[]);
    }
}

const PARIS: (&str, &str) = ("weather", r#"{"city": "Paris"}"#);
const NOW: (&str, &str) = ("now", "{}");

#[test]
fn hermes() {
    let call = r#"<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>"#;
    calls(ToolSyntax::Hermes, call, "", &[PARIS]);
    calls(ToolSyntax::Hermes, &format!("\n\n{call}\n{call}\n"), "", &[PARIS, PARIS]);
    calls(ToolSyntax::Hermes, &format!("Let me see.\n{call}"), "Let me see.\n", &[PARIS]);
    calls(ToolSyntax::Hermes, &format!("A\n{call}\n B {call}\nC\n"), "A\n\n B \nC\n", &[PARIS, PARIS]);
    for (text, call) in [
        (r#"<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>"#, PARIS),
        (r#"<tool_call>{"name": "weather", "parameters": {"city": "Paris"}}"#, PARIS),
        (r#"<tool_call>{"name": "weather", "arguments": "{\"city\": \"Paris\"}"}</tool_call>"#, PARIS),
        (r#"<tool_call>{"arguments": " {\"city\": \"P\u0061ris\"}", "name": "weather"}</tool_call>"#, PARIS),
        (r#"<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}}</tool_call>"#, PARIS),
        (r#"<tool_call>{"id": [1, "}"], "x": -1.5, "name": "now", "y": null}</tool_call>"#, NOW),
        (r#"<tool_call>{"name": "now", "arguments": null}</tool_call>"#, NOW),
        (r#"<tool_call>{"name": "now", "arguments": ""}</tool_call>"#, NOW),
        (r#"<tool_call>{"name": "now", "arguments": {}, "a": {"a": 1}, "x": "name"}</tool_call>"#, NOW),
        (
            "<tool_call>{\"name\":\"f\",\"arguments\":{ \"a\" :\n[1,{\"b\":\"</tool_call>}\\\"\"}] }}</tool_call>",
            ("f", "{ \"a\" :\n[1,{\"b\":\"</tool_call>}\\\"\"}] }"),
        ),
    ] {
        calls(ToolSyntax::Hermes, text, "", &[call]);
    }
    no_calls(
        ToolSyntax::Hermes,
        &[
            "",
            " \n",
            "{\"name\": \"f\", \"arguments\": {}}",
            "<tool_call",
            "a < b <tool_call <",
            "</tool_call>\n",
            "<tool_call>{\"answer\": 42}</tool_call>",
            "<tool_call>\n",
            "<tool_call>{\"name\": \"f",
            "<tool_call>{'name': 'f'}",
            "<tool_call>{\"name\": 5}",
            "<tool_call>{\"name\": \"\"}",
            "<tool_call><tool_call>{}",
            " <tool_call>[]</tool_call> ",
        ],
    );
    calls(ToolSyntax::Hermes, &format!("<tool_call>oops {call}"), "<tool_call>oops ", &[PARIS]);
    for rest in [r#", "name": "x"}"#, r#", "arguments": {"a": 1}}"#, r#", "x": 1, "parameters": {"a": 1}}"#] {
        let text = format!(r#"<tool_call>{{"name": "now", "arguments": {{}}{rest}</tool_call>"#);
        calls(ToolSyntax::Hermes, &text, &format!("{rest}</tool_call>"), &[NOW]);
    }
}

#[test]
fn llama3_json() {
    let call = r#"{"name": "weather", "parameters": {"city": "Paris"}}"#;
    calls(ToolSyntax::Llama3Json, call, "", &[PARIS]);
    calls(ToolSyntax::Llama3Json, &format!("\n{call}; {call};{call}"), "", &[PARIS, PARIS, PARIS]);
    calls(ToolSyntax::Llama3Json, &format!("<|python_tag|>{call}; {call}"), "", &[PARIS, PARIS]);
    calls(ToolSyntax::Llama3Json, &format!("I look. <|python_tag|>{call}"), "I look. ", &[PARIS]);
    calls(ToolSyntax::Llama3Json, &format!("{call}; done"), "; done", &[PARIS]);
    for (text, call) in [
        (r#"{"type": "function", "name": "weather", "arguments": "{\"city\": \"Paris\"}"}"#, PARIS),
        (r#"{"parameters": {"city": "Paris"}, "name": "weather"}"#, PARIS),
        (r#"{"name": "now"}"#, NOW),
        (r#"<|python_tag|>{"name": "now", "x": 1}"#, NOW),
        (r#"{"name": "unknown", "parameters": {}, "x": 1}"#, ("unknown", "{}")),
    ] {
        calls(ToolSyntax::Llama3Json, text, "", &[call]);
    }
    no_calls(
        ToolSyntax::Llama3Json,
        &[
            r#"{"name": "Alice", "age": 7}"#,
            r#"{"name": "Alice"}"#,
            r#"{"answer": {"name": "now"}}"#,
            "{",
            "{}",
            "{{{",
            "<|python_tag|>",
            r#"{"name": "now", "parameters": [1]}"#,
            r#"{"name": "now", "parameters": 1}"#,
            r#"{"parameters": {}}"#,
            "<|python_tag|>print(1)",
            &format!("So: {call}"),
            &format!("[{call}]"),
            " {\"name\": \"weather\", ",
        ],
    );
}

#[test]
fn mistral() {
    let args = r#"{"city": "Paris"}"#;
    let call = format!(r#"{{"name": "weather", "arguments": {args}, "id": "VvvODy9mT"}}"#);
    for text in [
        format!("[TOOL_CALLS] [{call}]"),
        format!("[TOOL_CALLS][{call}]\n"),
        format!("[TOOL_CALLS]{call}"),
        format!("[TOOL_CALLS]weather{args}"),
        format!("[TOOL_CALLS] weather {args}"),
        format!("[TOOL_CALLS]weather[ARGS]{args}"),
        format!("[TOOL_CALLS]weather[CALL_ID]VvvODy9mT[ARGS]{args}"),
        format!("[TOOL_CALLS]weather\n[ARGS] {args}"),
    ] {
        calls(ToolSyntax::Mistral, &text, "", &[PARIS]);
    }
    let two = format!("Both.[TOOL_CALLS] [{call}, {call}]");
    calls(ToolSyntax::Mistral, &two, "Both.", &[PARIS, PARIS]);
    let two = format!("Both.[TOOL_CALLS]weather[ARGS]{args}[TOOL_CALLS]now[ARGS]{{}}");
    calls(ToolSyntax::Mistral, &two, "Both.", &[PARIS, NOW]);
    let broken = format!("[TOOL_CALLS][{call}, nothing more]");
    calls(ToolSyntax::Mistral, &broken, ", nothing more]", &[PARIS]);
    no_calls(
        ToolSyntax::Mistral,
        &[
            "[TOOL_CALLS",
            "[TOOL_CALLS]",
            "[TOOL_CALLS] [",
            "[TOOL_CALLS] [{\"name\"",
            "[TOOL_CALLS]weather",
            "[TOOL_CALLS]a b{}",
            "[TOOL_CALLS]weather[ARGS]",
            "[TOOL_CALLS]weather[AR{",
            "[TOOL_CALLS]\"weather\"",
            "[1] [TOOL",
            "[{\"name\": \"now\"}]",
        ],
    );
}

#[test]
fn pythonic() {
    for (text, found) in [
        ("[weather(city='Paris')]", &[PARIS][..]),
        ("\n[weather(city=\"Paris\"), now()]\n", &[PARIS, NOW]),
        ("<|python_start|>[weather(city='Paris')]<|python_end|>", &[PARIS]),
        ("[now( ) , weather( city = 'Paris' , ) , ]", &[NOW, PARIS]),
        ("[now()]\n[now()]", &[NOW, NOW]),
        (
            "[a.b(x=-1, y=[True, None], z={'k': 'it\\'s \"q\"'}, s=\"]) [f(\")]",
            &[("a.b", r#"{"x": -1, "y": [true, null], "z": {"k": "it's \"q\""}, "s": "]) [f("}"#)],
        ),
    ] {
        calls(ToolSyntax::Pythonic, text, "", found);
    }
    calls(ToolSyntax::Pythonic, "Hm: <|python_start|>[now()]<|python_end|>", "Hm: ", &[NOW]);
    calls(ToolSyntax::Pythonic, "[now(), 5]", ", 5]", &[NOW]);
    no_calls(
        ToolSyntax::Pythonic,
        &[
            "[",
            "[]",
            "[1, 2]",
            "[link](https://a.b)",
            "[a, b]",
            "[f(1)]",
            "[f(a",
            "[f(x y=1)]",
            "[ok] [now()]",
            "now()",
            "[.f()]",
            "[1f()]",
            "See [now()]",
            "<|python_start|>now()<|python_end|>",
            "[\"now()\"]",
        ],
    );
}

#[test]
fn qwen3_coder() {
    let call = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>";
    calls(ToolSyntax::Qwen3Coder, call, "", &[PARIS]);
    calls(ToolSyntax::Qwen3Coder, &format!("Let me see.\n\n{call}\n{call}"), "Let me see.\n\n", &[PARIS, PARIS]);
    for (text, call) in [
        ("<function=weather><parameter=city>Paris</parameter></function></tool_call>", PARIS),
        ("<tool_call><function=weather><parameter=city>\nParis\n</function></tool_call>", PARIS),
        ("<tool_call><function=weather><parameter=city>\nParis</parameter>\n</tool_call>", PARIS),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", NOW),
        (
            "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n\
             <parameter=options>\n{\"a\": [1, \"b\"]}\n</parameter>\n<parameter=note>\nNone\n<parameter=city>\n\n a\n<b>\"\n\n\
             </parameter>\n<parameter=other>\n3\n</parameter>\n</function>\n</tool_call>",
            (
                "weather",
                "{\"days\": 3, \"exact\": true, \"options\": {\"a\": [1, \"b\"]}, \"note\": null, \"city\": \"\\n a\\n<b>\\\"\\n\", \
                 \"other\": \"3\"}",
            ),
        ),
        (
            "<tool_call><function=weather><parameter=options>{'a': None}</parameter>, <parameter=days>\nmany\n</parameter></function>",
            ("weather", r#"{"options": {"a": null}, "days": "many"}"#),
        ),
    ] {
        calls(ToolSyntax::Qwen3Coder, text, "", &[call]);
    }
    no_calls(
        ToolSyntax::Qwen3Coder,
        &[
            "<tool_call>",
            "<tool_call>{\"name\": \"now\"}</tool_call>",
            "<function=",
            "<function=now",
            "<function=>",
            "<function=a\nb>",
            "<tool_call>\n<function",
            "a <function b",
            "<parameter=a>b</parameter>",
            "</function>",
        ],
    );
}

#[test]
fn deepseek_v3() {
    let call =
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜>";
    let newer = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜>";
    for call in [call, newer] {
        let one = format!("<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>");
        calls(ToolSyntax::DeepSeekV3, &one, "", &[PARIS]);
        let two = format!("Ok.\n<｜tool▁calls▁begin｜>{call}\n{call}<｜tool▁calls▁end｜>");
        calls(ToolSyntax::DeepSeekV3, &two, "Ok.\n", &[PARIS, PARIS]);
        calls(ToolSyntax::DeepSeekV3, &one[..one.len() - 5], "", &[PARIS]);
    }
    let empty =
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>";
    calls(ToolSyntax::DeepSeekV3, empty, "", &[NOW]);
    no_calls(
        ToolSyntax::DeepSeekV3,
        &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>function",
            "<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n",
            "<｜tool▁call▁begin｜>a function<｜tool▁sep｜>now\n```json\n{}",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\nyes {}",
            "<｜tool",
            "<｜tool▁call▁begin｜><｜tool▁sep｜>{}",
        ],
    );
}

#[test]
fn unfinished_calls_keep_what_was_given_out() {
    for (syntax, text, arguments) in [
        (ToolSyntax::Hermes, r#"<tool_call>{"name": "f", "#, ""),
        (ToolSyntax::Hermes, r#"<tool_call>{"name": "f", "arguments": {"a": [1, "b"#, r#"{"a": [1, "b"#),
        (ToolSyntax::Llama3Json, r#"{"name": "f", "parameters": {"a""#, r#"{"a""#),
        (ToolSyntax::Mistral, r#"[TOOL_CALLS]f[ARGS]{"a": "#, r#"{"a": "#),
        (ToolSyntax::Pythonic, "[f(a=1, b='x", r#"{"a": 1, "b": "x"#),
        (ToolSyntax::Qwen3Coder, "<tool_call><function=f><parameter=a>\nx\n</para", r#"{"a": "x"#),
        (ToolSyntax::DeepSeekV3, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\"", r#"{"a""#),
    ] {
        let calls = vec![("f".to_owned(), arguments.to_owned())];
        assert_eq!(message((None, Some(syntax)), "", text), Message { calls, ..Message::default() });
    }
    // Text that breaks a call later is content.
    let text = r#"<tool_call>{"name": "f" and more"#;
    let message = message((None, Some(ToolSyntax::Hermes)), "", text);
    assert_eq!((message.content.as_str(), message.calls.len()), (" and more", 1));
}

#[test]
fn arguments_that_are_no_json_come_as_they_are() {
    let text = r#"<tool_call>{"name": "f", "arguments": {'a': 1,, ]}}</tool_call>"#;
    let message = message((None, Some(ToolSyntax::Hermes)), "", text);
    assert_eq!((message.content.as_str(), message.calls[0].1.as_str()), ("", "{'a': 1,, ]"));
}

const QWEN3: &str = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n";

fn reasoned(syntax: ReasoningSyntax, prompt: &str, text: &str, reasoning: &str, content: &str) {
    let message = message((Some(syntax), Some(ToolSyntax::Hermes)), prompt, text);
    let (reasoning, content) = (reasoning.to_owned(), content.to_owned());
    assert_eq!(message, Message { reasoning, content, calls: Vec::new() }, "{text:?}");
}

#[test]
fn qwen3_reasons_if_it_says_so() {
    let open = QWEN3.to_owned() + "<think>\n";
    let closed = QWEN3.to_owned() + "<think>\n\n</think>\n\n";
    let prefilled = QWEN3.to_owned() + "<think>\nWell";
    for (prompt, text, reasoning, content) in [
        (QWEN3, "<think>\nHm.\n\nOk.\n</think>\n\nYes.\n", "Hm.\n\nOk.", "Yes.\n"),
        (QWEN3, "\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (QWEN3, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (QWEN3, "<think>Hm.\n", "Hm.\n", ""),
        (QWEN3, "<think>Hm. </thin", "Hm. </thin", ""),
        (QWEN3, "<think>a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
        (QWEN3, "\n Yes <think>.</think>", "", "\n Yes <think>.</think>"),
        (QWEN3, "<thi <think>a", "", "<thi <think>a"),
        (QWEN3, "<thi", "", "<thi"),
        (QWEN3, "\n", "", "\n"),
        (&open, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (&open, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        (&open, "\n</think>\n\nYes.", "", "Yes."),
        (&prefilled, ", so\n</think>\n\nYes.", ", so", "Yes."),
        (&closed, "\nYes. <think>", "", "\nYes. <think>"),
        ("", "Yes.", "", "Yes."),
    ] {
        reasoned(ReasoningSyntax::Qwen3, prompt, text, reasoning, content);
    }
}

#[test]
fn deepseek_r1_reasons_until_it_stops() {
    let closed = "<｜User｜>Why?<｜Assistant｜></think>";
    for (prompt, text, reasoning, content) in [
        ("<｜User｜>Why </think>?<｜Assistant｜><think>\n", "Hm.\n</think>\n\nSo.", "Hm.", "So."),
        ("<｜User｜>Why </think>?<｜Assistant｜>", "<think>\nHm.\n</think>\n\nSo.", "Hm.", "So."),
        ("<｜User｜>Why </think>?<｜Assistant｜>", "Hm.\n</think>\n\nSo.", "Hm.", "So."),
        ("", "Hm, no end", "Hm, no end", ""),
        ("", "</think>\n", "", ""),
        ("", "\n\n", "", ""),
        (closed, "So.", "", "So."),
    ] {
        reasoned(ReasoningSyntax::DeepSeekR1, prompt, text, reasoning, content);
    }
}

#[test]
fn calls_follow_reasoning_or_end_it() {
    let reasoned = |syntax, text: &str, reasoning: &str, calls: &[(&str, &str)]| {
        let message = message((Some(ReasoningSyntax::Qwen3), Some(syntax)), QWEN3, text);
        let calls = calls.iter().map(|&(name, arguments)| (name.to_owned(), arguments.to_owned())).collect();
        assert_eq!(message, Message { reasoning: reasoning.to_owned(), content: String::new(), calls }, "{text:?}");
    };
    let call = "<tool_call>\n{\"name\": \"now\"}\n</tool_call>";
    reasoned(ToolSyntax::Hermes, &format!("<think>\nHm.\n</think>\n\n{call}"), "Hm.", &[NOW]);
    reasoned(ToolSyntax::Hermes, &format!("<think>\nA <tool_call>?\n\n{call}"), "A <tool_call>?", &[NOW]);
    let call = "<tool_call>\n<function=now>\n</function>\n</tool_call>";
    reasoned(ToolSyntax::Qwen3Coder, &format!("<think>\nHm.\n{call}"), "Hm.", &[NOW]);
}

#[test]
fn reasoning_is_known_to_be_open() {
    let mut out = Vec::new();
    let mut parser = OutputParser::new(Some(ReasoningSyntax::Qwen3), None, QWEN3);
    let mut open = vec![parser.is_reasoning()];
    for text in ["<think>", "a", "</thi", "nk>", "\nb"] {
        parser.push(text, &mut out);
        open.push(parser.is_reasoning());
    }
    assert_eq!(open, [false, true, true, true, false, false]);
    assert!(OutputParser::new(Some(ReasoningSyntax::DeepSeekR1), None, "").is_reasoning());
    assert!(!OutputParser::new(None, None, "<think>").is_reasoning());
}

#[test]
fn what_is_certain_is_given_out_at_once() {
    let tools = tools();
    let deltas = |syntax, pieces: &[&str]| {
        let mut parser = OutputParser::new(None, Some((syntax, &tools[..])), "");
        let counts = pieces.iter().map(|piece| {
            let mut out = Vec::new();
            parser.push(piece, &mut out);
            out.len()
        });
        counts.collect::<Vec<_>>()
    };
    let hermes = ["Hi", " <", "tool_call>", "{\"name\": \"f", "\"", ", \"arguments\": ", "{\"a", "\": 1", "}", "}"];
    assert_eq!(deltas(ToolSyntax::Hermes, &hermes), [1, 1, 0, 0, 1, 0, 1, 1, 1, 0]);
    let coder = ["<tool_call><function=weather>", "<parameter=city>", "P", "aris", "\n", "</parameter>", "</function>"];
    assert_eq!(deltas(ToolSyntax::Qwen3Coder, &coder), [1, 1, 1, 1, 0, 1, 1]);
}

#[test]
fn names_are_known_and_errors_list_them() {
    assert_eq!(ToolSyntax::names().len(), 25);
    for name in ToolSyntax::names() {
        assert!(name.parse::<ToolSyntax>().is_ok());
    }
    assert_eq!("qwen3_xml".parse(), Ok(ToolSyntax::Qwen3Coder));
    assert_eq!(ReasoningSyntax::NAMES.iter().filter(|name| name.parse::<ReasoningSyntax>().is_ok()).count(), 12);
    assert_eq!(
        "gpt".parse::<ReasoningSyntax>().unwrap_err().to_string(),
        "there is no reasoning parser \"gpt\"; the known ones are deepseek_r1, deepseek_v3, gemma4, glm45, granite, kimi_k2, minimax_m2, mistral, nemotron_v3, olmo3, openai_gptoss, qwen3"
    );
    assert!("Hermes".parse::<ToolSyntax>().unwrap_err().to_string().contains("hermes, jamba, "));
}
