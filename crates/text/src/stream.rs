//! Conversion of one sequence's tokens to text, as they are sampled.

mod stop;

use std::sync::Arc;

pub use self::stop::StopStrings;

use self::stop::StopMatcher;
use crate::tokenizer::{PieceDecoder, Tokenizer};

/// Number of prompt tokens that are decoded again for context, if the text is not a concatenation of the tokens'
/// pieces.
const CONTEXT_TOKENS: usize = 6;
/// Number of tokens after which text that still ends in U+FFFD is passed on unchanged, if the text is not a
/// concatenation of pieces.
const MAX_UNDECIDED_TOKENS: usize = 16;

/// Options of one sequence's text.
#[derive(Clone, Debug)]
pub struct TextOptions {
    /// Strings that end the text.
    pub stop: StopStrings,
    /// Keeps the stop string in the text.
    pub include_stop_str_in_output: bool,
    /// Omits special tokens.
    pub skip_special_tokens: bool,
    /// Number of tokens within which a complete stop string is ignored.
    pub min_tokens: u32,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self {
            stop: StopStrings::default(),
            include_stop_str_in_output: false,
            skip_special_tokens: true,
            min_tokens: 0,
        }
    }
}

/// Result of one token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// New text; empty while a character or a possible stop string is incomplete.
    pub text: String,
    /// Stop string that was found, which ends the text.
    pub stop: Option<String>,
}

/// Incremental detokeniser of one sequence, with stop strings.
///
/// All deltas and [`finish`](Self::finish) together are the text of the tokens up to the stop string. Only bytes of an
/// unfinished character and text that may become a stop string are held back. Work is constant per byte.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    decoder: Decoder,
    skip_special_tokens: bool,
    stop: Option<Stop>,
    tokens: u32,
}

#[derive(Debug)]
struct Stop {
    matcher: StopMatcher,
    include: bool,
    min_tokens: u32,
    /// Text that may be the start of a stop string.
    held: String,
    /// Whether a stop string was found, after which no more text comes.
    found: bool,
}

#[derive(Debug)]
enum Decoder {
    Pieces(PieceDecoder),
    Window(Window),
}

/// Detokenises by difference, for decoders whose result is not a concatenation: the text of some preceding tokens and
/// the new ones, minus the text of the preceding ones. It never has more than [`CONTEXT_TOKENS`] or
/// [`MAX_UNDECIDED_TOKENS`] preceding tokens and [`MAX_UNDECIDED_TOKENS`] new ones, so work is constant per token.
#[derive(Debug, Default)]
struct Window {
    /// Tokens that the decoder sees, without the skipped ones.
    ids: Vec<u32>,
    /// Number of leading `ids` whose text was passed on.
    given: usize,
}

impl TextStream {
    /// Creates a stream of the tokens that follow `prompt`. Its tokens determine whether a leading space is part of the
    /// text, and a character begun there is completed here.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32], options: TextOptions) -> Self {
        let skip = options.skip_special_tokens;
        let decoder = match tokenizer.pieces() {
            Some(pieces) => {
                let prompt = prompt.iter().map(|&id| tokenizer.visible_piece(pieces, id, skip));
                Decoder::Pieces(PieceDecoder::after_prompt(pieces, prompt))
            }
            None => {
                let mut ids: Vec<u32> = prompt
                    .iter()
                    .rev()
                    .copied()
                    .filter(|&id| tokenizer.is_decoded(id, skip))
                    .take(CONTEXT_TOKENS)
                    .collect();
                ids.reverse();
                Decoder::Window(Window { given: ids.len(), ids })
            }
        };
        let stop = options.stop.matcher().map(|matcher| Stop {
            matcher,
            include: options.include_stop_str_in_output,
            min_tokens: options.min_tokens,
            held: String::new(),
            found: false,
        });
        Self { tokenizer, decoder, skip_special_tokens: skip, stop, tokens: 0 }
    }

    /// Takes the next token. After a stop string no more text comes.
    pub fn push(&mut self, token: u32) -> TextDelta {
        self.tokens = self.tokens.saturating_add(1);
        let Some(mut stop) = self.stop.take() else {
            let mut text = String::new();
            self.decode(token, &mut text);
            return TextDelta { text, stop: None };
        };
        let mut delta = TextDelta::default();
        if !stop.found {
            let seen = stop.held.len();
            self.decode(token, &mut stop.held);
            delta = stop.advance(seen, self.tokens);
        }
        self.stop = Some(stop);
        delta
    }

    /// Ends the text and returns the held-back text. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut text = match &mut self.stop {
            Some(stop) if stop.found => return String::new(),
            Some(stop) => std::mem::take(&mut stop.held),
            None => String::new(),
        };
        match &mut self.decoder {
            Decoder::Pieces(decoder) => decoder.finish(&mut text),
            Decoder::Window(window) => window.flush(&self.tokenizer, self.skip_special_tokens, &mut text),
        }
        text
    }

    fn decode(&mut self, token: u32, out: &mut String) {
        match (&mut self.decoder, self.tokenizer.pieces()) {
            (Decoder::Pieces(decoder), Some(pieces)) => {
                decoder.push(self.tokenizer.visible_piece(pieces, token, self.skip_special_tokens), out);
            }
            (Decoder::Window(window), _) => window.push(token, &self.tokenizer, self.skip_special_tokens, out),
            (Decoder::Pieces(_), None) => {}
        }
    }
}

impl Stop {
    /// Searches for a stop string that ends in `held[seen..]` and passes on the text that cannot be part of one.
    fn advance(&mut self, seen: usize, tokens: u32) -> TextDelta {
        for (at, &byte) in self.held.as_bytes().iter().enumerate().skip(seen) {
            let found = self.matcher.step(byte).filter(|_| tokens > self.min_tokens);
            let Some(stop) = found.map(str::to_owned) else { continue };
            let end = at + 1;
            self.held.truncate(if self.include { end } else { end - stop.len() });
            self.found = true;
            return TextDelta { text: std::mem::take(&mut self.held), stop: Some(stop) };
        }
        let keep = if self.include { 0 } else { self.matcher.pending() };
        let text = if keep == 0 {
            std::mem::take(&mut self.held)
        } else {
            let certain = self.held.len() - keep;
            let text = self.held[..certain].to_owned();
            self.held.drain(..certain);
            text
        };
        TextDelta { text, stop: None }
    }
}

impl Window {
    fn push(&mut self, token: u32, tokenizer: &Tokenizer, skip_special_tokens: bool, out: &mut String) {
        if !tokenizer.is_decoded(token, skip_special_tokens) {
            return;
        }
        self.ids.push(token);
        let text = self.new_text(tokenizer, skip_special_tokens);
        let decided = !text.is_empty() && !text.ends_with(char::REPLACEMENT_CHARACTER);
        if decided || self.ids.len() - self.given >= MAX_UNDECIDED_TOKENS {
            out.push_str(&text);
            // The new tokens become the context of the next ones.
            self.ids.drain(..self.given);
            self.given = self.ids.len();
        }
    }

    fn flush(&mut self, tokenizer: &Tokenizer, skip_special_tokens: bool, out: &mut String) {
        out.push_str(&self.new_text(tokenizer, skip_special_tokens));
        self.given = self.ids.len();
    }

    /// Returns the text of all tokens from where it first differs from that of the preceding ones. Text that was passed
    /// on and that the new tokens change cannot be taken back.
    fn new_text(&self, tokenizer: &Tokenizer, skip_special_tokens: bool) -> String {
        let decode = |ids: &[u32]| tokenizer.decode(ids, skip_special_tokens).unwrap_or_default();
        let (before, mut all) = (decode(&self.ids[..self.given]), decode(&self.ids));
        let common = before.chars().zip(all.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        all.split_off(common)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpecialTokens;

    /// A WordPiece tokenizer: `[SEP]` is special, and `##` is the one token without text.
    fn word_piece() -> Arc<Tokenizer> {
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [{"id": 0, "content": "[SEP]", "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false}],
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": false},
            "model": {"type": "WordPiece", "unk_token": "[SEP]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": {"[SEP]": 0, "one": 1, "##": 2}},
        });
        Arc::new(Tokenizer::from_json(json.to_string().as_bytes(), SpecialTokens::default()).unwrap())
    }

    #[test]
    fn tokens_without_text_do_not_lengthen_the_window() {
        for silent in [0, 2, 1_000_000] {
            let mut stream = TextStream::new(word_piece(), &[1], TextOptions::default());
            for _ in 0..1000 {
                assert_eq!(stream.push(silent).text, "");
                let Decoder::Window(window) = &stream.decoder else { unreachable!("the decoder is not per token") };
                let most = 2 * MAX_UNDECIDED_TOKENS;
                assert!(window.ids.len() <= most, "{silent}: {}", window.ids.len());
            }
            assert_eq!(stream.push(1).text, " one");
        }
    }
}
