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
    /// `<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>
    /// </｜DSML｜invoke></｜DSML｜function_calls>`, values marked as text or JSON: DeepSeek-V3.2.
    DeepSeekV32,
    /// `<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`, values typed by the tool's schema:
    /// GLM-4.5 to 4.7.
    Glm,
    /// `<|tool_call|>[{"name": "f", "arguments": {…}}]`: Granite 3.
    Granite,
    /// `<tool_calls>[{"name": "f", "arguments": {…}}]</tool_calls>`: Jamba.
    Jamba,
    /// `<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
    /// <|tool_calls_section_end|>`: Kimi-K2.
    KimiK2,
    /// `<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>`, values typed
    /// by the tool's schema: MiniMax-M2.
    MinimaxM2,
    /// `functools[{"name": "f", "arguments": {…}}]`: Phi-4-mini.
    Phi4Mini,
    /// The calls of [`Qwen3Coder`](Self::Qwen3Coder) within `<seed:tool_call>`: Seed-OSS.
    SeedOss,
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
    /// `[THINK]…[/THINK]`, with the rules of [`Qwen3`](Self::Qwen3): Magistral, Ministral 3.
    Mistral,
}

/// Markers of reasoning in most families.
const THINK: &str = "<think>";
const END_THINK: &str = "</think>";

/// Markers that begin a turn in a prompt, in the families of models that reason. Text written by the user comes before
/// the last one.
const TURNS: [&str; 7] = [
    "<|im_start|>",
    "<｜Assistant｜>",
    "<|start_header_id|>",
    "<|assistant|>",
    "<|im_assistant|>",
    "]~b]ai",
    "[/INST]",
];

/// Error of an unknown parser name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no {kind} parser \"{name}\"; the known ones are {known}")]
pub struct UnknownParser {
    kind: &'static str,
    name: String,
    known: String,
}

const TOOL_NAMES: [(&str, ToolSyntax); 20] = [
    ("deepseek_v3", ToolSyntax::DeepSeekV3),
    ("deepseek_v31", ToolSyntax::DeepSeekV3),
    ("deepseek_v32", ToolSyntax::DeepSeekV32),
    ("glm45", ToolSyntax::Glm),
    ("glm47", ToolSyntax::Glm),
    ("granite", ToolSyntax::Granite),
    ("granite4", ToolSyntax::Hermes),
    ("hermes", ToolSyntax::Hermes),
    ("jamba", ToolSyntax::Jamba),
    ("kimi_k2", ToolSyntax::KimiK2),
    ("llama3_json", ToolSyntax::Llama3Json),
    ("llama4_json", ToolSyntax::Llama3Json),
    ("llama4_pythonic", ToolSyntax::Pythonic),
    ("minimax_m2", ToolSyntax::MinimaxM2),
    ("mistral", ToolSyntax::Mistral),
    ("phi4_mini_json", ToolSyntax::Phi4Mini),
    ("pythonic", ToolSyntax::Pythonic),
    ("qwen3_coder", ToolSyntax::Qwen3Coder),
    ("qwen3_xml", ToolSyntax::Qwen3Coder),
    ("seed_oss", ToolSyntax::SeedOss),
];

// The prompts of these families open or close the reasoning, or the model opens it with its marker.
const REASONING_NAMES: [(&str, ReasoningSyntax); 8] = [
    ("deepseek_r1", ReasoningSyntax::DeepSeekR1),
    ("deepseek_v3", ReasoningSyntax::Qwen3),
    ("glm45", ReasoningSyntax::Qwen3),
    ("kimi_k2", ReasoningSyntax::Qwen3),
    ("minimax_m2", ReasoningSyntax::DeepSeekR1),
    ("mistral", ReasoningSyntax::Mistral),
    ("nemotron_v3", ReasoningSyntax::Qwen3),
    ("qwen3", ReasoningSyntax::Qwen3),
];

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
            Self::DeepSeekV32 => "deepseek_v32",
            Self::Glm => "glm45",
            Self::Granite => "granite",
            Self::Jamba => "jamba",
            Self::KimiK2 => "kimi_k2",
            Self::MinimaxM2 => "minimax_m2",
            Self::Phi4Mini => "phi4_mini_json",
            Self::SeedOss => "seed_oss",
            Self::JsonArray => "json_array",
        }
    }

    /// Detects the syntax that a chat template shows the model: in the calls of earlier turns, or in the instructions
    /// to the model. Returns `None` if it shows none or an unknown one.
    pub fn detect(chat_template_source: &str) -> Option<Self> {
        /// Markers that only one syntax has.
        const OWN: [(&str, ToolSyntax); 10] = [
            ("<｜DSML｜function_calls>", ToolSyntax::DeepSeekV32),
            ("<｜tool▁calls▁begin｜>", ToolSyntax::DeepSeekV3),
            ("[TOOL_CALLS]", ToolSyntax::Mistral),
            ("<|tool_calls_section_begin|>", ToolSyntax::KimiK2),
            ("<minimax:tool_call>", ToolSyntax::MinimaxM2),
            ("<seed:tool_call>", ToolSyntax::SeedOss),
            ("<arg_key>", ToolSyntax::Glm),
            ("<|tool_call|>", ToolSyntax::Granite),
            ("<tool_calls>", ToolSyntax::Jamba),
            ("functools[", ToolSyntax::Phi4Mini),
        ];
        let has = |marker: &str| chat_template_source.contains(marker);
        if let Some((_, syntax)) = OWN.into_iter().find(|(marker, _)| has(marker)) {
            Some(syntax)
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
            Self::Mistral => "mistral",
        }
    }

    /// Detects the syntax of a model with this chat template; `None` if it shows no reasoning.
    pub fn detect(chat_template_source: &str) -> Option<Self> {
        let has = |marker: &str| chat_template_source.contains(marker);
        if has(Self::Mistral.start()) && has(Self::Mistral.end()) {
            Some(Self::Mistral)
        } else if !has(THINK) || !has(END_THINK) {
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
        self.start_markers()[0]
    }

    /// The start marker, as a list of markers.
    pub(super) fn start_markers(self) -> &'static [&'static str] {
        match self {
            Self::Qwen3 | Self::DeepSeekR1 => &[THINK],
            Self::Mistral => &["[THINK]"],
        }
    }

    /// The markers that end reasoning before calls in this syntax. All but the first also belong to the text that
    /// follows.
    pub(super) fn end_markers(self, tools: Option<ToolSyntax>) -> &'static [&'static str] {
        match (self, tools) {
            // Qwen3 calls tools from within its reasoning without closing it.
            (Self::Qwen3, Some(ToolSyntax::Hermes)) => &[END_THINK, "<tool_call>\n{\""],
            (Self::Qwen3, Some(ToolSyntax::Qwen3Coder)) => &[END_THINK, "<tool_call>\n<function="],
            (Self::Qwen3 | Self::DeepSeekR1, _) => &[END_THINK],
            (Self::Mistral, _) => &["[/THINK]"],
        }
    }

    /// Returns the end marker of reasoning.
    pub fn end(self) -> &'static str {
        self.end_markers(None)[0]
    }
}

impl FromStr for ReasoningSyntax {
    type Err = UnknownParser;

    fn from_str(name: &str) -> Result<Self, UnknownParser> {
        find(&REASONING_NAMES, name, "reasoning")
    }
}
