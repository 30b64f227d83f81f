//! Names of block contents.
//!
//! The hash is SHA-256, of the crates in the lock file the one whose collisions nobody can make: a client that could
//! would read another's prefix, as the compared token ids are those of one block and not of its ancestors. A block of 16
//! tokens costs two compressions, 0.1 to 0.2 µs with the SHA instructions of every server CPU since 2019, mostly on the
//! submitting thread.

use sha2::{Digest, Sha256};

use super::TokenSpan;

/// Names the tokens of a sequence up to the end of a full block, and all else that changes their keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChainKey([u8; 32]);

impl ChainKey {
    /// What the first block of a sequence continues. Sequences with different salts share no block.
    pub(crate) fn root(cache_salt: Option<&str>) -> Self {
        let hash = Sha256::new_with_prefix(b"octavo block chain 1");
        Self(match cache_salt {
            Some(salt) => hash.chain_update([1]).chain_update(salt).finalize().into(),
            None => hash.chain_update([0]).finalize().into(),
        })
    }

    /// The key of the block that holds `tokens` and follows this one.
    pub(crate) fn child(&self, tokens: TokenSpan<'_>) -> Self {
        let mut hash = Sha256::new_with_prefix(self.0);
        for part in [tokens.head, tokens.tail] {
            for chunk in part.chunks(16) {
                let mut bytes = [0; 64];
                for (four, token) in bytes.chunks_exact_mut(4).zip(chunk) {
                    four.copy_from_slice(&token.to_le_bytes());
                }
                hash.update(&bytes[..4 * chunk.len()]);
            }
        }
        Self(hash.finalize().into())
    }
}

/// Names the content of a block: a chain in one KV group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockKey {
    /// The tokens.
    pub(crate) chain: ChainKey,
    /// The layers.
    pub(crate) group: u32,
}

impl BlockKey {
    /// 64 of the key's bits, uniformly distributed.
    pub(crate) fn bits(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.chain.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h]) ^ u64::from(self.group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(tokens: &[u32]) -> TokenSpan<'_> {
        TokenSpan { head: tokens, tail: &[] }
    }

    #[test]
    fn keys_follow_content_and_ancestors() {
        let root = ChainKey::root(None);
        let a = root.child(span(&[1, 2, 3, 4]));
        assert_eq!(a, ChainKey::root(None).child(span(&[1, 2, 3, 4])));
        assert_eq!(a, root.child(TokenSpan { head: &[1], tail: &[2, 3, 4] }), "where the tokens lie does not matter");
        assert_ne!(a, root.child(span(&[1, 2, 3, 5])));
        assert_ne!(a, root.child(span(&[1, 2, 3])));
        assert_ne!(a.child(span(&[9])), root.child(span(&[9])), "the parent is part of the key");
    }

    #[test]
    fn the_salt_is_part_of_every_key_of_the_chain() {
        let roots = [ChainKey::root(None), ChainKey::root(Some("")), ChainKey::root(Some("a"))];
        for (i, a) in roots.iter().enumerate() {
            for b in &roots[..i] {
                assert_ne!(a, b);
                assert_ne!(a.child(span(&[1])).child(span(&[2])), b.child(span(&[1])).child(span(&[2])));
            }
        }
    }

    #[test]
    fn long_blocks_hash_like_their_parts_would() {
        let tokens: Vec<u32> = (0..100).collect();
        let whole = ChainKey::root(None).child(span(&tokens));
        for cut in [0, 1, 15, 16, 17, 99, 100] {
            let (head, tail) = tokens.split_at(cut);
            assert_eq!(whole, ChainKey::root(None).child(TokenSpan { head, tail }));
        }
    }
}
