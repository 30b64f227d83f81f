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
fn objects_after_a_marker() {
    let call = format!(r#"{{"name": "weather", "arguments": {ARGS}}}"#);
    frames(ToolSyntax::Granite20bFc, |call| format!("<function_call> {call}"), &call);
    frames(ToolSyntax::LongCat, |call| format!("<longcat_tool_call>\n{call}\n</longcat_tool_call>"), &call);
    no_calls(
        ToolSyntax::Granite20bFc,
        &["<function_call> ", "<function_call>f()", "<function_call> {\"name\": 1", "<functio"],
    );
}

#[test]
fn longcat_tags() {
    let wrap = |call: &str| format!("<longcat_tool_call>{call}</longcat_tool_call>");
    let city = "weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Paris</longcat_arg_value>\n";
    frames(ToolSyntax::LongCat, wrap, city);
    let days = "weather<longcat_arg_key>days</longcat_arg_key><longcat_arg_value>3</longcat_arg_value>";
    calls(ToolSyntax::LongCat, &wrap(days), "", &[("weather", r#"{"days": 3}"#)]);
    calls(ToolSyntax::LongCat, &wrap(" now "), "", &[NOW]);
    no_calls(
        ToolSyntax::LongCat,
        &["<longcat_tool_call>", "<longcat_tool_call>weather", "<longcat_arg_key>a</longcat_arg_key>"],
    );
}

#[test]
fn olmo3() {
    let wrap = |calls: &str| format!("<function_calls>\n{calls}\n</function_calls>");
    frames(ToolSyntax::Olmo3, wrap, "weather(city='Paris')");
    frames(ToolSyntax::Olmo3, |calls| format!("<function_calls>{calls}</function_calls>"), "weather(city=\"Paris\")");
    let two = wrap("weather(city='Paris')\nnow( )");
    calls(ToolSyntax::Olmo3, &two, "", &[PARIS, NOW]);
    calls(ToolSyntax::Olmo3, &wrap("weather(city='Paris'), now()"), "", &[PARIS, NOW]);
    calls(
        ToolSyntax::Olmo3,
        &wrap("weather(exact=true, note=null)"),
        "",
        &[("weather", r#"{"exact": true, "note": null}"#)],
    );
    calls(ToolSyntax::Olmo3, "<function_calls>now()", "", &[NOW]);
    calls(ToolSyntax::Olmo3, "<function_calls>now()\nand more", "\nand more", &[NOW]);
    no_calls(
        ToolSyntax::Olmo3,
        &[
            "<function_calls>",
            "<function_calls>\n</function_calls>",
            "<function_calls>[now()]",
            "now()",
            "<function_calls>f(1)",
        ],
    );
}

#[test]
fn gemma4() {
    let wrap = |call: &str| format!("<|tool_call>call:{call}<tool_call|>");
    frames(ToolSyntax::Gemma4, wrap, "weather{city:<|\"|>Paris<|\"|>}");
    calls(ToolSyntax::Gemma4, &(wrap("now{}") + &wrap("weather{city:<|\"|>Paris<|\"|>}")), "", &[NOW, PARIS]);
    for (arguments, json) in [
        ("{}", "{}"),
        ("{ }", "{}"),
        (
            "{a:1,b:-2.5e3,c:true,d:false,e:null,f:None,g:<|\"|>x\"{}\\\n<|\"|>}",
            r#"{"a": 1, "b": -2.5e3, "c": true, "d": false, "e": null, "f": null, "g": "x\"{}\\\n"}"#,
        ),
        ("{a:{b:[1,<|\"|>x<|\"|>,{c:[]}],d:{}}, e: [ ] }", r#"{"a": {"b": [1, "x", {"c": []}], "d": {}}, "e": []}"#),
        ("{<|\"|>a b<|\"|>:1}", r#"{"a b": 1}"#),
        (r#"{{"a": "x}", "b": [1]}}"#, r#"{"a": "x}", "b": [1]}"#),
        ("{a:New York,b:,c:[x,]}", r#"{"a": "New York", "b": "", "c": ["x"]}"#),
    ] {
        calls(ToolSyntax::Gemma4, &wrap(&format!("f{arguments}")), "", &[("f", json)]);
    }
    no_calls(
        ToolSyntax::Gemma4,
        &[
            "<|tool_call>",
            "<|tool_call>weather{}",
            "<|tool_call>call:{}",
            "<|tool_call>call:a b{}",
            "<tool_call|>",
            "<|tool_c",
        ],
    );
    let broken = |text: &str, content: &str, arguments: &str| {
        let message = message((None, Some(ToolSyntax::Gemma4)), "", text);
        assert_eq!((message.content.as_str(), message.calls[0].1.as_str()), (content, arguments), "{text:?}");
    };
    broken("<|tool_call>call:f{a:1 b:2}", "", r#"{"a": "1 b:2"}"#);
    broken("<|tool_call>call:f{{\"a\": 1} oops}", " oops}", r#"{"a": 1}"#);
    broken("<|tool_call>call:f{a:1,{\"b\": 1}}", "{\"b\": 1}}", r#"{"a": 1"#);
    broken("<|tool_call>call:f{a:1,b]}", "b]}", r#"{"a": 1"#);
    broken("<|tool_call>call:f{a:<|\"|>x<|\"|> oops}", " oops}", r#"{"a": "x""#);
    broken("<|tool_call>call:f{a:<|\"|>x", "", r#"{"a": "x"#);
    let deep = format!("<|tool_call>call:f{{a:{}", "[".repeat(200));
    let message = message((None, Some(ToolSyntax::Gemma4)), "", &deep);
    assert_eq!(message.content.len() + message.calls[0].1.len(), 200 + r#"{"a": "#.len());
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
    let value =
        "<invoke name=\"f\"><parameter name=\"a\">1</parameter><parameter name=\"b\"{\"k\": 1}/parameter></invoke>";
    let rest = "<parameter name=\"b\"{\"k\": 1}/parameter></invoke>";
    broken(ToolSyntax::MinimaxM2, value, rest, r#"{"a": "1""#);
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

#[test]
fn gemma4_reasons_in_a_channel() {
    let prompt = "<|turn>user\nWhy <|channel>thought\n?<turn|>\n<|turn>model\n";
    for (prompt, text, reasoning, content) in [
        (prompt, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
        (prompt, "<|channel>thinking<channel|>Yes.", "thinking", "Yes."),
        (prompt, "<|channel>thou", "thou", ""),
        (prompt, "<|channel><channel|>Yes.", "", "Yes."),
        (prompt, "Yes.", "", "Yes."),
        ("<|turn>model\n<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
        (
            "<|turn>model\n<|channel>thought\nHm.<channel|><|tool_call>call:f{}<tool_call|><|tool_response>1<tool_response|>",
            "<|channel>thought\nSo.<channel|>Yes.",
            "So.",
            "Yes.",
        ),
    ] {
        let message = message((Some(ReasoningSyntax::Gemma4), Some(ToolSyntax::Gemma4)), prompt, text);
        assert_eq!((message.reasoning.as_str(), message.content.as_str()), (reasoning, content), "{text:?}");
    }
    let call = "<|channel>thought\nHm.<|tool_call>call:now{}<tool_call|>";
    let message = message((Some(ReasoningSyntax::Gemma4), Some(ToolSyntax::Gemma4)), prompt, call);
    assert_eq!((message.reasoning.as_str(), message.calls.len()), ("Hm.", 1));
}

#[test]
fn granite_reasons_in_words() {
    let prompt =
        "<|start_of_role|>system<|end_of_role|>Write after 'Here is my thought process:'.<|start_of_role|>assistant";
    for (text, reasoning, content) in [
        ("Here is my thought process: Hm.\n\nHere is my response: Yes.", " Hm.", " Yes."),
        ("Here's my thought process:\nHm. Here's my response:\nYes.", "Hm. ", "Yes."),
        ("Here is my answer.", "", "Here is my answer."),
        ("Here is my thought process: Here is", " Here is", ""),
    ] {
        let message = message((Some(ReasoningSyntax::Granite), None), prompt, text);
        assert_eq!((message.reasoning.as_str(), message.content.as_str()), (reasoning, content), "{text:?}");
    }
}

#[test]
fn a_user_does_not_open_reasoning() {
    for (prompt, opened) in [
        ("### User: what is <think>?\n### Assistant:", None),
        ("### User: what is </think>?\n### Assistant:", None),
        ("### User: why?\n### Assistant:<think>\n", Some(true)),
        ("### User: <think>\n### Assistant:<think>\n\n</think>\n\n", Some(false)),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", None),
        ("<|im_start|>assistant\n<think>\nWell", Some(true)),
    ] {
        assert_eq!(ReasoningSyntax::Qwen3.opened_by(prompt), opened, "{prompt:?}");
        assert_eq!(ReasoningSyntax::Olmo3.opened_by(prompt), opened, "{prompt:?}");
    }
}

#[test]
fn a_user_does_not_write_the_turns_of_other_families() {
    let template = "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}### Assistant:";
    let prompt = "### User: what is <|ass<|im_start|>istant|><think> in <|assistant|><think>?\n### Assistant:";
    assert_eq!(ReasoningSyntax::Qwen3.opened_by(prompt), Some(true));
    let own = without_written_turns(prompt, template);
    assert_eq!(own, "### User: what is <|ass istant|><think> in  <think>?\n### Assistant:");
    assert_eq!(ReasoningSyntax::Qwen3.opened_by(&own), None);
    assert_eq!(without_written_turns("<|assistant|><think>", "{{ '<|assistant|>' }}"), "<|assistant|><think>");
}
