//! The instruction set of the kernels, chosen once.

#[cfg(all(feature = "amx-emulator", target_arch = "x86_64", target_os = "linux"))]
mod amx_emulator;

use std::fmt;
use std::str::FromStr;

/// Instruction sets with kernels. Each includes those before it, except that AVX-512 does not imply AVX-VNNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Instructions of every processor, in plain Rust, also for Miri and sanitizers.
    Portable,
    /// NEON with fused multiply-adds, which every 64-bit Arm processor has.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with dot products of four 8-bit integers (`FEAT_DotProd`).
    #[cfg(target_arch = "aarch64")]
    Dotprod,
    /// NEON with dot products and matrix products of 8-bit integers (`FEAT_I8MM`).
    #[cfg(target_arch = "aarch64")]
    I8mm,
    /// The same with dot products of bf16 (`FEAT_BF16`): queries of attention are rounded to bf16, and so are activations
    /// that are multiplied with bf16 weights.
    #[cfg(target_arch = "aarch64")]
    I8mmBf16,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX2 with AVX-VNNI: integer products in registers of 256 bits.
    AvxVnni,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// AVX-512 with BF16: queries of attention are rounded to bf16, and so are activations that are multiplied with
    /// bf16 weights.
    Avx512Bf16,
    /// AVX-512 with AMX for 8-bit integers and bf16, if the system permits this process to use it.
    Amx,
}

impl Isa {
    /// All instruction sets of this architecture, the simplest first.
    #[cfg(target_arch = "aarch64")]
    pub const ALL: [Self; 5] = [Self::Portable, Self::Neon, Self::Dotprod, Self::I8mm, Self::I8mmBf16];

    /// All instruction sets of this architecture, the simplest first.
    #[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
    pub const ALL: [Self; 1] = [Self::Portable];

    /// All instruction sets of this architecture, the simplest first.
    #[cfg(target_arch = "x86_64")]
    pub const ALL: [Self; 6] = [Self::Portable, Self::Avx2, Self::AvxVnni, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// Returns the best instruction set of this machine.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    /// Returns whether weights, keys and values in bf16 are multiplied directly instead of being widened to f32.
    pub(crate) const fn multiplies_bf16(self) -> bool {
        #[cfg(target_arch = "aarch64")]
        if matches!(self, Self::I8mmBf16) {
            return true;
        }
        matches!(self, Self::Avx512Bf16 | Self::Amx)
    }

    /// Returns whether weights in bf16 are multiplied from twelve bits without being unpacked in memory first.
    pub(crate) const fn multiplies_short(self) -> bool {
        matches!(self, Self::Avx512Bf16)
    }

    /// Returns whether registers have 512 bits.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn has_wide_registers(self) -> bool {
        matches!(self, Self::Avx512 | Self::Avx512Bf16 | Self::Amx)
    }

    /// Returns whether this machine supports it and the operating system permits this process to use it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => aarch64::has_neon(),
            #[cfg(target_arch = "aarch64")]
            Self::Dotprod => Self::Neon.is_available() && aarch64::has_dotprod(),
            #[cfg(target_arch = "aarch64")]
            Self::I8mm => Self::Dotprod.is_available() && aarch64::has_i8mm(),
            #[cfg(target_arch = "aarch64")]
            Self::I8mmBf16 => Self::I8mm.is_available() && aarch64::has_bf16(),
            Self::Avx2 => x86::has_avx2(),
            Self::AvxVnni => x86::has_avx2() && x86::has_avx_vnni(),
            Self::Avx512 => x86::has_avx2() && x86::has_avx512(),
            Self::Avx512Bf16 => Self::Avx512.is_available() && x86::has_avx512_bf16(),
            Self::Amx => Self::Avx512Bf16.is_available() && x86::has_amx(),
        }
    }

    /// Returns the value of `OCTAVO_CPU_ISA`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Self::Dotprod => "dotprod",
            #[cfg(target_arch = "aarch64")]
            Self::I8mm => "i8mm",
            #[cfg(target_arch = "aarch64")]
            Self::I8mmBf16 => "i8mm-bf16",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avx-vnni",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Amx => "amx",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::ALL.map(Self::name).join(", ");
        let isa = Self::ALL.into_iter().find(|isa| isa.name() == name);
        let isa = isa.ok_or_else(|| format!("'{name}' is no instruction set; known are {known}"))?;
        if isa.is_available() { Ok(isa) } else { Err(format!("this machine has no {isa}; it has {}", Self::detect())) }
    }
}

/// Declares kernels as methods of [`Isa`] that run the copy compiled for it. Each is a function of the module `plain`
/// that is inlined into all copies. Its constant parameter selects fused multiply-adds.
macro_rules! per_isa {
    ($plain:ident; $($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        #[cfg(target_arch = "x86_64")]
        mod avx2 {
            use super::*;
            $(
                #[target_feature(enable = "avx2,fma,f16c")]
                pub(super) fn $name($($arg: $type),*) { $plain::$name::<true>($($arg),*) }
            )*
        }

        #[cfg(target_arch = "x86_64")]
        mod avx512 {
            use super::*;
            $(
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
                pub(super) fn $name($($arg: $type),*) { $plain::$name::<true>($($arg),*) }
            )*
        }

        #[cfg(target_arch = "aarch64")]
        mod aarch64 {
            use super::*;
            $(
                #[target_feature(enable = "neon")]
                pub(super) fn $name($($arg: $type),*) { $plain::$name::<true>($($arg),*) }
            )*
        }

        impl Isa {
            $(
                $(#[$doc])*
                #[inline]
                pub(crate) fn $name(self, $($arg: $type),*) {
                    match self {
                        Self::Portable => $plain::$name::<false>($($arg),*),
                        #[cfg(target_arch = "x86_64")]
                        // SAFETY: an `Isa` is only used where it is available.
                        Self::Avx2 | Self::AvxVnni => unsafe { avx2::$name($($arg),*) },
                        #[cfg(target_arch = "x86_64")]
                        // SAFETY: as above.
                        Self::Avx512 | Self::Avx512Bf16 | Self::Amx => unsafe { avx512::$name($($arg),*) },
                        #[cfg(target_arch = "aarch64")]
                        // SAFETY: as above.
                        Self::Neon | Self::Dotprod | Self::I8mm | Self::I8mmBf16 => unsafe { aarch64::$name($($arg),*) },
                        #[cfg(not(target_arch = "x86_64"))]
                        _ => $plain::$name::<false>($($arg),*),
                    }
                }
            )*
        }
    };
}

pub(crate) use per_isa;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::is_x86_feature_detected as has;
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    use std::sync::OnceLock;

    pub(super) fn has_avx2() -> bool {
        has!("avx2") && has!("fma") && has!("f16c")
    }

    pub(super) fn has_avx_vnni() -> bool {
        has!("avxvnni")
    }

    pub(super) fn has_avx512() -> bool {
        has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq") && has!("avx512vnni")
    }

    pub(super) fn has_avx512_bf16() -> bool {
        has!("avx512bf16")
    }

    pub(super) fn has_amx() -> bool {
        static AVAILABLE: OnceLock<bool> = OnceLock::new();
        *AVAILABLE.get_or_init(|| {
            let granted = amx_is_granted();
            #[cfg(all(feature = "amx-emulator", target_os = "linux"))]
            let granted = granted || super::amx_emulator::install();
            granted
        })
    }

    /// The detection macro does not support AMX on stable Rust. This checks CPUID leaf 7 (EDX bits 22 and 25) and the
    /// tile state in XCR0 (bits 17 and 18), and requests the kernel's permission.
    fn amx_is_granted() -> bool {
        const BF16: u32 = 1 << 22;
        const TILE_AND_INT8: u32 = 3 << 24;
        const TILE_STATE: u64 = 3 << 17;
        if __cpuid(0).eax < 7 || !has!("xsave") {
            return false;
        }
        let features = __cpuid_count(7, 0).edx;
        let wanted = BF16 | TILE_AND_INT8;
        // SAFETY: the processor supports XSAVE and the system has enabled it, as the detection of AVX has shown.
        features & wanted == wanted && unsafe { xcr0() } & TILE_STATE == TILE_STATE && ask()
    }

    #[target_feature(enable = "xsave")]
    fn xcr0() -> u64 {
        // SAFETY: register 0 exists wherever XSAVE does.
        unsafe { _xgetbv(0) }
    }

    #[cfg(target_os = "linux")]
    fn ask() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        // SAFETY: the call takes two numbers and accesses no memory of this process.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    #[cfg(not(target_os = "linux"))]
    fn ask() -> bool {
        false
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use std::arch::is_aarch64_feature_detected as has;

    pub(super) fn has_neon() -> bool {
        has!("neon")
    }

    pub(super) fn has_dotprod() -> bool {
        has!("dotprod")
    }

    pub(super) fn has_i8mm() -> bool {
        has!("i8mm")
    }

    pub(super) fn has_bf16() -> bool {
        has!("bf16")
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod x86 {
    pub(super) fn has_avx2() -> bool {
        false
    }

    pub(super) fn has_avx_vnni() -> bool {
        false
    }

    pub(super) fn has_avx512() -> bool {
        false
    }

    pub(super) fn has_avx512_bf16() -> bool {
        false
    }

    pub(super) fn has_amx() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_contains_those_before_it() {
        let others = Isa::ALL.into_iter().filter(|&isa| isa != Isa::AvxVnni);
        let available: Vec<bool> = others.map(Isa::is_available).collect();
        assert!(available[0] && available.is_sorted_by(|a, b| a >= b), "{available:?}");
        assert!(Isa::Avx2.is_available() || !Isa::AvxVnni.is_available());
        assert!(Isa::detect().is_available());
    }

    /// With `OCTAVO_REQUIRE_ISA`, the tests run on a processor whose best instruction set is known.
    #[test]
    fn the_best_is_the_one_that_is_required() {
        if let Ok(required) = std::env::var("OCTAVO_REQUIRE_ISA") {
            assert_eq!(Isa::detect().name(), required);
        }
    }

    #[test]
    fn names_are_parsed_and_errors_say_what_there_is() {
        assert_eq!("portable".parse(), Ok(Isa::Portable));
        let error = "sse9".parse::<Isa>().unwrap_err();
        let known = if cfg!(target_arch = "x86_64") {
            "portable, avx2, avx-vnni, avx512, avx512-bf16, amx"
        } else if cfg!(target_arch = "aarch64") {
            "portable, neon, dotprod, i8mm, i8mm-bf16"
        } else {
            "portable"
        };
        assert_eq!(error, format!("'sse9' is no instruction set; known are {known}"));
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_available()) {
            assert!(isa.name().parse::<Isa>().unwrap_err().starts_with(&format!("this machine has no {isa}")));
        }
    }
}
