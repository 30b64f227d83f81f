//! What a grammar has to offer to restrict a request's tokens.

/// Restricts which tokens a request may draw next. Called on the engine thread while the device computes the logits,
/// so every method must be quick and must not block.
pub trait Constraint: Send {
    /// Sets bit `id` of `mask` (word `id / 32`) for every token that may come next and clears the others.
    fn fill_mask(&mut self, mask: &mut [u32]);

    /// Takes the drawn token. `false` if the grammar does not allow it: the request then ends with an error.
    fn accept(&mut self, token: u32) -> bool;

    /// Forgets the last `tokens` accepted tokens.
    fn rollback(&mut self, tokens: usize);
}
