//! AMX for tests, on a processor that lacks it.
//!
//! Such a processor raises an exception at the first byte of a tile instruction. A signal handler decodes the instruction, executes it on
//! tiles in memory and continues behind it. It knows those instructions that this crate uses, and ends the process with a message where
//! a processor would raise an exception. The semantics are those of Intel's Software Developer's Manual, volume 2.

use std::arch::x86_64::*;
use std::cell::UnsafeCell;

use libc::{c_int, c_void, siginfo_t, ucontext_t};

use crate::pool::denormals::flushing_denormals;

/// Largest number of rows of a tile, and of its columns of 32 bits.
const SIDE: usize = 16;

/// Number of tiles.
const TILES: usize = 8;

/// A tile, of which the configuration may use less. The rest is zero.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Tile([[u32; SIDE]; SIDE]);

impl Tile {
    const ZERO: Self = Self([[0; SIDE]; SIDE]);
}

/// The used part of a tile; none before it is configured.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    /// Number of columns of 32 bits.
    cols: usize,
}

/// The tiles of a thread.
struct Unit {
    tiles: [Tile; TILES],
    shapes: [Shape; TILES],
}

impl Unit {
    const INITIAL: Self = Self { tiles: [Tile::ZERO; TILES], shapes: [Shape { rows: 0, cols: 0 }; TILES] };
}

thread_local! {
    static UNIT: UnsafeCell<Unit> = const { UnsafeCell::new(Unit::INITIAL) };
}

/// Installs the handler if `OCTAVO_REQUIRE_ISA` is `amx`, so that a binary with all features computes without it. Returns whether tiles
/// are emulated: that takes AVX-512 with VNNI and BF16.
pub(super) fn install() -> bool {
    let required = std::env::var("OCTAVO_REQUIRE_ISA").is_ok_and(|isa| isa == "amx");
    if !(required && super::x86::has_avx512() && super::x86::has_avx512_bf16()) {
        return false;
    }
    // SAFETY: an action of zeros is valid, and the handler has the type that SA_SIGINFO requires.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut()) == 0
    }
}

/// Ends the process with a message. A handler must not panic.
fn fail(message: &str) -> ! {
    // SAFETY: the message has so many bytes; both calls are allowed in a handler.
    unsafe {
        libc::write(2, message.as_ptr().cast(), message.len());
        libc::write(2, b"\n".as_ptr().cast(), 1);
        libc::abort()
    }
}

extern "C" fn handler(signal: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the system passes the registers of the interrupted thread, whose code and operands are readable where it executes them. No
    // other code of this thread uses its tiles meanwhile.
    unsafe {
        let registers = &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs;
        let at = registers[libc::REG_RIP as usize] as *const u8;
        let Some(instruction) = Instruction::decode(at, registers) else {
            // The instruction is executed again, and ends the process.
            libc::signal(signal, libc::SIG_DFL);
            return;
        };
        flushing_denormals(|| UNIT.with(|unit| instruction.execute(&mut *unit.get())));
        registers[libc::REG_RIP as usize] += instruction.len as libc::greg_t;
    }
}

/// What an instruction does.
#[derive(Clone, Copy)]
enum Operation {
    /// LDTILECFG.
    Configure,
    /// TILERELEASE.
    Release,
    /// TILEZERO.
    Zero,
    /// TILELOADD.
    Load,
    /// TILESTORED.
    Store,
    /// TDPBSUD: signed bytes of the first source times unsigned ones of the second.
    DotIntegers,
    /// TDPBF16PS.
    DotBf16,
}

/// A decoded instruction.
struct Instruction {
    operation: Operation,
    len: usize,
    /// The register of the field `reg`, which is the destination but for stores.
    tile: usize,
    /// Sources of products.
    sources: [usize; 2],
    /// Address without the index.
    start: usize,
    /// The index times its scale: the number of bytes from a row to the next.
    stride: usize,
}

impl Instruction {
    /// Decodes a tile instruction.
    ///
    /// # Safety
    /// There must be an instruction.
    unsafe fn decode(at: *const u8, registers: &[libc::greg_t; 23]) -> Option<Self> {
        // SAFETY: the caller guarantees this; no byte is read that does not belong to the instruction.
        let byte = |i: usize| unsafe { *at.add(i) };
        // A VEX prefix of three bytes, the map 0F38, and neither W nor L.
        if byte(0) != 0xc4 || byte(1) & 0x1f != 2 || byte(2) & 0x84 != 0 {
            return None;
        }
        let (prefix, opcode, modrm) = (byte(2) & 3, byte(3), byte(4));
        let (mode, reg, rm) = (modrm >> 6, usize::from(modrm >> 3 & 7), modrm & 7);
        let operation = match (opcode, prefix, mode == 3) {
            (0x49, 0, false) => Operation::Configure,
            (0x49, 0, true) => Operation::Release,
            (0x49, 3, true) => Operation::Zero,
            (0x4b, 3, false) => Operation::Load,
            (0x4b, 2, false) => Operation::Store,
            (0x5e, 2, true) => Operation::DotIntegers,
            (0x5c, 2, true) => Operation::DotBf16,
            _ => return None,
        };
        let sources = [rm.into(), usize::from(!byte(2) >> 3 & 15)];
        let mut decoded = Self { operation, len: 5, tile: reg, sources, start: 0, stride: 0 };
        if mode == 3 {
            return Some(decoded);
        }
        // The bits of the prefix that extend register numbers are inverted.
        let register = |number: u8, extended: u8| {
            let number = usize::from(number) + if byte(1) & extended == 0 { 8 } else { 0 };
            registers[GENERAL[number] as usize] as usize
        };
        let mut base = (rm, 1);
        if rm == 4 {
            let sib = byte(5);
            let has_index = sib >> 3 & 7 != 4 || byte(1) & 0x40 == 0;
            decoded.stride = if has_index { register(sib >> 3 & 7, 0x40) << (sib >> 6) } else { 0 };
            (base, decoded.len) = ((sib & 7, 2), 6);
        }
        // Without a displacement, this base means another kind of address, which the crate does not use.
        if mode == 0 && base.0 == 5 {
            return None;
        }
        let displacement = match mode {
            0 => 0,
            1 => isize::from(byte(decoded.len) as i8),
            _ => i32::from_le_bytes(std::array::from_fn(|i| byte(decoded.len + i))) as isize,
        };
        decoded.len += [0, 1, 4][usize::from(mode)];
        decoded.start = register(base.0, 0x20).wrapping_add_signed(displacement);
        Some(decoded)
    }

    /// Executes the instruction.
    ///
    /// # Safety
    /// The memory that it accesses must be valid, and the instruction set that [`install`] requires available.
    unsafe fn execute(&self, unit: &mut Unit) {
        let row_at = |row: usize| self.start.wrapping_add(row.wrapping_mul(self.stride));
        // SAFETY: the caller guarantees this.
        unsafe {
            match self.operation {
                Operation::Configure => unit.configure(&*(self.start as *const [u8; 64])),
                Operation::Release => *unit = Unit::INITIAL,
                Operation::Zero => *unit.configured(self.tile).0 = Tile::ZERO,
                Operation::Load => {
                    let (tile, shape) = unit.configured(self.tile);
                    *tile = Tile::ZERO;
                    for (row, elements) in tile.0[..shape.rows].iter_mut().enumerate() {
                        let from = row_at(row) as *const u8;
                        std::ptr::copy_nonoverlapping(from, elements.as_mut_ptr().cast(), 4 * shape.cols);
                    }
                }
                Operation::Store => {
                    let (tile, shape) = unit.configured(self.tile);
                    for (row, elements) in tile.0[..shape.rows].iter().enumerate() {
                        let into = row_at(row) as *mut u8;
                        std::ptr::copy_nonoverlapping(elements.as_ptr().cast(), into, 4 * shape.cols);
                    }
                }
                Operation::DotIntegers => {
                    unit.add_products(self.tile, self.sources, |a, b, sums| dot_integers(a, b, sums))
                }
                Operation::DotBf16 => unit.add_products(self.tile, self.sources, |a, b, sums| dot_bf16(a, b, sums)),
            }
        }
    }
}

/// Places of the general registers in a context, by number.
const GENERAL: [c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

impl Unit {
    /// Takes a configuration as LDTILECFG reads it, and clears all tiles.
    fn configure(&mut self, config: &[u8; 64]) {
        *self = Self::INITIAL;
        let (head, unused) = (&config[..16], (&config[32..48], &config[56..]));
        if head[0] != 1 || head[1..].iter().chain(unused.0).chain(unused.1).any(|byte| *byte != 0) {
            fail("the configuration of tiles is invalid");
        }
        for (register, shape) in self.shapes.iter_mut().enumerate() {
            let row_bytes = usize::from(u16::from_le_bytes([config[16 + 2 * register], config[17 + 2 * register]]));
            let rows = usize::from(config[48 + register]);
            if rows > SIDE || row_bytes > 4 * SIDE || !row_bytes.is_multiple_of(4) || (rows == 0) != (row_bytes == 0) {
                fail("the configuration of a tile is invalid");
            }
            *shape = Shape { rows, cols: row_bytes / 4 };
        }
    }

    /// Returns a tile and the part of it that is used.
    fn configured(&mut self, tile: usize) -> (&mut Tile, Shape) {
        let shape = self.shapes.get(tile).copied().unwrap_or(Shape { rows: 0, cols: 0 });
        if shape.rows == 0 {
            fail("the tile is not configured");
        }
        (&mut self.tiles[tile], shape)
    }

    /// Adds the products of two tiles to a third one: `add` adds those of a row of the first source.
    fn add_products(
        &mut self,
        into: usize,
        [left, right]: [usize; 2],
        add: impl Fn(&[u32], &[[u32; SIDE]], &mut [u32; SIDE]),
    ) {
        let [out, a, b] = [into, left, right].map(|tile| self.configured(tile).1);
        if (a.rows, b.cols, a.cols) != (out.rows, out.cols, b.rows) {
            fail("the shapes of the tiles of a product do not match");
        }
        let Ok([sums, a_rows, b_rows]) = self.tiles.get_disjoint_mut([into, left, right]) else {
            fail("the tiles of a product are not three")
        };
        for (a_row, sums) in a_rows.0[..a.rows].iter().zip(&mut sums.0) {
            add(&a_row[..a.cols], &b_rows.0[..b.rows], sums);
        }
    }
}

/// Adds the products of four signed bytes, of each word of `a`, and four unsigned ones of a row of `b`.
///
/// # Safety
/// AVX-512 with VNNI must be available.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn dot_integers(a: &[u32], b: &[[u32; SIDE]], sums: &mut [u32; SIDE]) {
    // SAFETY: sums and a row have sixteen words.
    unsafe {
        let mut dots = _mm512_loadu_si512(sums.as_ptr().cast());
        for (a, b) in a.iter().zip(b) {
            dots = _mm512_dpbusd_epi32(dots, _mm512_loadu_si512(b.as_ptr().cast()), _mm512_set1_epi32(*a as i32));
        }
        _mm512_storeu_si512(sums.as_mut_ptr().cast(), dots);
    }
}

/// Adds the products of two numbers, of each word of `a`, and two of a row of `b`. Products of first and of second numbers are added in
/// the order of the words, then both sums, and then what there was.
///
/// # Safety
/// AVX-512 must be available, and MXCSR must say that denormals are zeros.
#[target_feature(enable = "avx512f")]
unsafe fn dot_bf16(a: &[u32], b: &[[u32; SIDE]], sums: &mut [u32; SIDE]) {
    let first = |words: __m512i| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
    let second =
        |words: __m512i| _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32)));
    let [mut firsts, mut seconds] = [_mm512_setzero_ps(); 2];
    // SAFETY: sums and a row have sixteen words.
    unsafe {
        for (a, b) in a.iter().zip(b) {
            let (a, b) = (_mm512_set1_epi32(*a as i32), _mm512_loadu_si512(b.as_ptr().cast()));
            firsts = _mm512_fmadd_ps(first(a), first(b), firsts);
            seconds = _mm512_fmadd_ps(second(a), second(b), seconds);
        }
        let sums = sums.as_mut_ptr().cast();
        _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), _mm512_add_ps(firsts, seconds)));
    }
}

#[cfg(test)]
mod tests {
    use std::arch::asm;

    use crate::tiles::{Shape, Tiles};

    /// A tile of three rows with five words, and one of five rows with seven words.
    fn tiles(mut byte: impl FnMut() -> u8) -> ([[u8; 20]; 3], [[u8; 28]; 5]) {
        (
            std::array::from_fn(|_| std::array::from_fn(|_| byte())),
            std::array::from_fn(|_| std::array::from_fn(|_| byte())),
        )
    }

    /// Returns the product of tiles, added twice to zero, with an instruction.
    macro_rules! product {
        ($instruction:literal, $a:expr, $b:expr) => {{
            let mut out = [[0u32; 7]; 3];
            let (left, right) = (Shape { rows: 3, row_bytes: 20 }, Shape { rows: 5, row_bytes: 28 });
            let result = Shape { rows: 3, row_bytes: 28 };
            let _tiles = Tiles::set_up([result, result, result, result, left, right, left, right]);
            // SAFETY: the tiles are set up, and what is read and written has their shapes.
            unsafe {
                asm!(
                    "tilezero tmm3",
                    "tileloadd tmm4, [{a} + {a_stride}]",
                    "tileloadd tmm7, [{b} + 4*{b_stride} - 28]",
                    concat!($instruction, " tmm3, tmm4, tmm7"),
                    concat!($instruction, " tmm3, tmm4, tmm7"),
                    "tilestored [{out} + {out_stride} + 4096], tmm3",
                    a = in(reg) $a.as_ptr(),
                    a_stride = in(reg) 20_usize,
                    b = in(reg) $b.as_ptr().wrapping_add(1),
                    b_stride = in(reg) 7_usize,
                    out = in(reg) out.as_mut_ptr().wrapping_byte_sub(4096),
                    out_stride = in(reg) 28_usize,
                    options(nostack, preserves_flags)
                );
            }
            out
        }};
    }

    #[test]
    fn products_of_integers_are_their_definition() {
        if !crate::Isa::Amx.is_available() {
            return;
        }
        let mut rng = octavo_ops::testing::TestRng(7);
        let (a, b) = tiles(|| rng.next_u64() as u8);
        let out = product!("tdpbsud", a, b);
        for (m, row) in out.iter().enumerate() {
            for (n, sum) in row.iter().enumerate() {
                let products = (0..20).map(|k| i32::from(a[m][k] as i8) * i32::from(b[k / 4][4 * n + k % 4]));
                assert_eq!(*sum as i32, 2 * products.sum::<i32>());
            }
        }
    }

    #[test]
    fn products_of_bf16_are_their_definition() {
        if !crate::Isa::Amx.is_available() {
            return;
        }
        let mut rng = octavo_ops::testing::TestRng(8);
        // Numbers of 0.5 to 2.
        let mut odd = false;
        let (a, b) = tiles(|| {
            odd = !odd;
            if odd { rng.next_u64() as u8 } else { 0x3f | (rng.next_u64() as u8 & 0x80) }
        });
        let number =
            |row: &[u8], at: usize| f32::from_bits(u32::from(row[2 * at + 1]) << 24 | u32::from(row[2 * at]) << 16);
        let out = product!("tdpbf16ps", a, b);
        for (m, row) in out.iter().enumerate() {
            for (n, sum) in row.iter().enumerate() {
                let mut both = [0.0_f32; 2];
                for k in 0..10 {
                    both[k % 2] = number(&a[m], k).mul_add(number(&b[k / 2], 2 * n + k % 2), both[k % 2]);
                }
                assert_eq!(f32::from_bits(*sum), 2.0 * (both[0] + both[1]));
            }
        }
    }
}
