//! The bytes of every token, which make detokenising a table look-up.

use serde_json::Value;
use tokenizers::DecoderWrapper;

use super::Entry;

/// Bytes of each token by id, and the treatment of the start of a text.
///
/// In byte-level and SentencePiece vocabularies, a token's bytes do not depend on its neighbours, except for spaces
/// stripped at the start of the text. Other decoders (WordPiece, CTC) lack this property and have no table.
#[derive(Debug)]
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// Ends of the tokens: token `id` is `bytes[ends[id - 1]..ends[id]]`.
    ends: Vec<u32>,
    /// Maximum number of spaces removed from the start of a text.
    leading_spaces: usize,
}

/// Conversion of a vocabulary entry to bytes.
#[derive(Debug, PartialEq)]
enum Rule {
    /// Each character stands for one byte, as in GPT-2.
    ByteLevel,
    /// Entries are text with replacements (`▁` for a space). With `byte_fallback`, `<0x0A>` stands for a byte.
    Text { replacements: Vec<(String, String)>, byte_fallback: bool },
}

impl Pieces {
    /// Builds the table; `None` if the decoder does not allow one.
    pub(super) fn new(decoder: Option<&DecoderWrapper>, entries: &[Entry<'_>]) -> Option<Self> {
        let decoder = serde_json::to_value(decoder?).ok()?;
        let (rule, leading_spaces) = parse_decoder(&decoder)?;
        let unicode_to_byte = byte_characters();
        let mut pieces = Self { bytes: Vec::new(), ends: Vec::with_capacity(entries.len()), leading_spaces };
        for entry in entries {
            if let Some(entry) = entry {
                rule.append(entry, &unicode_to_byte, &mut pieces.bytes);
            }
            pieces.ends.push(u32::try_from(pieces.bytes.len()).ok()?);
        }
        pieces.bytes.shrink_to_fit();
        Some(pieces)
    }

    /// Returns the bytes of a token inside a text; empty for an id without a token.
    pub(crate) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Returns `piece` without the spaces that are stripped at the start of a text.
    pub(crate) fn without_leading<'a>(&self, piece: &'a [u8]) -> &'a [u8] {
        let spaces = piece.iter().take(self.leading_spaces).take_while(|&&byte| byte == b' ').count();
        &piece[spaces..]
    }
}

impl Rule {
    fn append(&self, token: &str, unicode_to_byte: &[Option<u8>; 0x180], out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel => {
                let start = out.len();
                for character in token.chars() {
                    match unicode_to_byte.get(character as usize).copied().flatten() {
                        Some(byte) => out.push(byte),
                        // An added token is plain text, which a character outside the byte alphabet reveals.
                        None => {
                            out.truncate(start);
                            out.extend_from_slice(token.as_bytes());
                            return;
                        }
                    }
                }
            }
            Self::Text { replacements, byte_fallback } => {
                if let Some(byte) = byte_token(token).filter(|_| *byte_fallback) {
                    out.push(byte);
                    return;
                }
                let mut text = std::borrow::Cow::Borrowed(token);
                for (from, to) in replacements {
                    if text.contains(from.as_str()) {
                        text = text.replace(from.as_str(), to).into();
                    }
                }
                out.extend_from_slice(text.as_bytes());
            }
        }
    }
}

/// Parses `<0x0A>` as a byte.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

/// Returns the character of a byte in GPT-2's byte-level vocabularies: printable Latin-1 stands for itself, and the 68 other
/// bytes are U+0100 and up, in order.
pub fn byte_character(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..);
    if printable(byte) {
        return char::from(byte);
    }
    let others = (0..byte).filter(|&other| !printable(other)).count();
    char::from_u32(0x100 + others as u32).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// Returns the map from those characters to their bytes.
pub(super) fn byte_characters() -> [Option<u8>; 0x180] {
    let mut map = [None; 0x180];
    for byte in 0..=u8::MAX {
        map[byte_character(byte) as usize] = Some(byte);
    }
    map
}

/// Parses a decoder of tokenizer.json; `None` if its result is not a concatenation of per-token bytes.
fn parse_decoder(decoder: &Value) -> Option<(Rule, usize)> {
    let steps = match decoder["type"].as_str()? {
        "Sequence" => decoder["decoders"].as_array()?.as_slice(),
        _ => std::slice::from_ref(decoder),
    };
    if let [only] = steps
        && only["type"] == "ByteLevel"
    {
        return Some((Rule::ByteLevel, 0));
    }
    let (mut replacements, mut byte_fallback, mut fused, mut leading_spaces) = (Vec::new(), false, false, 0);
    for step in steps {
        match step["type"].as_str()? {
            "Replace" if !byte_fallback && !fused => {
                let from = step["pattern"]["String"].as_str()?;
                replacements.push((from.to_owned(), step["content"].as_str()?.to_owned()));
            }
            "ByteFallback" if !fused => byte_fallback = true,
            "Fuse" => fused = true,
            "Strip" if fused && leading_spaces == 0 => {
                if step["content"] != " " || step["stop"] != 0 {
                    return None;
                }
                leading_spaces = usize::try_from(step["start"].as_u64()?).ok()?;
            }
            _ => return None,
        }
    }
    Some((Rule::Text { replacements, byte_fallback }, leading_spaces))
}

/// Joins token bytes to text and holds back a character until its last byte.
#[derive(Debug)]
pub(crate) struct PieceDecoder {
    /// First bytes of a character, at most three.
    partial: [u8; 4],
    partial_len: usize,
    /// Whether the partial character belongs only to the prompt, so that it is dropped if it is never completed.
    partial_of_prompt: bool,
    /// Number of spaces still to be removed from the start of the text.
    leading_spaces: usize,
}

impl PieceDecoder {
    /// Creates a decoder at the start of a text.
    pub(crate) fn new(pieces: &Pieces) -> Self {
        Self { partial: [0; 4], partial_len: 0, partial_of_prompt: false, leading_spaces: pieces.leading_spaces }
    }

    /// Creates a decoder that continues after `prompt`, the pieces of the preceding tokens. Their text is not repeated,
    /// but a character begun there is returned whole when its last byte arrives.
    pub(crate) fn after_prompt<'a, I>(pieces: &Pieces, prompt: I) -> Self
    where
        I: DoubleEndedIterator<Item = &'a [u8]> + Clone,
    {
        let mut decoder = Self::new(pieces);
        if prompt.clone().any(|piece| !piece.is_empty()) {
            decoder.leading_spaces = 0;
        }
        // A partial character has at most three bytes, so it is in the last three pieces that are not empty.
        let last = prompt.rev().filter(|piece| !piece.is_empty()).take(3).collect::<Vec<_>>();
        let mut ignored = String::new();
        for piece in last.into_iter().rev() {
            decoder.push(piece, &mut ignored);
        }
        decoder.partial_of_prompt = decoder.partial_len > 0;
        decoder
    }

    /// Adds a token's bytes and appends to `out` the text that is now certain.
    pub(crate) fn push(&mut self, mut bytes: &[u8], out: &mut String) {
        while self.leading_spaces > 0 && !bytes.is_empty() {
            match bytes.strip_prefix(b" ") {
                Some(rest) => {
                    bytes = rest;
                    self.leading_spaces -= 1;
                }
                None => self.leading_spaces = 0,
            }
        }
        while self.partial_len > 0
            && let Some((&byte, rest)) = bytes.split_first()
        {
            self.partial[self.partial_len] = byte;
            match std::str::from_utf8(&self.partial[..=self.partial_len]) {
                Ok(character) => {
                    out.push_str(character);
                    self.partial_len = 0;
                }
                Err(error) if error.error_len().is_none() => {
                    self.partial_len += 1;
                    self.partial_of_prompt = false;
                }
                // The byte does not continue the character, so the character is replaced and the byte examined again.
                Err(_) => {
                    self.give_up_partial(out);
                    continue;
                }
            }
            bytes = rest;
        }
        self.push_whole(bytes, out);
    }

    /// Does the same as [`push`](Self::push) with no partial character before `bytes`.
    fn push_whole(&mut self, mut bytes: &[u8], out: &mut String) {
        loop {
            let error = match std::str::from_utf8(bytes) {
                Ok(text) => return out.push_str(text),
                Err(error) => error,
            };
            let (valid, rest) = bytes.split_at(error.valid_up_to());
            out.push_str(std::str::from_utf8(valid).unwrap_or_default());
            let Some(invalid) = error.error_len() else {
                self.partial[..rest.len()].copy_from_slice(rest);
                self.partial_len = rest.len();
                self.partial_of_prompt = false;
                return;
            };
            out.push(char::REPLACEMENT_CHARACTER);
            bytes = &rest[invalid..];
        }
    }

    /// Ends the text. An incomplete character becomes U+FFFD.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if self.partial_len > 0 {
            self.give_up_partial(out);
        }
    }

    fn give_up_partial(&mut self, out: &mut String) {
        if !self.partial_of_prompt {
            out.push(char::REPLACEMENT_CHARACTER);
        }
        self.partial_len = 0;
        self.partial_of_prompt = false;
    }
}
