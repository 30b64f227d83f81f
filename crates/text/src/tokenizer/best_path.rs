//! Long words of a Unigram model are encoded by a search that can be interrupted.
//!
//! The search is the library's: for each place of a word, the best path of tokens that ends there, with scores added from
//! the left. A token has at most so many bytes, so every path passes through one of the places just before the search. If
//! the best paths to all of them have a place in common, the tokens before it are certain and are no longer kept.

use std::collections::{BTreeSet, HashMap, VecDeque};

use tokenizers::{Model as _, ModelWrapper};

use super::TokenizerError;
use super::lazy::{Encoding, PAUSE_BYTES, Stop};
use super::model::Model;

/// By how much an unknown character is worse than the worst token.
const UNKNOWN_PENALTY: f64 = 10.0;

/// Encodes long words of a Unigram model.
#[derive(Debug)]
pub(super) struct BestPath {
    /// Bytes of a word that the search takes over, and between two of its pauses.
    pub(super) window: usize,
    /// The score of each token.
    scores: Vec<f64>,
    /// Bytes of the longest token by its first character.
    longest: HashMap<char, usize>,
    unknown: u32,
    unknown_score: f64,
    /// The tokens of all bytes, if unknown characters are spelled in them.
    bytes: Option<Vec<Option<u32>>>,
}

/// The best path to a place.
#[derive(Clone, Copy, Debug)]
struct Node {
    token: u32,
    score: f64,
    /// The place where its last token begins; `None` if no path ends here.
    start: Option<usize>,
}

/// The places of a word that are not certain yet.
struct Search<'w> {
    word: &'w str,
    /// The place of the first node.
    first: usize,
    nodes: VecDeque<Node>,
    /// Where unknown characters begin that are not followed by another token yet.
    unknown_from: Option<usize>,
}

impl BestPath {
    /// `None` for other models and for a Unigram model that has no unknown token or samples its paths.
    pub(super) fn new(model: &Model) -> Option<Self> {
        let Model::Library(ModelWrapper::Unigram(unigram)) = model else { return None };
        if unigram.alpha.is_some_and(|alpha| alpha != 0.0) {
            return None;
        }
        let unknown = serde_json::to_value(unigram).ok()?["unk_id"].as_u64()?;
        let mut longest = HashMap::new();
        for (token, _) in unigram.iter() {
            let Some(first) = token.chars().next() else { continue };
            let bytes = longest.entry(first).or_insert(0);
            *bytes = token.len().max(*bytes);
        }
        let byte = |byte: u8| unigram.token_to_id(&format!("<0x{byte:02X}>"));
        Some(Self {
            window: PAUSE_BYTES,
            scores: unigram.iter().map(|(_, score)| *score).collect(),
            longest,
            unknown: u32::try_from(unknown).ok()?,
            unknown_score: unigram.min_score - UNKNOWN_PENALTY,
            bytes: unigram.byte_fallback().then(|| (0..=u8::MAX).map(byte).collect()),
        })
    }

    /// Whether a word is longer than a window.
    pub(super) fn applies_to(&self, word: &str) -> bool {
        word.len() > self.window
    }

    /// Adds the tokens of a word.
    pub(super) fn encode<E: From<TokenizerError>>(
        &self,
        encoding: &mut Encoding<'_, E>,
        word: &str,
    ) -> Result<(), Stop<E>> {
        let root = Node { token: self.unknown, score: 0.0, start: Some(0) };
        let mut search = Search { word, first: 0, nodes: VecDeque::from([root]), unknown_from: None };
        let (mut next, mut reach) = (self.window, 0);
        for (at, character) in word.char_indices() {
            if at >= next {
                next = at + self.window;
                self.keep_uncertain(encoding, &mut search, (at, reach));
                encoding.wait(encoding.ids.len())?;
            }
            reach = reach.max(self.step(encoding.model, &mut search, (at, character)));
        }
        self.finish(encoding, &mut search, word.len());
        self.end_unknown(encoding, &mut search, word.len());
        Ok(())
    }

    /// Extends the paths to a place by each token that begins there. Returns the bytes of the longest token that might.
    fn step(&self, model: &Model, search: &mut Search<'_>, (at, character): (usize, char)) -> usize {
        let Some(node) = search.node(at).filter(|node| node.start.is_some() || at == 0).copied() else { return 0 };
        let rest = &search.word[at..];
        let longest = self.longest.get(&character).copied().unwrap_or(0);
        let mut known = false;
        for (offset, last) in rest.char_indices().take_while(|&(offset, _)| offset < longest) {
            let bytes = offset + last.len_utf8();
            if let Some(token) = model.token_to_id(&rest[..bytes]) {
                let score = self.scores.get(token as usize).copied().unwrap_or(f64::NEG_INFINITY);
                search.offer(at + bytes, Node { token, score: score + node.score, start: Some(at) });
                known |= offset == 0;
            }
        }
        if !known {
            let score = self.unknown_score + node.score;
            search.offer(at + character.len_utf8(), Node { token: self.unknown, score, start: Some(at) });
        }
        longest.max(character.len_utf8())
    }

    /// Adds the tokens that all paths have in common that pass through the last `reach` bytes before `at`.
    fn keep_uncertain<E: From<TokenizerError>>(
        &self,
        encoding: &mut Encoding<'_, E>,
        search: &mut Search<'_>,
        (at, reach): (usize, usize),
    ) {
        let from = (at + 1).saturating_sub(reach.max(1)).max(search.first);
        let has_path = |place: &usize| search.node(*place).is_some_and(|node| node.start.is_some());
        let mut places: BTreeSet<usize> = (from..=at).filter(has_path).collect();
        while places.len() > 1 {
            let Some(start) = places.pop_last().and_then(|last| search.node(last)).and_then(|node| node.start) else {
                break;
            };
            places.insert(start.max(search.first));
        }
        if let Some(certain) = places.first().copied() {
            self.finish(encoding, search, certain);
        }
    }

    /// Adds the tokens of the best path to a place, and forgets the nodes before it.
    fn finish<E: From<TokenizerError>>(&self, encoding: &mut Encoding<'_, E>, search: &mut Search<'_>, end: usize) {
        let (mut path, mut at) = (vec![], end);
        while at > search.first {
            let Some((node, start)) = search.node(at).and_then(|node| Some((node, node.start?))) else { break };
            path.push((start, node.token));
            at = start;
        }
        for (start, token) in path.into_iter().rev() {
            // The library joins unknown characters and looks their text up again.
            if token == self.unknown {
                search.unknown_from.get_or_insert(start);
            } else {
                self.end_unknown(encoding, search, start);
                encoding.ids.push(token);
            }
        }
        search.nodes.drain(..end - search.first);
        search.first = end;
    }

    /// Adds the tokens of the unknown characters before a place, if there are any.
    fn end_unknown<E: From<TokenizerError>>(
        &self,
        encoding: &mut Encoding<'_, E>,
        search: &mut Search<'_>,
        end: usize,
    ) {
        let Some(start) = search.unknown_from.take() else { return };
        let text = &search.word[start..end];
        let ids = &mut encoding.ids;
        if let Some(token) = encoding.model.token_to_id(text) {
            return ids.push(token);
        }
        let before = ids.len();
        let spelled = self.bytes.as_ref().and_then(|tokens| {
            text.bytes().try_for_each(|byte| tokens[usize::from(byte)].map(|token| ids.push(token)))
        });
        if spelled.is_none() {
            ids.truncate(before);
            ids.push(self.unknown);
        }
    }
}

impl Search<'_> {
    fn node(&self, place: usize) -> Option<&Node> {
        self.nodes.get(place.checked_sub(self.first)?)
    }

    /// Makes a path the best one to a place, unless another one is as good.
    fn offer(&mut self, place: usize, node: Node) {
        let index = place - self.first;
        if self.nodes.len() <= index {
            self.nodes.resize(index + 1, Node { token: 0, score: 0.0, start: None });
        }
        let best = &mut self.nodes[index];
        if best.start.is_none() || node.score > best.score {
            *best = node;
        }
    }
}
