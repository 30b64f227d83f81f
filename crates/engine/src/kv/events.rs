//! Events of the prefix cache, for routers that send requests to the server which holds their prefix.

use super::{ChainKey, ExtraKey, TokenSpan};

/// Hash of a block's content and of everything before it: vLLM's `sha256_cbor`.
pub type BlockHash = [u8; 32];

/// A change of the prefix cache. Events come in the order of the changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Consecutive blocks were added to the prefix cache.
    Stored {
        /// Hash of the block before the first of them; `None` if a sequence begins with it.
        parent: Option<BlockHash>,
        /// Hashes of the blocks.
        hashes: Vec<BlockHash>,
        /// Tokens of the blocks, concatenated.
        tokens: Vec<u32>,
        /// Number of tokens in a block.
        block_size: usize,
        /// Extra keys of each block, which are part of its hash; empty if no block has any.
        extra_keys: Vec<Vec<ExtraKey>>,
    },
    /// Blocks were removed from the prefix cache.
    Removed {
        /// Hashes of the blocks.
        hashes: Vec<BlockHash>,
    },
}

/// Receives the changes of the prefix cache. The engine's thread calls it between two steps, so it must not block.
pub trait KvEventSink: Send {
    /// Publishes the events since the last call. `events` is never empty.
    fn publish(&mut self, events: Vec<KvEvent>);
}

/// Events since they were last taken.
#[derive(Debug, Default)]
pub(crate) struct EventLog(Vec<KvEvent>);

impl EventLog {
    pub(crate) fn take(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.0)
    }

    /// Records that the block at `index` of a sequence, whose blocks have these keys, holds `tokens`.
    pub(crate) fn stored(
        &mut self,
        index: usize,
        keys: &[ChainKey],
        tokens: TokenSpan<'_>,
        extra: impl Iterator<Item = ExtraKey>,
    ) {
        let (hash, before) = (keys[index].0, index.checked_sub(1).map(|before| keys[before].0));
        let extra: Vec<ExtraKey> = extra.collect();
        if let Some(KvEvent::Stored { hashes, tokens: all, extra_keys, .. }) = self.0.last_mut()
            && before.is_some()
            && hashes.last() == before.as_ref()
        {
            if !extra.is_empty() || !extra_keys.is_empty() {
                extra_keys.resize_with(hashes.len(), Vec::new);
                extra_keys.push(extra);
            }
            hashes.push(hash);
            all.extend(tokens.iter());
            return;
        }
        self.0.push(KvEvent::Stored {
            parent: before,
            hashes: vec![hash],
            tokens: tokens.iter().collect(),
            block_size: tokens.len(),
            extra_keys: if extra.is_empty() { Vec::new() } else { vec![extra] },
        });
    }

    pub(crate) fn removed(&mut self, key: ChainKey) {
        match self.0.last_mut() {
            Some(KvEvent::Removed { hashes }) => hashes.push(key.0),
            _ => self.0.push(KvEvent::Removed { hashes: vec![key.0] }),
        }
    }
}
