//! What clients send and get: the bodies of OpenAI's API with vLLM's extensions. Requests are checked for shape here and
//! for meaning in [`crate::params`].

pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completion;
pub(crate) mod embeddings;
pub(crate) mod messages;
pub(crate) mod response;
pub(crate) mod responses;
pub(crate) mod structured;
pub(crate) mod tools;

#[cfg(test)]
mod tests;
