//! The instruction set of the kernels, chosen once.

use std::fmt;
use std::str::FromStr;

/// Instruction sets with kernels. Each includes those before it, except that AVX-512 does not imply AVX-VNNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Instructions of every processor, in plain Rust, also for Miri and sanitizers.
    Portable,
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
    /// All instruction sets, the simplest first.
    pub const ALL: [Self; 6] = [Self::Portable, Self::Avx2, Self::AvxVnni, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// Returns the best instruction set of this machine.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    /// Returns whether bf16 is multiplied directly instead of being widened to f32.
    pub(crate) const fn multiplies_bf16(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Amx)
    }

    /// Returns whether this machine supports it and the operating system permits this process to use it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
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

    /// The detection macro does not support AMX on stable Rust. This checks CPUID leaf 7 (EDX bits 22 and 25) and the
    /// tile state in XCR0 (bits 17 and 18), and requests the kernel's permission.
    pub(super) fn has_amx() -> bool {
        static GRANTED: OnceLock<bool> = OnceLock::new();
        *GRANTED.get_or_init(|| {
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
        })
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

    #[test]
    fn names_are_parsed_and_errors_say_what_there_is() {
        assert_eq!("portable".parse(), Ok(Isa::Portable));
        let error = "sse9".parse::<Isa>().unwrap_err();
        assert_eq!(error, "'sse9' is no instruction set; known are portable, avx2, avx-vnni, avx512, avx512-bf16, amx");
        for isa in Isa::ALL.into_iter().filter(|isa| !isa.is_available()) {
            assert!(isa.name().parse::<Isa>().unwrap_err().starts_with(&format!("this machine has no {isa}")));
        }
    }
}
