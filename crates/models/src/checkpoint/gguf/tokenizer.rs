//! Data for the text layer from a GGUF header: vocabulary, chat template, end-of-generation ids and sampling defaults.

use super::MetadataView;
use crate::checkpoint::{GenerationConfig, GgufTokenizer, TokenizerData};
use crate::config::ConfigError;

/// Tokens that end a generation whatever `eos_token_id` says. Chat models are often published with the base model's
/// end-of-text id there, although their turns end with one of these. Their type does not count, because Gemma's
/// `<end_of_turn>` is not a control token in every file.
const END_OF_GENERATION: [&str; 13] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    END_OF_MESSAGE,
];

/// Phi-3 ends its turns with this token. In the harmony format of GPT-OSS it ends each message of a turn, of which the
/// last one ends with [`END_OF_TURN`] or a call.
const END_OF_MESSAGE: &str = "<|end|>";
const END_OF_TURN: &str = "<|return|>";

/// Returns the vocabulary, or `None` if the file has none.
pub(crate) fn tokenizer_data<'a>(metadata: &MetadataView<'a>) -> Result<Option<TokenizerData<'a>>, ConfigError> {
    let Some(tokens) = metadata.strings("tokenizer.ggml.tokens")? else { return Ok(None) };
    let model = metadata.str("tokenizer.ggml.model")?.ok_or_else(|| ConfigError::missing("tokenizer.ggml.model"))?;
    let scores = metadata.f32s("tokenizer.ggml.scores")?.unwrap_or_default();
    let token_types = metadata.i32s("tokenizer.ggml.token_type")?.unwrap_or_default();
    for (key, len) in [("tokenizer.ggml.scores", scores.len()), ("tokenizer.ggml.token_type", token_types.len())] {
        if len != 0 && len != tokens.len() {
            let count = tokens.len();
            return Err(ConfigError::Invalid(format!("{key} has {len} entries, but there are {count} tokens")));
        }
    }
    Ok(Some(TokenizerData::Gguf(GgufTokenizer {
        model: model.to_owned(),
        pre: metadata.str("tokenizer.ggml.pre")?.map(str::to_owned),
        scores,
        token_types,
        merges: metadata.strings("tokenizer.ggml.merges")?.unwrap_or_default(),
        bos_id: metadata.u32("tokenizer.ggml.bos_token_id")?,
        eos_id: metadata.u32("tokenizer.ggml.eos_token_id")?,
        unk_id: metadata.u32("tokenizer.ggml.unknown_token_id")?,
        pad_id: metadata.u32("tokenizer.ggml.padding_token_id")?,
        add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        tokens,
    })))
}

/// Returns the chat template, if the file has one.
pub(crate) fn chat_template(metadata: &MetadataView<'_>) -> Result<Option<String>, ConfigError> {
    Ok(metadata.str("tokenizer.chat_template")?.map(str::to_owned))
}

/// Returns the sampling defaults (`general.sampling.*`) and every id that ends a generation.
pub(crate) fn generation_config(metadata: &MetadataView<'_>) -> Result<GenerationConfig, ConfigError> {
    let number = |key: &str| metadata.f64(&format!("general.sampling.{key}"));
    let mut config = GenerationConfig {
        temperature: number("temp")?.map(|x| x as f32),
        top_p: number("top_p")?.map(|x| x as f32),
        min_p: number("min_p")?.map(|x| x as f32),
        repetition_penalty: number("penalty_repeat")?.map(|x| x as f32),
        // Zero and negative values mean "all".
        top_k: number("top_k")?.map(|x| x as u32),
        max_new_tokens: None,
        eos_token_ids: Vec::new(),
    };
    for key in ["eos", "eot", "eom"] {
        config.add_eos(metadata.u32(&format!("tokenizer.ggml.{key}_token_id"))?);
    }
    let tokens = metadata.strings("tokenizer.ggml.tokens")?.unwrap_or_default();
    let is_harmony = tokens.contains(&END_OF_TURN);
    for (id, token) in (0..).zip(tokens) {
        if END_OF_GENERATION.contains(&token) && !(is_harmony && token == END_OF_MESSAGE) {
            config.add_eos(Some(id));
        }
    }
    Ok(config.checked())
}
