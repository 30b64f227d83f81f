//! Sets of token ids that the sequences of a request share.

use std::ops::Deref;
use std::sync::Arc;

/// Token ids in ascending order without duplicates. Clones share one list, and a look-up takes O(log n).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSet(Arc<[u32]>);

impl TokenSet {
    /// Returns whether the set has `id`.
    pub fn contains(&self, id: u32) -> bool {
        self.0.binary_search(&id).is_ok()
    }
}

impl From<Vec<u32>> for TokenSet {
    fn from(mut ids: Vec<u32>) -> Self {
        ids.sort_unstable();
        ids.dedup();
        Self(ids.into())
    }
}

impl Deref for TokenSet {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_set_has_the_ids_of_its_list(ids in prop::collection::vec(0_u32..64, 0..64)) {
            let set = TokenSet::from(ids.clone());
            for id in 0..64 {
                prop_assert_eq!(set.contains(id), ids.contains(&id));
            }
            prop_assert!(set.is_sorted_by(|a, b| a < b));
        }
    }

    #[test]
    fn clones_share_the_list() {
        let set = TokenSet::from(vec![3, 1, 3]);
        assert!(std::ptr::eq(&*set, &*set.clone()));
        assert_eq!(&*set, [1, 3]);
    }
}
