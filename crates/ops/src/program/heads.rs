//! The sizes of attention heads.

/// Place of the values of attention in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Beside the keys, with as many elements.
    Own,
    /// The first elements of the keys, so many of each: the cache has one row for both (latent attention).
    Prefix(usize),
}

/// Query and key-value heads of an attention layer. Sizes that overflow saturate, so that they match no other size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// Number of query heads Hq.
    pub q: usize,
    /// Number of key-value heads Hkv, a divisor of Hq.
    pub kv: usize,
    /// Number of elements D of a query and of a key.
    pub dim: usize,
    /// Place of the values.
    pub values: Values,
}

impl HeadShape {
    /// Returns heads with values of the same size as keys.
    pub const fn new(q: usize, kv: usize, dim: usize) -> Self {
        Self { q, kv, dim, values: Values::Own }
    }

    /// Returns heads that share one row of a latent of `rank` elements and a key of `rotated` elements.
    pub const fn latent(q: usize, rank: usize, rotated: usize) -> Self {
        Self { q, kv: 1, dim: rank.saturating_add(rotated), values: Values::Prefix(rank) }
    }

    /// Returns the number of elements Dv of a value.
    pub const fn value_dim(self) -> usize {
        match self.values {
            Values::Own => self.dim,
            Values::Prefix(dim) => dim,
        }
    }

    /// Returns the number of columns of q: Hq·D.
    pub const fn q_cols(self) -> usize {
        self.q.saturating_mul(self.dim)
    }

    /// Returns the number of columns of the output of attention: Hq·Dv.
    pub const fn out_cols(self) -> usize {
        self.q.saturating_mul(self.value_dim())
    }

    /// Returns the number of columns of k: Hkv·D.
    pub const fn kv_cols(self) -> usize {
        self.kv.saturating_mul(self.dim)
    }

    /// Returns the number of elements of a token in the cache, keys and values together.
    pub const fn cache_cols(self) -> usize {
        match self.values {
            Values::Own => self.kv_cols().saturating_mul(2),
            Values::Prefix(_) => self.kv_cols(),
        }
    }

    /// Returns the number of columns of the fused projection of heads with values of their own.
    pub const fn qkv_cols(self) -> usize {
        self.q_cols().saturating_add(self.kv_cols().saturating_mul(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_a_prefix_of_the_keys_count_once() {
        let plain = HeadShape::new(4, 2, 8);
        assert_eq!([plain.q_cols(), plain.out_cols(), plain.cache_cols(), plain.qkv_cols()], [32, 32, 32, 64]);
        // DeepSeek-V2-Lite.
        let latent = HeadShape::latent(16, 512, 64);
        assert_eq!([latent.q_cols(), latent.out_cols(), latent.cache_cols()], [9216, 8192, 576]);
        assert_eq!(HeadShape::latent(1, usize::MAX, 64).cache_cols(), usize::MAX);
    }
}
