//! Loading of kernel instances: from the pack, from the cache, or compiled in parallel.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use octavo_kernels::manifest::{self, Instance, Target};
use octavo_kernels::nvrtc::{Compiled, Nvrtc};
use octavo_ops::BackendError;

use crate::cache::{KernelCache, Key};
use crate::driver::{Gpu, Kernel, Module};
use crate::libraries::{LibraryKind, Places, Version, compiler, fits};
use crate::{CudaConfig, DeviceInfo, KernelPack, failed, unsupported};

/// Instances that a program needs, each once.
#[derive(Debug, Default)]
pub(crate) struct Instances {
    list: Vec<Instance>,
    by_name: HashMap<String, KernelId>,
}

/// Index of an instance among those of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelId(usize);

impl KernelId {
    pub(crate) fn index(self) -> usize {
        self.0
    }
}

impl Instances {
    /// Returns the index of an instance and adds it if it is new. The launch with the most shared memory determines its
    /// limit.
    pub(crate) fn id(&mut self, instance: Instance) -> KernelId {
        let next = KernelId(self.list.len());
        let id = *self.by_name.entry(instance.name.clone()).or_insert(next);
        match self.list.get_mut(id.0) {
            Some(known) => known.dynamic_shared = known.dynamic_shared.max(instance.dynamic_shared),
            None => self.list.push(instance),
        }
        id
    }

    /// Returns the instances in the order of their indices.
    pub(crate) fn into_list(self) -> Vec<Instance> {
        self.list
    }

    /// Checks that a device has the shared memory that launches need.
    fn fit(&self, device: &DeviceInfo) -> Result<(), BackendError> {
        let most = device.shared_memory as usize;
        match self.list.iter().find(|instance| instance.dynamic_shared > most) {
            Some(Instance { name, dynamic_shared: needed, .. }) => Err(unsupported(format!(
                "this model on {}: the kernel {name} needs {needed} bytes of shared memory, and it has {most}",
                device.name
            ))),
            None => Ok(()),
        }
    }
}

/// Loaded kernels, by [`KernelId`].
pub(crate) struct Kernels {
    kernels: Vec<Kernel>,
    /// Modules that hold the code.
    _modules: Vec<Module>,
}

impl Kernels {
    pub(crate) fn get(&self, id: KernelId) -> Kernel {
        self.kernels[id.0]
    }
}

/// Loads kernels for a device.
pub(crate) struct Builder<'a> {
    pub(crate) gpu: &'a Arc<Gpu>,
    pub(crate) driver: Version,
    pub(crate) config: &'a CudaConfig,
}

/// Numbers of kernels by the origin of their code.
#[derive(Debug, Default)]
struct Origins {
    pack: usize,
    cache: AtomicUsize,
    compiled: AtomicUsize,
}

/// The compiler, or a sentence that explains why there is none.
type Compiler = Result<Nvrtc, String>;

impl Builder<'_> {
    /// Loads the instances and logs the origin of their code.
    pub(crate) fn build(&self, instances: &Instances) -> Result<Kernels, BackendError> {
        let begun = Instant::now();
        let chip = self.gpu.info().chip;
        instances.fit(self.gpu.info())?;
        let keys: Vec<_> = instances.list.iter().map(|instance| Key::new(instance, Target::Code(chip))).collect();
        let mut origins = Origins::default();
        let pack = self.pack();
        let mut codes: Vec<Option<Vec<u8>>> = vec![None; keys.len()];
        if let Ok(Some((pack, target))) = &pack {
            let code = |instance| pack.code(&Key::new(instance, *target), *target);
            codes = instances.list.iter().map(code).collect();
            origins.pack = codes.iter().flatten().count();
        }
        if origins.pack < keys.len() {
            // The compiler is opened only now, because it is large and a machine with a pack may have none.
            let compiler = self.compiler().map_err(|reason| match &pack {
                Err(unfit) => format!("{reason}; {unfit}"),
                Ok(_) => reason,
            });
            self.fill(&mut codes, &instances.list, &keys, &compiler, &origins).map_err(failed)?;
        }
        let modules: Result<Vec<_>, _> = codes.iter().flatten().map(|code| Module::new(self.gpu, code)).collect();
        let modules = modules?;
        let kernels: Result<Vec<_>, _> =
            modules.iter().zip(&instances.list).map(|(module, instance)| module.kernel(instance)).collect();
        let kernels = kernels?;
        let Origins { pack, cache, compiled } = origins;
        tracing::info!(
            "kernels: {} for {}: {pack} from the pack, {} from the cache, {} compiled; after {:.1} s",
            kernels.len(),
            chip.arch(),
            cache.into_inner(),
            compiled.into_inner(),
            begun.elapsed().as_secs_f64()
        );
        Ok(Kernels { kernels, _modules: modules })
    }

    /// Returns the pack and the target of its kernels, if there is one for this device, or a sentence that explains why it is not used, which is also
    /// logged.
    fn pack(&self) -> Result<Option<(KernelPack, Target)>, String> {
        let Some(folder) = &self.config.kernel_pack else { return Ok(None) };
        let usable = KernelPack::read(folder).map_err(|error| error.to_string()).and_then(|pack| {
            let target = pack.target(self.gpu.info().chip, Some(self.driver));
            target
                .map(|target| (pack, target))
                .map_err(|reason| format!("the kernel pack {} is not used: {reason}", folder.display()))
        });
        match &usable {
            Ok((pack, target)) => tracing::info!("kernel pack: {pack}, of which {} is used", target.arch()),
            Err(reason) => tracing::warn!("{reason}"),
        }
        usable.map(Some)
    }

    fn compiler(&self) -> Compiler {
        let found = Places::usual(&self.config.libraries).find(LibraryKind::Nvrtc);
        let (nvrtc, path) = compiler(&found, self.driver, self.gpu.info().chip)?;
        tracing::info!("compiler: NVRTC {} ({})", Version::read(&nvrtc), path.display());
        Ok(nvrtc)
    }

    /// Finds missing code in the cache, or compiles it.
    fn fill(
        &self,
        codes: &mut [Option<Vec<u8>>],
        instances: &[Instance],
        keys: &[Key],
        compiler: &Compiler,
        origins: &Origins,
    ) -> Result<(), String> {
        let cache = KernelCache::new(&self.config.kernel_cache);
        let (chip, told) = (self.gpu.info().chip, AtomicBool::new(false));
        let missing: Vec<_> = (0..codes.len()).filter(|at| codes[*at].is_none()).collect();
        let made = in_parallel(missing.len(), |number| -> Result<_, String> {
            let (instance, key) = (&instances[missing[number]], &keys[missing[number]]);
            let count = |counter: &AtomicUsize| counter.fetch_add(1, Ordering::Relaxed);
            let kept = match compiler {
                Ok(nvrtc) => cache.get(key, Version::read(nvrtc)),
                // Code from any release of the compiler is used if the driver supports it.
                Err(_) => cache.get_any(key, |release| fits(release.major, self.driver, chip).is_ok()),
            };
            if let Some(code) = kept {
                count(&origins.cache);
                return Ok(code);
            }
            let nvrtc = compiler.as_ref().map_err(Clone::clone)?;
            let code = compile(nvrtc, instance, Target::Code(chip))?.code;
            count(&origins.compiled);
            if let Err(error) = cache.put(key, Version::read(nvrtc), &code)
                && !told.swap(true, Ordering::Relaxed)
            {
                let path = self.config.kernel_cache.display();
                tracing::warn!(%path, %error, "the kernel cache cannot be written: kernels are compiled at every start");
            }
            Ok(code)
        })?;
        for (at, code) in missing.into_iter().zip(made) {
            codes[at] = Some(code);
        }
        Ok(())
    }
}

/// Compiles an instance on its own: its code does not depend on the other kernels of a program, so that it is the same
/// for every program, the cache and a pack.
pub(crate) fn compile(nvrtc: &Nvrtc, instance: &Instance, target: Target) -> Result<Compiled, String> {
    tracing::debug!(kernel = instance.name, target = target.arch(), "compiling");
    let text = manifest::program(instance.source, std::slice::from_ref(instance));
    nvrtc.compile(instance.source.path, &text, target).map_err(|error| format!("{}: {error}", instance.name))
}

/// Calls `work` for each number below `count`, on as many threads as there are processors. After an error no further
/// calls start.
pub(crate) fn in_parallel<T: Send, E: Send>(
    count: usize,
    work: impl Fn(usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let run = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return done;
            }
            let result = work(number);
            if result.is_err() {
                next.store(count, Ordering::Relaxed);
            }
            done.push((number, result));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(count);
    let mut done: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    done.sort_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use octavo_kernels::manifest::{Dtype, NormMean, sampling_adjust, sampling_draw};

    use super::*;
    use crate::lower::norm_instance;

    #[test]
    fn an_instance_has_one_number() {
        let mut instances = Instances::default();
        let ids = [sampling_draw(), sampling_adjust(), sampling_draw()].map(|instance| instances.id(instance));
        assert_eq!(ids, [KernelId(0), KernelId(1), KernelId(0)]);
        assert_eq!(instances.list.len(), 2);
    }

    #[test]
    fn the_launch_that_asks_for_most_shared_memory_counts() {
        let mut instances = Instances::default();
        for cols in [128, 4096, 1024] {
            instances.id(norm_instance(Dtype::F16, NormMean::Rms, cols));
        }
        assert_eq!(instances.list.iter().map(|instance| instance.dynamic_shared).collect::<Vec<_>>(), [4 * 4096]);
        let mut device = DeviceInfo {
            ordinal: 0,
            name: "X".into(),
            chip: manifest::Chip::SM_70,
            memory: 0,
            processors: 1,
            shared_memory: 4 * 4096,
        };
        instances.fit(&device).unwrap();
        device.shared_memory -= 1;
        let error = instances.fit(&device).unwrap_err().to_string();
        assert!(
            error.ends_with("the kernel norm_rms_f16 needs 16384 bytes of shared memory, and it has 16383"),
            "{error}"
        );
    }

    #[test]
    fn work_in_parallel_keeps_its_order_and_stops_at_an_error() {
        let squares = in_parallel(100, |number| Ok::<_, ()>(number * number)).unwrap();
        assert!(squares.iter().enumerate().all(|(number, square)| *square == number * number));
        assert_eq!(in_parallel(0, |_| Ok::<(), ()>(())), Ok(Vec::new()));
        let begun = AtomicUsize::new(0);
        let result = in_parallel(1_000_000, |number| {
            begun.fetch_add(1, Ordering::Relaxed);
            if number == 3 { Err("three") } else { Ok(number) }
        });
        assert_eq!(result, Err("three"));
        assert!(begun.into_inner() < 1_000_000);
    }
}
