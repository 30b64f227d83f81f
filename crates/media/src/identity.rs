//! The name of a processed image, which keys the caches.

use std::fmt;

use crate::processor::ImageProcessor;

/// The identity of a processed image: the same file, processor and model have the same identity.
///
/// It depends on the bytes of the file, so no client can give one image the identity of another. Displayed as 64
/// hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity([u8; 32]);

impl Identity {
    /// The identity of a file's bytes, before they are decoded.
    #[must_use]
    pub fn new(model: &str, processor: &ImageProcessor, bytes: &[u8]) -> Self {
        Self(digest([b"image".as_slice(), model.as_bytes()], processor, bytes))
    }

    /// The BLAKE3 hash.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.0
    }

    /// The hash that names one view of the image.
    #[must_use]
    pub fn of_view(&self, index: usize) -> [u8; 32] {
        let mut hash = Framed::default();
        hash.add(b"view");
        hash.add(&self.0);
        hash.add(&(index as u64).to_le_bytes());
        hash.finish()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

/// The key of the download of a URL.
pub(crate) fn source_key(processor: &ImageProcessor, source: &str) -> [u8; 32] {
    digest([b"source".as_slice(), b""], processor, source.as_bytes())
}

/// The key of a name that a client has given to an image. Names of different scopes do not meet.
pub(crate) fn name_key(processor: &ImageProcessor, scope: &str, name: &str) -> [u8; 32] {
    digest([b"name".as_slice(), scope.as_bytes()], processor, name.as_bytes())
}

fn digest(kind: [&[u8]; 2], processor: &ImageProcessor, content: &[u8]) -> [u8; 32] {
    let mut hash = Framed::default();
    kind.iter().for_each(|part| hash.add(part));
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
            Identity::new("a", &base, b"bc").digest(),
            Identity::new("ab", &base, b"c").digest(),
            Identity::new("a", &smaller, b"bc").digest(),
            name_key(&base, "a", "bc"),
            name_key(&base, "ab", "c"),
            source_key(&base, "bc"),
            Identity::new("a", &base, b"bc").of_view(0),
            Identity::new("a", &base, b"bc").of_view(1),
            Identity::new("ab", &base, b"c").of_view(0),
        ];
        for (i, a) in names.iter().enumerate() {
            assert!(names[..i].iter().all(|b| a != b), "{a:?}");
        }
        assert_eq!(names[0], Identity::new("a", &base.clone(), b"bc").digest());
    }

    #[test]
    fn an_identity_is_displayed_as_its_hash() {
        let name = Identity::new("m", &processor(), b"x");
        let hex: String = name.digest().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(name.to_string(), hex);
    }
}
