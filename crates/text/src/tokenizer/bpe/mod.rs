//! Byte-pair encoding in compact tables.
//!
//! The tokenizers library has every entry twice as a string of its own, and each thread that encodes keeps the symbols of ten
//! thousand words. Here an entry takes its text and about ten bytes, and nothing is kept of a word. The tokens are those of the
//! library, in the same places.

mod entries;
mod merges;
mod read;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

pub(super) use entries::Entries;
use merges::Merges;

/// A byte-pair model without dropout and without marks at the ends of words.
#[derive(Debug)]
pub(super) struct Bpe {
    entries: Entries,
    merges: Merges,
    /// Token of characters that are no entries; without one they are left out.
    unknown: Option<u32>,
    /// Whether neighbouring unknown characters are one token.
    fuse_unknown: bool,
    /// The token of each byte, if characters that are no entries are spelled in bytes.
    bytes: Option<Box<[Option<u32>; 256]>>,
    /// Whether a word that is an entry is not merged.
    ignore_merges: bool,
}

/// What a model has beside its entries and merges.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Settings<'a> {
    pub(super) unknown: Option<&'a str>,
    pub(super) fuse_unknown: bool,
    pub(super) byte_fallback: bool,
    pub(super) ignore_merges: bool,
}

/// A part of a word: a token, or nothing after it was merged into the one before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    pub(super) token: u32,
    /// Bytes of the word; 0 for nothing.
    pub(super) bytes: u32,
    /// Places of the neighbours, or [`NONE`].
    previous: u32,
    next: u32,
}

/// No neighbour.
const NONE: u32 = u32::MAX;

impl Bpe {
    /// Creates a model from its entries and its merges, best first.
    ///
    /// # Errors
    /// Returns an error if a merge or the unknown token is not among the entries.
    pub(super) fn new<'a>(
        entries: Entries,
        merges: impl Iterator<Item = (&'a str, &'a str)>,
        settings: Settings<'_>,
    ) -> Result<Self, String> {
        let merges = Merges::new(&entries, merges)?;
        let unknown = match settings.unknown {
            Some(token) => Some(entries.id(token).ok_or_else(|| format!("the unknown token `{token}` is no entry"))?),
            None => None,
        };
        let byte = |byte: usize| entries.id(&format!("<0x{byte:02X}>"));
        let bytes = settings.byte_fallback.then(|| Box::new(std::array::from_fn(byte)));
        let (fuse_unknown, ignore_merges) = (settings.fuse_unknown, settings.ignore_merges);
        Ok(Self { entries, merges, unknown, fuse_unknown, bytes, ignore_merges })
    }

    pub(super) fn entries(&self) -> &Entries {
        &self.entries
    }

    /// Whether a word that is an entry is not merged.
    pub(super) fn ignores_merges(&self) -> bool {
        self.ignore_merges
    }

    /// Whether unknown characters may come behind neighbours that are spelled in bytes.
    pub(super) fn moves_unknown(&self) -> bool {
        self.unknown.is_some() && self.bytes.as_ref().is_some_and(|bytes| bytes.contains(&None))
    }

    /// Returns the tokens of a word.
    pub(super) fn tokens(&self, word: &str) -> Vec<Symbol> {
        if self.ignore_merges
            && let Some(token) = self.entries.id(word)
        {
            return vec![Symbol { token, bytes: word.len() as u32, previous: NONE, next: NONE }];
        }
        let mut symbols = self.characters(word);
        self.merge(&mut symbols);
        symbols.retain(|symbol| symbol.bytes != 0);
        symbols
    }

    /// Returns the tokens of the characters of a word.
    fn characters(&self, word: &str) -> Vec<Symbol> {
        let mut symbols = Vec::with_capacity(word.len());
        let mut unknown: Option<Symbol> = None;
        let mut buffer = [0; 4];
        for character in word.chars() {
            let text = character.encode_utf8(&mut buffer);
            let bytes = text.len() as u32;
            if let Some(token) = self.entries.id(text) {
                symbols.extend(unknown.take());
                symbols.push(Symbol { token, bytes, previous: NONE, next: NONE });
            } else if let Some(spelling) = self.spell(text) {
                // As in the library, unknown characters before these follow them.
                symbols.extend(spelling.map(|token| Symbol { token, bytes: 1, previous: NONE, next: NONE }));
            } else if let Some(token) = self.unknown {
                let before = unknown.take();
                let fused = before.filter(|_| self.fuse_unknown).map_or(0, |before| before.bytes);
                symbols.extend(before.filter(|_| !self.fuse_unknown));
                unknown = Some(Symbol { token, bytes: bytes + fused, previous: NONE, next: NONE });
            }
        }
        symbols.extend(unknown);
        symbols
    }

    /// Returns the tokens of the bytes of a character, if all have one.
    fn spell<'t>(&'t self, text: &'t str) -> Option<impl Iterator<Item = u32> + 't> {
        let tokens = self.bytes.as_ref()?;
        let token = |byte: u8| tokens[usize::from(byte)];
        text.bytes().all(|byte| token(byte).is_some()).then(|| text.bytes().filter_map(token))
    }

    /// Merges neighbours, the best merge first and the leftmost of equal ones.
    fn merge(&self, symbols: &mut [Symbol]) {
        let last = symbols.len().saturating_sub(1) as u32;
        for (place, symbol) in (0..).zip(symbols.iter_mut()) {
            symbol.previous = if place == 0 { NONE } else { place - 1 };
            symbol.next = if place == last { NONE } else { place + 1 };
        }
        let mut queue = BinaryHeap::with_capacity(symbols.len());
        queue.extend((0..last).filter_map(|place| self.candidate(symbols, place)));
        while let Some(Reverse((rank, place))) = queue.pop() {
            let left = symbols[place as usize];
            if left.bytes == 0 || left.next == NONE {
                continue;
            }
            let right = symbols[left.next as usize];
            let token = self.merges.merged(rank);
            // What was queued for this place may have become another pair.
            if self.merges.rank(left.token, right.token).is_none_or(|rank| self.merges.merged(rank) != token) {
                continue;
            }
            symbols[place as usize] = Symbol { token, bytes: left.bytes + right.bytes, next: right.next, ..left };
            symbols[left.next as usize].bytes = 0;
            if right.next != NONE {
                symbols[right.next as usize].previous = place;
            }
            if left.previous != NONE {
                queue.extend(self.candidate(symbols, left.previous));
            }
            queue.extend(self.candidate(symbols, place));
        }
    }

    /// Returns the merge of the symbol at a place with the next one.
    fn candidate(&self, symbols: &[Symbol], place: u32) -> Option<Reverse<(u32, u32)>> {
        let left = symbols[place as usize];
        let right = symbols.get(left.next as usize)?;
        Some(Reverse((self.merges.rank(left.token, right.token)?, place)))
    }
}

#[cfg(test)]
mod tests;
