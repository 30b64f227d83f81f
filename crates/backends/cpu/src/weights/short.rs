//! bf16 in twelve bits a weight, without loss.
//!
//! The upper byte of a number in bf16 is its sign and seven bits of its exponent. Weights of a panel have few of the 256 values: a
//! trained weight is rarely smaller than a 10 000th of the largest. The panel has a table of the sixteen most frequent ones, the lower
//! bytes of all weights, and four bits for each that are an index of the table. The weights whose upper byte is not in the
//! table are listed: exceptions, of which a panel of a usual model has fewer than one. Lossless compression of the exponents of bf16 is
//! known from DFloat11 (arXiv 2504.11651), whose codes have a variable length; with a fixed one, a few instructions unpack a register.
//!
//! A panel is a header, padded to whole lines, and an **octet** for each eight inputs, 192 bytes in place of 256. The header is
//! the table and then the exceptions, in order, four bytes each: the upper byte, and above it the index of the weight in a panel in
//! bf16. The last is followed by [`END`]. An octet is a line of lower bytes for its first two pairs of inputs, one for the other
//! two, and a line of indices: those of the first line in the lower nibbles, those of the second in the upper ones.

use super::{Layout, PANEL};
use crate::memory::LINE;

/// Number of inputs in an octet.
pub(crate) const OCTET: usize = 8;

/// Size of an octet in bytes.
pub(crate) const OCTET_BYTES: usize = 3 * LINE;

/// Number of weights in an octet.
pub(crate) const OCTET_WEIGHTS: usize = OCTET * PANEL;

/// Size of the table in bytes.
pub(crate) const TABLE: usize = 16;

/// Entry after the last exception. Its index is that of no weight.
const END: u32 = u32::MAX;

/// Number of inputs from which the index of a weight does not fit in an exception.
const TOO_MANY: usize = 1 << 20;

/// Returns the largest number of exceptions of a panel.
const fn most_exceptions(cols: usize) -> usize {
    8 + cols / 32
}

/// Returns the size of the header of a panel in bytes; `None` if it cannot have so many inputs.
pub(super) fn header_bytes(cols: usize) -> Option<usize> {
    (cols < TOO_MANY).then(|| (TABLE + (most_exceptions(cols) + 1) * size_of::<u32>()).next_multiple_of(LINE))
}

/// Returns the place of a weight in the bytes of an octet: that of its lower byte, and of its index and the index's place in the byte.
const fn place(weight: usize) -> (usize, usize, u32) {
    let (pair, word) = (weight / (2 * PANEL), weight % (2 * PANEL));
    // Unpacking interleaves eight bytes of each sixteen for a pair.
    let at = word / 8 * 16 + pair % 2 * 8 + word % 8;
    (pair / 2 * LINE + at, 2 * LINE + at, 4 * (pair / 2) as u32)
}

/// Packs a panel in bf16. Returns whether it has few enough exceptions.
pub(super) fn pack(layout: &Layout, bf16: &[u8], panel: &mut [u8]) -> bool {
    let (header, octets) = panel.split_at_mut(layout.octets_at());
    let (octets, weights) = (octets.as_chunks_mut::<OCTET_BYTES>().0, bf16.as_chunks::<{ 2 * OCTET_WEIGHTS }>().0);
    let codes = codes(bf16);
    let (table, list) = header.split_at_mut(TABLE);
    for (upper, code) in codes.iter().enumerate() {
        if let Some(entry) = table.get_mut(usize::from(*code)) {
            *entry = upper as u8;
        }
    }
    let mut list = list.as_chunks_mut::<4>().0.iter_mut();
    for (octet, (out, weights)) in octets.iter_mut().zip(weights).enumerate() {
        out[2 * LINE..].fill(0);
        for (weight, [lower, upper]) in weights.as_chunks::<2>().0.iter().enumerate() {
            let (low, index, shift) = place(weight);
            out[low] = *lower;
            let code = codes[usize::from(*upper)];
            if code == NO_CODE {
                let Some(entry) = list.next() else { return false };
                *entry = (((octet * OCTET_WEIGHTS + weight) as u32) << 8 | u32::from(*upper)).to_le_bytes();
            } else {
                out[index] |= code << shift;
            }
        }
    }
    list.next().map(|entry| *entry = END.to_le_bytes()).is_some()
}

/// Code of upper bytes that are not in the table.
const NO_CODE: u8 = TABLE as u8;

/// Returns the codes by upper byte: the most frequent sixteen have one.
fn codes(bf16: &[u8]) -> [u8; 256] {
    let mut counts = [0u32; 256];
    bf16.as_chunks::<2>().0.iter().for_each(|[_, upper]| counts[usize::from(*upper)] += 1);
    let mut uppers: [u8; 256] = std::array::from_fn(|upper| upper as u8);
    uppers.sort_by_key(|upper| std::cmp::Reverse(counts[usize::from(*upper)]));
    let mut codes = [NO_CODE; 256];
    uppers[..TABLE].iter().zip(0..).for_each(|(upper, code)| codes[usize::from(*upper)] = code);
    codes
}

/// Returns the exceptions of a panel: the index of the weight and its upper byte.
fn exceptions(layout: &Layout, panel: &[u8]) -> impl Iterator<Item = (usize, u8)> {
    let entries = panel[TABLE..layout.octets_at()].as_chunks().0.iter().map(|entry| u32::from_le_bytes(*entry));
    entries.take_while(|entry| *entry != END).map(|entry| ((entry >> 8) as usize, entry as u8))
}

/// Returns a weight that is no exception.
#[inline(always)]
fn weight(layout: &Layout, panel: &[u8], index: usize) -> [u8; 2] {
    let octet = &panel[layout.octets_at() + index / OCTET_WEIGHTS * OCTET_BYTES..][..OCTET_BYTES];
    let (low, at, shift) = place(index % OCTET_WEIGHTS);
    [octet[low], panel[usize::from(octet[at] >> shift & 15)]]
}

/// Unpacks a panel to one of bf16.
pub(crate) fn unpack(layout: &Layout, panel: &[u8], bf16: &mut [u8]) {
    let weights = bf16.as_chunks_mut::<2>().0;
    for (index, out) in weights[..layout.cols * PANEL].iter_mut().enumerate() {
        *out = weight(layout, panel, index);
    }
    exceptions(layout, panel).for_each(|(index, upper)| weights[index][1] = upper);
}

/// Reads one row of a panel.
pub(crate) fn read(layout: &Layout, panel: &[u8], lane: usize, out: &mut [f32]) {
    let of_bytes = |bytes: [u8; 2]| half::bf16::from_le_bytes(bytes).to_f32();
    let index = |k: usize| k / 2 * 2 * PANEL + lane * 2 + k % 2;
    for (k, out) in out.iter_mut().enumerate() {
        *out = of_bytes(weight(layout, panel, index(k)));
    }
    for (at, upper) in exceptions(layout, panel) {
        let (pair, word) = (at / (2 * PANEL), at % (2 * PANEL));
        if let Some(out) = out.get_mut(2 * pair + word % 2).filter(|_| word / 2 == lane) {
            *out = of_bytes([weight(layout, panel, at)[0], upper]);
        }
    }
}

#[cfg(test)]
mod tests {
    use octavo_ops::testing::TestRng;

    use super::*;
    use crate::weights::PanelKind;

    /// Returns a panel of normal weights in which so many are far smaller than the others.
    fn panel(cols: usize, small: usize, rng: &mut TestRng) -> Vec<u8> {
        let mut weights: Vec<f32> = (0..cols * PANEL).map(|_| rng.signed() * rng.signed()).collect();
        for at in 0..small {
            weights[at * 7919 % (cols * PANEL)] = [0.0, -0.0, 1e-30, -3e30, f32::INFINITY][at % 5];
        }
        weights.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect()
    }

    #[test]
    fn nothing_is_lost() {
        let mut rng = TestRng(11);
        for (cols, small) in [(32, 0), (576, 0), (576, 3), (1536, 40), (4096, 100)] {
            let layout = Layout::short(cols).unwrap();
            assert!(layout.kind == PanelKind::Short && layout.bytes < cols * PANEL * 2 * 4 / 5 + 2 * LINE);
            let bf16 = panel(cols, small, &mut rng);
            let (mut packed, mut unpacked) = (vec![0xff; layout.bytes], vec![0; bf16.len()]);
            assert!(pack(&layout, &bf16, &mut packed), "{cols} inputs, {small} small ones");
            unpack(&layout, &packed, &mut unpacked);
            assert_eq!(unpacked, bf16, "{cols} inputs, {small} small ones");
            let mut row = vec![0.0; cols];
            for lane in 0..PANEL {
                read(&layout, &packed, lane, &mut row);
                for (k, found) in row.iter().enumerate() {
                    let at = (k / 2 * 2 * PANEL + lane * 2 + k % 2) * 2;
                    let expected = half::bf16::from_le_bytes([bf16[at], bf16[at + 1]]).to_f32();
                    assert_eq!(found.to_bits(), expected.to_bits(), "input {k} of row {lane}");
                }
            }
        }
    }

    #[test]
    fn panels_with_many_exceptions_are_not_packed() {
        let layout = Layout::short(64).unwrap();
        let bits: Vec<u8> = (0..64 * PANEL).flat_map(|k| (k as u16).wrapping_mul(40503).to_le_bytes()).collect();
        assert!(!pack(&layout, &bits, &mut vec![0; layout.bytes]));
        assert!(Layout::short(TOO_MANY).is_none());
    }
}
