//! The model that a request names.

use std::sync::Arc;

use crate::app::App;
use crate::error::ApiError;

/// The name of an adapter of the base model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AdapterName(pub Arc<str>);

/// The model of a request, from the name in its body to the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResolvedModel {
    /// The name of the base model in the response.
    pub(crate) base: Arc<str>,
    /// The adapter; `None` for the base model alone.
    pub(crate) adapter: Option<AdapterName>,
}

impl ResolvedModel {
    /// The name in the response.
    pub(crate) fn name(&self) -> &Arc<str> {
        self.adapter.as_ref().map_or(&self.base, |adapter| &adapter.0)
    }
}

impl App {
    /// The model of this name, by default the one that is served. A name that is not served is refused.
    pub(crate) fn resolve_model(&self, name: Option<&str>) -> Result<ResolvedModel, ApiError> {
        let names = &self.config.served_model_names;
        match name {
            Some(name) if !names.iter().any(|served| served == name) => Err(ApiError::model_not_found(name, names)),
            _ => Ok(ResolvedModel { base: Arc::clone(&self.model), adapter: None }),
        }
    }
}
