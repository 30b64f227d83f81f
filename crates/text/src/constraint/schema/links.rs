//! References from one schema to another for the same value. A schema that leads back to itself this way describes no
//! value: it is what it is.

use std::collections::HashMap;

use super::super::GrammarError;

/// The references between referenced schemas, by their indices in `$defs`.
#[derive(Default)]
pub(super) struct Links<'d> {
    links: Vec<Link<'d>>,
}

struct Link<'d> {
    from: usize,
    to: usize,
    reference: &'d str,
}

impl<'d> Links<'d> {
    /// Adds a reference from one schema to another that must hold for the same value.
    pub(super) fn add(&mut self, from: usize, to: usize, reference: &'d str) {
        self.links.push(Link { from, to, reference });
    }

    /// # Errors
    /// Returns an error if the references lead from a schema back to itself.
    pub(super) fn check(&self) -> Result<(), GrammarError> {
        // Schemas whose references all end are removed, until only those remain that lead to a circle.
        let mut open: HashMap<usize, usize> = HashMap::new();
        let mut into: HashMap<usize, Vec<usize>> = HashMap::new();
        for link in &self.links {
            *open.entry(link.from).or_default() += 1;
            into.entry(link.to).or_default().push(link.from);
        }
        let mut ended: Vec<usize> = into.keys().copied().filter(|to| !open.contains_key(to)).collect();
        while let Some(schema) = ended.pop() {
            for from in into.get(&schema).into_iter().flatten() {
                if let Some(left) = open.get_mut(from) {
                    *left -= 1;
                    if *left == 0 {
                        open.remove(from);
                        ended.push(*from);
                    }
                }
            }
        }
        match self.links.iter().find(|link| open.contains_key(&link.from) && open.contains_key(&link.to)) {
            Some(link) => Err(GrammarError::Circular(link.reference.to_owned())),
            None => Ok(()),
        }
    }
}
