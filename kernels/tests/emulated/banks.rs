//! Tests of the bank use of the tensor-core kernels in shared memory: every additional turn of a warp costs time.

use octavo_kernels::emulation::{BankUse, Order};
use octavo_kernels::manifest::{self, CacheType, Chip, Dtype, GemmTile};

use crate::attention::{Path, Setup, setups};
use crate::common::rng;
use crate::latent;
use crate::launcher::Kernels;
use crate::linear::Case;

/// Returns the number of additional turns per hundred phases.
fn conflicts(bank_use: BankUse) -> f64 {
    assert!(bank_use.phases > 0, "shared memory is used");
    100.0 * (bank_use.wavefronts - bank_use.phases) as f64 / bank_use.phases as f64
}

#[test]
fn dense_products_meet_in_no_bank() {
    let rng = &mut rng();
    for chip in [Chip::SM_70, Chip::SM_89] {
        for tile in GemmTile::ALL {
            let instance = manifest::gemm(chip, Dtype::F16, Dtype::F16, tile);
            let kernels = Kernels::new(std::slice::from_ref(&instance));
            let case = Case::draw(rng, Dtype::F16, Dtype::F16, [128, 128, 128]);
            let bank_use = kernels.bank_use(|| {
                case.run(&kernels, Order::Forward, &instance, |p| p.gemm_grid(tile.outputs(Dtype::F16)));
            });
            if let Some(bank_use) = bank_use {
                assert_eq!(bank_use.wavefronts, bank_use.phases, "{}: {bank_use:?}", instance.name);
            }
        }
    }
}

#[test]
fn prefill_seldom_meets_in_a_bank() {
    let rng = &mut rng();
    for setup in setups().into_iter().filter(|setup| setup.path != Path::Plain) {
        let setup = Setup { window: None, softcap: None, ..setup };
        let sequence = setup.sequence(128, rng);
        let Some(bank_use) = setup.bank_use(&[(&sequence, 0..128)]) else { return };
        // Rows of 96 elements have twelve pieces, so eight threads that fill them together may conflict at a row's end.
        // On Volta weights pass through shared memory, in an order for which no padding avoids all conflicts.
        let volta = matches!(setup.path, Path::Fast { chip: Chip::SM_70, .. });
        let most = if volta {
            12.0
        } else if setup.size == 96 {
            8.0
        } else {
            0.0
        };
        let found = conflicts(bank_use);
        println!("{} {}: {found:.1}", if volta { "sm_70" } else { "sm_80" }, setup.size);
        assert!(found <= most, "{setup:?}: {found:.1} conflicts in a hundred phases");
    }
}

#[test]
fn decode_seldom_meets_in_a_bank() {
    let rng = &mut rng();
    let has_tensor_cores = |setup: &Setup| matches!(setup.path, Path::Fast { chip: Chip::SM_89, .. });
    for (setup, cache) in setups().into_iter().filter(has_tensor_cores).flat_map(|s| CacheType::ALL.map(|c| (s, c))) {
        let setup = Setup { cache, ..setup };
        let sequence = setup.sequence(100, rng);
        let Some(bank_use) = setup.bank_use(&[(&sequence, 99..100)]) else { return };
        // Eight threads that fill two rows together conflict once unless the row of a tile has a multiple of eight pieces.
        let pieces = setup.size * cache.bytes(setup.dtype) / 16;
        let most = if pieces.is_multiple_of(8) { 0.0 } else { 25.0 };
        let found = conflicts(bank_use);
        println!("{:?} {} {:?}: {found:.1}", setup.dtype, setup.size, setup.cache);
        assert!(found <= most, "{setup:?}: {found:.1} conflicts in a hundred phases");
    }
}

#[test]
fn latent_attention_meets_in_no_bank() {
    let rng = &mut rng();
    for setup in latent::setups(16).into_iter().filter(|setup| setup.path != Path::Plain) {
        let sequence = setup.sequence(64, rng);
        for positions in [0..64, 63..64] {
            let Some(bank_use) = setup.bank_use(&[(&sequence, positions.clone())]) else { return };
            let found = conflicts(bank_use);
            println!("{:?}, {positions:?}: {found:.1}", setup.dtype);
            assert!(found <= 0.0, "{setup:?}, {positions:?}: {found:.1} conflicts in a hundred phases");
        }
    }
}
