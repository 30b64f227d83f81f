//! Values of plain storage types, of those that Hugging Face checkpoints have, and of those of GGUF that candle lacks.

use half::{bf16, f16};

use super::StorageType;

/// Number of elements whose codes and scale belong together.
const GROUP: usize = 32;

/// Number of elements of an IQ4_XS block.
const SUPER: usize = 256;

/// Reads whole blocks as numbers. The second argument has an element for each of theirs.
pub type Decoder = fn(&[u8], &mut [f32]);

/// Values of the codes of [`StorageType::Mxfp4`], doubled so that they are integers.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Values of the codes of [`StorageType::Iq4Nl`] and [`StorageType::Iq4Xs`], as ggml defines them.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Values of the codes of [`StorageType::Nf4`]: NormalFloat as bitsandbytes defines it, from quantiles of the normal
/// distribution (Dettmers et al. 2023, appendix E).
pub const NF4_VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Values of the codes of [`StorageType::Fp4`], as bitsandbytes defines them: one bit of sign, two of the exponent, one of
/// the mantissa, over the largest value.
pub const FP4_VALUES: [f32; 16] = {
    let magnitudes = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < magnitudes.len() {
        values[code] = magnitudes[code] / 12.0;
        values[code + magnitudes.len()] = -magnitudes[code] / 12.0;
        code += 1;
    }
    values
};

/// Returns the factor of [`E2M1_DOUBLED`] in a block of [`StorageType::Mxfp4`] with this scale: half of
/// `2^(exponent − 127)`.
pub const fn e8m0_halved(exponent: u8) -> f32 {
    // The two smallest are denormal.
    f32::from_bits(if exponent < 2 { 0x20_0000 << exponent } else { (exponent as u32 - 1) << 23 })
}

/// Returns the value of an e4m3 code: four bits of the exponent with a bias of 7, three of the mantissa, no infinity.
pub const fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// Returns the scale of half a block of [`StorageType::Nvfp4`]: its e4m3 code times that of the whole matrix, or divided by the
/// magnitude of that if it is negative. The formats differ in this, and so do the bits of their scales.
pub const fn nvfp4_scale(whole: f32, code: u8) -> f32 {
    if whole < 0.0 { e4m3(code) / -whole } else { e4m3(code) * whole }
}

/// Returns the nearest e4m3 code, ties to even. Numbers beyond ±448 become ±448, and NaN stays NaN.
pub fn to_e4m3(x: f32) -> u8 {
    let magnitude = x.abs().min(448.0);
    let code = if x.is_nan() {
        0x7f
    } else if magnitude < 1.0 / 64.0 {
        // The codes up to the least normal number are multiples of 1/512.
        (magnitude * 512.0).round_ties_even() as u32
    } else {
        let bits = magnitude.to_bits();
        ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)
    };
    (x.to_bits() >> 24 & 0x80 | code) as u8
}

/// Returns the factor of group `group` of an IQ4_XS block, of which these are the first eight bytes: an f16 scale, the
/// upper pairs of bits of eight factors, their lower nibbles. The offset is 32.
pub const fn iq4_xs_factor(header: &[u8; 8], group: usize) -> i8 {
    let low = header[4 + group / 2] >> (group % 2 * 4) & 15;
    let high = header[2 + group / 4] >> (group % 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

/// Returns the decoder of a type.
pub(super) const fn decoder(storage: StorageType) -> Option<Decoder> {
    Some(match storage {
        StorageType::F32 => |bytes, out| plain(bytes, out, f32::from_le_bytes),
        StorageType::F16 => |bytes, out| plain(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        StorageType::BF16 => |bytes, out| plain(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        StorageType::Q4_0 => q4_0,
        StorageType::Q8_0 => q8_0,
        StorageType::Mxfp4 => mxfp4,
        StorageType::Nvfp4 => nvfp4,
        StorageType::Iq4Nl => iq4_nl,
        StorageType::Iq4Xs => iq4_xs,
        StorageType::Int4 => int4,
        StorageType::Int8 => int8,
        StorageType::F8E4M3 => f8,
        StorageType::Nf4 => |blocks, out| table(&NF4_VALUES, blocks, out),
        StorageType::Fp4 => |blocks, out| table(&FP4_VALUES, blocks, out),
        _ => return None,
    })
}

/// Returns the codes of a group: the low nibbles are those of elements 0 to 15, the high ones the others.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = usize> {
    bytes.iter().map(|byte| usize::from(byte & 15)).chain(bytes.iter().map(|byte| usize::from(byte >> 4)))
}

fn half_of(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

fn plain<const SIZE: usize>(bytes: &[u8], out: &mut [f32], read: impl Fn([u8; SIZE]) -> f32) {
    out.iter_mut().zip(bytes.as_chunks().0).for_each(|(out, bytes)| *out = read(*bytes));
}

fn q4_0(blocks: &[u8], out: &mut [f32]) {
    for ([a, b, codes @ ..], out) in blocks.as_chunks::<18>().0.iter().zip(out.as_chunks_mut::<GROUP>().0) {
        let scale = half_of([*a, *b]);
        out.iter_mut().zip(nibbles(codes)).for_each(|(out, code)| *out = (code as f32 - 8.0) * scale);
    }
}

fn q8_0(blocks: &[u8], out: &mut [f32]) {
    for ([a, b, codes @ ..], out) in blocks.as_chunks::<34>().0.iter().zip(out.as_chunks_mut::<GROUP>().0) {
        let scale = half_of([*a, *b]);
        out.iter_mut().zip(codes).for_each(|(out, code)| *out = f32::from(*code as i8) * scale);
    }
}

fn mxfp4(blocks: &[u8], out: &mut [f32]) {
    for ([exponent, codes @ ..], out) in blocks.as_chunks::<17>().0.iter().zip(out.as_chunks_mut::<GROUP>().0) {
        let scale = e8m0_halved(*exponent);
        out.iter_mut().zip(nibbles(codes)).for_each(|(out, code)| *out = f32::from(E2M1_DOUBLED[code]) * scale);
    }
}

fn nvfp4(blocks: &[u8], out: &mut [f32]) {
    let blocks = blocks.as_chunks::<22>().0.iter();
    for ([a, b, c, d, low, high, codes @ ..], out) in blocks.zip(out.as_chunks_mut::<GROUP>().0) {
        let whole = f32::from_le_bytes([*a, *b, *c, *d]);
        let scales = [*low, *high].map(|code| nvfp4_scale(whole, code));
        for (k, (out, code)) in out.iter_mut().zip(nibbles(codes)).enumerate() {
            *out = f32::from(E2M1_DOUBLED[code]) / 2.0 * scales[k * 2 / GROUP];
        }
    }
}

fn iq4_nl(blocks: &[u8], out: &mut [f32]) {
    for ([a, b, codes @ ..], out) in blocks.as_chunks::<18>().0.iter().zip(out.as_chunks_mut::<GROUP>().0) {
        let scale = half_of([*a, *b]);
        out.iter_mut().zip(nibbles(codes)).for_each(|(out, code)| *out = scale * f32::from(IQ4_VALUES[code]));
    }
}

fn iq4_xs(blocks: &[u8], out: &mut [f32]) {
    for (block, out) in blocks.as_chunks::<136>().0.iter().zip(out.as_chunks_mut::<SUPER>().0) {
        let Some((header, codes)) = block.split_first_chunk::<8>() else { continue };
        let groups = codes.chunks_exact(GROUP / 2).zip(out.as_chunks_mut::<GROUP>().0);
        for (group, (codes, out)) in groups.enumerate() {
            let scale = half_of([header[0], header[1]]) * f32::from(iq4_xs_factor(header, group));
            out.iter_mut().zip(nibbles(codes)).for_each(|(out, code)| *out = scale * f32::from(IQ4_VALUES[code]));
        }
    }
}

fn int4(blocks: &[u8], out: &mut [f32]) {
    for ([a, b, zero, codes @ ..], out) in blocks.as_chunks::<19>().0.iter().zip(out.as_chunks_mut::<GROUP>().0) {
        let (scale, zero) = (half_of([*a, *b]), f32::from(*zero));
        out.iter_mut().zip(nibbles(codes)).for_each(|(out, code)| *out = (code as f32 - zero) * scale);
    }
}

fn int8(blocks: &[u8], out: &mut [f32]) {
    for ([a, b, c, d, zero, codes @ ..], out) in blocks.as_chunks::<37>().0.iter().zip(out.as_chunks_mut::<GROUP>().0) {
        let (scale, zero) = (f32::from_le_bytes([*a, *b, *c, *d]), f32::from(*zero));
        out.iter_mut().zip(codes).for_each(|(out, code)| *out = (f32::from(*code) - zero) * scale);
    }
}

fn f8(blocks: &[u8], out: &mut [f32]) {
    for ([a, b, c, d, codes @ ..], out) in blocks.as_chunks::<36>().0.iter().zip(out.as_chunks_mut::<GROUP>().0) {
        let scale = f32::from_le_bytes([*a, *b, *c, *d]);
        out.iter_mut().zip(codes).for_each(|(out, code)| *out = e4m3(*code) * scale);
    }
}

fn table(values: &[f32; 16], blocks: &[u8], out: &mut [f32]) {
    for ([a, b, c, d, codes @ ..], out) in blocks.as_chunks::<36>().0.iter().zip(out.as_chunks_mut::<{ 2 * GROUP }>().0)
    {
        let scale = f32::from_le_bytes([*a, *b, *c, *d]);
        let codes = codes.chunks_exact(GROUP / 2).flat_map(nibbles);
        out.iter_mut().zip(codes).for_each(|(out, code)| *out = values[code] * scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_e4m3() {
        for (code, value) in
            [(0x00, 0.0), (0x01, 0.001_953_125), (0x08, 0.015_625), (0x38, 1.0), (0x7e, 448.0), (0xc0, -2.0)]
        {
            assert_eq!(e4m3(code), value, "{code:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }

    #[test]
    fn numbers_become_the_nearest_code() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(to_e4m3(e4m3(code)), code);
            // Between two codes, the even one is taken.
            let (next, even) = (code + 1, code + (code & 1));
            if next & 0x7f != 0x7f {
                assert_eq!(to_e4m3((e4m3(code) + e4m3(next)) / 2.0), even, "{code:#x}");
            }
        }
        assert_eq!([1e9, f32::INFINITY, -449.0].map(to_e4m3), [0x7e, 0x7e, 0xfe]);
        assert!(e4m3(to_e4m3(f32::NAN)).is_nan());
    }

    #[test]
    fn blocks_are_read_whole() {
        for storage in StorageType::ALL {
            let Some(decode) = storage.decoder() else { continue };
            let mut out = vec![f32::NAN; 2 * storage.block_elements()];
            decode(&vec![0; 2 * storage.block_bytes()], &mut out);
            assert!(out.iter().all(|x| *x == 0.0), "{storage}");
        }
    }

    #[test]
    fn halves_of_nvfp4_have_a_scale_each() {
        let read = |whole: f32| {
            let mut block = [0x32; 22];
            block[..4].copy_from_slice(&whole.to_le_bytes());
            // 1 and −2 in e4m3.
            block[4..6].copy_from_slice(&[0x38, 0xc0]);
            let mut out = [f32::NAN; GROUP];
            nvfp4(&block, &mut out);
            (out[0], out[15], out[16], out[31])
        };
        assert_eq!(read(0.3), (0.3, 0.3, 1.5 * (-2.0 * 0.3), 1.5 * (-2.0 * 0.3)), "a factor");
        assert_eq!(read(-0.7), (1.0 / 0.7, 1.0 / 0.7, 1.5 * (-2.0 / 0.7), 1.5 * (-2.0 / 0.7)), "a divisor");
    }

    #[test]
    fn an_integer_is_a_number_of_scales_from_its_zero_point() {
        let mut block = [0; 19];
        block[..2].copy_from_slice(&f16::from_f32(0.5).to_le_bytes());
        (block[2], block[3]) = (7, 0xf1);
        let mut out = [0.0; GROUP];
        int4(&block, &mut out);
        assert_eq!((out[0], out[16], out[1]), (-3.0, 4.0, -3.5));
    }
}
