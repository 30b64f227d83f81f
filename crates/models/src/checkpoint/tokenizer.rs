//! Data from which the text layer builds a tokenizer. This crate only finds it.

/// Tokenizer data in one of the two published forms.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizerData<'a> {
    /// `tokenizer.json` with the special tokens of `tokenizer_config.json`.
    Json {
        /// Content of `tokenizer.json`.
        tokenizer_json: Vec<u8>,
        /// Beginning-of-sequence token.
        bos: Option<String>,
        /// End-of-sequence token.
        eos: Option<String>,
        /// Unknown token.
        unk: Option<String>,
        /// Padding token.
        pad: Option<String>,
        /// Whether encoding adds the beginning-of-sequence token; `None` follows `tokenizer.json`.
        add_bos: Option<bool>,
        /// Whether encoding adds the end-of-sequence token; `None` follows `tokenizer.json`.
        add_eos: Option<bool>,
    },
    /// The vocabulary of a GGUF header.
    Gguf(GgufTokenizer<'a>),
}

/// The `tokenizer.ggml.*` keys of a GGUF header. The texts lie in the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufTokenizer<'a> {
    /// Tokenizer model: `gpt2` (byte-level BPE), `llama` (SentencePiece), ...
    pub model: String,
    /// Name of the pre-tokenizer.
    pub pre: Option<String>,
    /// Token texts by id.
    pub tokens: Vec<&'a str>,
    /// Scores by id: either empty or one per token.
    pub scores: Vec<f32>,
    /// Token types by id (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte): either empty or one per
    /// token.
    pub token_types: Vec<i32>,
    /// BPE merges in order of rank, each two texts separated by a space.
    pub merges: Vec<&'a str>,
    /// Beginning-of-sequence id.
    pub bos_id: Option<u32>,
    /// End-of-sequence id.
    pub eos_id: Option<u32>,
    /// Unknown id.
    pub unk_id: Option<u32>,
    /// Padding id.
    pub pad_id: Option<u32>,
    /// Whether encoding adds the beginning-of-sequence id.
    pub add_bos: Option<bool>,
    /// Whether encoding adds the end-of-sequence id.
    pub add_eos: Option<bool>,
    /// Whether encoding inserts a space before the text.
    pub add_space_prefix: Option<bool>,
}
