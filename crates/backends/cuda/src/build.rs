//! From instances to loaded kernels: looked up on disk, compiled where they are missing, in parallel.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use octavo_kernels::manifest::{self, Instance};
use octavo_kernels::nvrtc::{self, Nvrtc};
use octavo_kernels::sources::{HEADERS, Source};
use octavo_ops::BackendError;

use crate::cache::KernelCache;
use crate::driver::{Gpu, Kernel, Module};
use crate::failed;

/// The instances that a program needs, each once.
#[derive(Debug, Default)]
pub(crate) struct Instances {
    list: Vec<Instance>,
    by_name: HashMap<String, KernelId>,
}

/// Number of an instance among those of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelId(usize);

impl Instances {
    /// The number of an instance, which is added if it is new.
    pub(crate) fn id(&mut self, instance: Instance) -> KernelId {
        let next = KernelId(self.list.len());
        let id = *self.by_name.entry(instance.name.clone()).or_insert(next);
        if id == next {
            self.list.push(instance);
        }
        id
    }
}

/// Loaded kernels, by [`KernelId`].
pub(crate) struct Kernels {
    kernels: Vec<Kernel>,
    /// What holds their code.
    _modules: Vec<Module>,
}

impl Kernels {
    pub(crate) fn get(&self, id: KernelId) -> Kernel {
        self.kernels[id.0]
    }
}

/// Who compiles: needed only for what is not on disk.
pub(crate) struct Builder<'a> {
    pub(crate) gpu: &'a Arc<Gpu>,
    pub(crate) cache: &'a KernelCache,
    /// Or a sentence that says why there is none.
    pub(crate) compiler: Result<&'a Nvrtc, &'a str>,
}

impl Builder<'_> {
    /// Loads the instances: those of a source are one module.
    pub(crate) fn build(&self, instances: &Instances) -> Result<Kernels, BackendError> {
        let begun = Instant::now();
        let sources = manifest::sources(&instances.list);
        let compiled = AtomicUsize::new(0);
        let codes = self.codes(&sources, &instances.list, &compiled)?;
        let modules: Result<Vec<_>, _> = codes.iter().map(|code| Module::new(self.gpu, code)).collect();
        let modules = modules?;
        let kernel = |instance: &Instance| {
            let at = sources.iter().position(|source| *source == instance.source);
            at.map(|at| modules[at].kernel(instance))
                .ok_or_else(|| failed("a kernel without a source"))?
                .map_err(failed)
        };
        let kernels = instances.list.iter().map(kernel).collect::<Result<Vec<_>, _>>()?;
        tracing::info!(
            "{} kernels in {} modules, {} of them compiled, after {:.1} s",
            kernels.len(),
            modules.len(),
            compiled.into_inner(),
            begun.elapsed().as_secs_f64()
        );
        Ok(Kernels { kernels, _modules: modules })
    }

    /// The code of each source, on as many threads as there are processors.
    fn codes(
        &self,
        sources: &[Source],
        instances: &[Instance],
        compiled: &AtomicUsize,
    ) -> Result<Vec<Vec<u8>>, BackendError> {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(source) = sources.get(at) else { return done };
                let code = self.code(*source, instances, compiled);
                if code.is_err() {
                    // The others need not begin anything more.
                    next.store(sources.len(), Ordering::Relaxed);
                }
                done.push((at, code));
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(sources.len());
        let done: Vec<_> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
        });
        let mut codes = vec![Vec::new(); sources.len()];
        for (at, code) in done {
            codes[at] = code.map_err(failed)?;
        }
        match codes.iter().position(Vec::is_empty) {
            Some(at) => Err(failed(format!("{} was not compiled", sources[at].path))),
            None => Ok(codes),
        }
    }

    /// The code of the instances of a source, from disk or compiled.
    fn code(&self, source: Source, instances: &[Instance], compiled: &AtomicUsize) -> Result<Vec<u8>, String> {
        let (text, chip) = (manifest::program(source, instances), self.gpu.info().chip);
        let key = key(&text, &nvrtc::options(chip));
        let nvrtc = match self.compiler {
            Ok(nvrtc) => nvrtc,
            // What was compiled ahead of time serves, whichever release compiled it.
            Err(reason) => return self.cache.get_any(&key).ok_or_else(|| reason.to_owned()),
        };
        let (major, minor) = nvrtc.version();
        let version = format!("{major}.{minor}");
        if let Some(code) = self.cache.get(&key, &version) {
            return Ok(code);
        }
        compiled.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(path = source.path, "compiling");
        let made = nvrtc.compile(source.path, &text, chip).map_err(|error| error.to_string())?;
        self.cache.put(&key, &version, &made.cubin);
        Ok(made.cubin)
    }
}

/// What code depends on beside the compiler's release: the text with its headers, the options with the chip.
fn key(text: &str, options: &[String]) -> String {
    let headers = HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
    let options = options.iter().map(String::as_str);
    KernelCache::key([text].into_iter().chain(headers).chain(options))
}

#[cfg(test)]
mod tests {
    use octavo_kernels::manifest::{Chip, sampling_adjust, sampling_draw};

    use super::*;

    #[test]
    fn an_instance_has_one_number() {
        let mut instances = Instances::default();
        let ids = [sampling_draw(), sampling_adjust(), sampling_draw()].map(|instance| instances.id(instance));
        assert_eq!(ids, [KernelId(0), KernelId(1), KernelId(0)]);
        assert_eq!(instances.list.len(), 2);
    }

    #[test]
    fn a_key_tells_text_and_chip() {
        let (volta, ada) = (nvrtc::options(Chip::SM_70), nvrtc::options(Chip::SM_89));
        let keys = [key("a", &volta), key("b", &volta), key("a", &ada)];
        for (i, key) in keys.iter().enumerate() {
            assert!(!keys[..i].contains(key));
        }
    }
}
