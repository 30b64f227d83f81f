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

    /// What tells the files of an adapter from those after a change; `None` if that is not known. An adapter that is read again
    /// keeps its blocks in the prefix cache if this is the same.
    fn version_of(&self, _path: &Path) -> Option<String> {
        None
    }
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
    pub(crate) name: Arc<str>,
    pub(crate) path: Arc<str>,
    /// The name of its base model in the list of models.
    pub(crate) parent: Arc<str>,
    folder: PathBuf,
    version: Option<String>,
    number: u64,
    origin: Arc<str>,
    /// The weights; `None` until the next request if those of others were used since.
    adapter: Option<Adapter>,
    /// Time of the last use, in uses.
    used: u64,
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
    /// Number of adapters whose weights are kept.
    kept: usize,
    served: Mutex<Served>,
    /// Held while an adapter is read, so that the same one is not read twice.
    loading: Mutex<()>,
}

#[derive(Default)]
struct Served {
    /// In the order in which they were loaded first.
    list: Vec<ServedAdapter>,
    loads: u64,
    uses: u64,
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
    /// searched for in `folder`. The weights of the `kept` adapters that were used last stay in memory; those of others are
    /// read again when a request needs them.
    pub fn new(loader: impl AdapterLoader + 'static, folder: Option<PathBuf>, base: Vec<String>, kept: usize) -> Self {
        let (served, loading) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Registry { loader: Box::new(loader), folder, base, kept, served, loading }))
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
        if !in_place && lock(&self.0.served).find(name).is_some() {
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
        // Files that change while they are read have another version later.
        let version = self.0.loader.version_of(path);
        let adapter = self.0.loader.load(AdapterSource { name, path, number, origin: &origin })?;
        let parent = parent.or(self.0.base.first().map(String::as_str)).unwrap_or_default().into();
        let mut served = lock(&self.0.served);
        let new = ServedAdapter {
            name: name.into(),
            path: shown.as_ref().into(),
            parent,
            folder: path.to_owned(),
            version,
            number,
            origin: origin.into(),
            adapter: Some(adapter.clone()),
            used: served.next_use(),
        };
        match served.find(name) {
            Some(known) => *known = new,
            None => served.list.push(new),
        }
        served.keep(self.0.kept);
        tracing::info!(name, path = %shown, "an adapter was loaded");
        Ok(adapter)
    }

    /// Removes the name of an adapter. Requests that have it complete.
    pub(crate) fn remove(&self, name: &str) -> Result<(), UpdateError> {
        let mut served = lock(&self.0.served);
        let found = served.list.iter().position(|known| &*known.name == name);
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

    /// The adapter of a name, if its weights are in memory.
    fn kept(&self, name: &str) -> Option<Adapter> {
        let mut served = lock(&self.0.served);
        let used = served.next_use();
        let known = served.find(name)?;
        known.used = used;
        known.adapter.clone()
    }

    /// Reads the weights of a served adapter again.
    fn read_again(&self, known: &ServedAdapter) -> Result<Adapter, AdapterLoadError> {
        let ServedAdapter { name, folder: path, parent, version, number, origin, .. } = known;
        if version.is_none() || *version != self.0.loader.version_of(path) {
            return self.read(name, path, Some(parent));
        }
        let adapter = self.0.loader.load(AdapterSource { name, path, number: *number, origin })?;
        let mut served = lock(&self.0.served);
        // The name may have been removed meanwhile.
        if let Some(known) = served.find(name) {
            known.adapter = Some(adapter.clone());
            served.keep(self.0.kept);
        }
        tracing::debug!(name = &**name, "the weights of an adapter were read again");
        Ok(adapter)
    }

    /// The adapter of a name; one that is not known is searched for in the folder of adapters. Blocks in that case, and if
    /// the weights are not in memory.
    ///
    /// # Errors
    /// The adapter cannot be read, or there is a folder of this name with an adapter of the model that cannot be read.
    pub(crate) fn resolve(&self, name: &str) -> Result<Option<Adapter>, AdapterLoadError> {
        if let Some(adapter) = self.kept(name) {
            return Ok(Some(adapter));
        }
        if lock(&self.0.served).find(name).is_some() {
            let _one_at_a_time = lock(&self.0.loading);
            if let Some(adapter) = self.kept(name) {
                return Ok(Some(adapter));
            }
            let known = lock(&self.0.served).find(name).cloned();
            return known.map(|known| self.read_again(&known)).transpose();
        }
        let Some(path) = self.0.folder.as_ref().filter(|_| is_plain(name)).map(|folder| folder.join(name)) else {
            return Ok(None);
        };
        let _one_at_a_time = lock(&self.0.loading);
        if let Some(adapter) = self.kept(name) {
            return Ok(Some(adapter));
        }
        match self.0.loader.base_of(&path) {
            Some(base) if self.0.base.contains(&base) => self.read(name, &path, None).map(Some),
            _ => Ok(None),
        }
    }
}

impl Served {
    fn find(&mut self, name: &str) -> Option<&mut ServedAdapter> {
        self.list.iter_mut().find(|known| &*known.name == name)
    }

    fn next_use(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }

    /// Forgets the weights of all but the `kept` adapters that were used last. Requests keep those that they have.
    fn keep(&mut self, kept: usize) {
        let mut loaded: Vec<_> = self.list.iter_mut().filter(|known| known.adapter.is_some()).collect();
        loaded.sort_unstable_by_key(|known| std::cmp::Reverse(known.used));
        for known in loaded.into_iter().skip(kept.max(1)) {
            known.adapter = None;
        }
    }
}

/// Whether a name is one component of a path, so that no request can leave the folder.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', ':', '\0'])
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Knows the adapters `/good` and `/fine` of `base`, and a damaged one. Their version is the number of changes.
    #[derive(Clone, Default)]
    struct Fake {
        changes: Arc<AtomicU64>,
        reads: Arc<AtomicU64>,
    }

    impl AdapterLoader for Fake {
        fn load(&self, source: AdapterSource<'_>) -> Result<Adapter, AdapterLoadError> {
            let AdapterSource { name, path, number, origin } = source;
            self.reads.fetch_add(1, Ordering::Relaxed);
            match path.file_name().and_then(|name| name.to_str()) {
                Some("good" | "fine") => Ok(Adapter::new(number, name, origin, ())),
                Some("bad") => Err(AdapterLoadError::Refused("it is damaged".into())),
                _ => Err(AdapterLoadError::NotFound(path.display().to_string())),
            }
        }

        fn base_of(&self, path: &Path) -> Option<String> {
            let name = path.file_name().and_then(|name| name.to_str())?;
            ["good", "bad", "other"].contains(&name).then(|| if name == "other" { "else" } else { "base" }.into())
        }

        fn version_of(&self, _: &Path) -> Option<String> {
            Some(self.changes.load(Ordering::Relaxed).to_string())
        }
    }

    fn adapters(folder: Option<&str>) -> Adapters {
        Adapters::new(Fake::default(), folder.map(PathBuf::from), vec!["base".into(), "alias".into()], 8)
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
    fn the_weights_of_the_adapters_that_were_used_last_are_kept() {
        let fake = Fake::default();
        let reads = || fake.reads.load(Ordering::Relaxed);
        let adapters = Adapters::new(fake.clone(), None, vec!["base".into()], 2);
        let number = |name: &str| adapters.resolve(name).unwrap().unwrap().number();
        for (name, path) in [("a", "/good"), ("b", "/fine"), ("c", "/good")] {
            adapters.load(name, Path::new(path), None).unwrap();
        }
        assert_eq!(adapters.list().len(), 3, "all are served");
        assert_eq!((number("c"), number("b"), reads()), (3, 2, 3), "two are in memory");
        assert_eq!((number("a"), reads()), (1, 4), "the first is read again and is the same to the engine");
        assert_eq!((number("b"), reads()), (2, 4));
        assert_eq!((number("c"), reads()), (3, 5), "the one that was used longest ago has made room");
        fake.changes.fetch_add(1, Ordering::Relaxed);
        assert_eq!((number("b"), reads()), (2, 5), "it is still in memory");
        assert_eq!((number("a"), reads()), (4, 6), "files that have changed are another adapter");
        assert_eq!(adapters.resolve("a").unwrap().unwrap().origin(), "/good#2");
        assert_eq!(adapters.remove("c"), Ok(()));
        assert_eq!(adapters.resolve("c"), Ok(None));
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
