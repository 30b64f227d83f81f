//! Kernels on the CPU, for tests: g++ compiles the text for NVRTC against the emulation in `emulation/`.
//!
//! [`compile`] compiles a program to a shared library, once for each content; [`Emulation`] loads and launches
//! instances. With `OCTAVO_EMULATION_SANITIZE` set, libraries are built with the address and undefined-behaviour
//! sanitizers; the process must then run with `LD_PRELOAD` of [`address_sanitizer`]. [`Emulation::finding_races`] makes
//! libraries in which a data race ends a launch.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::{env, fs, io};

use crate::manifest::{self, Instance};
use crate::params::Params;
use crate::sources::Source;

/// Environment variable that enables the sanitizers.
pub const SANITIZE: &str = "OCTAVO_EMULATION_SANITIZE";

/// Defects that end a launch, beside those that end it always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    Nothing,
    /// Accesses outside an array, and undefined behaviour.
    Memory,
    /// Accesses of two threads that nothing orders.
    Races,
}

impl Check {
    /// Returns what [`SANITIZE`] asks for.
    fn from_env() -> Self {
        if env::var_os(SANITIZE).is_some() { Self::Memory } else { Self::Nothing }
    }

    /// Returns the compiler's options for all parts of a library.
    fn options(self) -> &'static str {
        match self {
            Self::Nothing => "-O2",
            // Frame pointers are kept for readable reports.
            Self::Memory => "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all",
            // Beyond -O1, loops that clear memory become calls that are not reported.
            Self::Races => "-O1 -g1 -DEMU_RACES",
        }
    }

    /// Adds the compiler's further options for kernels.
    fn with_kernel_options(self, mut options: Vec<String>) -> Vec<String> {
        options.extend(self.kernel_options().iter().copied().map(String::from));
        options
    }

    /// Returns the compiler's further options for kernels.
    fn kernel_options(self) -> &'static [&'static str] {
        match self {
            // Most tests take longer to compile their kernels than to run them.
            Self::Nothing => &["-O1"],
            Self::Memory => &[],
            // The calls that the sanitizer inserts are those of `emulation/races.cpp`; a function's begin and end are not
            // needed.
            Self::Races => &[
                "-fsanitize=thread",
                "--param=tsan-distinguish-volatile=1",
                "--param=tsan-instrument-func-entry-exit=0",
            ],
        }
    }

    /// Returns the sources of the emulation.
    fn parts(self) -> &'static [&'static str] {
        match self {
            Self::Nothing | Self::Memory => &["scheduler", "instructions"],
            Self::Races => &["scheduler", "instructions", "races"],
        }
    }
}

/// Reason why kernels could not be compiled, loaded or launched.
#[derive(Debug)]
pub struct EmulationError(String);

impl std::fmt::Display for EmulationError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for EmulationError {}

fn io_error(what: &Path) -> impl Fn(io::Error) -> EmulationError + '_ {
    move |error| EmulationError(format!("{}: {error}", what.display()))
}

/// Order in which ready threads and CTAs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Ascending.
    Forward,
    /// Descending.
    Reverse,
    /// Random order with this seed.
    Random(u64),
}

/// Folder of the emulation's sources.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/emulation");

/// Returns the folder of this package's sources.
fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the options of every compilation.
fn options(check: Check) -> Vec<String> {
    let include = |folder| format!("-I{}", package().join(folder).display());
    let mut options = vec![include("include"), include("emulation")];
    options.extend(
        "-std=c++17 -fPIC -fvisibility=hidden -fno-gnu-unique -fno-strict-aliasing -march=x86-64-v3 -Wall -Wextra -Wno-unknown-pragmas"
            .split(' ')
            .map(String::from),
    );
    // As in `nvrtc`, a product and a sum are one operation only where the source calls `fmaf`.
    options.push("-ffp-contract=off".to_owned());
    options.extend(check.options().split(' ').map(String::from));
    options
}

/// Returns the folder of cached libraries: in cargo's target folder if the running program is in one, else among
/// temporary files.
pub fn cache_folder() -> PathBuf {
    let executable = env::current_exe().unwrap_or_default();
    let target = executable.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists());
    target.map_or_else(env::temp_dir, Path::to_path_buf).join("emulation")
}

/// Returns a hash of everything that affects a compilation of `text`, including the compiler's version.
fn key(text: &str, options: &[String]) -> Result<u64, EmulationError> {
    let mut hasher = DefaultHasher::new();
    (text, options, compiler_version()?).hash(&mut hasher);
    for folder in ["include", "emulation"] {
        hash_sources(&package().join(folder), &mut hasher)?;
    }
    Ok(hasher.finish())
}

/// Hashes the C++ files of a folder.
fn hash_sources(folder: &Path, hasher: &mut DefaultHasher) -> Result<(), EmulationError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(io_error(folder))? {
        files.push(entry.map_err(io_error(folder))?.path());
    }
    files.sort();
    for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "h" || e == "cpp")) {
        fs::read(file).map_err(io_error(file))?.hash(hasher);
    }
    Ok(())
}

/// Returns a hash of the emulation and of the sources in a subfolder.
pub fn sources_key(folder: &str) -> Result<u64, EmulationError> {
    let mut hasher = DefaultHasher::new();
    key("", &options(Check::from_env()))?.hash(&mut hasher);
    hash_sources(&Path::new(FOLDER).join(folder), &mut hasher)?;
    Ok(hasher.finish())
}

/// Returns the C++ compiler: that of CXX, or g++.
pub fn compiler() -> Command {
    Command::new(env::var_os("CXX").as_deref().unwrap_or(OsStr::new("g++")))
}

/// Runs a command and returns its output.
pub fn run(command: &mut Command) -> Result<Vec<u8>, EmulationError> {
    let output = command.output().map_err(|e| EmulationError(format!("{command:?}: {e}")))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(EmulationError(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))))
}

/// Returns what the compiler says of its version, which is asked once.
fn compiler_version() -> Result<&'static [u8], EmulationError> {
    static VERSION: OnceLock<Vec<u8>> = OnceLock::new();
    if let Some(version) = VERSION.get() {
        return Ok(version);
    }
    let version = run(compiler().arg("--version"))?;
    Ok(VERSION.get_or_init(|| version))
}

/// Returns the address sanitizer's library, which must be loaded before everything else.
pub fn address_sanitizer() -> Result<PathBuf, EmulationError> {
    let path = run(compiler().arg("-print-file-name=libasan.so"))?;
    Ok(String::from_utf8_lossy(&path).trim().into())
}

/// Creates `path` with `make`, which gets a unique name beside it, so that other processes see the complete file or
/// none.
pub fn make_once(path: &Path, make: impl FnOnce(&Path) -> Result<(), EmulationError>) -> Result<(), EmulationError> {
    type Turns = HashMap<PathBuf, Arc<Mutex<()>>>;
    // Threads that need the same file make it once, and other files at the same time.
    static TURNS: LazyLock<Mutex<Turns>> = LazyLock::new(Mutex::default);
    let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner).entry(path.to_owned()).or_default().clone();
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    if path.exists() {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(io_error(folder))?;
    }
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    make(&partial)?;
    fs::rename(&partial, path).map_err(io_error(path))
}

/// Returns the compiler's arguments for a library of kernels, except their text: options, and the emulation's objects,
/// which are compiled if necessary.
pub fn library_arguments() -> Result<(Vec<String>, Vec<PathBuf>), EmulationError> {
    let check = Check::from_env();
    let (options, objects) = arguments(check)?;
    Ok((check.with_kernel_options(options), objects))
}

fn arguments(check: Check) -> Result<(Vec<String>, Vec<PathBuf>), EmulationError> {
    let mut options = options(check);
    let folder = cache_folder();
    let mut objects = Vec::new();
    let machine = key("", &options)?;
    for part in check.parts() {
        let object = folder.join(format!("{part}-{machine:016x}.o"));
        make_once(&object, |partial| {
            let source = package().join("emulation").join(part).with_extension("cpp");
            run(compiler().args(&options).arg("-c").arg(source).arg("-o").arg(partial)).map(drop)
        })?;
        objects.push(object);
    }
    options.extend(["-shared".to_owned(), "-Wl,-Bsymbolic".to_owned()]);
    Ok((options, objects))
}

/// Returns the shared library of a program from [`manifest::program`]: its kernels by name, behind the functions of
/// `emulation/emu.h`. It is compiled if necessary.
fn compile(program: &str, check: Check) -> Result<PathBuf, EmulationError> {
    let (options, objects) = arguments(check)?;
    let kernel_options = check.with_kernel_options(options.clone());
    let library = cache_folder().join(format!("kernels-{:016x}.so", key(program, &kernel_options)?));
    make_once(&library, |partial| {
        let source = library.with_extension("cpp");
        fs::write(&source, program).map_err(io_error(&source))?;
        // The kernels are an object first, because the linker would add the library of a sanitizer.
        let object = partial.with_extension("o");
        let mut command = compiler();
        command.args(&kernel_options).args(["-c", "-x", "c++"]);
        run(command.arg(source).arg("-o").arg(&object))?;
        run(compiler().args(&options).args(&objects).arg(&object).arg("-o").arg(partial))?;
        fs::remove_file(&object).map_err(io_error(&object))
    })?;
    Ok(library)
}

type Launch = unsafe extern "C" fn(*const c_char, *const u32, *const u32, u32, *const c_void, usize) -> c_int;
type SetOrder = unsafe extern "C" fn(c_int, u64);
type Error = unsafe extern "C" fn() -> *const c_char;
type CountBanks = unsafe extern "C" fn(c_int);
type BankWavefronts = unsafe extern "C" fn(*mut u64, *mut u64);

/// Bank use of launches in shared memory, by vector loads and stores, `ldmatrix` and `cp.async`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BankUse {
    /// Number of phases: parts of at most 128 bytes into which accesses of warps are divided.
    pub phases: u64,
    /// Number of turns that they take: as many as the phases, and more if lanes access different words of one bank.
    pub wavefronts: u64,
}

/// A loaded library of kernels. It is never unloaded, because threads keep its state.
struct Library {
    path: PathBuf,
    launch: Launch,
    set_order: SetOrder,
    error: Error,
    count_banks: CountBanks,
    bank_wavefronts: BankWavefronts,
}

impl Library {
    fn open(path: &Path) -> Result<Self, EmulationError> {
        let failed = |e: libloading::Error| EmulationError(format!("{}: {e}", path.display()));
        // SAFETY: the library belongs to this project, and its constructors only list its kernels. `emu.h` declares the
        // functions with these types, and they stay valid because the library is never closed.
        unsafe {
            let library = std::mem::ManuallyDrop::new(libloading::Library::new(path).map_err(failed)?);
            Ok(Self {
                path: path.to_owned(),
                launch: *library.get::<Launch>("emu_launch").map_err(failed)?,
                set_order: *library.get::<SetOrder>("emu_set_order").map_err(failed)?,
                error: *library.get::<Error>("emu_error").map_err(failed)?,
                count_banks: *library.get::<CountBanks>("emu_count_banks").map_err(failed)?,
                bank_wavefronts: *library.get::<BankWavefronts>("emu_bank_wavefronts").map_err(failed)?,
            })
        }
    }

    /// Returns a message in which lines of the sources take the place of addresses in `<>`.
    fn with_lines(&self, message: &str) -> String {
        let mut parts = message.split('<');
        let mut text = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let Some((address, rest)) = part.split_once('>') else {
                text.extend(["<", part]);
                continue;
            };
            // A report without lines is of use too.
            let lines =
                run(Command::new("addr2line").args(["-i", "-e"]).arg(&self.path).arg(address)).unwrap_or_default();
            let lines: Vec<_> = String::from_utf8_lossy(&lines)
                .lines()
                .map(|line| line.rsplit('/').next().unwrap_or(line).to_owned())
                .filter(|line| !line.starts_with("manifest:"))
                .collect();
            text.extend([&lines.join(" in "), rest]);
        }
        text
    }
}

/// Instances that can be launched.
pub struct Emulation {
    /// Kernels by name of the instance.
    kernels: Vec<(Instance, usize)>,
    libraries: Vec<Library>,
}

impl Emulation {
    /// Compiles and loads `instances`.
    pub fn new(instances: &[Instance]) -> Result<Self, EmulationError> {
        Self::with(instances, Check::from_env(), manifest::program)
    }

    /// Does the same with libraries in which a data race ends a launch. `program` returns the text of a source with an
    /// entry point for each of its instances, as [`manifest::program`] does.
    pub fn finding_races(
        instances: &[Instance],
        program: impl Fn(Source, &[Instance]) -> String,
    ) -> Result<Self, EmulationError> {
        Self::with(instances, Check::Races, program)
    }

    fn with(
        instances: &[Instance],
        check: Check,
        program: impl Fn(Source, &[Instance]) -> String,
    ) -> Result<Self, EmulationError> {
        let mut this = Self { kernels: Vec::new(), libraries: Vec::new() };
        for source in manifest::sources(instances) {
            this.libraries.push(Library::open(&compile(&program(source, instances), check)?)?);
            let of_source = instances.iter().filter(|i| i.source == source);
            this.kernels.extend(of_source.map(|i| (i.clone(), this.libraries.len() - 1)));
        }
        Ok(this)
    }

    /// Returns the total bank use of the launches that `work` makes on the calling thread.
    pub fn bank_use(&self, work: impl FnOnce()) -> BankUse {
        // SAFETY: according to `emu.h` the function accepts any number.
        let count = |on| self.libraries.iter().for_each(|library| unsafe { (library.count_banks)(on) });
        count(1);
        work();
        count(0);
        let mut all = BankUse::default();
        for library in &self.libraries {
            let mut one = BankUse::default();
            // SAFETY: the function writes the two numbers whose addresses it gets.
            unsafe { (library.bank_wavefronts)(&mut one.phases, &mut one.wavefronts) };
            all.phases += one.phases;
            all.wavefronts += one.wavefronts;
        }
        all
    }

    /// Runs a kernel to its end on the calling thread.
    ///
    /// # Safety
    /// The kernel may read and write the memory that it accesses through the addresses in `params`.
    pub unsafe fn launch<P: Params>(
        &self,
        order: Order,
        instance: &Instance,
        grid: [u32; 3],
        dynamic_shared: usize,
        params: &P,
    ) -> Result<(), EmulationError> {
        let (found, library) = self
            .kernels
            .iter()
            .find(|(i, _)| i == instance)
            .ok_or_else(|| EmulationError(format!("{} has not been compiled", instance.name)))?;
        let library = &self.libraries[*library];
        if found.params != P::NAME || dynamic_shared > found.dynamic_shared {
            let reason = format!("{} takes {} and {} bytes", found.name, found.params, found.dynamic_shared);
            return Err(EmulationError(reason));
        }
        let name = CString::new(found.name.as_str()).map_err(|e| EmulationError(e.to_string()))?;
        let (order, seed) = match order {
            Order::Forward => (0, 0),
            Order::Reverse => (1, 0),
            Order::Random(seed) => (2, seed),
        };
        let (block, bytes) = ([found.threads, 1, 1], params.bytes());
        // SAFETY: the arguments are those of `emu.h`; the caller guarantees the kernel's own accesses.
        let status = unsafe {
            (library.set_order)(order, seed);
            let params = bytes.as_ptr().cast();
            (library.launch)(name.as_ptr(), grid.as_ptr(), block.as_ptr(), dynamic_shared as u32, params, bytes.len())
        };
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the string lives until this thread's next launch.
        let message = unsafe { CStr::from_ptr((library.error)()) }.to_string_lossy();
        Err(EmulationError(library.with_lines(&message)))
    }
}
