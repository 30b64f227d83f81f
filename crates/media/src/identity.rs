//! The name of a processed image, which keys the caches.

use std::fmt;
use std::sync::Arc;

use crate::processor::ImageProcessor;

/// The identity of a processed image: the same file, processor and model have the same identity.
///
/// Displayed as 64 hexadecimal digits, or as the `uuid` that the client gave.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    digest: [u8; 32],
    uuid: Option<Arc<str>>,
}

impl Identity {
    /// The identity of a file's bytes, before they are decoded.
    #[must_use]
    pub fn of_bytes(model: &str, processor: &ImageProcessor, bytes: &[u8]) -> Self {
        Self { digest: digest(b"bytes", model, processor, bytes), uuid: None }
    }

    /// The identity that a client gives to an image. It stands for the bytes, which are not looked at.
    #[must_use]
    pub fn of_uuid(model: &str, processor: &ImageProcessor, uuid: &str) -> Self {
        Self { digest: digest(b"uuid", model, processor, uuid.as_bytes()), uuid: Some(uuid.into()) }
    }

    /// The BLAKE3 hash behind the name.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.uuid {
            Some(uuid) => f.write_str(uuid),
            None => f.write_str(&blake3::Hash::from_bytes(self.digest).to_hex()),
        }
    }
}

fn digest(kind: &[u8], model: &str, processor: &ImageProcessor, content: &[u8]) -> [u8; 32] {
    let mut hash = Framed::default();
    hash.add(kind);
    hash.add(model.as_bytes());
    processor.describe(&mut hash);
    hash.add(content);
    hash.finish()
}

/// A hash over parts, each preceded by its length, so that no two lists of parts run into the same bytes.
#[derive(Default)]
pub(crate) struct Framed(blake3::Hasher);

impl Framed {
    pub(crate) fn add(&mut self, part: &[u8]) {
        self.0.update(&(part.len() as u64).to_le_bytes());
        self.0.update(part);
    }

    pub(crate) fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processor::tests::processor;

    #[test]
    fn an_identity_depends_on_every_part_and_on_where_parts_end() {
        let base = processor();
        let mut smaller = base.clone();
        smaller.layout.merge = 1;
        let names = [
            Identity::of_bytes("a", &base, b"bc"),
            Identity::of_bytes("ab", &base, b"c"),
            Identity::of_bytes("a", &smaller, b"bc"),
            Identity::of_uuid("a", &base, "bc"),
        ];
        for (i, a) in names.iter().enumerate() {
            assert!(names[..i].iter().all(|b| a.digest() != b.digest()), "{a:?}");
        }
        assert_eq!(names[0], Identity::of_bytes("a", &base.clone(), b"bc"));
    }

    #[test]
    fn an_identity_is_displayed_as_its_hash_or_as_the_uuid() {
        let name = Identity::of_bytes("m", &processor(), b"x");
        let hex: String = name.digest().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(name.to_string(), hex);
        assert_eq!(Identity::of_uuid("m", &processor(), "logo").to_string(), "logo");
    }
}
