//! The adapters that are served beside the base model.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use octavo_engine::Adapter;

use crate::lock::lock;

/// Reads adapters.
pub trait AdapterLoader: Send + Sync {
    /// Reads the adapter in a folder and gives it to the engine under this name. `number` and `origin` are those of
    /// [`Adapter::new`]. Blocks.
    ///
    /// # Errors
    /// There is no adapter, or it does not fit the model.
    fn load(&self, source: AdapterSource<'_>) -> Result<Adapter, AdapterLoadError>;

    /// The base model for which an adapter says that it was trained; `None` if the folder has no adapter.
    fn base_of(&self, path: &Path) -> Option<String>;
}

/// An adapter to read.
#[derive(Clone, Copy, Debug)]
pub struct AdapterSource<'a> {
    /// Name in the API.
    pub name: &'a str,
    /// Folder.
    pub path: &'a Path,
    /// Number of this load, from 1.
    pub number: u64,
    /// The path, and what tells this load from earlier ones of the same name and path.
    pub origin: &'a str,
}

/// The reason why an adapter cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdapterLoadError {
    /// The folder has no adapter.
    #[error("No adapter found for {0}")]
    NotFound(String),
    /// The adapter is damaged or does not fit; contains a sentence.
    #[error("{0}")]
    Refused(String),
}

/// An adapter that is served.
#[derive(Clone, Debug)]
pub(crate) struct ServedAdapter {
    pub(crate) adapter: Adapter,
    pub(crate) path: Arc<str>,
    /// The name of its base model in the list of models.
    pub(crate) parent: Arc<str>,
}

/// The adapters that are served, by name.
#[derive(Clone)]
pub struct Adapters(Arc<Registry>);

struct Registry {
    loader: Box<dyn AdapterLoader>,
    /// Folder in which an adapter of an unknown name is searched for.
    folder: Option<PathBuf>,
    /// The names of the base model.
    base: Vec<String>,
    served: Mutex<Served>,
    /// Held while an adapter is read, so that the same one is not read twice.
    loading: Mutex<()>,
}

#[derive(Default)]
struct Served {
    /// In the order in which they were loaded first.
    list: Vec<ServedAdapter>,
    loads: u64,
    /// Number of loads by name and path.
    origins: HashMap<(String, PathBuf), u64>,
}

/// The reason why an adapter was not loaded or unloaded, in the terms of vLLM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UpdateError {
    /// The request contradicts what is served.
    Invalid(String),
    NotFound(String),
    /// The adapter does not fit.
    Failed(String),
}

impl Adapters {
    /// Creates a registry without adapters for a model that is served under these names. An adapter of an unknown name is
    /// searched for in `folder`.
    pub fn new(loader: impl AdapterLoader + 'static, folder: Option<PathBuf>, base: Vec<String>) -> Self {
        let (served, loading) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Registry { loader: Box::new(loader), folder, base, served, loading }))
    }

    /// Loads an adapter. `parent` is the name of its base model in the list of models, by default the first. Blocks.
    ///
    /// # Errors
    /// The name is taken, or the adapter cannot be read.
    pub fn load(&self, name: &str, path: &Path, parent: Option<&str>) -> Result<(), String> {
        self.update(name, path, parent, false).map_err(|error| match error {
            UpdateError::Invalid(message) | UpdateError::NotFound(message) | UpdateError::Failed(message) => message,
        })
    }

    /// Loads an adapter. With `in_place` it replaces the one of its name. Blocks.
    pub(crate) fn update(
        &self,
        name: &str,
        path: &Path,
        parent: Option<&str>,
        in_place: bool,
    ) -> Result<(), UpdateError> {
        let _one_at_a_time = lock(&self.0.loading);
        if self.0.base.iter().any(|base| base == name) {
            return Err(UpdateError::Invalid(format!("The lora adapter '{name}' conflicts with a served base model.")));
        }
        if !in_place && self.find(name).is_some() {
            return Err(UpdateError::Invalid(format!(
                "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set \
                 'load_inplace' to True."
            )));
        }
        self.read(name, path, parent).map(drop).map_err(|error| match error {
            AdapterLoadError::NotFound(_) => UpdateError::NotFound(format!("Loading lora {name} failed: {error}")),
            AdapterLoadError::Refused(reason) => UpdateError::Failed(reason),
        })
    }

    /// Reads an adapter and serves it under a name.
    fn read(&self, name: &str, path: &Path, parent: Option<&str>) -> Result<Adapter, AdapterLoadError> {
        let shown = path.to_string_lossy();
        let (number, origin) = {
            let mut served = lock(&self.0.served);
            served.loads += 1;
            let loads = served.origins.entry((name.to_owned(), path.to_owned())).or_insert(0);
            *loads += 1;
            // Blocks of an earlier load must not be found.
            let origin = if *loads == 1 { shown.to_string() } else { format!("{shown}#{loads}") };
            (served.loads, origin)
        };
        let adapter = self.0.loader.load(AdapterSource { name, path, number, origin: &origin })?;
        let parent = parent.or(self.0.base.first().map(String::as_str)).unwrap_or_default().into();
        let new = ServedAdapter { adapter: adapter.clone(), path: shown.as_ref().into(), parent };
        let mut served = lock(&self.0.served);
        match served.list.iter_mut().find(|known| &**known.adapter.name() == name) {
            Some(known) => *known = new,
            None => served.list.push(new),
        }
        tracing::info!(name, path = %shown, "an adapter was loaded");
        Ok(adapter)
    }

    /// Removes the name of an adapter. Requests that have it complete.
    pub(crate) fn remove(&self, name: &str) -> Result<(), UpdateError> {
        let mut served = lock(&self.0.served);
        let found = served.list.iter().position(|known| &**known.adapter.name() == name);
        let Some(index) = found else {
            return Err(UpdateError::NotFound(format!("The lora adapter '{name}' cannot be found.")));
        };
        served.list.remove(index);
        drop(served);
        tracing::info!(name, "an adapter was unloaded");
        Ok(())
    }

    pub(crate) fn list(&self) -> Vec<ServedAdapter> {
        lock(&self.0.served).list.clone()
    }

    fn find(&self, name: &str) -> Option<Adapter> {
        let served = lock(&self.0.served);
        served.list.iter().find(|known| &**known.adapter.name() == name).map(|known| known.adapter.clone())
    }

    /// The adapter of a name; one that is not known is searched for in the folder of adapters. Blocks in that case.
    ///
    /// # Errors
    /// There is a folder of this name with an adapter of the model, and it cannot be read.
    pub(crate) fn resolve(&self, name: &str) -> Result<Option<Adapter>, AdapterLoadError> {
        if let Some(adapter) = self.find(name) {
            return Ok(Some(adapter));
        }
        let Some(path) = self.0.folder.as_ref().filter(|_| is_plain(name)).map(|folder| folder.join(name)) else {
            return Ok(None);
        };
        let _one_at_a_time = lock(&self.0.loading);
        if let Some(adapter) = self.find(name) {
            return Ok(Some(adapter));
        }
        match self.0.loader.base_of(&path) {
            Some(base) if self.0.base.contains(&base) => self.read(name, &path, None).map(Some),
            _ => Ok(None),
        }
    }
}

/// Whether a name is one component of a path, so that no request can leave the folder.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', ':', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Knows the adapter `/good` of `base`, and a damaged one.
    struct Fake;

    impl AdapterLoader for Fake {
        fn load(&self, source: AdapterSource<'_>) -> Result<Adapter, AdapterLoadError> {
            let AdapterSource { name, path, number, origin } = source;
            match path.file_name().and_then(|name| name.to_str()) {
                Some("good") => Ok(Adapter::new(number, name, origin, ())),
                Some("bad") => Err(AdapterLoadError::Refused("it is damaged".into())),
                _ => Err(AdapterLoadError::NotFound(path.display().to_string())),
            }
        }

        fn base_of(&self, path: &Path) -> Option<String> {
            let name = path.file_name().and_then(|name| name.to_str())?;
            ["good", "bad", "other"].contains(&name).then(|| if name == "other" { "else" } else { "base" }.into())
        }
    }

    fn adapters(folder: Option<&str>) -> Adapters {
        Adapters::new(Fake, folder.map(PathBuf::from), vec!["base".into(), "alias".into()])
    }

    #[test]
    fn a_name_is_loaded_once_and_each_load_has_keys_of_its_own() {
        let adapters = adapters(None);
        let good = Path::new("/good");
        assert_eq!(adapters.update("a", good, None, false), Ok(()));
        let first = adapters.resolve("a").unwrap().unwrap();
        assert_eq!((first.number(), &**first.name(), first.origin()), (1, "a", "/good"));
        let again = adapters.update("a", good, None, false).unwrap_err();
        assert!(matches!(again, UpdateError::Invalid(message) if message.contains("has already been loaded")));
        assert_eq!(adapters.update("a", good, Some("mine"), true), Ok(()));
        let second = adapters.resolve("a").unwrap().unwrap();
        assert_eq!((second.number(), second.origin()), (2, "/good#2"));
        assert_eq!(adapters.list().iter().map(|served| &*served.parent).collect::<Vec<_>>(), ["mine"]);
        assert_eq!(adapters.remove("a"), Ok(()));
        assert_eq!(adapters.resolve("a"), Ok(None));
        assert!(matches!(adapters.remove("a"), Err(UpdateError::NotFound(_))));
        assert_eq!(adapters.update("a", good, None, false), Ok(()));
        assert_eq!(adapters.resolve("a").unwrap().unwrap().origin(), "/good#3");
    }

    #[test]
    fn a_load_that_fails_changes_nothing() {
        let adapters = adapters(None);
        adapters.load("a", Path::new("/good"), None).unwrap();
        assert_eq!(
            adapters.update("a", Path::new("/bad"), None, true),
            Err(UpdateError::Failed("it is damaged".into()))
        );
        assert_eq!(adapters.resolve("a").unwrap().unwrap().origin(), "/good");
        assert_eq!(
            adapters.update("b", Path::new("/none"), None, false),
            Err(UpdateError::NotFound("Loading lora b failed: No adapter found for /none".into()))
        );
        for name in ["base", "alias"] {
            assert_eq!(
                adapters.load(name, Path::new("/good"), None),
                Err(format!("The lora adapter '{name}' conflicts with a served base model."))
            );
        }
    }

    #[test]
    fn unknown_names_are_searched_for_in_the_folder_and_nowhere_else() {
        let adapters = adapters(Some("/adapters"));
        assert_eq!(adapters.resolve("good").unwrap().unwrap().origin(), "/adapters/good");
        assert_eq!(adapters.resolve("bad"), Err(AdapterLoadError::Refused("it is damaged".into())));
        for name in ["other", "none", "", ".", "..", "../good", "x/good", "/good", "c:good", ".good", "x\\good"] {
            assert_eq!(adapters.resolve(name), Ok(None), "{name}");
        }
        assert_eq!(self::adapters(None).resolve("good"), Ok(None));
    }
}
