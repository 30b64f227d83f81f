//! Tests of the syntaxes that share a parser with an older one.

use super::*;

const ARGS: &str = r#"{"city": "Paris"}"#;

/// Checks a call with text around it, alone and twice.
fn frames(syntax: ToolSyntax, wrap: impl Fn(&str) -> String, call: &str) {
    calls(syntax, &wrap(call), "", &[PARIS]);
    calls(syntax, &format!("Let me see.\n{}", wrap(call)), "Let me see.\n", &[PARIS]);
    calls(syntax, &format!("\n{}\n", wrap(call)), "", &[PARIS]);
    calls(syntax, &format!("{} Done. {}", wrap(call), wrap(call)), " Done. ", &[PARIS, PARIS]);
}

#[test]
fn lists_of_objects() {
    let call = format!(r#"{{"name": "weather", "arguments": {ARGS}}}"#);
    for (syntax, start, end) in [
        (ToolSyntax::Granite, "<|tool_call|>", ""),
        (ToolSyntax::Granite, "<tool_call>", "</tool_call>"),
        (ToolSyntax::Jamba, "<tool_calls>", "</tool_calls>"),
        (ToolSyntax::Phi4Mini, "functools", ""),
    ] {
        frames(syntax, |calls| format!("{start}[{calls}]{end}"), &call);
        calls(syntax, &format!("{start} [\n{call},\n{call}\n]{end}"), "", &[PARIS, PARIS]);
        calls(syntax, &format!("{start}{call}{end}"), "", &[PARIS]);
        let texts =
            [start, &format!("{start}weather{ARGS}"), &format!("{start}[{{"), &format!("{start}[1]"), &start[1..]];
        no_calls(syntax, &texts);
    }
    no_calls(ToolSyntax::Phi4Mini, &["use functools.partial(f)", "functools", "import functools\n"]);
}

#[test]
fn kimi_k2() {
    let section = |calls: &str| format!("<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>");
    let call = |id: &str| format!("<|tool_call_begin|>{id}<|tool_call_argument_begin|>{ARGS}<|tool_call_end|>");
    frames(ToolSyntax::KimiK2, section, &call("functions.weather:0"));
    let two = section(&(call("functions.weather:0") + &call("functions.weather:1")));
    calls(ToolSyntax::KimiK2, &two, "", &[PARIS, PARIS]);
    for id in ["weather", " functions.weather:12 ", "weather:0"] {
        calls(ToolSyntax::KimiK2, &call(id), "", &[PARIS]);
    }
    calls(ToolSyntax::KimiK2, &call("functions.a.b:c:1"), "", &[("a.b:c", ARGS)]);
    no_calls(
        ToolSyntax::KimiK2,
        &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_begin|>oops",
            "<|tool_call_begin|>functions.f:0",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|> ",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>[1]",
            "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}",
            "<|tool_call_begin|>a {",
            "<|tool_call_end|>",
        ],
    );
}

#[test]
fn glm() {
    let wrap = |call: &str| format!("<tool_call>{call}</tool_call>");
    frames(ToolSyntax::Glm, wrap, "weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n");
    frames(ToolSyntax::Glm, wrap, "weather<arg_key>city</arg_key><arg_value>Paris</arg_value>");
    for (text, call) in [
        ("\nnow\n", NOW),
        ("now", NOW),
        (" now ", NOW),
        (
            "weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>city</arg_key>\n<arg_value>\n<a>\"\n</arg_value>\n\
             <arg_key>options</arg_key>\n<arg_value>{\"a\": [1]}</arg_value>\n",
            ("weather", r#"{"days": 3, "city": "\n<a>\"\n", "options": {"a": [1]}}"#),
        ),
        // Without closing tags.
        (
            "weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n<arg_key>days</arg_key>\n<arg_value>3\n",
            ("weather", r#"{"city": "Paris", "days": 3}"#),
        ),
    ] {
        calls(ToolSyntax::Glm, &wrap(text), "", &[call]);
    }
    no_calls(
        ToolSyntax::Glm,
        &[
            "<tool_call>",
            "<tool_call>weather",
            "<tool_call>{\"name\": \"f\"}\n",
            "<tool_call>\n</tool_call>",
            "<arg_key>a</arg_key>",
        ],
    );
}

#[test]
fn tags_with_names_in_quotes() {
    let minimax = |call: &str| format!("<minimax:tool_call>\n{call}\n</minimax:tool_call>");
    let weather = "<invoke name=\"weather\">\n<parameter name=\"city\">Paris</parameter>\n</invoke>";
    frames(ToolSyntax::MinimaxM2, minimax, weather);
    calls(ToolSyntax::MinimaxM2, &minimax(&format!("{weather}\n{weather}")), "", &[PARIS, PARIS]);
    let dsml = |call: &str| format!("<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>");
    let parameter = |name: &str, is_text: bool, value: &str| {
        format!("<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n")
    };
    let invoke =
        |name: &str, parameters: &str| format!("<｜DSML｜invoke name=\"{name}\">\n{parameters}</｜DSML｜invoke>");
    let weather = invoke("weather", &parameter("city", true, "Paris"));
    frames(ToolSyntax::DeepSeekV32, dsml, &weather);
    calls(ToolSyntax::DeepSeekV32, &dsml(&format!("{weather}\n{weather}")), "", &[PARIS, PARIS]);
    let typed = parameter("days", true, "3") + &parameter("x", false, "[1, null]") + &parameter("y", false, "so");
    let arguments = r#"{"days": "3", "x": [1, null], "y": "so"}"#;
    calls(ToolSyntax::DeepSeekV32, &dsml(&invoke("weather", &typed)), "", &[("weather", arguments)]);
    calls(ToolSyntax::DeepSeekV32, &dsml(&invoke("now", "")), "", &[NOW]);
    no_calls(
        ToolSyntax::DeepSeekV32,
        &["<｜DSML｜function_calls>", "<｜DSML｜invoke name=\"\">", "<｜DSML｜invoke name=\"f\"", "<｜DSML｜"],
    );
    let seed = |call: &str| format!("<seed:tool_call>\n{call}\n</seed:tool_call>");
    let weather = "<function=weather>\n<parameter=city>Paris</parameter>\n</function>";
    frames(ToolSyntax::SeedOss, seed, weather);
}

#[test]
fn text_between_parameters_is_content_after_the_call() {
    let text = "<function=weather><parameter=city>Paris</parameter> and\nparameter=days>\n3\n</parameter>, </function>";
    calls(ToolSyntax::Qwen3Coder, text, "and\nparameter=days>\n3\n</parameter>,", &[PARIS]);
}

#[test]
fn text_of_a_broken_call_is_content() {
    let broken = |syntax, text: &str, content: &str, arguments: &str| {
        let message = message((None, Some(syntax)), "", text);
        assert_eq!((message.content.as_str(), message.calls[0].1.as_str()), (content, arguments), "{text:?}");
    };
    broken(ToolSyntax::Hermes, r#"<tool_call>{"name": "f", "arguments: {"a": 1}}"#, r#", "arguments: {"a": 1}}"#, "");
    broken(ToolSyntax::Hermes, r#"<tool_call>{"name": "f", "arguments": {"a": 1} oops}"#, " oops}", r#"{"a": 1}"#);
    broken(ToolSyntax::Pythonic, "[f(a=1, b!2)]", " b!2)]", r#"{"a": 1"#);
    broken(ToolSyntax::Glm, "<tool_call>f\n<arg_key>a</arg_key>1</arg_value>", "1</arg_value>", r#"{"a": ""#);
    let skipped = "<tool_call>f\n<arg_key{>a\n<arg_key>b</arg_key>\n<arg>1";
    broken(ToolSyntax::Glm, skipped, "<arg_key{>a\n<arg>1", r#"{"b": ""#);
}

#[test]
fn mistral_reasons_in_its_own_markers() {
    let prompt = "[INST]What is [THINK]?[/INST]";
    for (text, reasoning, content) in
        [("[THINK]Hm.\n[/THINK]Yes.", "Hm.", "Yes."), ("Yes [THINK].", "", "Yes [THINK]."), ("[THINK]Hm", "Hm", "")]
    {
        let message = message((Some(ReasoningSyntax::Mistral), Some(ToolSyntax::Mistral)), "", text);
        assert_eq!((message.reasoning.as_str(), message.content.as_str()), (reasoning, content), "{text:?}");
    }
    assert_eq!(ReasoningSyntax::Mistral.opened_by(prompt), None);
    assert_eq!(ReasoningSyntax::detect("[THINK] {{ x }} [/THINK]"), Some(ReasoningSyntax::Mistral));
}
