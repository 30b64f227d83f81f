//! Tests that the parameter structs have the same layout in Rust and in C.

use std::fmt::Write as _;

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{Chips, Instance};
use octavo_kernels::params::{
    ActParams, AttentionParams, CopyBlocksParams, DequantizeParams, EmbedParams, EmbedTapsParams, ExpertLinearParams,
    ExpertSumParams, FillParams, FusedDecodeParams, FusedLinearParams, GateRowsParams, GatherColumnsParams,
    GatherRowsParams, GluCodesParams, GluParams, LatentPostParams, LinearParams, LoraPairsParams, LoraParams, LoraPart,
    MediaRowsParams, NormCodesParams, NormParams, PagedDecodeParams, Params, PatchesParams, PoolRowsParams,
    QkvPostParams, QuantGluParams, QuantLinearParams, QuantPairParams, QuantWeight, QuantizeParams, RoundedRows,
    RouteParams, SamplingParams, SamplingRow, SamplingState, SkinnyLinearParams, SkinnyQuantParams, SortExpertsParams,
    TableRunsParams,
};
use octavo_kernels::sources::Source;

use crate::common::launch;
use crate::launcher::{Kernels, address_mut};

/// Appends statements that write the offsets of a struct's fields and its size in C, and the same numbers in Rust.
fn layout<P: Params>(text: &mut String, expected: &mut Vec<(String, u32)>) {
    for (field, offset) in P::FIELDS {
        let _ = writeln!(text, "    *out++ = offsetof({}, {field});", P::NAME);
        expected.push((format!("{}::{field}", P::NAME), *offset as u32));
    }
    let _ = writeln!(text, "    *out++ = sizeof({});", P::NAME);
    expected.push((format!("{}'s size", P::NAME), size_of::<P>() as u32));
}

#[test]
fn structs_lie_as_in_c() {
    let (mut text, mut expected) = (String::new(), Vec::new());
    text += "#include \"gpu.h\"\ntemplate <class T> void offsets(const GatherRowsParams& p) {\n    u32* out = (u32*)p.out;\n";
    let mut check = |layout: fn(&mut String, &mut Vec<(String, u32)>)| layout(&mut text, &mut expected);
    check(layout::<FillParams>);
    check(layout::<EmbedParams>);
    check(layout::<RoundedRows>);
    check(layout::<NormParams>);
    check(layout::<NormCodesParams>);
    check(layout::<GluParams>);
    check(layout::<GluCodesParams>);
    check(layout::<ActParams>);
    check(layout::<GatherRowsParams>);
    check(layout::<GatherColumnsParams>);
    check(layout::<PoolRowsParams>);
    check(layout::<TableRunsParams>);
    check(layout::<CopyBlocksParams>);
    check(layout::<PatchesParams>);
    check(layout::<EmbedTapsParams>);
    check(layout::<MediaRowsParams>);
    check(layout::<QkvPostParams>);
    check(layout::<LatentPostParams>);
    check(layout::<AttentionParams>);
    check(layout::<FusedDecodeParams>);
    check(layout::<PagedDecodeParams>);
    check(layout::<LinearParams>);
    check(layout::<SkinnyLinearParams>);
    check(layout::<SkinnyQuantParams>);
    check(layout::<FusedLinearParams>);
    check(layout::<QuantWeight>);
    check(layout::<QuantizeParams>);
    check(layout::<QuantLinearParams>);
    check(layout::<QuantPairParams>);
    check(layout::<QuantGluParams>);
    check(layout::<DequantizeParams>);
    check(layout::<RouteParams>);
    check(layout::<SortExpertsParams>);
    check(layout::<ExpertLinearParams>);
    check(layout::<ExpertSumParams>);
    check(layout::<GateRowsParams>);
    check(layout::<LoraPart>);
    check(layout::<LoraParams>);
    check(layout::<LoraPairsParams>);
    check(layout::<SamplingRow>);
    check(layout::<SamplingState>);
    check(layout::<SamplingParams>);
    text += "}\n";

    let instance = Instance {
        source: Source { path: "layout.cu", text: text.leak() },
        name: "offsets".into(),
        call: "offsets<u32>".into(),
        params: GatherRowsParams::NAME,
        params_bytes: size_of::<GatherRowsParams>(),
        threads: 1,
        dynamic_shared: 0,
        chips: Chips::All,
        resident: 0,
        stages: None,
        stage_keys: None,
        formats: Vec::new(),
    };
    let mut found = vec![u32::MAX; expected.len()];
    let params = GatherRowsParams { out: address_mut(&mut found), ..Default::default() };
    launch(&Kernels::new(std::slice::from_ref(&instance)), Order::Forward, &instance, [1; 3], &params);
    for ((what, expected), found) in expected.iter().zip(found) {
        assert_eq!(found, *expected, "{what}");
    }
}
