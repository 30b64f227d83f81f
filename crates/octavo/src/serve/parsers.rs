//! Choice of the parsers of tool calls and reasoning: by flag, or by the chat template.

use anyhow::{Context, Result, bail};
use octavo_server::TextModel;
use octavo_text::{ChatTemplate, ReasoningSyntax, Tokenizer, ToolSyntax, UnknownParser};
use tracing::info;

use crate::cli::ChatFormatArgs;

/// The value of a parser's flag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Choice<S> {
    /// The chat template decides.
    #[default]
    Auto,
    Disabled,
    Named(S),
}

impl<S: std::str::FromStr<Err = UnknownParser>> Choice<S> {
    /// Reads `auto`, `none` or the name of a parser. An empty name is vLLM's default, so it means `auto`.
    pub(crate) fn read(name: &str) -> Result<Self, UnknownParser> {
        Ok(match name {
            "" | "auto" => Self::Auto,
            "none" => Self::Disabled,
            name => Self::Named(name.parse()?),
        })
    }
}

/// The flags that choose parsers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ParserFlags {
    pub(crate) tools: Choice<ToolSyntax>,
    /// Whether a server without a parser of tool calls must not start (`--enable-auto-tool-choice`).
    pub(crate) tools_are_needed: bool,
    pub(crate) reasoning: Choice<ReasoningSyntax>,
}

impl ParserFlags {
    /// Reads the flags.
    ///
    /// # Errors
    /// A name is unknown, or the flags contradict each other.
    pub(crate) fn new(args: &ChatFormatArgs) -> Result<Self> {
        let tools = Choice::read(&args.tool_call_parser).context("--tool-call-parser")?;
        let reasoning = Choice::read(&args.reasoning_parser).context("--reasoning-parser")?;
        if args.enable_auto_tool_choice && tools == Choice::Disabled {
            bail!("--enable-auto-tool-choice contradicts --tool-call-parser none");
        }
        Ok(Self { tools, tools_are_needed: args.enable_auto_tool_choice, reasoning })
    }

    /// Returns the parsers for a model and logs them with the reason.
    ///
    /// # Errors
    /// A parser that a flag demands does not fit the model.
    pub(crate) fn choose(self, model: &TextModel) -> Result<(Option<ToolSyntax>, Option<ReasoningSyntax>)> {
        let template = model.template.as_deref();
        Ok((self.tools(template)?, self.reasoning(template, &model.tokenizer)?))
    }

    fn tools(self, template: Option<&ChatTemplate>) -> Result<Option<ToolSyntax>> {
        let (syntax, reason) = match self.tools {
            Choice::Disabled => (None, "--tool-call-parser"),
            Choice::Named(syntax) => (Some(syntax), "--tool-call-parser"),
            Choice::Auto => match template.map(|template| ToolSyntax::detect(template.source())) {
                Some(Some(syntax)) => (Some(syntax), "its syntax is in the chat template"),
                Some(None) => (None, "the chat template shows no known syntax"),
                None => (None, "the model has no chat template"),
            },
        };
        if syntax.is_none() && self.tools_are_needed {
            bail!("--enable-auto-tool-choice needs --tool-call-parser NAME, because {reason}");
        }
        info!("parser of tool calls: {} ({reason})", syntax.map_or("none", ToolSyntax::name));
        Ok(syntax)
    }

    fn reasoning(self, template: Option<&ChatTemplate>, tokenizer: &Tokenizer) -> Result<Option<ReasoningSyntax>> {
        let unmarked =
            |syntax: ReasoningSyntax| syntax.marker_tokens().iter().find(|marker| !is_one_token(tokenizer, marker));
        let (syntax, reason) = match self.reasoning {
            Choice::Disabled => (None, "--reasoning-parser".to_owned()),
            Choice::Named(syntax) => match unmarked(syntax) {
                Some(marker) => bail!(
                    "--reasoning-parser {}: the model's tokenizer has no token {marker}, so the model does not reason \
                     in this syntax; use --reasoning-parser none",
                    syntax.name()
                ),
                None => (Some(syntax), "--reasoning-parser".to_owned()),
            },
            Choice::Auto => match template.and_then(|template| ReasoningSyntax::detect(template.source())) {
                Some(syntax) => match unmarked(syntax) {
                    Some(marker) => (None, format!("the tokenizer has no token {marker}")),
                    None => (Some(syntax), "its markers are in the chat template".to_owned()),
                },
                None => (None, "the chat template shows no reasoning".to_owned()),
            },
        };
        info!("parser of reasoning: {} ({reason})", syntax.map_or("none", ReasoningSyntax::name));
        Ok(syntax)
    }
}

/// Returns whether the tokenizer reads a marker as a single token.
fn is_one_token(tokenizer: &Tokenizer, marker: &str) -> bool {
    tokenizer.encode(marker, false).is_ok_and(|ids| ids.len() == 1)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use octavo_text::{GgufVocabulary, SpecialTokens};

    use super::*;

    const QWEN: &str = "<|im_start|> <tool_call> \"arguments\" <think> </think>";

    /// A model with this chat template, whose tokenizer has `markers` beside the printable characters.
    fn model(template: Option<&str>, markers: &[&str]) -> TextModel {
        let characters: Vec<String> = ('!'..='~').map(String::from).collect();
        let tokens: Vec<&str> = characters.iter().map(String::as_str).chain(markers.iter().copied()).collect();
        let mut token_types = vec![1; tokens.len()];
        token_types[tokens.len() - markers.len()..].fill(4);
        let vocabulary = GgufVocabulary {
            model: "gpt2".to_owned(),
            pre: Some("smollm".to_owned()),
            tokens,
            token_types,
            ..GgufVocabulary::default()
        };
        let template = template.map(|source| Arc::new(ChatTemplate::new(source, &SpecialTokens::default()).unwrap()));
        TextModel { tokenizer: Arc::new(Tokenizer::from_gguf(&vocabulary).unwrap()), template, images: None }
    }

    fn flags(tools: &str, reasoning: &str) -> ParserFlags {
        let (tools, reasoning) = (Choice::read(tools).unwrap(), Choice::read(reasoning).unwrap());
        ParserFlags { tools, tools_are_needed: false, reasoning }
    }

    const GPT_OSS: &str = "<|start|>assistant<|channel|>analysis<|message|> <|channel|>commentary";
    const THINK: &[&str] = &["<think>", "</think>"];
    const HARMONY: &[&str] = &["<|channel|>", "<|message|>", "<|end|>"];

    #[test]
    fn the_template_decides_without_flags() {
        for (template, markers, tools, reasoning) in [
            (Some(QWEN), THINK, Some(ToolSyntax::Hermes), Some(ReasoningSyntax::Qwen3)),
            (Some(QWEN), &[], Some(ToolSyntax::Hermes), None),
            (Some("[TOOL_CALLS]"), THINK, Some(ToolSyntax::Mistral), None),
            (Some("{{ messages }}"), THINK, None, None),
            (Some(GPT_OSS), HARMONY, Some(ToolSyntax::OpenAi), Some(ReasoningSyntax::OpenAiGptOss)),
            (Some(GPT_OSS), &["<|channel|>"], Some(ToolSyntax::OpenAi), None),
            (Some("Here is my thought process: Here is my response:"), &[], None, Some(ReasoningSyntax::Granite)),
            (None, THINK, None, None),
        ] {
            let chosen = flags("auto", "").choose(&model(template, markers)).unwrap();
            assert_eq!(chosen, (tools, reasoning), "{template:?} {markers:?}");
        }
    }

    #[test]
    fn flags_take_precedence_over_the_template() {
        let qwen = model(Some(QWEN), THINK);
        assert_eq!(flags("none", "none").choose(&qwen).unwrap(), (None, None));
        let chosen = flags("mistral", "deepseek_r1").choose(&qwen).unwrap();
        assert_eq!(chosen, (Some(ToolSyntax::Mistral), Some(ReasoningSyntax::DeepSeekR1)));
    }

    #[test]
    fn parsers_that_the_model_lacks_are_errors() {
        let error = flags("auto", "qwen3").choose(&model(Some(QWEN), &["<think>"])).unwrap_err().to_string();
        assert!(error.starts_with("--reasoning-parser qwen3: the model's tokenizer has no token </think>"), "{error}");
        let needed = ParserFlags { tools_are_needed: true, ..ParserFlags::default() };
        assert!(needed.choose(&model(Some(QWEN), THINK)).is_ok());
        let error = needed.choose(&model(Some("plain"), THINK)).unwrap_err().to_string();
        assert!(error.starts_with("--enable-auto-tool-choice needs --tool-call-parser NAME"), "{error}");
    }
}
