//! Property tests of the parsers of reasoning and of tool calls.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use octavo_text::{ChatTemplate, OutputDelta, OutputParser, ReasoningSyntax, SpecialTokens, TemplateInput, ToolSyntax};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::damage::{damage, is_private, marked_text};
use crate::writing::{definitions, write};

mod damage;
mod writing;

const SYNTAXES: [ToolSyntax; 20] = [
    ToolSyntax::Hermes,
    ToolSyntax::Llama3Json,
    ToolSyntax::Mistral,
    ToolSyntax::Pythonic,
    ToolSyntax::Qwen3Coder,
    ToolSyntax::DeepSeekV3,
    ToolSyntax::DeepSeekV32,
    ToolSyntax::Glm,
    ToolSyntax::Granite,
    ToolSyntax::Jamba,
    ToolSyntax::KimiK2,
    ToolSyntax::MinimaxM2,
    ToolSyntax::Phi4Mini,
    ToolSyntax::SeedOss,
    ToolSyntax::Gemma4,
    ToolSyntax::Granite20bFc,
    ToolSyntax::LongCat,
    ToolSyntax::Olmo3,
    ToolSyntax::OpenAi,
    ToolSyntax::JsonArray,
];

type Calls = Vec<(String, Map<String, Value>)>;

/// Joins neighbouring deltas. Checks that indices count the calls and that arguments belong to the last call.
fn parse<'a>(mut parser: OutputParser, pieces: impl IntoIterator<Item = &'a str>) -> Vec<OutputDelta> {
    let mut deltas = Vec::new();
    pieces.into_iter().for_each(|piece| parser.push(piece, &mut deltas));
    parser.finish(&mut deltas);
    let mut out: Vec<OutputDelta> = Vec::new();
    let mut calls = 0;
    for delta in deltas {
        match &delta {
            OutputDelta::ToolCall { index, name } => {
                assert!(*index == calls && !name.is_empty());
                calls += 1;
            }
            OutputDelta::Arguments { index, fragment } => assert!(index + 1 == calls && !fragment.is_empty()),
            OutputDelta::Reasoning(text) | OutputDelta::Content(text) => assert!(!text.is_empty()),
        }
        match (out.last_mut(), delta) {
            (Some(OutputDelta::Reasoning(text)), OutputDelta::Reasoning(more))
            | (Some(OutputDelta::Content(text)), OutputDelta::Content(more))
            | (Some(OutputDelta::Arguments { fragment: text, .. }), OutputDelta::Arguments { fragment: more, .. }) => {
                text.push_str(&more);
            }
            (_, delta) => out.push(delta),
        }
    }
    out
}

fn calls(deltas: &[OutputDelta]) -> Calls {
    let mut calls = Calls::new();
    for delta in deltas {
        match delta {
            OutputDelta::ToolCall { name, .. } => calls.push((name.clone(), Map::new())),
            OutputDelta::Arguments { fragment, .. } => {
                let arguments = serde_json::from_str(fragment).unwrap_or_else(|error| panic!("{fragment:?}: {error}"));
                calls.last_mut().unwrap().1 = arguments;
            }
            OutputDelta::Reasoning(_) | OutputDelta::Content(_) => {}
        }
    }
    calls
}

fn content(deltas: &[OutputDelta]) -> String {
    let contents = deltas.iter().filter_map(|delta| match delta {
        OutputDelta::Content(text) => Some(text.as_str()),
        _ => None,
    });
    contents.collect()
}

/// Divides `text` into pieces of these lengths in characters, repeatedly.
fn pieces<'a>(text: &'a str, lengths: &'a [usize]) -> impl Iterator<Item = &'a str> {
    let mut rest = text;
    lengths.iter().cycle().map_while(move |&length| {
        let end = rest.char_indices().nth(length).map_or(rest.len(), |(at, _)| at);
        let (piece, after) = rest.split_at(end);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

fn lengths() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1_usize..9, 1..6)
}

/// Generates text with everything that matters to a parser except the start of a tag.
fn string() -> impl Strategy<Value = String> {
    r#"[a-z"'\\{}\[\]()=,;: \n\t/é\u{1f600}]{0,12}"#
}

fn value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        4 => string().prop_map(Value::from),
        2 => any::<i64>().prop_map(Value::from),
        1 => any::<bool>().prop_map(Value::from),
        1 => Just(Value::Null),
    ];
    scalar.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(string(), inner, 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

fn some_calls(most: usize) -> impl Strategy<Value = Calls> {
    let arguments = prop::collection::btree_map("[a-z_]{1,6}", value(), 0..4);
    let call = ("[a-z_]{1,8}", arguments.prop_map(|members| members.into_iter().collect()));
    prop::collection::vec(call, 1..=most)
}

/// Returns the model's text according to its own template: the last turn without its end.
fn turn(template: &ChatTemplate, message: Value, end: &str) -> (String, String) {
    let render = |messages: &[Value], add_generation_prompt| {
        let kwargs = Map::new();
        let input = TemplateInput {
            messages,
            tools: None,
            documents: None,
            add_generation_prompt,
            continue_final_message: false,
            kwargs: &kwargs,
        };
        template.render(&input).unwrap()
    };
    let user = json!({"role": "user", "content": "Go."});
    let prompt = render(std::slice::from_ref(&user), true);
    let full = render(&[user, message], false);
    let text = full.strip_prefix(&prompt).unwrap().strip_suffix(end).unwrap();
    (prompt, text.to_owned())
}

/// Parts of messages, most of them from one of the syntaxes.
const PARTS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "f>",
    "</function>",
    "<parameter=",
    "a>",
    "</parameter>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "<think>",
    "</think>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜DSML｜function_calls>",
    "<｜DSML｜invoke name=\"f\">",
    "<｜DSML｜parameter name=\"a\" string=\"true\">",
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|tool_call|>",
    "<tool_calls>",
    "</tool_calls>",
    "functools",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.f:0",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<minimax:tool_call>",
    "<invoke name=\"f\">",
    "<parameter name=\"a\">",
    "</invoke>",
    "<seed:tool_call>",
    "<|tool_call>call:f{",
    "<tool_call|>",
    "<|\"|>",
    "a:",
    "<function_call>",
    "<longcat_tool_call>",
    "<longcat_arg_key>",
    "</longcat_arg_key>",
    "<longcat_arg_value>",
    "</longcat_arg_value>",
    "<function_calls>",
    "</function_calls>",
    "f(a='",
    "<|start|>",
    "assistant",
    "<|channel|>",
    "final",
    "analysis",
    "commentary",
    " to=functions.f",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|channel>thought\n",
    "<channel|>",
    "Here is my thought process:",
    "Here's my response:",
    "```json\n",
    "```",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "\"name\"",
    "\"arguments\"",
    "\"parameters\"",
    ":",
    ",",
    ";",
    "\"",
    "'",
    "=",
    "\"f\"",
    "f",
    "1",
    "null",
    "True",
    "\\",
    "\\u12",
    "{\"name\": \"f\", \"arguments\": {",
    "{\"name\": \"f\", \"parameters\": {}}",
    "\"{\\\"a\\\"",
    "[f(a=1",
    "f(a='x')",
    "\n",
    " ",
    "é",
    "<",
    ">",
];

/// Generates text from the parts and from starts of them.
fn noise() -> impl Strategy<Value = String> {
    let part = prop_oneof![8 => prop::sample::select(PARTS).prop_map(str::to_owned), 1 => any::<String>()];
    // Truncated parts are the starts of markers.
    let cut =
        (part, 0_usize..20).prop_map(|(part, keep)| if keep > 3 { part } else { part.chars().take(keep).collect() });
    prop::collection::vec(cut, 0..30).prop_map(|parts| parts.concat())
}

fn reasoning() -> impl Strategy<Value = Option<ReasoningSyntax>> {
    let syntaxes = vec![
        ReasoningSyntax::Qwen3,
        ReasoningSyntax::DeepSeekR1,
        ReasoningSyntax::Gemma4,
        ReasoningSyntax::Granite,
        ReasoningSyntax::OpenAiGptOss,
    ];
    prop::option::of(prop::sample::select(syntaxes))
}

proptest! {
    #[test]
    fn calls_come_back_as_they_were_written(
        syntax in prop::sample::select(&SYNTAXES[..]), written in some_calls(3), lengths in lengths(),
    ) {
        let tools = definitions(&written);
        // The last of two definitions of a name counts, so all its calls have one type.
        let unique = written.iter().all(|(name, _)| written.iter().filter(|call| call.0 == *name).count() == 1);
        prop_assume!(unique);
        let text = write(syntax, &written);
        let deltas = parse(OutputParser::new(None, Some((syntax, &tools)), ""), pieces(&text, &lengths));
        prop_assert_eq!(calls(&deltas), written, "{}", text);
        prop_assert_eq!(content(&deltas), "");
    }

    #[test]
    fn templates_write_what_the_parsers_read(written in some_calls(3), lengths in lengths(), said in "[a-z]{0,5}") {
        for (source, end, most) in [
            (include_str!("../data/templates/qwen3.jinja"), "<|im_end|>\n", 3),
            (include_str!("../data/templates/mistral.jinja"), "</s>", 3),
            (include_str!("../data/templates/llama3.jinja"), "<|eot_id|>", 1),
        ] {
            let special = SpecialTokens { bos: Some("<s>".to_owned()), eos: Some("</s>".to_owned()), ..SpecialTokens::default() };
            let template = ChatTemplate::new(source, &special).unwrap();
            let syntax = ToolSyntax::detect(source).unwrap();
            let reasoning = ReasoningSyntax::detect(source);
            let written = &written[..written.len().min(most)];
            let said = if reasoning.is_some() { said.as_str() } else { "" };
            let list = written.iter().map(|(name, arguments)| {
                json!({"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}})
            });
            let message = json!({
                "role": "assistant", "content": said, "reasoning_content": "Why?\n\nSo.", "tool_calls": list.collect::<Vec<_>>(),
            });
            let (prompt, text) = turn(&template, message, end);
            let deltas = parse(OutputParser::new(reasoning, Some((syntax, &[])), &prompt), pieces(&text, &lengths));
            prop_assert_eq!(calls(&deltas), written, "{}", text);
            prop_assert_eq!(content(&deltas).trim_end().to_owned(), said);
            let thought = deltas.iter().any(|delta| *delta == OutputDelta::Reasoning("Why?\n\nSo.".to_owned()));
            prop_assert_eq!(thought, reasoning.is_some());
        }
    }

    #[test]
    fn how_the_text_is_cut_does_not_matter(
        syntax in prop::sample::select(&SYNTAXES[..]), reasoning in reasoning(), text in noise(), lengths in lengths(),
    ) {
        let tools = [json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "object"}}}}})];
        let parser = || OutputParser::new(reasoning, Some((syntax, &tools)), "");
        let whole = parse(parser(), [text.as_str()]);
        prop_assert_eq!(&parse(parser(), pieces(&text, &lengths)), &whole);
        prop_assert_eq!(&parse(parser(), pieces(&text, &[1])), &whole);
    }

    #[test]
    fn text_without_markers_is_content(
        syntax in prop::sample::select(&SYNTAXES[..]), text in r#"[a-z <>"':,;{}()/=\n\-é]{0,40}"#, lengths in lengths(),
    ) {
        let parser = OutputParser::new(Some(ReasoningSyntax::Qwen3), Some((syntax, &[])), "");
        let deltas = parse(parser, pieces(&text, &lengths));
        prop_assert_eq!(content(&deltas), text.as_str());
        prop_assert!(deltas.len() <= 1);
    }

    /// Text that a client sees is found again however the markup around it is damaged. Private characters stand for the
    /// text; each is in the value of an argument or outside the calls.
    #[test]
    fn damaged_calls_lose_no_text(
        syntax in prop::sample::select(&SYNTAXES[..SYNTAXES.len() - 1]), texts in prop::collection::vec(marked_text(), 1..5),
        damages in prop::collection::vec(damage(), 0..4), before in "|\u{e000} ", lengths in lengths(),
    ) {
        let written: Calls = texts
            .iter()
            .enumerate()
            .map(|(index, value)| {
                let arguments = json!({"a": value, "b": {"n": [1, value]}});
                (format!("f{index}"), arguments.as_object().unwrap().clone())
            })
            .collect();
        let mut text = format!("{before}{} \u{e001}", write(syntax, &written));
        damages.iter().for_each(|damage| damage.apply(&mut text));
        let parser = || OutputParser::new(None, Some((syntax, &definitions(&written))), "");
        let whole = parse(parser(), [text.as_str()]);
        prop_assert_eq!(&parse(parser(), pieces(&text, &lengths)), &whole);
        let private = |text: &str| text.chars().filter(|&character| is_private(character)).count();
        let seen = whole.iter().map(|delta| match delta {
            OutputDelta::Content(text) | OutputDelta::Reasoning(text) | OutputDelta::Arguments { fragment: text, .. } => private(text),
            OutputDelta::ToolCall { name, .. } => private(name),
        });
        prop_assert_eq!(seen.sum::<usize>(), private(&text), "{:?} {:?}", text, whole);
    }

    #[test]
    fn without_parsers_all_is_content(text in noise(), lengths in lengths()) {
        let deltas = parse(OutputParser::new(None, None, ""), pieces(&text, &lengths));
        prop_assert_eq!(content(&deltas), text);
    }
}

/// Texts that make each syntax hold text back, fail and retry, or nest.
const HOSTILE: &[(ToolSyntax, &[&str])] = &[
    (
        ToolSyntax::Hermes,
        &["<", " ", "<tool_cal", "<tool_call>{", "<tool_call>{\"name\":\"f\",\"arguments\":[", "<tool_call>{\"x\":["],
    ),
    (
        ToolSyntax::Llama3Json,
        &["{", "<|python_tag|>{\"parameters\":", "{\"parameters\":\"\\", "{\"name\":\"f\",\"parameters\":{};"],
    ),
    (ToolSyntax::Mistral, &["[TOOL_CALLS]a", "[TOOL_CALLS][{\"name\":\"f\"},", "[TOOL_CALLS]a[b"]),
    (ToolSyntax::Pythonic, &["[", "[f(a=[", "[f(a='\\", "[f(a=1", "[f(),"]),
    (
        ToolSyntax::Qwen3Coder,
        &["<function=f><parameter=a>\n<", "<function=f>\n</par", "<function=f><parameter=o>\n[", "<tool_call>\n<func"],
    ),
    (
        ToolSyntax::DeepSeekV3,
        &[
            "<｜tool▁calls▁begin｜><｜tool▁call",
            "<｜tool▁call▁begin｜>a<｜tool▁se",
            "<｜tool▁call▁begin｜>a<｜tool▁sep｜>b`",
        ],
    ),
    (
        ToolSyntax::DeepSeekV32,
        &["<｜DSML｜invoke name=\"f\">", "<｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"a\" string=\"false\">["],
    ),
    (ToolSyntax::Glm, &["<tool_call>f\n", "<tool_call>f<arg_key>a</arg_key>", "<tool_call>f\nx"]),
    (ToolSyntax::Granite, &["<|tool_call|>[{\"name\":\"f\"},", "<tool_call><"]),
    (ToolSyntax::Jamba, &["<tool_calls>[", "<tool_calls>{\"name\":\"f\"}"]),
    (ToolSyntax::KimiK2, &["<|tool_call_begin|>a<|tool_call_arg", "<|tool_call_begin|>f<|tool_call_argument_begin|>{"]),
    (ToolSyntax::MinimaxM2, &["<invoke name=f>", "<invoke name=f><parameter name=a>\n</"]),
    (ToolSyntax::Phi4Mini, &["functools", "functools["]),
    (ToolSyntax::SeedOss, &["<seed:tool_call>", "<function=f>x"]),
    (
        ToolSyntax::Gemma4,
        &["<|tool_call>call:", "<|tool_call>call:f{a:[", "<|tool_call>call:f{a:<|\"|>", "<|tool_call>call:f{a:1,"],
    ),
    (ToolSyntax::Granite20bFc, &["<function_call> {\"name\":\"f\"}", "<function_call> {"]),
    (ToolSyntax::LongCat, &["<longcat_tool_call>f\n", "<longcat_tool_call>{\"x\":["]),
    (ToolSyntax::Olmo3, &["<function_calls>f()\n", "<function_calls>f(a='"]),
    (
        ToolSyntax::OpenAi,
        &[
            "<|start|>",
            "<|channel|>a",
            "<|channel|>analysis<|message|>a",
            " to=f<|channel|>",
            "<|channel|> to=functions.f<|message|>",
        ],
    ),
];

/// Parses a megabyte of each text: quadratic work would take hours.
#[test]
fn hostile_text_takes_linear_time() {
    let definition = json!({"name": "f", "parameters": {"properties": {"o": {"type": "object"}}}});
    let tools = [json!({"type": "function", "function": definition})];
    for &(syntax, seeds) in HOSTILE {
        for seed in seeds {
            let last = seed.chars().last().map_or(String::new(), String::from);
            for text in [seed.repeat((1 << 20) / seed.len()), (*seed).to_owned() + &last.repeat(1 << 20)] {
                let mut parser = OutputParser::new(Some(ReasoningSyntax::Qwen3), Some((syntax, &tools)), "");
                let mut out = Vec::new();
                let mut given = 0;
                let mut buffer = [0; 4];
                for character in text.chars() {
                    parser.push(character.encode_utf8(&mut buffer), &mut out);
                    given += size(&mut out);
                }
                parser.finish(&mut out);
                given += size(&mut out);
                assert!(given <= 2 * text.len(), "{syntax:?} {seed:?}");
            }
        }
    }
}

/// Returns the size in bytes of the text in the deltas, and clears them.
fn size(out: &mut Vec<OutputDelta>) -> usize {
    let text = |delta: OutputDelta| match delta {
        OutputDelta::Reasoning(text) | OutputDelta::Content(text) => text.len(),
        OutputDelta::ToolCall { name, .. } => name.len(),
        OutputDelta::Arguments { fragment, .. } => fragment.len(),
    };
    out.drain(..).map(text).sum()
}

#[test]
fn templates_tell_their_syntax() {
    for (source, tools, reasoning) in [
        (include_str!("../data/templates/qwen3.jinja"), Some(ToolSyntax::Hermes), Some(ReasoningSyntax::Qwen3)),
        (include_str!("../data/templates/mistral.jinja"), Some(ToolSyntax::Mistral), None),
        (include_str!("../data/templates/llama3.jinja"), Some(ToolSyntax::Llama3Json), None),
        (include_str!("../data/templates/chatml.jinja"), None, None),
        (include_str!("../data/templates/smollm2.jinja"), None, None),
        (
            "<|im_start|> <tool_call>\\n<function= <parameter= \"arguments\" <think> </think>",
            Some(ToolSyntax::Qwen3Coder),
            Some(ReasoningSyntax::Qwen3),
        ),
        (
            "<｜Assistant｜><think>\\n </think> <｜tool▁calls▁begin｜>",
            Some(ToolSyntax::DeepSeekV3),
            Some(ReasoningSyntax::DeepSeekR1),
        ),
        ("<|header_start|> [func_name1(params_name1=params_value1)]", Some(ToolSyntax::Pythonic), None),
        ("<tool_call>{name}<arg_key>", Some(ToolSyntax::Glm), None),
        ("<tool_call>", None, None),
        (
            "<|turn>model <|channel>thought <channel|> <|tool_call>call:",
            Some(ToolSyntax::Gemma4),
            Some(ReasoningSyntax::Gemma4),
        ),
        (
            "<|start|>assistant<|channel|>analysis<|message|> <|channel|>commentary",
            Some(ToolSyntax::OpenAi),
            Some(ReasoningSyntax::OpenAiGptOss),
        ),
        (
            "<functions></functions> <function_calls> <|im_start|>assistant\\n<think>",
            Some(ToolSyntax::Olmo3),
            Some(ReasoningSyntax::Olmo3),
        ),
        ("<|function_call_library|> <function_call> ", Some(ToolSyntax::Granite20bFc), None),
        ("<longcat_tool_call>\\n{\"name\"", Some(ToolSyntax::LongCat), None),
        (
            "<|tool_call|> Here is my thought process:' 'Here is my response:'",
            Some(ToolSyntax::Granite),
            Some(ReasoningSyntax::Granite),
        ),
    ] {
        assert_eq!((ToolSyntax::detect(source), ReasoningSyntax::detect(source)), (tools, reasoning), "{source}");
    }
    let kept: Vec<_> = SYNTAXES.into_iter().filter(|syntax| !syntax.needs_special_tokens()).collect();
    assert_eq!(kept, [ToolSyntax::Pythonic, ToolSyntax::JsonArray]);
    assert_eq!((ReasoningSyntax::Qwen3.start(), ReasoningSyntax::DeepSeekR1.end()), ("<think>", "</think>"));
}

#[test]
fn a_parser_can_move_between_threads() {
    fn sent<T: Send>(value: T) -> T {
        value
    }
    let parser = sent(OutputParser::new(None, Some((ToolSyntax::Mistral, &[])), ""));
    assert!(!parser.is_reasoning());
}
