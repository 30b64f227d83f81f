//! Finds data races in kernels, and checks that none would be overlooked: without any one of its barriers, fences and
//! waits, a kernel has a race that is found.

use std::ops::Range;

use octavo_kernels::manifest::{self, Activation, CacheType, Chip, Dtype, GemmTile, NormMean, Pool};
use octavo_kernels::quant::QuantFormat;
use octavo_kernels::sources::{HEADERS, SOURCES};
use octavo_ops::testing::TestRng;

use crate::attention::{Chunk, Path, Sequence, Setup};
use crate::common::{in_every_order, rng};
use crate::launcher::{Kernels, finding_races};
use crate::{
    attention, experts, float8, fused, fused_decode, latent, linear, lora, qkv_post, quantized, rounded, rows,
    sampling, skinny, skinny_quant,
};

// ---------------------------------------------------------------------------------------- mutants

/// A change of the kernels' sources.
#[derive(Clone, Debug)]
pub(crate) struct Edit {
    pub(crate) name: String,
    change: Option<Change>,
}

/// A text in place of a part of a file.
#[derive(Clone, Debug)]
struct Change {
    file: &'static str,
    part: Range<usize>,
    text: &'static str,
}

impl Edit {
    const NONE: &'static Self = &Self { name: String::new(), change: None };

    /// Returns the program of the source at `path` with the change.
    pub(crate) fn apply(&self, path: &str, program: String) -> String {
        let Some(change) = &self.change else { return program };
        if change.file == path {
            let changed = change.apply();
            return program.replacen(source(change.file), &changed, 1);
        }
        change.include(&program, &mut Vec::new())
    }
}

impl Change {
    fn apply(&self) -> String {
        let mut text = source(self.file).to_owned();
        text.replace_range(self.part.clone(), self.text);
        text
    }

    /// Returns a text in which the changed header, and those that include it, have taken the place of their names.
    fn include(&self, text: &str, included: &mut Vec<&'static str>) -> String {
        let mut out = String::new();
        for line in text.lines() {
            let name = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
            let header = HEADERS.iter().find(|header| Some(header.0) == name && self.is_included(header.0));
            match header {
                Some(header) if included.contains(&header.0) => {}
                Some(&(name, content)) => {
                    included.push(name);
                    let content = if name == self.file { self.apply() } else { content.to_owned() };
                    let content = self.include(&content.replace("#pragma once", ""), included);
                    out += &format!("#line 1 \"{name}\"\n{content}\n#line 1 \"the rest\"\n");
                }
                None => out.extend([line, "\n"]),
            }
        }
        out
    }

    /// Returns whether a header is the changed one or includes it.
    fn is_included(&self, name: &str) -> bool {
        let includes = |inner: &&(&str, &str)| source(name).contains(&format!("#include \"{}\"", inner.0));
        name == self.file || HEADERS.iter().filter(includes).any(|inner| self.is_included(inner.0))
    }
}

/// Returns the text of a source or of a header.
fn source(name: &str) -> &'static str {
    let sources = SOURCES.iter().chain([&crate::machine::SOURCE]).map(|source| (source.path, source.text));
    let found = sources.chain(HEADERS.iter().copied()).find(|(path, _)| *path == name);
    found.unwrap_or_else(|| panic!("there is no {name}")).1
}

/// What orders the accesses of threads.
const ORDERS: [&str; 5] =
    ["__syncthreads();", "__syncwarp();", "__threadfence();", "cp_async_wait<", "wait_for_launch();"];

/// Returns the mutants of a file, each without one of its statements that order accesses.
fn mutants(file: &'static str) -> Vec<Edit> {
    let text = source(file);
    let code = |at: usize| !text[..at].rsplit('\n').next().unwrap_or_default().contains("//");
    let statements = ORDERS.into_iter().flat_map(|order| text.match_indices(order)).filter(|found| code(found.0));
    statements
        .map(|(at, _)| {
            let end = at + text[at..].find(';').expect("the end of a statement") + 1;
            let line = text[..at].matches('\n').count() + 1;
            let name = format!("{file}:{line} without {}", &text[at..end]);
            Edit { name, change: Some(Change { file, part: at..end, text: ";" }) }
        })
        .collect()
}

/// Returns the mutant in which `to` takes the place of `from`.
fn mutant(file: &'static str, from: &str, to: &'static str) -> Edit {
    let found: Vec<_> = source(file).match_indices(from).collect();
    assert_eq!(found.len(), 1, "{file} has one `{from}`");
    let part = found[0].0..found[0].0 + from.len();
    Edit { name: format!("{file} with `{to}` for `{from}`"), change: Some(Change { file, part, text: to }) }
}

// ---------------------------------------------------------------------------------------- cases

/// A step of kernels, and the files whose statements it needs.
struct Case {
    name: &'static str,
    files: &'static [&'static str],
    run: fn(),
}

const CASES: &[Case] = &[
    Case { name: "few rows on sm_80", files: &["gpu.h", "tiles.h"], run: skinny::check_parts },
    Case {
        name: "few rows with a quantised weight on sm_80",
        files: &["cuda/gemm_skinny_quant.cu"],
        run: skinny_quant::check_parts,
    },
    Case {
        name: "few rows with a quantised weight on sm_70",
        files: &["cuda/gemm_skinny_volta.cu"],
        run: skinny_quant::check_parts_on_volta,
    },
    Case { name: "few rows", files: &["cuda/gemv.cu"], run: linear::check_vectors },
    Case { name: "few rows with a norm", files: &["cuda/gemv_fused.cu", "gpu.h"], run: fused::check_turns },
    Case {
        name: "attention on sm_80",
        files: &["cuda/attention_prefill.cu", "cuda/attention_decode.cu", "splits.h"],
        run: || step(attention::setups()[1], [90, 80, 70, 20]),
    },
    Case {
        name: "attention over codes on sm_80",
        files: &["cuda/attention_prefill.cu"],
        run: || step(Setup { cache: CacheType::E4m3, ..attention::setups()[1] }, [90, 80, 70, 20]),
    },
    Case {
        name: "decode that completes heads on sm_80",
        files: &["cuda/attention_decode.cu"],
        run: || fused_decode::check(&mut rng()),
    },
    Case {
        name: "attention on sm_70",
        files: &["cuda/attention_prefill_volta.cu", "cuda/attention_decode_volta.cu"],
        run: || step(attention::setups()[5], [90, 40, 36, 33]),
    },
    Case {
        name: "attention of any size",
        files: &["cuda/attention_plain.cu", "gpu.h"],
        run: || step(attention::setups()[8], [140, 20, 10, 5]),
    },
    Case {
        name: "latent attention",
        files: &["cuda/attention_latent.cu", "splits.h"],
        run: || step(latent::setups(5)[2], [40, 70, 50, 9]),
    },
    Case { name: "latents", files: &["cuda/latent_post.cu"], run: || latent::check(Dtype::F16, &mut rng()) },
    Case { name: "qkv", files: &["heads.h"], run: || qkv_post::check(Dtype::F16, &mut rng()) },
    Case { name: "dense on sm_80", files: &["tiles.h"], run: || dense(Chip::SM_89, Dtype::F16) },
    Case { name: "dense on sm_70", files: &["cuda/gemm_volta.cu"], run: || dense(Chip::SM_70, Dtype::F16) },
    Case { name: "dense in f32", files: &["cuda/gemm_f32.cu"], run: || dense(Chip::SM_89, Dtype::F32) },
    Case {
        name: "quantised tiles",
        files: &["cuda/gemm_quant.cu", "tiles.h"],
        run: || quantized::check_tiled(QuantFormat::Q4_0, Dtype::F16, Dtype::F16, &mut rng()),
    },
    Case {
        name: "gated products",
        files: &["cuda/quantized.cu"],
        run: || rounded::check_gated(QuantFormat::Q4K, Dtype::F16, Activation::Silu, &mut rng()),
    },
    Case {
        name: "codes in e4m3",
        files: &["cuda/gemm_f8.cu"],
        run: || float8::check(Dtype::F16, Dtype::F16, [20, 12, 160], &mut rng()),
    },
    Case {
        name: "experts",
        files: &["cuda/experts.cu", "cuda/gemm_volta.cu", "cuda/expert_mma.cu"],
        run: pairs_of_experts,
    },
    Case {
        name: "choice of experts",
        files: &["cuda/experts.cu"],
        run: || (0..12).for_each(|seed| experts::check_route(Dtype::F16, &mut TestRng(seed))),
    },
    Case { name: "adapters", files: &["cuda/lora.cu"], run: || lora::check(((Dtype::F16, Dtype::F16), false), 1) },
    Case { name: "pairs with adapters", files: &["cuda/lora.cu"], run: lora::check_pairs },
    Case {
        name: "sampling",
        files: &["cuda/sampling.cu", "cuda/logprobs.cu", "sampling.h"],
        run: || {
            sampling::check_adjusted_again(&mut rng());
            sampling::check_drawn(8, &[130, 1100], &mut rng());
            sampling::check_crowded(1100, &mut rng());
        },
    },
    Case {
        name: "rows",
        files: &["gpu.h"],
        run: || {
            let rng = &mut rng();
            rows::check_norm(Dtype::F16, NormMean::Layer, rng);
            rows::check_pool(Dtype::F16, Pool::Mean, rng);
            rows::check_copy_blocks(rng);
            rows::check_table_runs(rng);
        },
    },
];

/// Runs a step of a chunk, a prompt, decodes of several splits and of one, and rows without keys.
fn step(setup: Setup, lens: [usize; 4]) {
    let rng = &mut rng();
    // A CTA has several splits one after the other.
    let path = match setup.path {
        Path::Fast { chip, .. } => Path::Fast { chip, split_tokens: 32, columns: 2 },
        Path::Plain | Path::Invariant { .. } => setup.path,
    };
    let setup = Setup { path, ..setup };
    let s: [Sequence; 4] = lens.map(|len| setup.sequence(len, rng));
    let last = |i: usize| (&s[i], lens[i] - 1..lens[i]);
    let chunks: [Chunk<'_>; 7] =
        [(&s[0], lens[0] - 30..lens[0]), last(1), last(2), (&s[3], 0..lens[3]), last(3), last(3), last(3)];
    setup.check(&chunks, &setup.run_padded(&chunks, &s[3], 3));
}

fn dense(chip: Chip, dtype: Dtype) {
    let instance = manifest::gemm(chip, dtype, dtype, GemmTile::Small);
    let kernels = Kernels::new(std::slice::from_ref(&instance));
    let case = linear::Case::draw(&mut rng(), dtype, dtype, [20, 40, 200]);
    in_every_order(|order| case.run(&kernels, order, &instance, |p| p.gemm_grid(GemmTile::Small.outputs(dtype))));
}

fn pairs_of_experts() {
    experts::check_tiles(1);
    for chip in [Chip::SM_70, Chip::SM_89] {
        let product = manifest::expert_gemm(chip, None, Dtype::F16, GemmTile::Small).expect("a kernel");
        (0..2).for_each(|seed| experts::check_linear(Dtype::F16, None, &product, &mut TestRng(seed)));
    }
}

/// Returns what is found in a case.
fn find(case: &Case, edit: &'static Edit) -> Result<(), String> {
    finding_races(edit, case.run).map_err(|text| format!("{}: {text}", case.name))
}

/// Statements that order nothing which another does not, at least in the cases, so that a mutant without one of them has no
/// race.
const REDUNDANT: &[(&str, &str)] = &[
    // What an item writes is behind a barrier that follows the last reads of the item before it.
    ("cuda/attention_decode_volta.cu", "flag, output);\n        __syncthreads();\n    }\n}"),
    // A lane goes on with what it has written itself, up to the next barrier.
    ("cuda/experts.cu", "? first + second : first;\n    }\n    __syncwarp();"),
    ("cuda/experts.cu", "scores[i] = sigmoid(scores[i]);\n        __syncwarp();"),
    ("cuda/experts.cu", "scores[i] /= sum;\n    __syncwarp();"),
    ("cuda/experts.cu", "values[i] = 0.0f;\n    __syncwarp();"),
    // All callers have a barrier between this and the next use of the same shared memory.
    ("gpu.h", "result = fmaxf(result, scratch[warp]);\n    __syncthreads();"),
];

fn is_redundant(edit: &Edit) -> bool {
    let change = edit.change.as_ref().expect("a mutant");
    REDUNDANT.iter().any(|(file, text)| {
        let found: Vec<_> = source(file).match_indices(text).map(|found| found.0).collect();
        assert_eq!(found.len(), 1, "{file} has one `{text}`");
        *file == change.file && found[0] <= change.part.start && change.part.end <= found[0] + text.len()
    })
}

/// Returns the name of a mutant if no race is found in the cases that need its file.
fn missed(edit: Edit) -> Option<String> {
    let (file, edit) = (edit.change.as_ref().expect("a mutant").file, &*Box::leak(Box::new(edit)));
    let mut cases = CASES.iter().filter(|case| case.files.contains(&file));
    let is_caught = cases.any(|case| find(case, edit).is_err_and(|text| text.contains("race at")));
    (!is_caught).then(|| edit.name.clone())
}

#[test]
fn kernels_have_no_races() {
    let found: Vec<_> = CASES.iter().filter_map(|case| find(case, Edit::NONE).err()).collect();
    assert!(found.is_empty(), "{found:#?}");
}

/// Mutants with a defect of each kind.
#[test]
fn few_mutants_have_races() {
    let of = |file, text: &str| mutants(file).into_iter().filter(|edit| edit.name.ends_with(text)).collect::<Vec<_>>();
    let few = [
        of("gpu.h", "__threadfence();"),
        of("tiles.h", "cp_async_wait<STAGES - 2>();"),
        of("cuda/latent_post.cu", "__syncwarp();"),
        of("cuda/lora.cu", "__syncthreads();").split_off(3),
    ];
    assert!(few.iter().all(|of_kind| !of_kind.is_empty()), "{few:?}");
    let missed: Vec<_> = few.into_iter().flatten().filter_map(missed).collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
#[ignore = "it compiles each of the mutants, which takes minutes"]
fn every_mutant_has_a_race() {
    let mut files: Vec<&str> = CASES.iter().flat_map(|case| case.files).copied().collect();
    files.sort_unstable();
    files.dedup();
    let (redundant, needed): (Vec<_>, Vec<_>) = files.into_iter().flat_map(mutants).partition(is_redundant);
    assert_eq!(redundant.len(), REDUNDANT.len());
    let others = [
        // Bytes that the launch writes are read by the path that does not see it, and counted without an atomic operation.
        mutant(
            "splits.h",
            "load_fresh<2>(params.partial_sums + 2 * at)",
            "load_once_if<2>(params.partial_sums + 2 * at, true)",
        ),
        mutant("gpu.h", "atomicAdd(ticket, 1u)", "(*ticket)++"),
        // A CTA reads from the cache what another one writes.
        mutant("cuda/attention_decode.cu", "stored - key)", "end - key)"),
    ];
    let missed: Vec<_> = needed.into_iter().chain(others).filter_map(missed).collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

/// Every file that orders the accesses of threads has cases.
#[test]
fn every_file_has_cases() {
    let names = SOURCES.iter().map(|source| source.path).chain(HEADERS.iter().map(|header| header.0));
    for file in names.filter(|file| !mutants(file).is_empty()) {
        assert!(CASES.iter().any(|case| case.files.contains(&file)), "no case is about {file}");
    }
}
