//! The syntaxes, their names, and how to tell which one a model was trained on.

use std::str::FromStr;

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToolSyntax {
    /// `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3, Qwen3-VL.
    Hermes,
    /// `{"name": "f", "parameters": {…}}`, with or without `<|python_tag|>` in front, several separated by `; `:
    /// Llama 3 and 4. Without the tag only where no other content came before.
    Llama3Json,
    /// `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, `[TOOL_CALLS]f{…}` or `[TOOL_CALLS]f[ARGS]{…}`: Mistral.
    Mistral,
    /// `[f(a=1, b='x'), g()]`, alone or within `<|python_start|>` and `<|python_end|>`: Llama 3.2 and 4, ToolACE.
    Pythonic,
    /// `<tool_call><function=f><parameter=a>\n1\n</parameter></function></tool_call>`, values typed by the tool's
    /// schema: Qwen3-Coder, Qwen3.5.
    Qwen3Coder,
    /// ``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{…}\n```<｜tool▁call▁end｜>`` of
    /// DeepSeek-V3 and R1, and `f<｜tool▁sep｜>{…}` between the same markers of V3.1.
    DeepSeekV3,
    /// `[{"name": "f", "parameters": {…}}, …]` and nothing else: no model's own, but what a grammar makes any model write
    /// that must call something.
    JsonArray,
}

/// How a model marks its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReasoningSyntax {
    /// `<think>…</think>`, opened by the prompt or by the first thing that the model writes: without it all is content,
    /// `</think>` included, since a stream cannot take back what it gave out.
    Qwen3,
    /// `<think>…</think>`, open from the start: without `</think>` all is reasoning. A prompt may have closed it.
    DeepSeekR1,
}

/// What begins and ends reasoning, in all families so far.
pub(super) const THINK: &str = "<think>";
pub(super) const END_THINK: &str = "</think>";

/// A parser name that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no {kind} parser \"{name}\"; the known ones are {known}")]
pub struct UnknownParser {
    kind: &'static str,
    name: String,
    known: String,
}

const TOOL_NAMES: [(&str, ToolSyntax); 10] = [
    ("deepseek_v3", ToolSyntax::DeepSeekV3),
    ("deepseek_v31", ToolSyntax::DeepSeekV3),
    ("hermes", ToolSyntax::Hermes),
    ("llama3_json", ToolSyntax::Llama3Json),
    ("llama4_json", ToolSyntax::Llama3Json),
    ("llama4_pythonic", ToolSyntax::Pythonic),
    ("mistral", ToolSyntax::Mistral),
    ("pythonic", ToolSyntax::Pythonic),
    ("qwen3_coder", ToolSyntax::Qwen3Coder),
    ("qwen3_xml", ToolSyntax::Qwen3Coder),
];

const REASONING_NAMES: [(&str, ReasoningSyntax); 2] =
    [("deepseek_r1", ReasoningSyntax::DeepSeekR1), ("qwen3", ReasoningSyntax::Qwen3)];

/// The names in a table, in its order.
const fn names<S: Copy, const N: usize>(table: &[(&'static str, S); N]) -> [&'static str; N] {
    let mut names = [""; N];
    let mut index = 0;
    while index < N {
        names[index] = table[index].0;
        index += 1;
    }
    names
}

fn find<S: Copy, const N: usize>(
    table: &[(&'static str, S); N],
    name: &str,
    kind: &'static str,
) -> Result<S, UnknownParser> {
    match table.iter().find(|entry| entry.0 == name) {
        Some(&(_, syntax)) => Ok(syntax),
        None => Err(UnknownParser { kind, name: name.to_owned(), known: names(table).join(", ") }),
    }
}

impl ToolSyntax {
    /// The names that `--tool-call-parser` takes, which are vLLM's.
    pub const NAMES: &'static [&'static str] = &names(&TOOL_NAMES);

    /// The syntax that a chat template shows the model: by what it writes around the calls of earlier turns, or by what
    /// it tells the model to write. `None` if it shows none, or one that is not known.
    pub fn detect(chat_template_source: &str) -> Option<Self> {
        let has = |marker| chat_template_source.contains(marker);
        if has("<｜tool▁calls▁begin｜>") {
            Some(Self::DeepSeekV3)
        } else if has("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if has("<function=") && has("<parameter=") {
            Some(Self::Qwen3Coder)
        } else if has("<tool_call>") && has("\"arguments\"") {
            Some(Self::Hermes)
        } else if has("[func_name1(") {
            Some(Self::Pythonic)
        } else if has("\"parameters\": ") && (has("<|start_header_id|>") || has("<|header_start|>")) {
            Some(Self::Llama3Json)
        } else {
            None
        }
    }

    /// Whether its markers are special tokens, in the vocabularies of some of its models at least: they must then not
    /// be left out of the text. The markers of [`Pythonic`](Self::Pythonic) can: calls are known without them.
    pub fn needs_special_tokens(self) -> bool {
        !matches!(self, Self::Pythonic | Self::JsonArray)
    }
}

impl FromStr for ToolSyntax {
    type Err = UnknownParser;

    fn from_str(name: &str) -> Result<Self, UnknownParser> {
        find(&TOOL_NAMES, name, "tool call")
    }
}

impl ReasoningSyntax {
    /// The names that `--reasoning-parser` takes, which are vLLM's.
    pub const NAMES: &'static [&'static str] = &names(&REASONING_NAMES);

    /// The syntax of a model with this chat template; `None` if it shows no reasoning.
    pub fn detect(chat_template_source: &str) -> Option<Self> {
        let has = |marker| chat_template_source.contains(marker);
        if !has(THINK) || !has(END_THINK) {
            None
        } else if has("<｜Assistant｜>") {
            Some(Self::DeepSeekR1)
        } else {
            Some(Self::Qwen3)
        }
    }

    /// What begins reasoning.
    pub fn start(self) -> &'static str {
        THINK
    }

    /// What ends reasoning.
    pub fn end(self) -> &'static str {
        END_THINK
    }
}

impl FromStr for ReasoningSyntax {
    type Err = UnknownParser;

    fn from_str(name: &str) -> Result<Self, UnknownParser> {
        find(&REASONING_NAMES, name, "reasoning")
    }
}
