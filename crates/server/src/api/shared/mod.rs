//! The parts that several APIs share.

pub(crate) mod bias;
pub(crate) mod common;
pub(crate) mod conversation;
pub(crate) mod convert;
pub(crate) mod fields;
pub(crate) mod headers;
pub(crate) mod logprobs;
pub(crate) mod model;
pub(crate) mod places;
pub(crate) mod prompt;
pub(crate) mod query;
pub(crate) mod response;
pub(crate) mod restrictions;
pub(crate) mod run;
pub(crate) mod sampling;
pub(crate) mod size;
pub(crate) mod sse;
pub(crate) mod staged;
pub(crate) mod stream;
pub(crate) mod structured_outputs;
pub(crate) mod tools;
pub(crate) mod unserved;
pub(crate) mod untrusted_template;
