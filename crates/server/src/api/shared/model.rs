//! The model that a request names.

use std::sync::Arc;

use octavo_engine::Adapter;

use crate::adapters::Adapters;
use crate::app::App;
use crate::error::ApiError;

/// The model of a request, from the name in its body to the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResolvedModel {
    /// The name of the base model in the response.
    pub(crate) base: Arc<str>,
    /// The adapter; `None` for the base model alone.
    pub(crate) adapter: Option<Adapter>,
}

impl ResolvedModel {
    /// The name in the response.
    pub(crate) fn name(&self) -> &Arc<str> {
        self.adapter.as_ref().map_or(&self.base, Adapter::name)
    }
}

impl App {
    /// The model of this name, by default the one that is served. A name that is not served is refused. May read an
    /// adapter, so it is called on the blocking pool.
    pub(crate) fn resolve_model(&self, name: Option<&str>) -> Result<ResolvedModel, ApiError> {
        let base = Arc::clone(&self.model);
        let Some(name) = name.filter(|name| !self.config.served_model_names.iter().any(|served| served == name)) else {
            return Ok(ResolvedModel { base, adapter: None });
        };
        let found = self.adapters.as_ref().map(|adapters| adapters.resolve(name)).transpose();
        match found.map_err(|error| ApiError::bad_request(error.to_string()).with_param("model"))?.flatten() {
            Some(adapter) => Ok(ResolvedModel { base, adapter: Some(adapter) }),
            None => Err(ApiError::model_not_found(name, &self.model_names())),
        }
    }

    /// The names that requests may have as their model.
    pub(crate) fn model_names(&self) -> Vec<String> {
        let adapters = self.adapters.iter().flat_map(Adapters::list).map(|served| served.name.to_string());
        self.config.served_model_names.iter().cloned().chain(adapters).collect()
    }
}
