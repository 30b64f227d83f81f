//! The syntaxes, their names, and the detection of a model's syntax.

use std::str::FromStr;

use super::harmony;
use super::tool_syntax::ToolSyntax;

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
    /// `<|channel>thought\n…<channel|>`, with the rules of [`Qwen3`](Self::Qwen3): Gemma 4.
    Gemma4,
    /// `Here is my thought process:…Here is my response:`, also with `Here's`, with the rules of [`Qwen3`](Self::Qwen3):
    /// Granite 3.2.
    Granite,
    /// The markers and rules of [`Qwen3`](Self::Qwen3), written as text of several tokens: Olmo 3.
    Olmo3,
    /// `<|channel|>analysis<|message|>…<|end|>`, any number of times: gpt-oss.
    OpenAiGptOss,
}

/// Markers that end reasoning.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndMarkers {
    pub(super) markers: &'static [&'static str],
    /// Number of markers that are only markup. The others begin the text that follows.
    pub(super) own: usize,
}

/// Markers of reasoning in most families.
const THINK: &str = "<think>";
const END_THINK: &str = "</think>";

/// Markers that begin a turn in a prompt, in the families of models that reason. Text written by the user comes before
/// the last one.
const TURNS: [&str; 10] = [
    "<|im_start|>",
    "<|start_of_role|>",
    "<|turn>",
    // The turn goes on after a tool's answer, and may reason again.
    "<tool_response|>",
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

// The prompts of these families open or close the reasoning, or the model opens it with its marker.
const REASONING_NAMES: [(&str, ReasoningSyntax); 12] = [
    ("deepseek_r1", ReasoningSyntax::DeepSeekR1),
    ("deepseek_v3", ReasoningSyntax::Qwen3),
    ("gemma4", ReasoningSyntax::Gemma4),
    ("glm45", ReasoningSyntax::Qwen3),
    ("granite", ReasoningSyntax::Granite),
    ("kimi_k2", ReasoningSyntax::Qwen3),
    ("minimax_m2", ReasoningSyntax::DeepSeekR1),
    ("mistral", ReasoningSyntax::Mistral),
    ("nemotron_v3", ReasoningSyntax::Qwen3),
    ("olmo3", ReasoningSyntax::Olmo3),
    ("openai_gptoss", ReasoningSyntax::OpenAiGptOss),
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
    /// Values of `--tool-call-parser`, which are vLLM's, in alphabetical order.
    pub fn names() -> Vec<&'static str> {
        let mut names: Vec<_> = Self::ALL.iter().flat_map(|syntax| syntax.row().names).copied().collect();
        names.sort_unstable();
        names
    }

    /// Returns the name of the parser; empty for [`JsonArray`](Self::JsonArray), which has none.
    pub fn name(self) -> &'static str {
        self.row().names.first().copied().unwrap_or_default()
    }

    /// Detects the syntax that a chat template shows the model: in the calls of earlier turns, or in the instructions
    /// to the model. Returns `None` if it shows none or an unknown one.
    pub fn detect(chat_template_source: &str) -> Option<Self> {
        let has_all = |group: &&[&str]| group.iter().all(|text| chat_template_source.contains(text));
        Self::ALL.iter().copied().find(|syntax| syntax.row().shown.iter().any(has_all))
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
        let found = Self::ALL.iter().copied().find(|syntax| syntax.row().names.contains(&name));
        found.ok_or_else(|| UnknownParser { kind: "tool call", name: name.to_owned(), known: Self::names().join(", ") })
    }
}

/// Returns a prompt without those markers of turns that its template does not write: a user wrote them.
pub fn without_written_turns(prompt: &str, template: &str) -> String {
    let written = TURNS.iter().filter(|turn| !template.contains(**turn));
    // The space keeps the text around a marker from becoming one.
    written.fold(prompt.to_owned(), |prompt, turn| prompt.replace(turn, " "))
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
            Self::Gemma4 => "gemma4",
            Self::Granite => "granite",
            Self::Olmo3 => "olmo3",
            Self::OpenAiGptOss => "openai_gptoss",
        }
    }

    /// Detects the syntax of a model with this chat template; `None` if it shows no reasoning.
    pub fn detect(chat_template_source: &str) -> Option<Self> {
        /// Pairs of texts that only one syntax has.
        const OWN: [(&str, &str, ReasoningSyntax); 5] = [
            ("[THINK]", "[/THINK]", ReasoningSyntax::Mistral),
            ("<|channel>", "<channel|>", ReasoningSyntax::Gemma4),
            ("<|channel|>analysis", "<|message|>", ReasoningSyntax::OpenAiGptOss),
            ("Here is my thought process:", "Here is my response:", ReasoningSyntax::Granite),
            // The template opens the reasoning and never closes it.
            ("<functions>", THINK, ReasoningSyntax::Olmo3),
        ];
        let has = |marker: &str| chat_template_source.contains(marker);
        if let Some((.., syntax)) = OWN.into_iter().find(|(first, second, _)| has(first) && has(second)) {
            Some(syntax)
        } else if !has(THINK) || !has(END_THINK) {
            None
        } else if has("<｜Assistant｜>") {
            Some(Self::DeepSeekR1)
        } else {
            Some(Self::Qwen3)
        }
    }

    /// Returns whether the end of the prompt has opened or closed reasoning; `None` if it leaves that to the model. Only
    /// the turn that the model continues counts, so markers in text written by the user do not. If the marker of the turn
    /// is unknown, only a marker at the very end counts.
    pub fn opened_by(self, prompt: &str) -> Option<bool> {
        if self == Self::OpenAiGptOss {
            return harmony::is_answering(prompt).then_some(false);
        }
        let (starts, ends) = (self.start_markers(), self.end_markers(None).markers);
        let Some(turn) = TURNS.iter().filter_map(|turn| prompt.rfind(turn)).max() else {
            let at_end = |markers: &[&str]| markers.iter().any(|marker| prompt.trim_end().ends_with(marker));
            return if at_end(starts) { Some(true) } else { at_end(ends).then_some(false) };
        };
        let last = |markers: &[&str]| markers.iter().filter_map(|marker| prompt[turn..].rfind(marker)).max();
        let (start, end) = (last(starts), last(ends));
        (start != end).then_some(start > end)
    }

    /// Returns whether the text is reasoning even without the start marker, if the prompt leaves that to the model.
    pub fn is_default(self) -> bool {
        self == Self::DeepSeekR1
    }

    /// Returns the start marker of reasoning.
    pub fn start(self) -> &'static str {
        self.start_markers()[0]
    }

    /// The start markers.
    pub(super) fn start_markers(self) -> &'static [&'static str] {
        match self {
            Self::Qwen3 | Self::DeepSeekR1 | Self::Olmo3 => &[THINK],
            Self::Mistral => &["[THINK]"],
            Self::Gemma4 => &["<|channel>"],
            Self::Granite => &["Here is my thought process:", "Here's my thought process:"],
            Self::OpenAiGptOss => &["<|channel|>analysis<|message|>"],
        }
    }

    /// Text after the start marker that belongs to the markup.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Gemma4 => "thought\n",
            _ => "",
        }
    }

    /// The markers that end reasoning before calls in this syntax.
    pub(super) fn end_markers(self, tools: Option<ToolSyntax>) -> EndMarkers {
        let (markers, own): (&[_], _) = match (self, tools) {
            // Models call tools from within their reasoning without closing it.
            (Self::Qwen3, Some(ToolSyntax::Hermes)) => (&[END_THINK, "<tool_call>\n{\""], 1),
            (Self::Qwen3, Some(ToolSyntax::Qwen3Coder)) => (&[END_THINK, "<tool_call>\n<function="], 1),
            (Self::Gemma4, Some(ToolSyntax::Gemma4)) => (&["<channel|>", "<|tool_call>"], 1),
            (Self::Qwen3 | Self::DeepSeekR1 | Self::Olmo3, _) => (&[END_THINK], 1),
            (Self::Mistral, _) => (&["[/THINK]"], 1),
            (Self::Gemma4, _) => (&["<channel|>"], 1),
            (Self::Granite, _) => (&["Here is my response:", "Here's my response:"], 2),
            (Self::OpenAiGptOss, _) => (&["<|end|>"], 1),
        };
        EndMarkers { markers, own }
    }

    /// Returns the end marker of reasoning.
    pub fn end(self) -> &'static str {
        self.end_markers(None).markers[0]
    }

    /// Returns the header of the answer, if reasoning and other messages may alternate until it comes: only its tokens
    /// end the reasoning. The content's type may come before its last token.
    pub fn answer_header(self) -> Option<&'static str> {
        (self == Self::OpenAiGptOss).then_some("<|channel|>final<|message|>")
    }

    /// Returns the markers that are single tokens in the vocabulary of a model that reasons in this syntax.
    pub fn marker_tokens(self) -> &'static [&'static str] {
        match self {
            Self::Qwen3 | Self::DeepSeekR1 => &[THINK, END_THINK],
            Self::Mistral => &["[THINK]", "[/THINK]"],
            Self::Gemma4 => &["<|channel>", "<channel|>"],
            Self::OpenAiGptOss => &["<|channel|>", "<|message|>", "<|end|>"],
            Self::Granite | Self::Olmo3 => &[],
        }
    }

    /// Returns whether its markers are special tokens in some models' vocabularies and must therefore be kept in the text.
    pub fn needs_special_tokens(self) -> bool {
        matches!(self, Self::Mistral | Self::Gemma4 | Self::OpenAiGptOss)
    }
}

impl FromStr for ReasoningSyntax {
    type Err = UnknownParser;

    fn from_str(name: &str) -> Result<Self, UnknownParser> {
        find(&REASONING_NAMES, name, "reasoning")
    }
}
