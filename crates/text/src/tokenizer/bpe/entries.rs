//! The texts of tokens by id, and the ids by text.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

/// Largest number of ids, so that an id far above the others takes no memory: more than any vocabulary has.
const MOST: usize = 1 << 24;

/// The entries of a vocabulary.
#[derive(Debug, Default)]
pub(in crate::tokenizer) struct Entries {
    texts: String,
    /// Ends of the texts: that of `id` is `texts[ends[id - 1]..ends[id]]`.
    ends: Vec<u32>,
    /// The ids of the texts. An id that is not here has no entry.
    ids: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl Entries {
    /// Creates the table from entries in ascending order of their ids. Of two entries with the same text, the first one counts.
    ///
    /// # Errors
    /// Returns an error if ids do not ascend or are too large, or if the texts are longer than 4 GiB.
    pub(in crate::tokenizer) fn new<'a>(
        entries: impl ExactSizeIterator<Item = (u32, &'a str)>,
    ) -> Result<Self, String> {
        let mut table = Self {
            ends: Vec::with_capacity(entries.len()),
            ids: HashTable::with_capacity(entries.len()),
            ..Self::default()
        };
        for (id, text) in entries {
            table.push(id, text)?;
        }
        table.texts.shrink_to_fit();
        table.ends.shrink_to_fit();
        Ok(table)
    }

    fn push(&mut self, id: u32, text: &str) -> Result<(), String> {
        let at = id as usize;
        if at < self.ends.len() {
            return Err(format!("the id {id} has two entries"));
        }
        if at >= MOST {
            return Err(format!("the id {id} is too large"));
        }
        self.ends.resize(at, self.texts.len() as u32);
        self.texts.push_str(text);
        self.ends.push(u32::try_from(self.texts.len()).map_err(|_| "the entries are longer than 4 GiB".to_owned())?);
        if self.id(text).is_none() {
            let (texts, ends, hasher) = (&self.texts, &self.ends, &self.hasher);
            let hash = |&id: &u32| hasher.hash_one(slice(texts, ends, id));
            self.ids.insert_unique(hasher.hash_one(text), id, hash);
        }
        Ok(())
    }

    /// Returns one more than the largest id.
    pub(in crate::tokenizer) fn end(&self) -> usize {
        self.ends.len()
    }

    /// Returns the number of different texts.
    pub(in crate::tokenizer) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns the id of a text.
    pub(in crate::tokenizer) fn id(&self, text: &str) -> Option<u32> {
        let is_it = |&id: &u32| slice(&self.texts, &self.ends, id) == text;
        self.ids.find(self.hasher.hash_one(text), is_it).copied()
    }

    /// Returns the text of an id.
    pub(in crate::tokenizer) fn text(&self, id: u32) -> Option<&str> {
        if id as usize >= self.ends.len() {
            return None;
        }
        Some(slice(&self.texts, &self.ends, id)).filter(|text| self.id(text) == Some(id))
    }

    /// Returns the entries in ascending order of their ids.
    pub(in crate::tokenizer) fn iter(&self) -> impl Iterator<Item = (u32, &str)> {
        (0..self.ends.len() as u32).filter_map(|id| Some((id, self.text(id)?)))
    }
}

/// Returns the text of an id, which is empty if the id has no entry.
fn slice<'a>(texts: &'a str, ends: &[u32], id: u32) -> &'a str {
    let start = if id == 0 { 0 } else { ends[id as usize - 1] };
    &texts[start as usize..ends[id as usize] as usize]
}
