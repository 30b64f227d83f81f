//! Tests of the channels of gpt-oss.

use super::*;

const GPT_OSS: Parsers = (Some(ReasoningSyntax::OpenAiGptOss), Some(ToolSyntax::OpenAi));
const PROMPT: &str = "<|start|>user<|message|>Why <|channel|>analysis?<|end|><|start|>assistant";

/// Checks a message of gpt-oss with both parsers.
fn harmony(text: &str, reasoning: &str, content: &str, calls: &[(&str, &str)]) {
    let message = message(GPT_OSS, PROMPT, text);
    let calls = calls.iter().map(|&(name, arguments)| (name.to_owned(), arguments.to_owned())).collect();
    let (reasoning, content) = (reasoning.to_owned(), content.to_owned());
    assert_eq!(message, Message { reasoning, content, calls }, "{text:?}");
}

#[test]
fn channels_are_separated() {
    let analysis = "<|channel|>analysis<|message|>Hm.<|end|>";
    let last = "<|channel|>final<|message|>Yes.";
    for end in ["", "<|return|>", "<|end|>"] {
        harmony(&format!("{analysis}<|start|>assistant{last}{end}"), "Hm.", "Yes.", &[]);
        harmony(&format!("{last}{end}"), "", "Yes.", &[]);
    }
    harmony(&format!("{analysis}<|start|>assistant{analysis}<|start|>assistant{last}"), "Hm.\nHm.", "Yes.", &[]);
    let preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>";
    harmony(&format!("{analysis}{preamble}<|start|>assistant{last}"), "Hm.", "I look.\nYes.", &[]);
    // Content with a type, without a channel, without an end, and of a tool that the model brings along.
    harmony("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}", &[]);
    harmony("<|start|>assistant<|message|>Yes.<|end|>", "", "Yes.", &[]);
    harmony("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.", "Hm.", "Yes.", &[]);
    harmony("<|channel|>commentary to=python code<|message|>1+1<|call|>", "1+1", "", &[]);
    harmony("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", "{}", "", &[]);
}

#[test]
fn calls_of_functions() {
    let args = r#"{"city": "Paris"}"#;
    for header in [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.weather json<|message|>",
        "<|channel|>commentary to=weather<|message|>",
        " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>",
        "<|channel|>analysis to=functions.weather code<|message|>",
    ] {
        for end in ["<|call|>", "<|end|>", ""] {
            harmony(&format!("{header}{args}{end}"), "", "", &[PARIS]);
        }
        let analysis = "<|channel|>analysis<|message|>Hm.<|end|>";
        let header = header.strip_prefix("<|start|>assistant").unwrap_or(header);
        let text =
            format!("{analysis}<|start|>assistant{header}{args}<|call|><|start|>assistant{header}{args}<|call|>");
        harmony(&text, "Hm.", "", &[PARIS, PARIS]);
    }
    harmony("<|channel|>commentary to=functions.now<|message|><|call|>", "", "", &[NOW]);
    harmony("<|channel|>commentary to=functions.f<|message|>{\"a\": [1", "", "", &[("f", "{\"a\": [1")]);
}

#[test]
fn text_that_is_no_message_is_content() {
    for text in ["", " \n", "Yes.", " to", " to=the point", "assistant", "a <|chan", "to=f\n\n"] {
        harmony(text, "", text, &[]);
    }
    for header in
        ["<|channel|>", "<|channel|>fin", "<|start|>assist", "<|channel|>commentary to=functions.f <|constrain|>js"]
    {
        harmony(header, "", "", &[]);
        harmony(&format!("{header}{{\"a\""), "", &format!("{header}{{\"a\""), &[]);
        harmony(&format!("{header}\n"), "", &format!("{header}\n"), &[]);
    }
    harmony(
        "<|channel|>commentary to=functions.<|message|>{}<|call|>",
        "",
        "<|channel|>commentary to=functions.<|message|>{}",
        &[],
    );
    harmony("<|channel|>final<|message|>Yes.<|return|> And more", "", "Yes. And more", &[]);
    let long = format!("<|channel|>{}", "a ".repeat(400));
    harmony(&long, "", &long, &[]);
}

#[test]
fn each_parser_works_without_the_other() {
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>";
    let only_reasoning = message((GPT_OSS.0, None), PROMPT, text);
    assert_eq!((only_reasoning.reasoning.as_str(), only_reasoning.calls.len()), ("Hm.", 0));
    assert_eq!(only_reasoning.content, "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}");
    let only_tools = message((None, GPT_OSS.1), PROMPT, text);
    assert_eq!((only_tools.content.as_str(), only_tools.reasoning.as_str(), only_tools.calls.len()), ("Hm.", "", 1));
    // A call that a grammar enforces is the answer.
    let forced = (GPT_OSS.0, Some(ToolSyntax::JsonArray));
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>[{\"name\": \"now\", \"parameters\": {}}]";
    let forced = message(forced, PROMPT, text);
    assert_eq!((forced.reasoning.as_str(), forced.content.as_str(), forced.calls.len()), ("Hm.", "", 1));
}

#[test]
fn a_message_that_the_prompt_begins_is_continued() {
    let answer = "<|start|>assistant<|channel|>final<|message|>Yes";
    let continued = message(GPT_OSS, answer, ", no.<|return|>");
    assert_eq!((continued.content.as_str(), continued.reasoning.as_str()), (", no.", ""));
    let analysis = "<|start|>assistant<|channel|>analysis<|message|>Hm";
    let continued = message(GPT_OSS, analysis, ", so.<|end|><|start|>assistant<|channel|>final<|message|>Yes.");
    assert_eq!((continued.content.as_str(), continued.reasoning.as_str()), ("Yes.", ", so."));
    let syntax = ReasoningSyntax::OpenAiGptOss;
    assert_eq!([answer, analysis, PROMPT].map(|prompt| syntax.opened_by(prompt)), [Some(false), None, None]);
}
