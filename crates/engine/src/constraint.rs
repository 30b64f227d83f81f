//! Interface through which a grammar restricts a request's tokens.

/// Restricts which tokens a request may sample next. The engine thread calls it while the device computes the logits,
/// so every method must be quick and must not block.
pub trait Constraint: Send {
    /// Sets bit `id` of `mask` (word `id / 32`) for every allowed next token and clears all other bits.
    fn fill_mask(&mut self, mask: &mut [u32]);

    /// Accepts the sampled token. Returns `false` if the grammar does not allow it; the request then ends with an
    /// error.
    fn accept(&mut self, token: u32) -> bool;

    /// Rolls back the last `tokens` accepted tokens.
    fn rollback(&mut self, tokens: usize);
}

/// A constraint of tests, which allows every token.
#[cfg(test)]
pub(crate) struct Anything;

#[cfg(test)]
impl Constraint for Anything {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(u32::MAX);
    }

    fn accept(&mut self, _: u32) -> bool {
        true
    }

    fn rollback(&mut self, _: usize) {}
}
