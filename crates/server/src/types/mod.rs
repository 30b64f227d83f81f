//! The bodies of requests and responses: OpenAI's API with vLLM's extensions. The structure of requests is checked here,
//! their values in [`crate::params`].

pub(crate) mod bias;
pub(crate) mod chat;
pub(crate) mod common;
pub(crate) mod completion;
pub(crate) mod messages;
pub(crate) mod places;
pub(crate) mod pooling;
pub(crate) mod response;
pub(crate) mod responses;
pub(crate) mod structured;
pub(crate) mod tools;

#[cfg(test)]
mod tests;
