//! The syntaxes of tool calls: their names, how a template shows them, and how their calls are written.

use super::calls::{Body, ToolParser};
use super::gemma::Gemma;
use super::json::Envelope;
use super::marked::{DeepSeek, Kimi, LongCat, Mistral};
use super::python::PythonCalls;
use super::xml::{self, Xml};

/// Creates the parser of a call without a marker.
type BareBody = fn(&ToolParser) -> Box<dyn Body>;

/// One syntax.
#[derive(Debug)]
pub(super) struct Row {
    /// Names of the parser; the first is its own, the others are vLLM's names of the same syntax.
    pub(super) names: &'static [&'static str],
    /// Texts that a chat template has if it shows this syntax and none of the rows before: all of one of these groups.
    pub(super) shown: &'static [&'static [&'static str]],
    /// Markers: the first `opening` begin a call, the others may follow a call and are ignored.
    pub(super) markers: &'static [&'static str],
    pub(super) opening: usize,
    /// Characters that, with whitespace, are ignored between calls and after the last.
    pub(super) separators: &'static str,
    /// Parses a call after the opening marker with this index.
    pub(super) body: fn(&ToolParser, usize) -> Box<dyn Body>,
    /// The character that begins a call if no content came before, and what parses such a call. No marker starts with it.
    pub(super) bare: Option<(char, BareBody)>,
}

/// A row with one opening marker.
const PLAIN: Row = Row {
    names: &[],
    shown: &[],
    markers: &[],
    opening: 1,
    separators: "",
    body: |_, _| Box::new(Mistral::Start),
    bare: None,
};

macro_rules! tool_syntaxes {
    ($($(#[$documentation:meta])* $Syntax:ident: $row:expr;)*) => {
        /// Syntax of a model's tool calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ToolSyntax {
            $($(#[$documentation])* $Syntax,)*
        }

        impl ToolSyntax {
            /// All syntaxes, in the order in which a template is searched for them.
            pub(super) const ALL: &'static [Self] = &[$(Self::$Syntax),*];

            pub(super) fn row(self) -> &'static Row {
                match self {
                    $(Self::$Syntax => const { &$row },)*
                }
            }
        }
    };
}

tool_syntaxes! {
    /// `<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>
    /// </｜DSML｜invoke></｜DSML｜function_calls>`, values marked as text or JSON: DeepSeek-V3.2.
    DeepSeekV32: Row {
        names: &["deepseek_v32"],
        shown: &[&["<｜DSML｜function_calls>"]],
        markers: &["<｜DSML｜function_calls>", "<｜DSML｜invoke name=", "</｜DSML｜invoke>", "</｜DSML｜function_calls>"],
        opening: 2,
        body: |parser, at| parser.xml(&xml::DSML, at),
        ..PLAIN
    };
    /// ``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{…}\n```<｜tool▁call▁end｜>`` of
    /// DeepSeek-V3 and R1, and `f<｜tool▁sep｜>{…}` between the same markers of V3.1.
    DeepSeekV3: Row {
        names: &["deepseek_v3", "deepseek_v31"],
        shown: &[&["<｜tool▁calls▁begin｜>"]],
        markers: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        opening: 2,
        separators: "`",
        body: |parser, at| parser.inner(DeepSeek::new(), at),
        ..PLAIN
    };
    /// `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, `[TOOL_CALLS]f{…}` or `[TOOL_CALLS]f[ARGS]{…}`: Mistral.
    Mistral: Row {
        names: &["mistral"],
        shown: &[&["[TOOL_CALLS]"]],
        markers: &["[TOOL_CALLS]"],
        ..PLAIN
    };
    /// `<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
    /// <|tool_calls_section_end|>`: Kimi-K2.
    KimiK2: Row {
        names: &["kimi_k2"],
        shown: &[&["<|tool_calls_section_begin|>"]],
        markers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"],
        opening: 2,
        body: |parser, at| parser.inner(Kimi::new(), at),
        ..PLAIN
    };
    /// `<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>`, values typed
    /// by the tool's schema: MiniMax-M2.
    MinimaxM2: Row {
        names: &["minimax_m2"],
        shown: &[&["<minimax:tool_call>"]],
        markers: &["<minimax:tool_call>", "<invoke name=", "</minimax:tool_call>", "</invoke>"],
        opening: 2,
        body: |parser, at| parser.xml(&xml::MINIMAX, at),
        ..PLAIN
    };
    /// The calls of [`Qwen3Coder`](Self::Qwen3Coder) within `<seed:tool_call>`: Seed-OSS.
    SeedOss: Row {
        names: &["seed_oss"],
        shown: &[&["<seed:tool_call>"]],
        markers: &["<seed:tool_call>", "<function=", "</seed:tool_call>", "</function>"],
        opening: 2,
        body: |parser, at| parser.xml(&xml::QWEN, at),
        ..PLAIN
    };
    /// `<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`, values typed by the tool's schema:
    /// GLM-4.5 to 4.7.
    Glm: Row {
        names: &["glm45", "glm47"],
        shown: &[&["<arg_key>"]],
        markers: &["<tool_call>", "</tool_call>"],
        body: |parser, at| parser.xml(&xml::GLM, at),
        ..PLAIN
    };
    /// `<|tool_call|>[{"name": "f", "arguments": {…}}]`: Granite 3.
    Granite: Row {
        names: &["granite"],
        shown: &[&["<|tool_call|>"]],
        markers: &["<|tool_call|>", "<tool_call>", "</tool_call>"],
        opening: 2,
        body: |_, _| Box::new(Mistral::List),
        ..PLAIN
    };
    /// `<tool_calls>[{"name": "f", "arguments": {…}}]</tool_calls>`: Jamba.
    Jamba: Row {
        names: &["jamba"],
        shown: &[&["<tool_calls>"]],
        markers: &["<tool_calls>", "</tool_calls>"],
        body: |_, _| Box::new(Mistral::List),
        ..PLAIN
    };
    /// `functools[{"name": "f", "arguments": {…}}]`: Phi-4-mini.
    Phi4Mini: Row {
        names: &["phi4_mini_json"],
        shown: &[&["functools["]],
        markers: &["functools"],
        body: |_, _| Box::new(Mistral::List),
        ..PLAIN
    };
    /// `<|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|>`: Gemma 4.
    Gemma4: Row {
        names: &["gemma4"],
        shown: &[&["<|tool_call>"]],
        markers: &["<|tool_call>", "<tool_call|>"],
        body: |_, _| Box::new(Gemma::new()),
        ..PLAIN
    };
    /// `<function_call> {"name": "f", "arguments": {…}}`: Granite 20B function calling.
    Granite20bFc: Row {
        names: &["granite-20b-fc"],
        shown: &[&["<function_call>"]],
        markers: &["<function_call>", "</function_call>"],
        separators: "}",
        body: |_, _| Box::new(Envelope::marked()),
        ..PLAIN
    };
    /// `<longcat_tool_call>{"name": "f", "arguments": {…}}</longcat_tool_call>`, and GLM's tags with the prefix `longcat_`
    /// of later models: LongCat-Flash.
    LongCat: Row {
        names: &["longcat"],
        shown: &[&["<longcat_tool_call>"]],
        markers: &["<longcat_tool_call>", "</longcat_tool_call>"],
        separators: "}",
        body: |parser, _| Box::new(LongCat::new(Xml::new(&xml::LONGCAT, parser.tools()))),
        ..PLAIN
    };
    /// `<function_calls>\nf(a=1)\ng(b='x')\n</function_calls>`: Olmo 3.
    Olmo3: Row {
        names: &["olmo3"],
        shown: &[&["<function_calls>"]],
        markers: &["<function_calls>", "</function_calls>"],
        body: |_, _| Box::new(PythonCalls::lines()),
        ..PLAIN
    };
    /// `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`: gpt-oss. The messages are separated
    /// by channel even without a parser of reasoning; the analysis is content then.
    OpenAi: Row {
        names: &["openai"],
        shown: &[&["<|channel|>commentary"]],
        // The messages are separated before.
        opening: 0,
        ..PLAIN
    };
    /// `<tool_call><function=f><parameter=a>\n1\n</parameter></function></tool_call>`, values typed by the tool's
    /// schema: Qwen3-Coder, Qwen3.5.
    Qwen3Coder: Row {
        names: &["qwen3_coder", "qwen3_xml"],
        shown: &[&["<function=", "<parameter="]],
        // Models omit the outer tag.
        markers: &["<tool_call>", "<function=", "</tool_call>", "</function>"],
        opening: 2,
        body: |parser, at| parser.xml(&xml::QWEN, at),
        ..PLAIN
    };
    /// `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3, Qwen3-VL.
    Hermes: Row {
        names: &["hermes", "granite4"],
        shown: &[&["<tool_call>", "\"arguments\""]],
        // Small models write one closing brace too many.
        markers: &["<tool_call>", "</tool_call>"],
        separators: "}",
        body: |_, _| Box::new(Envelope::marked()),
        ..PLAIN
    };
    /// `[f(a=1, b='x'), g()]`, alone or within `<|python_start|>` and `<|python_end|>`: Llama 3.2 and 4, ToolACE.
    Pythonic: Row {
        names: &["pythonic", "llama4_pythonic"],
        shown: &[&["[func_name1("]],
        markers: &["<|python_start|>", "<|python_end|>"],
        body: |_, _| Box::new(PythonCalls::list()),
        bare: Some(('[', |_| Box::new(PythonCalls::list()))),
        ..PLAIN
    };
    /// `{"name": "f", "parameters": {…}}`, with or without a leading `<|python_tag|>`, several separated by `; `: Llama
    /// 3 and 4. Without the tag only if no other content came before.
    Llama3Json: Row {
        names: &["llama3_json", "llama4_json"],
        shown: &[&["\"parameters\": ", "<|start_header_id|>"], &["\"parameters\": ", "<|header_start|>"]],
        markers: &["<|python_tag|>"],
        separators: ";,}",
        body: |_, _| Box::new(Envelope::marked()),
        bare: Some(('{', |parser| Box::new(Envelope::bare(parser.tools())))),
        ..PLAIN
    };
    /// `[{"name": "f", "parameters": {…}}, …]` and nothing else. No model writes this by itself; a grammar enforces it
    /// if a call is required.
    JsonArray: Row {
        opening: 0,
        bare: Some(('[', |_| Box::new(Mistral::Start))),
        ..PLAIN
    };
}
