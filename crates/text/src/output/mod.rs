//! What a model's text turns out to be: reasoning, content, tool calls.
//!
//! Text passes two filters, one character at a time: [`reasoning`] takes the reasoning out of it, [`calls`] the tool
//! calls out of the rest. Each is a state machine that sees single characters, so how the text came in pieces cannot
//! matter, and a complete message is a stream that was pushed at once. A syntax of calls is a row in the table of
//! frames in [`calls`] and a [`calls::Body`] that reads one call; families of models share them:
//!
//! | file | calls |
//! |---|---|
//! | [`json`] | an object with name and arguments, marked (Hermes) or bare (Llama 3) |
//! | [`marked`] | JSON arguments after a marker and a name: Mistral, DeepSeek |
//! | [`python`] | a list of Python calls |
//! | [`xml`] | tags around untyped values: Qwen3-Coder |
//!
//! Models write anything and are made to by clients, so every machine goes on after any character, holds back no more
//! than the text itself, nests without recursion and does constant work for each character.

mod calls;
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
mod tools;
mod xml;

pub use self::syntax::{ReasoningSyntax, ToolSyntax, UnknownParser};

use self::calls::ToolParser;
use self::reasoning::Reasoning;
use self::sink::Sink;

/// A piece of a model's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputDelta {
    /// Reasoning goes on.
    Reasoning(String),
    /// Content goes on. There is none if nothing but whitespace stands around the calls.
    Content(String),
    /// A call begins.
    ToolCall {
        /// Its place among the calls of the message, from 0.
        index: u32,
        /// The function's name: complete, not empty.
        name: String,
    },
    /// A call's arguments go on. All fragments of a complete call together are a JSON object as the model wrote it, or
    /// whatever the model wrote in the place of one; `{}` if it wrote none. A call that the end of the text or an error
    /// of the model cuts off keeps the fragments that it has, possibly none.
    Arguments {
        /// The call's index.
        index: u32,
        /// Not empty.
        fragment: String,
    },
}

/// Reads the text of one sequence as it comes.
///
/// The deltas of all calls of [`push`](Self::push) and of [`finish`](Self::finish) are, neighbours joined, the same
/// however the text was cut. Without a parser, and in text without markers, they are the text.
#[derive(Debug)]
pub struct OutputParser {
    reasoning: Option<Reasoning>,
    tools: Option<ToolParser>,
    sink: Sink,
    /// What is not reasoning; empty between calls.
    content: String,
}

impl OutputParser {
    /// A parser of the text that follows `prompt`, of which the last turn is enough: it decides whether reasoning is
    /// open (DeepSeek-R1 prompts end in `<think>\n`) or closed (Qwen3 prompts without thinking end in
    /// `<think>\n\n</think>\n\n`).
    ///
    /// `tools` are definitions as in the request, `{"type": "function", "function": {"name", "parameters"}}`: they give
    /// values their types where the syntax does not.
    pub fn new(
        reasoning: Option<ReasoningSyntax>,
        tools: Option<(ToolSyntax, &[serde_json::Value])>,
        prompt: &str,
    ) -> Self {
        Self {
            reasoning: reasoning.map(|syntax| Reasoning::new(syntax, tools.map(|(syntax, _)| syntax), prompt)),
            tools: tools.map(|(syntax, tools)| ToolParser::new(syntax, tools)),
            sink: Sink::default(),
            content: String::new(),
        }
    }

    /// Takes the next text and appends to `out` what is certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<OutputDelta>) {
        for character in text.chars() {
            match &mut self.reasoning {
                Some(reasoning) => reasoning.step(character, &mut self.sink, &mut self.content),
                None => self.content.push(character),
            }
            self.drain_content();
        }
        self.sink.drain_into(out);
    }

    /// Ends the text and appends to `out` what was held back: the start of a marker, and a call whose name is not
    /// known, are content; of an unfinished call nothing more comes.
    pub fn finish(&mut self, out: &mut Vec<OutputDelta>) {
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.finish(&mut self.sink, &mut self.content);
        }
        self.drain_content();
        if let Some(tools) = &mut self.tools {
            tools.finish(&mut self.sink);
        }
        self.sink.drain_into(out);
    }

    /// Whether reasoning is open: what comes next belongs to it, or ends it.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(Reasoning::is_open)
    }

    /// Passes on what is not reasoning.
    fn drain_content(&mut self) {
        for character in self.content.drain(..) {
            match &mut self.tools {
                Some(tools) => tools.step(character, &mut self.sink),
                None => self.sink.content(character),
            }
        }
    }
}
