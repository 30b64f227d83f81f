//! What can be wrong with a configuration.

/// A configuration that is incomplete, wrong or unsupported.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A key that every checkpoint of the architecture has.
    #[error("'{key}' is missing")]
    Missing {
        /// Key.
        key: String,
    },
    /// A value of another type.
    #[error("'{key}' is not {expected}")]
    Type {
        /// Key.
        key: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A value out of its bounds.
    #[error("{key} is {found}; {low} to {high} are possible")]
    Range {
        /// Key, or what it means.
        key: String,
        /// Value found.
        found: u64,
        /// Least.
        low: u64,
        /// Most.
        high: u64,
    },
    /// An architecture with no program.
    #[error("the architecture '{found}' is not supported (supported: {supported})")]
    UnknownArchitecture {
        /// Its name.
        found: String,
        /// The names that are.
        supported: String,
    },
    /// A variation that no program covers.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// Values that do not fit together.
    #[error("{0}")]
    Invalid(String),
}

impl ConfigError {
    /// A key that is not there.
    pub(crate) fn missing(key: &str) -> Self {
        Self::Missing { key: key.to_owned() }
    }

    /// A key whose value is of another type.
    pub(crate) fn wrong_type(key: &str, expected: &'static str) -> Self {
        Self::Type { key: key.to_owned(), expected }
    }
}
