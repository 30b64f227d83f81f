//! All kernel instances, each with its template, arguments, source and number of threads.
//!
//! Code that launches a kernel requests its instance by typed values ([`gemv`], [`paged_decode`], ...) and never writes
//! a name. [`all`] lists the instances of a chip, which `octavo kernels build` compiles and the compile check covers.

mod attention;
mod experts;
mod fill;
mod images;
mod linear;
mod lora;
mod rows;
mod sampling;

use std::fmt::Write as _;

pub use attention::{
    AttentionTypes, CacheType, DecodeKernel, HEAD_SIZES, LATENT_SIZES, PREFILL_HEAD_SIZES, latent_decode, latent_post,
    latent_prefill, paged_attention, paged_decode, paged_decode_fused, paged_prefill, prefill_tile, qkv_post,
};
pub use experts::{ExpertProduct, ExpertTiles, expert_gemm, expert_gemv, expert_sum, gate_rows, route, sort_experts};
pub use fill::fill;
pub use images::{MediaMove, embed_taps, mean_rows, media_rows, patches};
pub use linear::{
    FUSED_ROWS, FUSED_SHARED, GEMM_F8_TILE, GEMM_QUANT_MOST, GEMM_QUANT_ROWS, GemmTile, MMVQ_PAIRS, Pairs,
    SKINNY_QUANT_INPUTS, SKINNY_STAGES, SKINNY_TILES, STAGE_INPUTS, SkinnyQuant, dequantize, gemm, gemm_f8, gemm_quant,
    gemm_skinny, gemm_skinny_quant, gemv, gemv_cutoff, gemv_fused, gemv_quant, gemv_rows, has_mmvq_glu, library_cutoff,
    mmvq, mmvq_cutoff, mmvq_glu, mmvq_pair, mmvq_rows, quantize_activations, quantize_f8, quantize_f8_groups, scale_f8,
    skinny_most, skinny_quant_most, skinny_quant_tiles, skinny_rows,
};
pub use lora::{lora_expand, lora_expand_table, lora_pairs, lora_shrink};
pub use rows::{
    Activation, NormMean, Pool, act, copy_blocks, embed, embed_add, gather_columns, gather_rows, glu, glu_codes, norm,
    norm_codes, pool_rows, table_runs,
};
pub use sampling::{sampling_adjust, sampling_draw, sampling_rank, sampling_report, sampling_scan, sampling_weigh};

use crate::params::Params;
use crate::quant::QuantFormat;
use crate::sources::Source;

/// Element type of activations, dense weights and the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// IEEE single precision, for exactness and for checks.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16, from sm_80 on.
    Bf16,
}

impl Dtype {
    /// All element types.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Returns the name in instances and in `--dtype`'s short forms.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Returns the type's name in C.
    pub const fn c_name(self) -> &'static str {
        match self {
            Self::F32 => "float",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Returns the size of an element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// A chip, identified by its compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Chip {
    /// Major number: 7 for Volta and Turing, 8 for Ampere and Ada, 9 for Hopper.
    pub major: u32,
    /// Minor number: 0 for a V100, 9 for an L40S, 0 for an H100.
    pub minor: u32,
}

impl Chip {
    /// V100.
    pub const SM_70: Self = Self { major: 7, minor: 0 };
    /// T4.
    pub const SM_75: Self = Self { major: 7, minor: 5 };
    /// A100.
    pub const SM_80: Self = Self { major: 8, minor: 0 };
    /// A10.
    pub const SM_86: Self = Self { major: 8, minor: 6 };
    /// L40S.
    pub const SM_89: Self = Self { major: 8, minor: 9 };
    /// H100 and H200.
    pub const SM_90: Self = Self { major: 9, minor: 0 };
    /// Chips for which every change is compiled.
    pub const CHECKED: [Self; 3] = [Self::SM_70, Self::SM_89, Self::SM_90];

    /// Returns the compiler's name of the chip: `sm_89`, and `sm_90a` with the features that only that chip has.
    pub fn arch(self) -> String {
        let suffix = if self == Self::SM_90 { "a" } else { "" };
        format!("sm_{}{}{suffix}", self.major, self.minor)
    }

    /// Parses a compiler's name of a chip.
    pub fn parse(arch: &str) -> Option<Self> {
        let digits = arch.strip_prefix("sm_")?.trim_end_matches('a');
        let at = digits.len().checked_sub(1)?;
        let chip = Self { major: digits.get(..at)?.parse().ok()?, minor: digits.get(at..)?.parse().ok()? };
        (chip.arch() == arch).then_some(chip)
    }

    /// Returns whether the chip has `ldmatrix` and tensor-core instructions whose fragments are those of Ampere. The instruction of
    /// Volta is slow there.
    pub const fn has_sm75(self) -> bool {
        self.major >= 8 || (self.major == 7 && self.minor >= 5)
    }

    /// Returns whether the chip has bf16, `cp.async`, `ldmatrix` and the tensor-core instructions of Ampere.
    pub const fn has_sm80(self) -> bool {
        self.major >= 8
    }

    /// Returns whether a launch on the chip may begin before the one before has ended.
    pub const fn has_sm90(self) -> bool {
        self.major >= 9
    }

    /// Returns whether the chip has 8-bit floating-point numbers.
    pub const fn has_fp8(self) -> bool {
        self.major >= 9 || (self.major == 8 && self.minor >= 9)
    }

    /// Returns whether an instruction of a warp multiplies 8-bit floating-point numbers on the tensor cores: Ada and the
    /// Blackwell of workstations. Hopper and the Blackwell of data centres do so only by instructions of a warp group; the
    /// compiler makes half-precision products of the warp's instruction there.
    pub const fn has_fp8_mma(self) -> bool {
        (self.major == 8 && self.minor >= 9) || self.major == 12
    }

    /// Returns whether there are kernels of this element type for the chip.
    pub const fn has(self, dtype: Dtype) -> bool {
        !matches!(dtype, Dtype::Bf16) || self.has_sm80()
    }
}

/// Form to which kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// Machine code for a chip.
    Code(Chip),
    /// PTX for a chip, which the driver compiles for that chip or a later one.
    Ptx(Chip),
}

impl Target {
    /// Returns the chip for which kernels are compiled.
    pub const fn chip(self) -> Chip {
        match self {
            Self::Code(chip) | Self::Ptx(chip) => chip,
        }
    }

    /// Returns whether `chip` runs this form: PTX runs on its chip and later ones, and machine code on those of the same major. The
    /// code of sm_90a uses features of that chip alone, which is the only one of its major.
    pub fn runs_on(self, chip: Chip) -> bool {
        match self {
            Self::Code(of) => of.major == chip.major && of.minor <= chip.minor,
            Self::Ptx(of) => of <= chip,
        }
    }

    /// Returns the compiler's name of the target: `sm_89`, or `compute_89` for PTX.
    pub fn arch(self) -> String {
        match self {
            Self::Code(chip) => chip.arch(),
            Self::Ptx(Chip { major, minor }) => format!("compute_{major}{minor}"),
        }
    }

    /// Parses a compiler's name of a target.
    pub fn parse(arch: &str) -> Option<Self> {
        let ptx = arch.strip_prefix("compute_").and_then(|digits| {
            let chip = Chip::parse(&format!("sm_{digits}")).or_else(|| Chip::parse(&format!("sm_{digits}a")))?;
            Some(Self::Ptx(chip)).filter(|target| target.arch() == arch)
        });
        ptx.or_else(|| Chip::parse(arch).map(Self::Code))
    }
}

/// Chips that an instance supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chips {
    /// All chips.
    All,
    /// Up to sm_72.
    BeforeSm75,
    /// sm_75 and later.
    FromSm75,
    /// Up to sm_75.
    BeforeSm80,
    /// sm_80 and later.
    FromSm80,
    /// Those with [`Chip::has_fp8`].
    Fp8,
    /// Those with [`Chip::has_fp8_mma`].
    Fp8Mma,
}

impl Chips {
    /// Returns whether `chip` is among them.
    pub const fn contains(self, chip: Chip) -> bool {
        match self {
            Self::All => true,
            Self::BeforeSm75 => !chip.has_sm75(),
            Self::FromSm75 => chip.has_sm75(),
            Self::BeforeSm80 => !chip.has_sm80(),
            Self::FromSm80 => chip.has_sm80(),
            Self::Fp8 => chip.has_fp8(),
            Self::Fp8Mma => chip.has_fp8_mma(),
        }
    }
}

/// An entry point.
#[derive(Clone, Debug, PartialEq)]
pub struct Instance {
    /// Source file with its template.
    pub source: Source,
    /// Name of the entry point, unique in the manifest.
    pub name: String,
    /// The template with its arguments, as C++.
    pub call: String,
    /// Name of the parameter struct.
    pub params: &'static str,
    /// Size of the parameter struct in bytes.
    pub params_bytes: usize,
    /// Number of threads in a CTA.
    pub threads: u32,
    /// Maximum dynamic shared memory of a launch in bytes.
    pub dynamic_shared: usize,
    /// Chips on which it can run.
    pub chips: Chips,
    /// Minimum number of CTAs on a multiprocessor at once, which limits the registers that the compiler may use. 0
    /// leaves it to the compiler.
    pub resident: u32,
    /// Number of stages of shared memory that a CTA, or a warp of decode attention, copies and multiplies in turn, if the template
    /// has it.
    pub stages: Option<u32>,
    /// Number of keys of a stage of attention on tensor cores, if the template has it.
    pub stage_keys: Option<u32>,
    /// Formats of the weights that it decodes, in the order of its template; none if they are dense.
    pub formats: Vec<QuantFormat>,
}

impl Instance {
    /// Creates an instance with parameters P, without dynamic shared memory, for every chip.
    pub(crate) fn new<P: Params>(source: Source, name: String, call: String, threads: u32) -> Self {
        Self {
            source,
            name,
            call,
            params: P::NAME,
            params_bytes: size_of::<P>(),
            threads,
            dynamic_shared: 0,
            chips: Chips::All,
            resident: 0,
            stages: None,
            stage_keys: None,
            formats: Vec::new(),
        }
    }

    /// Sets the minimum number of CTAs on a multiprocessor, which limits the registers.
    pub(crate) fn resident(self, ctas: u32) -> Self {
        Self { resident: ctas, ..self }
    }

    /// Sets the dynamic shared memory.
    pub(crate) fn with_shared(self, dynamic_shared: usize) -> Self {
        Self { dynamic_shared, ..self }
    }

    /// Sets the number of stages.
    pub(crate) fn with_stages(self, stages: usize) -> Self {
        Self { stages: Some(stages as u32), ..self }
    }

    /// Sets the number of keys of a stage.
    pub(crate) fn with_stage_keys(self, keys: usize) -> Self {
        Self { stage_keys: Some(keys as u32), ..self }
    }

    /// Sets the formats.
    pub(crate) fn decoding(self, formats: &[QuantFormat]) -> Self {
        Self { formats: formats.to_vec(), ..self }
    }

    /// Restricts the instance to these chips.
    pub(crate) fn on(self, chips: Chips) -> Self {
        Self { chips, ..self }
    }

    /// Restricts the instance to chips with the element type.
    pub(crate) fn typed(self, dtype: Dtype) -> Self {
        if dtype == Dtype::Bf16 { self.on(Chips::FromSm80) } else { self }
    }

    /// Returns the line that defines the entry point.
    fn line(&self) -> String {
        let Self { name, threads, resident, params, call, .. } = self;
        match resident {
            0 => format!("KERNEL({name}, {threads}, {params}, {call})"),
            ctas => format!("KERNEL_RESIDENT({name}, {threads}, {ctas}, {params}, {call})"),
        }
    }
}

/// Returns all instances for a chip.
pub fn all(chip: Chip) -> Vec<Instance> {
    let families = [
        rows::all(chip),
        experts::all(chip),
        images::all(chip),
        attention::all(chip),
        linear::all(chip),
        lora::all(chip),
        sampling::all(),
        fill::all(chip),
    ];
    let instances: Vec<_> = families.into_iter().flatten().collect();
    debug_assert!(instances.iter().all(|i| i.chips.contains(chip)));
    instances
}

/// Returns the sources of `instances`, each once, in order of first mention.
pub fn sources(instances: &[Instance]) -> Vec<Source> {
    let mut sources: Vec<Source> = Vec::new();
    for instance in instances {
        if !sources.contains(&instance.source) {
            sources.push(instance.source);
        }
    }
    sources
}

/// Returns the text to compile, which includes the [`HEADERS`](crate::sources::HEADERS): the source with an entry point
/// for each of `instances` that belongs to it.
pub fn program(source: Source, instances: &[Instance]) -> String {
    let mut text = format!("#line 1 \"{}\"\n{}\n#line 1 \"manifest\"\n", source.path, source.text);
    for instance in instances.iter().filter(|i| i.source == source) {
        let _ = writeln!(text, "{}", instance.line());
    }
    text
}

/// Targets of a pack unless others are named: machine code for the chips of data centres and workstations, and PTX for
/// later ones.
pub const PACKED: &str = "sm_70,sm_75,sm_80,sm_86,sm_89,sm_90a,sm_100,sm_120,compute_120";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn code_runs_on_later_chips_of_its_major_and_ptx_on_all_later_ones() {
        let chip = |major, minor| Chip { major, minor };
        let runs = |target: &str, on| Target::parse(target).unwrap().runs_on(on);
        assert!(runs("sm_80", chip(8, 0)) && runs("sm_80", chip(8, 9)) && runs("sm_86", chip(8, 9)));
        assert!(!runs("sm_89", chip(8, 6)) && !runs("sm_89", chip(9, 0)) && !runs("sm_75", chip(7, 0)));
        assert!(runs("sm_90a", chip(9, 0)) && !runs("sm_90a", chip(10, 0)) && runs("sm_100", chip(10, 3)));
        assert!(
            runs("compute_120", chip(12, 1)) && runs("compute_70", chip(9, 0)) && !runs("compute_120", chip(10, 0))
        );
    }

    #[test]
    fn a_pack_has_kernels_for_every_chip_that_is_compiled() {
        let packed: Vec<_> = PACKED.split(',').map(|arch| Target::parse(arch).expect(arch)).collect();
        for chip in Chip::CHECKED.into_iter().chain([Chip::SM_75, Chip::SM_80, Chip::SM_86]) {
            assert!(packed.contains(&Target::Code(chip)), "{}", chip.arch());
        }
        let newest = packed.iter().map(|target| target.chip()).max().expect("targets");
        assert!(packed.contains(&Target::Ptx(newest)), "chips after {} run nothing", newest.arch());
    }

    #[test]
    fn names_are_unique_and_say_one_thing() {
        for chip in Chip::CHECKED {
            let instances = all(chip);
            assert!(!instances.is_empty());
            let names: BTreeSet<_> = instances.iter().map(|i| i.name.as_str()).collect();
            assert_eq!(names.len(), instances.len(), "{}: a name twice", chip.arch());
            let calls: BTreeSet<_> = instances.iter().map(|i| (i.call.as_str(), i.threads)).collect();
            assert_eq!(calls.len(), instances.len(), "{}: an instance under two names", chip.arch());
        }
    }

    #[test]
    fn a_name_means_the_same_on_every_chip() {
        let instances: Vec<_> = Chip::CHECKED.into_iter().flat_map(all).collect();
        for (i, a) in instances.iter().enumerate() {
            assert!(instances[..i].iter().all(|b| a.name != b.name || a == b), "{} is two instances", a.name);
        }
    }

    #[test]
    fn stages_and_their_keys_are_those_of_the_templates() {
        use crate::sources::{ATTENTION_DECODE, ATTENTION_PREFILL, GEMM_F8, GEMM_MMA, GEMM_SKINNY, GEMM_SKINNY_QUANT};
        for instance in Chip::CHECKED.into_iter().flat_map(all) {
            let numbers = instance.call.split([',', '>']).filter_map(|argument| argument.trim().parse().ok());
            let numbers: Vec<u32> = numbers.collect();
            let (stages, keys) = match instance.source {
                // What follows the head size and two other numbers, and is the last but for the type of a cache.
                ATTENTION_DECODE => (numbers.get(3), Some(&(crate::params::KV_BLOCK as u32))),
                ATTENTION_PREFILL => (Some(&(attention::PREFILL_STAGES as u32)), numbers.get(3)),
                GEMM_MMA | GEMM_SKINNY | GEMM_SKINNY_QUANT => (numbers.last(), None),
                GEMM_F8 if instance.name.starts_with("gemm") => (numbers.last(), None),
                _ => (None, None),
            };
            let found = (instance.stages.as_ref(), instance.stage_keys.as_ref());
            assert_eq!(found, (stages, keys), "{}: {}", instance.name, instance.call);
        }
    }

    #[test]
    fn formats_are_those_of_the_templates() {
        for instance in Chip::CHECKED.into_iter().flat_map(all) {
            let of = |argument: &str| QuantFormat::ALL.into_iter().find(|format| format.c_name() == argument.trim());
            let found: Vec<_> = instance.call.split(['<', ',', '>']).filter_map(of).collect();
            assert_eq!(instance.formats, found, "{}: {}", instance.name, instance.call);
        }
    }

    #[test]
    fn volta_is_not_asked_for_what_it_lacks() {
        let instances = all(Chip::SM_70);
        assert!(instances.iter().all(|i| !i.name.contains("bf16") && i.chips != Chips::FromSm80));
        assert!(instances.iter().any(|i| i.chips == Chips::BeforeSm75));
        assert!(all(Chip::SM_89).iter().any(|i| i.name.contains("bf16")));
    }

    #[test]
    fn turing_has_no_kernel_of_volta_and_what_its_shared_memory_holds() {
        let instances = all(Chip::SM_75);
        let has = |part: &str| instances.iter().any(|i| i.name.starts_with(part));
        assert!(!has("gemm_volta") && !has("expert_volta") && !has("paged_prefill_volta"));
        assert!(has("gemm_mma_f16_large") && has("expert_mma_f16_small") && has("paged_prefill_f16_d128"));
        assert!(!instances.iter().any(|i| i.name.contains("bf16")));
        let longest = |i: &&Instance| i.source != crate::sources::ROWS && i.dynamic_shared > 64 << 10;
        assert_eq!(instances.iter().find(longest), None, "a norm asks for less than its most");
    }

    #[test]
    fn every_source_is_used_and_holds_what_is_called() {
        let instances: Vec<_> = Chip::CHECKED.into_iter().flat_map(all).collect();
        assert_eq!(sources(&instances).len(), crate::sources::SOURCES.len());
        for instance in instances {
            let template = instance.call.split('<').next().expect("a name");
            assert_ne!(template, instance.name, "an entry point beside a function of its name cannot call it");
            let defined = format!("void {template}(const {}& ", instance.params);
            assert!(instance.source.text.contains(&defined), "{}: no `{defined}`", instance.source.path);
        }
    }

    #[test]
    fn chips_are_read_as_they_are_written() {
        for chip in Chip::CHECKED {
            assert_eq!(Chip::parse(&chip.arch()), Some(chip));
        }
        assert_eq!(Chip::parse("sm_86"), Some(Chip { major: 8, minor: 6 }));
        for wrong in ["", "sm_", "sm_9", "90", "sm_90", "sm_89a", "compute_70"] {
            assert_eq!(Chip::parse(wrong), None, "{wrong}");
        }
        for target in Chip::CHECKED.into_iter().flat_map(|chip| [Target::Code(chip), Target::Ptx(chip)]) {
            assert_eq!(Target::parse(&target.arch()), Some(target));
        }
        for wrong in ["compute_", "compute_90a", "compute_7", "70", "sm_90"] {
            assert_eq!(Target::parse(wrong), None, "{wrong}");
        }
    }
}
