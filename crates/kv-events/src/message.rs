//! Batches of events as MessagePack, in the format of vLLM's readers.

use octavo_engine::{BlockHash, ExtraKey, KvEvent};

use crate::Batch;

/// Storage medium of the engine's own cache, whatever its device: routers treat it as the fastest tier.
const MEDIUM: &str = "GPU";

/// Encoding of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// Map with the key `type`, as in vLLM 0.33.
    #[default]
    Maps,
    /// Array that begins with the type, as in older releases.
    Arrays,
}

/// Encodes a batch: its time, its events and its data-parallel rank.
pub(crate) fn encode(batch: &Batch, encoding: Encoding, int_hashes: bool) -> Vec<u8> {
    let mut out = Writer { bytes: Vec::with_capacity(256), int_hashes };
    out.array(3);
    out.float(batch.time);
    out.array(batch.events.len());
    for event in &batch.events {
        match encoding {
            Encoding::Maps => map(&mut out, event),
            Encoding::Arrays => array(&mut out, event),
        }
    }
    out.uint(0);
    out.bytes
}

fn map(out: &mut Writer, event: &KvEvent) {
    match event {
        KvEvent::Stored { extra_keys, .. } => {
            out.map(8 + usize::from(!extra_keys.is_empty()));
            out.text("type");
            out.text("BlockStored");
            stored(out, event, true);
        }
        KvEvent::Removed { hashes } => {
            out.map(3);
            out.text("type");
            out.text("BlockRemoved");
            out.text("block_hashes");
            out.hashes(hashes);
            out.text("medium");
            out.text(MEDIUM);
        }
    }
}

fn array(out: &mut Writer, event: &KvEvent) {
    match event {
        KvEvent::Stored { extra_keys, .. } => {
            out.array(8 + usize::from(!extra_keys.is_empty()));
            out.text("BlockStored");
            stored(out, event, false);
        }
        KvEvent::Removed { hashes } => {
            out.array(3);
            out.text("BlockRemoved");
            out.hashes(hashes);
            out.text(MEDIUM);
        }
    }
}

/// Writes the fields of stored blocks in vLLM's order, with or without their names.
fn stored(out: &mut Writer, event: &KvEvent, named: bool) {
    let KvEvent::Stored { parent, hashes, tokens, block_size, extra_keys } = event else { return };
    let name = |out: &mut Writer, name: &str| {
        if named {
            out.text(name);
        }
    };
    name(out, "block_hashes");
    out.hashes(hashes);
    name(out, "parent_block_hash");
    match parent {
        Some(parent) => out.hash(parent),
        None => out.nil(),
    }
    name(out, "token_ids");
    out.array(tokens.len());
    tokens.iter().for_each(|&token| out.uint(u64::from(token)));
    name(out, "block_size");
    out.uint(*block_size as u64);
    let adapter = extra_keys.iter().flatten().find_map(|key| match key {
        ExtraKey::Adapter(adapter) => Some(adapter),
        _ => None,
    });
    name(out, "lora_id");
    match adapter {
        Some(adapter) => out.uint(adapter.number()),
        None => out.nil(),
    }
    name(out, "medium");
    out.text(MEDIUM);
    name(out, "lora_name");
    match adapter {
        Some(adapter) => out.text(adapter.name()),
        None => out.nil(),
    }
    if !extra_keys.is_empty() {
        name(out, "extra_keys");
        out.array(extra_keys.len());
        extra_keys.iter().for_each(|keys| extra(out, keys));
    }
}

/// Writes the extra keys of a block: the other inputs of its hash.
fn extra(out: &mut Writer, keys: &[ExtraKey]) {
    if keys.is_empty() {
        return out.nil();
    }
    out.array(keys.len());
    for key in keys {
        match key {
            ExtraKey::Image { hash, offset } => {
                out.array(3);
                out.text("mm");
                out.text(&hash.to_string());
                out.int(*offset);
            }
            ExtraKey::Adapter(adapter) => out.text(adapter.name()),
            ExtraKey::CacheSalt(salt) => {
                out.array(2);
                out.text("cache_salt");
                out.text(salt);
            }
        }
    }
}

/// Appends encoded values to a buffer.
struct Writer {
    bytes: Vec<u8>,
    int_hashes: bool,
}

impl Writer {
    fn nil(&mut self) {
        self.bytes.push(0xc0);
    }

    fn float(&mut self, value: f64) {
        self.bytes.push(0xcb);
        self.bytes.extend(value.to_be_bytes());
    }

    fn uint(&mut self, value: u64) {
        match value {
            0..0x80 => self.bytes.push(value as u8),
            0x80..0x100 => self.bytes.extend([0xcc, value as u8]),
            0x100..0x1_0000 => self.tagged(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..0x1_0000_0000 => self.tagged(0xce, &(value as u32).to_be_bytes()),
            _ => self.tagged(0xcf, &value.to_be_bytes()),
        }
    }

    fn int(&mut self, value: i64) {
        match u64::try_from(value) {
            Ok(value) => self.uint(value),
            Err(_) if value >= -0x20 => self.bytes.push(value as u8),
            Err(_) if value >= -0x80 => self.bytes.extend([0xd0, value as u8]),
            Err(_) if value >= -0x8000 => self.tagged(0xd1, &(value as i16).to_be_bytes()),
            Err(_) if value >= -0x8000_0000 => self.tagged(0xd2, &(value as i32).to_be_bytes()),
            Err(_) => self.tagged(0xd3, &value.to_be_bytes()),
        }
    }

    fn text(&mut self, text: &str) {
        match text.len() {
            len @ 0..32 => self.bytes.push(0xa0 | len as u8),
            len @ 32..0x100 => self.bytes.extend([0xd9, len as u8]),
            len => self.tagged(0xdb, &(len as u32).to_be_bytes()),
        }
        self.bytes.extend_from_slice(text.as_bytes());
    }

    fn array(&mut self, len: usize) {
        match len {
            0..16 => self.bytes.push(0x90 | len as u8),
            16..0x1_0000 => self.tagged(0xdc, &(len as u16).to_be_bytes()),
            _ => self.tagged(0xdd, &(len as u32).to_be_bytes()),
        }
    }

    /// Starts a map of fewer than 16 keys.
    fn map(&mut self, len: usize) {
        self.bytes.push(0x80 | len as u8);
    }

    fn hash(&mut self, hash: &BlockHash) {
        if self.int_hashes {
            let [.., a, b, c, d, e, f, g, h] = *hash;
            self.uint(u64::from_be_bytes([a, b, c, d, e, f, g, h]));
        } else {
            self.bytes.extend([0xc4, hash.len() as u8]);
            self.bytes.extend_from_slice(hash);
        }
    }

    fn hashes(&mut self, hashes: &[BlockHash]) {
        self.array(hashes.len());
        hashes.iter().for_each(|hash| self.hash(hash));
    }

    fn tagged(&mut self, tag: u8, rest: &[u8]) {
        self.bytes.push(tag);
        self.bytes.extend_from_slice(rest);
    }
}

#[cfg(test)]
mod tests {
    use octavo_engine::ImageHash;

    use super::*;

    fn hash(last: u8) -> BlockHash {
        let mut hash = [0xee; 32];
        hash[24..].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, last]);
        hash
    }

    fn encoded(event: KvEvent, encoding: Encoding, int_hashes: bool) -> Vec<u8> {
        encode(&Batch { sequence: 0, time: 1.5, events: vec![event] }, encoding, int_hashes)
    }

    #[test]
    fn a_removal_is_spelled_as_its_readers_expect() {
        let removed = || KvEvent::Removed { hashes: vec![hash(7)] };
        let head = b"\x93\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\x91";
        let map = b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x07\xa6medium\xa3GPU\x00";
        assert_eq!(encoded(removed(), Encoding::Maps, true), [&head[..], map].concat());
        let array = b"\x93\xacBlockRemoved\x91\x07\xa3GPU\x00";
        assert_eq!(encoded(removed(), Encoding::Arrays, true), [&head[..], array].concat());
        let raw = [&head[..], b"\x93\xacBlockRemoved\x91\xc4\x20", &hash(7), b"\xa3GPU\x00"].concat();
        assert_eq!(encoded(removed(), Encoding::Arrays, false), raw);
    }

    #[test]
    fn whole_numbers_take_the_shortest_form() {
        let uint = |value| {
            let mut out = Writer { bytes: vec![], int_hashes: true };
            out.uint(value);
            out.bytes
        };
        assert_eq!([uint(0x7f), uint(0x80), uint(0xff)], [vec![0x7f], vec![0xcc, 0x80], vec![0xcc, 0xff]]);
        assert_eq!([uint(0x100), uint(0xffff)], [[0xcd, 1, 0], [0xcd, 0xff, 0xff]]);
        assert_eq!([uint(0x1_0000), uint(0xffff_ffff)], [[0xce, 0, 1, 0, 0], [0xce, 0xff, 0xff, 0xff, 0xff]]);
        assert_eq!(uint(1 << 32), [0xcf, 0, 0, 0, 1, 0, 0, 0, 0]);
    }

    #[test]
    fn stored_blocks_tell_all_that_their_hash_is_made_of() {
        let stored = KvEvent::Stored {
            parent: None,
            hashes: vec![hash(1), hash(2)],
            tokens: vec![3, 4, 5, 300],
            block_size: 2,
            extra_keys: vec![vec![ExtraKey::CacheSalt("s".into())], vec![]],
        };
        let bytes = encoded(stored, Encoding::Arrays, true);
        let expected = b"\x99\xabBlockStored\x92\x01\x02\xc0\x94\x03\x04\x05\xcd\x01\x2c\x02\xc0\xa3GPU\xc0\x92\x91\x92\xaacache_salt\xa1s\xc0\x00";
        assert_eq!(bytes[11..], expected[..]);
    }

    #[test]
    fn blocks_of_an_adapter_tell_its_number_and_name() {
        let adapter = octavo_engine::Adapter::new(7, "sql", "/adapters/sql", ());
        let stored = KvEvent::Stored {
            parent: None,
            hashes: vec![hash(1)],
            tokens: vec![3],
            block_size: 1,
            extra_keys: vec![vec![ExtraKey::Adapter(adapter)]],
        };
        let bytes = encoded(stored, Encoding::Arrays, true);
        assert_eq!(
            bytes[11..],
            b"\x99\xabBlockStored\x91\x01\xc0\x91\x03\x01\x07\xa3GPU\xa3sql\x91\x91\xa3sql\x00"[..]
        );
    }

    #[test]
    fn images_are_told_with_their_place() {
        let mut out = Writer { bytes: vec![], int_hashes: true };
        let key = |offset| ExtraKey::Image { hash: ImageHash([0xab; 32]), offset };
        extra(&mut out, &[key(-3), key(7)]);
        let text = [&b"\xd9\x40"[..], "ab".repeat(32).as_bytes()].concat();
        assert_eq!(out.bytes, [&b"\x92\x93\xa2mm"[..], &text, b"\xfd\x93\xa2mm", &text, b"\x07"].concat());
        let int = |value| {
            let mut out = Writer { bytes: vec![], int_hashes: true };
            out.int(value);
            out.bytes
        };
        assert_eq!([int(-32), int(-33), int(-128)], [vec![0xe0], vec![0xd0, 0xdf], vec![0xd0, 0x80]]);
        assert_eq!([int(-129), int(-0x8000)], [[0xd1, 0xff, 0x7f], [0xd1, 0x80, 0]]);
        assert_eq!(int(-0x8001), [0xd2, 0xff, 0xff, 0x7f, 0xff]);
        assert_eq!(int(-0x8000_0001)[..5], [0xd3, 0xff, 0xff, 0xff, 0xff]);
    }
}
