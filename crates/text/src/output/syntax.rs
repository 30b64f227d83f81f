//! The syntaxes, their names, and the detection of a model's syntax.

use std::str::FromStr;

/// Syntax of a model's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToolSyntax {
    /// `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3, Qwen3-VL.
    Hermes,
    /// `{"name": "f", "parameters": {…}}`, with or without a leading `<|python_tag|>`, several separated by `; `: Llama
    /// 3 and 4. Without the tag only if no other content came before.
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
    /// `[{"name": "f", "parameters": {…}}, …]` and nothing else. No model writes this by itself; a grammar enforces it
    /// if a call is required.
    JsonArray,
}

/// Markup of a model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReasoningSyntax {
    /// `<think>…</think>`, opened by the prompt or by the model's first text. Otherwise everything is content,
    /// including `</think>`, because a stream cannot take back text that it has sent.
    Qwen3,
    /// `<think>…</think>`, open from the start: without `</think>` everything is reasoning. A prompt may have closed
    /// it.
    DeepSeekR1,
}

/// Markers of reasoning in all supported families.
pub(super) const THINK: &str = "<think>";
pub(super) const END_THINK: &str = "</think>";

/// Markers that begin a turn in a prompt, in the families of models that reason. Text written by the user comes before
/// the last one.
const TURNS: [&str; 6] =
    ["<|im_start|>", "<｜Assistant｜>", "<|start_header_id|>", "<|assistant|>", "<|im_assistant|>", "]~b]ai"];

/// Error of an unknown parser name.
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

/// Returns the names in a table, in its order.
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
    /// Values of `--tool-call-parser`, which are vLLM's.
    pub const NAMES: &'static [&'static str] = &names(&TOOL_NAMES);

    /// Returns the name of the parser.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama3Json => "llama3_json",
            Self::Mistral => "mistral",
            Self::Pythonic => "pythonic",
            Self::Qwen3Coder => "qwen3_coder",
            Self::DeepSeekV3 => "deepseek_v3",
            Self::JsonArray => "json_array",
        }
    }

    /// Detects the syntax that a chat template shows the model: in the calls of earlier turns, or in the instructions
    /// to the model. Returns `None` if it shows none or an unknown one.
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

    /// Returns whether its markers are special tokens in some models' vocabularies and must therefore be kept in the
    /// text. The markers of [`Pythonic`](Self::Pythonic) may be omitted, because calls are recognised without them.
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
    /// Values of `--reasoning-parser`, which are vLLM's.
    pub const NAMES: &'static [&'static str] = &names(&REASONING_NAMES);

    /// Returns the name of the parser.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qwen3 => "qwen3",
            Self::DeepSeekR1 => "deepseek_r1",
        }
    }

    /// Detects the syntax of a model with this chat template; `None` if it shows no reasoning.
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

    /// Returns whether the end of the prompt has opened or closed reasoning; `None` if it leaves that to the model. Only
    /// the turn that the model continues counts, so markers in text written by the user do not.
    pub fn opened_by(self, prompt: &str) -> Option<bool> {
        let turn = TURNS.iter().filter_map(|turn| prompt.rfind(turn)).max().unwrap_or(0);
        let (start, end) = (prompt[turn..].rfind(self.start()), prompt[turn..].rfind(self.end()));
        (start != end).then_some(start > end)
    }

    /// Returns the start marker of reasoning.
    pub fn start(self) -> &'static str {
        THINK
    }

    /// Returns the end marker of reasoning.
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
