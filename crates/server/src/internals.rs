//! Parts of a response without its socket, for the benches and tests of this workspace. They are not part of the stable API.

use std::sync::Arc;

use bytes::Bytes;
use octavo_text::{OutputDelta, Tokenizer};

use crate::api::chat::stream::ChatFormat;
use crate::api::shared::logprobs::Spelling;
use crate::api::shared::response::{Envelope, UsageDetails};
use crate::api::shared::sse::{Events, Extras};
use crate::api::shared::stream::ResponseFormat;
use crate::choices::Output;
use crate::config::ServerConfig;
use crate::route_table::served;

/// The paths of a server that take POST requests.
pub fn post_routes(config: &ServerConfig) -> Vec<&'static str> {
    served(config).filter(|route| route.method == "POST").map(|route| route.path).collect()
}

/// The events of a streamed chat completion of one choice.
pub struct ChatEvents(ChatFormat);

impl ChatEvents {
    /// A stream without log-probabilities.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let envelope = Envelope {
            id: "chatcmpl-0123456789abcdef0123456789abcdef".into(),
            created: 1_700_000_000,
            model: "org/model".into(),
            fingerprint: Some("octavo".into()),
            details: UsageDetails::default(),
        };
        Self(ChatFormat {
            envelope,
            n: 1,
            prompt: Arc::new([0; 8]),
            role: "assistant".into(),
            echo: None,
            logprobs: None,
            prompt_logprobs: false,
            spelling: Spelling { tokenizer, as_ids: false },
            return_token_ids: false,
            prompt_text: None,
            parses: false,
        })
    }

    /// The event that carries `text`.
    pub fn text(&mut self, text: String) -> Bytes {
        let mut events = Events::default();
        let output = Output { parts: vec![OutputDelta::Content(text)], ..Output::default() };
        self.0.chunk(&mut events, output, Extras::default());
        events.into_bytes()
    }
}
