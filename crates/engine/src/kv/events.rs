//! What happens to the blocks in which prefixes are found, for those who route requests by it.

use std::sync::Arc;

use super::{ChainKey, TokenSpan};

/// The name of a block's content and of all that comes before it: vLLM's `sha256_cbor`.
pub type BlockHash = [u8; 32];

/// A change of what can be found, in the order of the changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks that follow one another can be found from now on.
    Stored {
        /// The block before the first of them; `None` if a sequence begins with it.
        parent: Option<BlockHash>,
        /// The blocks.
        hashes: Vec<BlockHash>,
        /// Their tokens, one block's after the other's.
        tokens: Vec<u32>,
        /// Tokens of a block.
        block_size: usize,
        /// What the hash of the first block has besides, if it is a sequence's first.
        cache_salt: Option<Arc<str>>,
    },
    /// These blocks cannot be found any more.
    Removed {
        /// The blocks.
        hashes: Vec<BlockHash>,
    },
}

/// Who is told. The engine's thread calls it between two steps: it must not block.
pub trait KvEventSink: Send {
    /// Takes what happened since the last call; never nothing.
    fn publish(&mut self, events: Vec<KvEvent>);
}

/// The events since they were last taken.
#[derive(Debug, Default)]
pub(crate) struct EventLog(Vec<KvEvent>);

impl EventLog {
    pub(crate) fn take(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.0)
    }

    /// The block at `index` of a sequence, whose blocks have these keys, holds `tokens`.
    pub(crate) fn stored(&mut self, index: usize, keys: &[ChainKey], tokens: TokenSpan<'_>, salt: Option<&Arc<str>>) {
        let (hash, before) = (keys[index].0, index.checked_sub(1).map(|before| keys[before].0));
        if let Some(KvEvent::Stored { hashes, tokens: all, .. }) = self.0.last_mut()
            && before.is_some()
            && hashes.last() == before.as_ref()
        {
            hashes.push(hash);
            all.extend(tokens.iter());
            return;
        }
        self.0.push(KvEvent::Stored {
            parent: before,
            hashes: vec![hash],
            tokens: tokens.iter().collect(),
            block_size: tokens.len(),
            cache_salt: salt.filter(|_| before.is_none()).cloned(),
        });
    }

    pub(crate) fn removed(&mut self, key: ChainKey) {
        match self.0.last_mut() {
            Some(KvEvent::Removed { hashes }) => hashes.push(key.0),
            _ => self.0.push(KvEvent::Removed { hashes: vec![key.0] }),
        }
    }
}
