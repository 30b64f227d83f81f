//! Errors of the contract, each a sentence a user can act on.

/// A program or its weights do not fit together; a defect of the model or of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// An op reads a buffer that no earlier op wrote.
    #[error("op {op} ({name}) reads buffer '{buffer}' before any op writes it")]
    ReadBeforeWrite {
        /// Index of the op.
        op: usize,
        /// Its name.
        name: &'static str,
        /// The buffer.
        buffer: String,
    },
    /// Two sizes that must agree do not.
    #[error("op {op} ({name}): the size of {what} is {found}, expected {expected}")]
    Shape {
        /// Index of the op.
        op: usize,
        /// Its name.
        name: &'static str,
        /// The buffer or weight.
        what: String,
        /// Size found.
        found: usize,
        /// Size expected.
        expected: usize,
    },
    /// Anything else, said in words.
    #[error("{0}")]
    Invalid(String),
}

/// A tensor of the checkpoint cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightError {
    /// The checkpoint has no such tensor.
    #[error("the checkpoint has no tensor '{0}'")]
    Missing(String),
    /// The tensor's bytes are not what its header says.
    #[error("tensor '{name}' of the checkpoint is unusable: {reason}")]
    Invalid {
        /// Tensor name.
        name: String,
        /// Why.
        reason: String,
    },
}

/// A backend could not load a model or run a step.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// A weight could not be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// The program is not well formed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The backend does not support what was asked.
    #[error("the {backend} backend does not support {what}")]
    Unsupported {
        /// Backend name.
        backend: &'static str,
        /// What was asked.
        what: String,
    },
    /// Memory is short.
    #[error("not enough memory for {what}: {needed} bytes are needed")]
    OutOfMemory {
        /// What for.
        what: String,
        /// Bytes needed.
        needed: u64,
    },
    /// The device failed; the step's results are lost.
    #[error("the {backend} backend failed: {reason}")]
    Failed {
        /// Backend name.
        backend: &'static str,
        /// The device's own words.
        reason: String,
    },
    /// The device is lost: nothing runs on it any more, and what was in its memory is gone.
    #[error("the {backend} backend lost its device: {reason}")]
    DeviceLost {
        /// Backend name.
        backend: &'static str,
        /// The device's own words.
        reason: String,
    },
}
