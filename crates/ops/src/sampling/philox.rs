//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a counter-based generator. A
//! random number is a pure function of its key, so no state is carried from step to step.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// Returns 128 random bits for a counter and a key.
pub const fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    let mut round = 0;
    while round < ROUNDS {
        let p0 = MULTIPLIERS[0] as u64 * c0 as u64;
        let p1 = MULTIPLIERS[1] as u64 * c2 as u64;
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
        round += 1;
    }
    [c0, c1, c2, c3]
}

/// Returns the uniform number in [0, 1), with 53 random bits, that selects output token `position` of a sequence with
/// seed `seed`.
pub fn uniform(seed: u64, position: u32) -> f64 {
    let [high, low, ..] = philox4x32([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    bits as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the known-answer vectors that the authors publish with the generator.
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_is_a_pure_function_of_seed_and_position() {
        assert_eq!(uniform(7, 3), uniform(7, 3));
        assert_ne!(uniform(7, 3), uniform(7, 4));
        assert_ne!(uniform(7, 3), uniform(8, 3));
        assert_ne!(uniform(7, 3), uniform(7 | 1 << 40, 3), "the seed's high half counts");
    }

    #[test]
    fn uniform_fills_the_unit_interval_evenly() {
        const DRAWS: u32 = 20_000;
        let mut bins = [0u32; 20];
        for position in 0..DRAWS {
            let u = uniform(42, position);
            assert!((0.0..1.0).contains(&u));
            bins[(u * 20.0) as usize] += 1;
        }
        let expected = f64::from(DRAWS) / 20.0;
        let chi2: f64 = bins.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        // The limit is the 99.9 % quantile of chi-square with 19 degrees of freedom.
        assert!(chi2 < 43.8, "chi-square {chi2}");
    }
}
