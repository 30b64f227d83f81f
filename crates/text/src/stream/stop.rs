//! Search for stop strings in text that arrives in pieces.

use std::sync::Arc;

/// State without a match.
const ROOT: u32 = 0;
const NONE: u32 = u32::MAX;

/// The stop strings of a request. Clones share the strings and the automaton that finds them.
#[derive(Clone, Debug, Default)]
pub struct StopStrings(Option<Arc<Automaton>>);

impl From<Vec<String>> for StopStrings {
    /// Empty strings match nothing.
    fn from(strings: Vec<String>) -> Self {
        let any = strings.iter().any(|string| !string.is_empty());
        Self(any.then(|| Arc::new(Automaton::new(strings))))
    }
}

impl StopStrings {
    /// Returns the strings, none if all are empty.
    pub fn strings(&self) -> &[String] {
        self.0.as_ref().map_or(&[], |automaton| &automaton.strings)
    }

    /// The search for the strings in one text; `None` if there are none.
    pub(super) fn matcher(&self) -> Option<StopMatcher> {
        self.0.as_ref().map(|automaton| StopMatcher { automaton: Arc::clone(automaton), current: ROOT })
    }
}

/// The search in one text.
#[derive(Debug)]
pub(super) struct StopMatcher {
    automaton: Arc<Automaton>,
    current: u32,
}

impl StopMatcher {
    /// Takes the next byte of the text. Returns a string that ends with it; of several, the first in the list.
    pub(super) fn step(&mut self, byte: u8) -> Option<&str> {
        self.current = self.automaton.next(self.current, byte);
        let found = self.automaton.states[self.current as usize].found;
        self.automaton.strings.get(found as usize).map(String::as_str)
    }

    /// Returns the number of bytes at the end of the text that start a stop string.
    pub(super) fn pending(&self) -> usize {
        self.automaton.pending(self.current)
    }
}

/// An Aho-Corasick automaton over bytes: after each byte its state is the longest suffix of the text that is a prefix
/// of a stop string. Work is linear in the text and in the total length of the strings.
#[derive(Debug)]
struct Automaton {
    strings: Vec<String>,
    states: Vec<State>,
    /// Successors of the root, the state after nearly every byte.
    root: [u32; 256],
}

#[derive(Debug)]
struct State {
    byte: u8,
    /// Length of the prefix.
    depth: u32,
    /// State of the longest proper suffix that is a prefix too.
    fail: u32,
    first_child: u32,
    next_sibling: u32,
    /// Index of the first string in the list that ends here.
    found: u32,
}

impl Automaton {
    fn new(strings: Vec<String>) -> Self {
        let root = State { byte: 0, depth: 0, fail: ROOT, first_child: NONE, next_sibling: NONE, found: NONE };
        let mut automaton = Self { strings: Vec::new(), states: vec![root], root: [ROOT; 256] };
        for (index, string) in (0..).zip(&strings) {
            let state = automaton.insert(string.as_bytes());
            if state != ROOT {
                let found = &mut automaton.states[state as usize].found;
                *found = index.min(*found);
            }
        }
        automaton.link();
        automaton.strings = strings;
        automaton
    }

    fn insert(&mut self, string: &[u8]) -> u32 {
        let mut state = ROOT;
        for &byte in string {
            state = match self.child(state, byte) {
                Some(child) => child,
                None => self.add_child(state, byte),
            };
        }
        state
    }

    fn add_child(&mut self, parent: u32, byte: u8) -> u32 {
        let child = u32::try_from(self.states.len()).unwrap_or(NONE - 1);
        let State { depth, first_child, .. } = self.states[parent as usize];
        self.states.push(State {
            byte,
            depth: depth + 1,
            fail: ROOT,
            first_child: NONE,
            next_sibling: first_child,
            found: NONE,
        });
        self.states[parent as usize].first_child = child;
        if parent == ROOT {
            self.root[usize::from(byte)] = child;
        }
        child
    }

    /// Sets `fail` and the matches along it, shorter prefixes first.
    fn link(&mut self) {
        let mut queue = std::collections::VecDeque::from([ROOT]);
        while let Some(parent) = queue.pop_front() {
            let mut child = self.states[parent as usize].first_child;
            while child != NONE {
                let byte = self.states[child as usize].byte;
                let fail = if parent == ROOT { ROOT } else { self.next(self.states[parent as usize].fail, byte) };
                let inherited = self.states[fail as usize].found;
                let state = &mut self.states[child as usize];
                state.fail = fail;
                state.found = state.found.min(inherited);
                queue.push_back(child);
                child = state.next_sibling;
            }
        }
    }

    fn child(&self, state: u32, byte: u8) -> Option<u32> {
        if state == ROOT {
            let child = self.root[usize::from(byte)];
            return (child != ROOT).then_some(child);
        }
        let mut child = self.states[state as usize].first_child;
        while child != NONE {
            let State { byte: edge, next_sibling, .. } = self.states[child as usize];
            if edge == byte {
                return Some(child);
            }
            child = next_sibling;
        }
        None
    }

    fn next(&self, mut state: u32, byte: u8) -> u32 {
        loop {
            match self.child(state, byte) {
                Some(child) => return child,
                None if state == ROOT => return ROOT,
                None => state = self.states[state as usize].fail,
            }
        }
    }

    fn pending(&self, state: u32) -> usize {
        let mut state = &self.states[state as usize];
        // A state without successors is a whole string that was ignored.
        while state.first_child == NONE && state.depth > 0 {
            state = &self.states[state.fail as usize];
        }
        state.depth as usize
    }
}
