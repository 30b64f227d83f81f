//! A bounds-checked reader over the mapped bytes.

use std::ops::Range;

use super::GgufError;

/// Reads little-endian values in order. Every read checks the remaining length.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the offset of the next byte.
    pub(super) const fn position(&self) -> usize {
        self.at
    }

    /// Returns the number of remaining bytes.
    pub(super) const fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Skips `len` bytes and returns their range.
    pub(super) fn skip(&mut self, len: usize) -> Result<Range<usize>, GgufError> {
        if len > self.remaining() {
            return Err(GgufError::Truncated { offset: self.at, size: self.bytes.len() });
        }
        let start = self.at;
        self.at += len;
        Ok(start..self.at)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let range = self.skip(N)?;
        let mut out = [0; N];
        out.copy_from_slice(&self.bytes[range]);
        Ok(out)
    }

    pub(super) fn u8(&mut self) -> Result<u8, GgufError> {
        self.array::<1>().map(|[b]| b)
    }

    pub(super) fn u16(&mut self) -> Result<u16, GgufError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, GgufError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, GgufError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a `u64` that counts bytes or items in this file. A count that exceeds the address space is an error.
    pub(super) fn length(&mut self) -> Result<usize, GgufError> {
        let offset = self.at;
        let value = self.u64()?;
        usize::try_from(value).map_err(|_| GgufError::Truncated { offset, size: self.bytes.len() })
    }

    /// Reads a length-prefixed string and returns the range of its bytes.
    pub(super) fn string(&mut self) -> Result<Range<usize>, GgufError> {
        let len = self.length()?;
        self.skip(len)
    }

    /// Reads a length-prefixed name of at most `limit` bytes.
    pub(super) fn name(&mut self, limit: usize) -> Result<&'a str, GgufError> {
        let offset = self.at;
        let range = self.string()?;
        if range.len() > limit {
            return Err(GgufError::NameTooLong { offset, limit });
        }
        std::str::from_utf8(&self.bytes[range]).map_err(|_| GgufError::NameNotUtf8 { offset })
    }
}
