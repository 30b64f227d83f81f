//! Tests that dummy weights have the bits of the host's.

use std::sync::LazyLock;

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest;
use octavo_kernels::params::FillParams;
use octavo_ops::dummy::DummyRule;

use crate::common::{encode, in_every_order, launch};
use crate::launcher::{Kernels, dtypes};
use crate::support::Array;

/// Number of multiprocessors for which the grid is computed.
const PROCESSORS: u32 = 132;

static KERNELS: LazyLock<Kernels> =
    LazyLock::new(|| Kernels::new(&dtypes().into_iter().map(manifest::fill).collect::<Vec<_>>()));

#[test]
fn values_have_the_hosts_bits() {
    for dtype in dtypes() {
        // The cases are a spread that no type represents exactly, that of a norm, one whose products are rounded before they are
        // added, and more elements than one pass of the grid takes.
        let cases = [(1, 0.0, 0.0270633, 1000), (77, 1.0, 0.125, 5), (5, 1.0, 0.0270633, 1000), (3, 0.0, 0.5, 150_000)];
        for (seed, centre, spread, count) in cases {
            let rule = DummyRule { seed, centre, spread };
            let instance = manifest::fill(dtype);
            let run = |order| {
                let mut out = Array::poisoned(dtype, count);
                let params = FillParams { out: out.ptr_mut(), count: count as u64, seed, centre, spread, reserved: 0 };
                launch(&KERNELS, order, &instance, params.grid(instance.threads, PROCESSORS), &params);
                out
            };
            let out = if count < 10_000 { in_every_order(run) } else { run(Order::Forward) };
            for i in 0..count {
                assert_eq!(out.bits(i..i + 1), encode(dtype, rule.value(i as u64)), "{dtype:?} {i}");
            }
        }
    }
}
