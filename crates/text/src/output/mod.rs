//! Parsing of a model's text into reasoning, content and tool calls.
//!
//! Text passes through two filters, one character at a time: [`reasoning`] removes the reasoning and [`calls`] the tool
//! calls from the rest. Each is a state machine over single characters, so the result does not depend on the pieces in
//! which text arrives, and a complete message is a stream that was pushed at once. A syntax of calls is a row in
//! [`tool_syntax`], which names the [`calls::Body`] that parses one call. Families of models share them:
//!
//! | file | calls |
//! |---|---|
//! | [`json`] | an object with name and arguments, marked (Hermes, Granite 20B) or bare (Llama 3) |
//! | [`marked`] | JSON arguments after a marker and a name, or lists: Mistral, DeepSeek, Kimi, Granite, Jamba, Phi, LongCat |
//! | [`python`] | a list of Python calls, or lines of them (Olmo 3) |
//! | [`xml`] | tags around untyped values: Qwen3-Coder, GLM, MiniMax, DeepSeek-V3.2, Seed-OSS |
//! | [`gemma`] | values without quotes (Gemma 4) |
//!
//! [`harmony`] takes the place of the first filter for gpt-oss, whose channels hold reasoning, calls and content alike.
//!
//! Models may write anything, and clients can make them, so every state machine continues after any character, holds
//! back at most the text itself, nests without recursion and does constant work per character.

mod calls;
mod gemma;
mod harmony;
mod json;
mod marked;
mod markers;
mod python;
mod reasoning;
mod sink;
mod strings;
mod syntax;
#[cfg(test)]
mod tests;
mod tool_syntax;
mod tools;
mod xml;

pub use self::syntax::{ReasoningSyntax, UnknownParser, without_written_turns};
pub use self::tool_syntax::ToolSyntax;

use self::calls::ToolParser;
use self::harmony::Harmony;
use self::reasoning::Reasoning;
use self::sink::Sink;

/// A piece of a model's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputDelta {
    /// More reasoning.
    Reasoning(String),
    /// More content. Whitespace around calls is not content if there is nothing else.
    Content(String),
    /// Start of a call.
    ToolCall {
        /// Index among the calls of the message, from 0.
        index: u32,
        /// Name of the function, complete and not empty.
        name: String,
    },
    /// More arguments of a call. All fragments of a complete call together are the JSON object that the model wrote, or
    /// the text that it wrote instead; `{}` if it wrote none. A call that is cut off by the end of the text or by an
    /// error of the model keeps its fragments so far, possibly none.
    Arguments {
        /// The call's index.
        index: u32,
        /// Text, not empty.
        fragment: String,
    },
}

/// Parses the text of one sequence as it arrives.
///
/// The deltas of all calls of [`push`](Self::push) and of [`finish`](Self::finish), with neighbours joined, do not
/// depend on how the text was divided. Without a parser, and in text without markers, they are the text.
#[derive(Debug)]
pub struct OutputParser {
    first: Option<First>,
    tools: Option<ToolParser>,
    sink: Sink,
    /// Text outside reasoning; empty between calls.
    content: String,
}

/// The filter that separates reasoning from the rest.
#[derive(Debug)]
enum First {
    Reasoning(Reasoning),
    Harmony(Harmony),
}

impl First {
    fn new(
        reasoning: Option<ReasoningSyntax>,
        tools: Option<(ToolSyntax, &[serde_json::Value])>,
        prompt: &str,
    ) -> Option<Self> {
        match (reasoning, tools) {
            (Some(ReasoningSyntax::OpenAiGptOss), _) | (_, Some((ToolSyntax::OpenAi, _))) => {
                // A model that must call a function in JSON may still do it in its own way.
                let native = tools.filter(|&(syntax, _)| matches!(syntax, ToolSyntax::OpenAi | ToolSyntax::JsonArray));
                Some(Self::Harmony(Harmony::new(reasoning.is_some(), native.map(|(_, tools)| tools), prompt)))
            }
            (Some(syntax), _) => Some(Self::Reasoning(Reasoning::new(syntax, tools.map(|(syntax, _)| syntax), prompt))),
            (None, _) => None,
        }
    }
}

impl OutputParser {
    /// Creates a parser of the text that follows `prompt`. The last turn of the prompt is sufficient: it determines
    /// whether reasoning is open (DeepSeek-R1 prompts end in `<think>\n`) or closed (Qwen3 prompts without thinking end
    /// in `<think>\n\n</think>\n\n`).
    ///
    /// `tools` are the request's definitions, `{"type": "function", "function": {"name", "parameters"}}`. They provide
    /// the types of values if the syntax does not.
    pub fn new(
        reasoning: Option<ReasoningSyntax>,
        tools: Option<(ToolSyntax, &[serde_json::Value])>,
        prompt: &str,
    ) -> Self {
        Self {
            first: First::new(reasoning, tools, prompt),
            tools: tools
                .filter(|&(syntax, _)| syntax != ToolSyntax::OpenAi)
                .map(|(syntax, tools)| ToolParser::new(syntax, tools)),
            sink: Sink::default(),
            content: String::new(),
        }
    }

    /// Takes the next text and appends to `out` everything that is certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<OutputDelta>) {
        for character in text.chars() {
            match &mut self.first {
                Some(First::Reasoning(reasoning)) => reasoning.step(character, &mut self.sink, &mut self.content),
                Some(First::Harmony(harmony)) => harmony.step(character, &mut self.sink, &mut self.content),
                None => self.content.push(character),
            }
            self.drain_content();
        }
        self.sink.drain_into(out);
    }

    /// Ends the text and appends the held-back text to `out`: the start of a marker and a call without a known name
    /// become content, unless a grammar enforces calls. An unfinished call gets no more deltas.
    pub fn finish(&mut self, out: &mut Vec<OutputDelta>) {
        match &mut self.first {
            Some(First::Reasoning(reasoning)) => reasoning.finish(&mut self.sink, &mut self.content),
            Some(First::Harmony(harmony)) => harmony.finish(&mut self.sink, &mut self.content),
            None => {}
        }
        self.drain_content();
        if let Some(tools) = &mut self.tools {
            tools.finish(&mut self.sink);
        }
        self.sink.drain_into(out);
    }

    /// Returns whether reasoning is open, so that the next text continues or ends it.
    pub fn is_reasoning(&self) -> bool {
        match &self.first {
            Some(First::Reasoning(reasoning)) => reasoning.is_open(),
            Some(First::Harmony(harmony)) => harmony.is_open(),
            None => false,
        }
    }

    /// Passes on the text outside reasoning.
    fn drain_content(&mut self) {
        for character in self.content.drain(..) {
            match &mut self.tools {
                Some(tools) => tools.step(character, &mut self.sink),
                None => self.sink.content(character),
            }
        }
    }
}
