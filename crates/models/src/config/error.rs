//! Errors of a configuration.

/// A configuration that is incomplete, wrong or unsupported.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A key is missing that every checkpoint of the architecture has.
    #[error("'{key}' is missing")]
    Missing {
        /// Key.
        key: String,
    },
    /// A value has the wrong type.
    #[error("'{key}' is not {expected}")]
    Type {
        /// Key.
        key: String,
        /// Expected type.
        expected: &'static str,
    },
    /// A value is out of bounds.
    #[error("{key} is {found}; {low} to {high} are possible")]
    Range {
        /// Key, or its meaning.
        key: String,
        /// Value found.
        found: u64,
        /// Minimum.
        low: u64,
        /// Maximum.
        high: u64,
    },
    /// There is no program for the architecture.
    #[error("the architecture '{found}' is not supported (supported: {supported})")]
    UnknownArchitecture {
        /// Name of the architecture.
        found: String,
        /// Names of the supported architectures.
        supported: String,
    },
    /// No program covers a variant of the architecture.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// Values contradict each other.
    #[error("{0}")]
    Invalid(String),
}

impl ConfigError {
    /// Returns the error of a missing key.
    pub(crate) fn missing(key: &str) -> Self {
        Self::Missing { key: key.to_owned() }
    }

    /// Returns the error of a key whose value has the wrong type.
    pub(crate) fn wrong_type(key: &str, expected: &'static str) -> Self {
        Self::Type { key: key.to_owned(), expected }
    }
}
