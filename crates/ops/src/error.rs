//! Errors of the contract. Each message is a sentence a user can act on.

/// An inconsistency of a program or its weights: a defect of the model or of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// An op reads a buffer that no earlier op wrote.
    #[error("op {op} ({name}) reads buffer '{buffer}' before any op writes it")]
    ReadBeforeWrite {
        /// Index of the op.
        op: usize,
        /// Name of the op.
        name: &'static str,
        /// Name of the buffer.
        buffer: String,
    },
    /// Two sizes that must agree differ.
    #[error("op {op} ({name}): the size of {what} is {found}, expected {expected}")]
    Shape {
        /// Index of the op.
        op: usize,
        /// Name of the op.
        name: &'static str,
        /// Name of the buffer or weight.
        what: String,
        /// Size found.
        found: usize,
        /// Size expected.
        expected: usize,
    },
    /// Any other defect.
    #[error("{0}")]
    Invalid(String),
}

/// Reason why a tensor of the checkpoint cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightError {
    /// The checkpoint has no such tensor.
    #[error("the checkpoint has no tensor '{0}'")]
    Missing(String),
    /// The tensor's bytes do not match its header.
    #[error("tensor '{name}' of the checkpoint is unusable: {reason}")]
    Invalid {
        /// Tensor name.
        name: String,
        /// Description of the defect.
        reason: String,
    },
}

/// Reason why a backend could not load a model or run a step.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// A weight could not be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// The program is not well formed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The backend does not support the request.
    #[error("the {backend} backend does not support {what}")]
    Unsupported {
        /// Backend name.
        backend: &'static str,
        /// Unsupported feature.
        what: String,
    },
    /// There is not enough memory.
    #[error("not enough memory for {what}: {needed} bytes are needed")]
    OutOfMemory {
        /// Purpose of the memory.
        what: String,
        /// Number of bytes needed.
        needed: u64,
    },
    /// The device failed; the step's results are lost.
    #[error("the {backend} backend failed: {reason}")]
    Failed {
        /// Backend name.
        backend: &'static str,
        /// Message of the device.
        reason: String,
    },
    /// The device is lost: nothing runs on it any more, and its memory content is gone.
    #[error("the {backend} backend lost its device: {reason}")]
    DeviceLost {
        /// Backend name.
        backend: &'static str,
        /// Message of the device.
        reason: String,
    },
}
