//! Hashes that identify block contents.
//!
//! The hash is vLLM's `sha256_cbor`: SHA-256 over the parent's hash, the block's tokens and everything else its content
//! depends on, as canonical CBOR, so that a router which knows vLLM's hashes knows these. A hit compares the token ids
//! of one block and not of its ancestors, so a client that could produce collisions could read another client's prefix;
//! SHA-256 rules that out. A block of 16 tokens costs two compressions, 0.1 to 0.2 µs with the SHA instructions of
//! every server CPU since 2019, mostly on the submitting thread.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::TokenSpan;
use crate::image::overlapping;
use crate::{Adapter, ImageHash, PromptImage};

/// Seed of vLLM's hash chains when `PYTHONHASHSEED` is not set.
pub(crate) const DEFAULT_SEED: &str = "vllm-none-hash";

/// Property of a block, beside its tokens and the blocks before it, on which its content depends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// Adapter of the sequence. Every block of it has this key.
    Adapter(Adapter),
    /// An image with tokens in the block.
    Image {
        /// Identity of the image.
        hash: ImageHash,
        /// Position of its first token, counted from the first token of the block. May be negative.
        offset: i64,
    },
    /// Cache salt. Only the first block of a sequence has it.
    CacheSalt(Arc<str>),
}

/// Properties of a sequence on which the content of its blocks depends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extras {
    pub(crate) salt: Option<Arc<str>>,
    pub(crate) images: Arc<[PromptImage]>,
    pub(crate) adapter: Option<Adapter>,
}

impl Extras {
    /// Returns the properties of a block, in the order of vLLM.
    pub(crate) fn of_block(&self, block: usize, block_size: usize) -> impl Iterator<Item = ExtraKey> + Clone {
        let start = block * block_size;
        let images = &self.images[overlapping(&self.images, &(start..start + block_size))];
        let images = images
            .iter()
            .map(move |image| ExtraKey::Image { hash: image.hash, offset: i64::from(image.span.start) - start as i64 });
        let salt = self.salt.iter().filter(move |_| block == 0).cloned();
        self.adapter.iter().cloned().map(ExtraKey::Adapter).chain(images).chain(salt.map(ExtraKey::CacheSalt))
    }
}

/// Identifies the tokens of a sequence up to the end of a full block, and everything else that changes their keys and
/// values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChainKey(pub(crate) [u8; 32]);

impl ChainKey {
    /// Returns the parent of a sequence's first block. With different seeds, no two blocks have the same key.
    pub(crate) fn root(seed: &str) -> Self {
        let mut cbor = Cbor::new();
        cbor.text(seed);
        cbor.finish()
    }

    /// Returns the key of the block that holds `tokens` and follows this one. The chain carries extra keys on, so
    /// sequences with different salts share no block.
    pub(crate) fn child(
        &self,
        tokens: TokenSpan<'_>,
        extra: impl IntoIterator<Item = ExtraKey, IntoIter: Clone>,
    ) -> Self {
        let extra = extra.into_iter();
        let mut cbor = Cbor::new();
        cbor.head(Cbor::ARRAY, 3);
        cbor.head(Cbor::BYTES, self.0.len());
        cbor.put(&self.0);
        cbor.head(Cbor::ARRAY, tokens.len());
        for token in tokens.iter() {
            cbor.head(Cbor::UINT, token as usize);
        }
        match extra.clone().count() {
            0 => cbor.put(&[Cbor::NULL]),
            count => cbor.head(Cbor::ARRAY, count),
        }
        extra.for_each(|key| cbor.extra(&key));
        cbor.finish()
    }
}

/// Writes canonical CBOR into a hash.
struct Cbor {
    hash: Sha256,
    /// Bytes not hashed yet. A call for every token would cost more than its hash.
    pending: [u8; 128],
    len: usize,
}

impl Cbor {
    /// CBOR major types, in the top three bits of a head.
    const UINT: u8 = 0;
    /// The number is −1 − n.
    const NEGATIVE: u8 = 1 << 5;
    const BYTES: u8 = 2 << 5;
    const TEXT: u8 = 3 << 5;
    const ARRAY: u8 = 4 << 5;
    const NULL: u8 = 0xf6;

    fn new() -> Self {
        Self { hash: Sha256::new(), pending: [0; 128], len: 0 }
    }

    /// Writes a type and a 32-bit number in the shortest form.
    fn head(&mut self, kind: u8, number: usize) {
        let [.., a, b, c, d] = number.to_be_bytes();
        match number {
            0..24 => self.put(&[kind | d]),
            24..0x100 => self.put(&[kind | 24, d]),
            0x100..0x1_0000 => self.put(&[kind | 25, c, d]),
            _ => self.put(&[kind | 26, a, b, c, d]),
        }
    }

    fn extra(&mut self, key: &ExtraKey) {
        match key {
            ExtraKey::Image { hash, offset } => {
                self.head(Self::ARRAY, 3);
                self.text("mm");
                self.text(&hash.to_string());
                match usize::try_from(*offset) {
                    Ok(offset) => self.head(Self::UINT, offset),
                    Err(_) => self.head(Self::NEGATIVE, !*offset as usize),
                }
            }
            ExtraKey::Adapter(adapter) => {
                self.head(Self::ARRAY, 3);
                self.text("lora");
                self.text(adapter.name());
                self.text(adapter.origin());
            }
            ExtraKey::CacheSalt(salt) => {
                self.head(Self::ARRAY, 2);
                self.text("cache_salt");
                self.text(salt);
            }
        }
    }

    fn text(&mut self, text: &str) {
        self.head(Self::TEXT, text.len());
        self.put(text.as_bytes());
    }

    fn put(&mut self, bytes: &[u8]) {
        if self.len + bytes.len() > self.pending.len() {
            self.hash.update(&self.pending[..self.len]);
            self.len = 0;
        }
        match self.pending.get_mut(self.len..self.len + bytes.len()) {
            Some(room) => {
                room.copy_from_slice(bytes);
                self.len += bytes.len();
            }
            None => self.hash.update(bytes),
        }
    }

    fn finish(self) -> ChainKey {
        ChainKey(self.hash.chain_update(&self.pending[..self.len]).finalize().into())
    }
}

/// Identifies the content of a block: a chain in one KV group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockKey {
    /// Tokens of the sequence up to the end of the block.
    pub(crate) chain: ChainKey,
    /// Index of the KV group.
    pub(crate) group: u32,
}

impl BlockKey {
    /// Returns 64 bits of the key, uniformly distributed.
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

    fn salted(salt: &str) -> ExtraKey {
        ExtraKey::CacheSalt(salt.into())
    }

    fn root() -> ChainKey {
        ChainKey::root(DEFAULT_SEED)
    }

    #[test]
    fn keys_follow_content_and_ancestors() {
        let a = root().child(span(&[1, 2, 3, 4]), None);
        assert_eq!(a, root().child(span(&[1, 2, 3, 4]), None));
        let parted = TokenSpan { head: &[1], tail: &[2, 3, 4] };
        assert_eq!(a, root().child(parted, None), "where the tokens lie does not matter");
        assert_ne!(a, root().child(span(&[1, 2, 3, 5]), None));
        assert_ne!(a, root().child(span(&[1, 2, 3]), None));
        assert_ne!(a.child(span(&[9]), None), root().child(span(&[9]), None), "the parent is part of the key");
        assert_ne!(a, ChainKey::root("0").child(span(&[1, 2, 3, 4]), None), "and so is the seed");
    }

    #[test]
    fn the_salt_is_part_of_every_key_of_the_chain() {
        let firsts = [None, Some(""), Some("a")].map(|salt| root().child(span(&[1]), salt.map(salted)));
        for (i, a) in firsts.iter().enumerate() {
            for b in &firsts[..i] {
                assert_ne!(a, b);
                assert_ne!(a.child(span(&[2]), None), b.child(span(&[2]), None));
            }
        }
    }

    #[test]
    fn long_blocks_hash_like_their_parts_would() {
        let tokens: Vec<u32> = (0..100).map(|n| n * 1000).collect();
        let whole = root().child(span(&tokens), None);
        for cut in [0, 1, 15, 16, 17, 99, 100] {
            let (head, tail) = tokens.split_at(cut);
            assert_eq!(whole, root().child(TokenSpan { head, tail }, None));
        }
    }

    /// The expected values come from Python: `hashlib.sha256(cbor((parent, tokens, extra)))`.
    #[test]
    fn keys_with_images_are_those_of_vllm() {
        let hex = |key: ChainKey| ImageHash(key.0).to_string();
        let image = |hash, offset| ExtraKey::Image { hash: ImageHash(hash), offset };
        let counting = std::array::from_fn(|byte| byte as u8);
        let first = root().child(span(&(0..16).collect::<Vec<_>>()), None);
        let extra = [image(counting, -3), image([255; 32], 40), salted("s")];
        assert_eq!(
            hex(first.child(span(&[1, 2, 3]), extra)),
            "7250642c44b84fd9c512bc76dd08bf57f07fe8df385c714dea30090479610dc7"
        );
        assert_eq!(
            hex(root().child(span(&[1, 2, 3]), [image(counting, -300)])),
            "6ecc4bc871871da5533098fcb3f02a01492b7ddc1bd0ac1fcdc79080f54cc449"
        );
    }

    /// The expected values come from vLLM 0.33.
    #[test]
    fn keys_with_adapters_are_those_of_vllm() {
        let hex = |key: ChainKey| key.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let adapter = || ExtraKey::Adapter(Adapter::new(1, "sql", "/adapters/sql", ()));
        let tokens: Vec<u32> = (0..32).collect();
        let first = root().child(span(&tokens[..16]), [adapter()]);
        assert_eq!(hex(first), "8197107baf430f7cae998e7d0478285e7ffc745b2972fac1fddad421bc54a1d2");
        assert_eq!(
            hex(first.child(span(&tokens[16..]), [adapter()])),
            "1ae5abfe4ce335e4b3fd5e81236134ba22454741bd6759dc700c8e0f1be8e546"
        );
        let salted = root().child(span(&tokens[..16]), [adapter(), salted("tenant-1")]);
        assert_eq!(hex(salted), "fa90b2a21f2251a4d8025108cdb46fa71bbf5d27aeac21dee35f547d8c2fec78");
    }

    /// The expected values come from Python: `hashlib.sha256(cbor2.dumps((parent, tokens, extra), canonical=True))`.
    #[test]
    fn keys_are_those_of_vllm() {
        let hex = |key: ChainKey| key.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let first = root().child(span(&(0..16).collect::<Vec<_>>()), None);
        assert_eq!(hex(root()), "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
        assert_eq!(hex(first), "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749");
        let wide = [0, 23, 24, 255, 256, 65535, 65536, 128_255, 151_643, 7, 8, 9, 10, 11, 12, 13];
        assert_eq!(
            hex(first.child(span(&wide), None)),
            "134ab55fd72585d9f517c22e6894d0d8fedac491a00bc438f8d4f46e99331211"
        );
        let salted = ChainKey::root("0").child(span(&[1, 2, 3]), Some(salted("tenant-1")));
        assert_eq!(hex(salted), "70c3d2c347cfbffeb162b1827a77a8d10720b76aef704059b874b086cee7bedf");
    }
}
