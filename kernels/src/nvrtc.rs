//! NVRTC, NVIDIA's CUDA C++ compiler library, opened at run time from a path, so that no part of CUDA is linked.
//!
//! It needs neither a GPU nor a driver, generates code for every chip that it supports, and may be called by several
//! threads at once.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use libloading::Library;

use crate::manifest::{Chip, Target};
use crate::sources::HEADERS;

/// Options of every compilation except the target. A product and a sum are one operation only where the source calls `fmaf`: kernels
/// that promise the same bits could otherwise be contracted in different ways.
const OPTIONS: &[&str] = &["--std=c++17", "--fmad=false"];

/// Options of a compilation to machine code.
const ASSEMBLER_OPTIONS: &[&str] = &["--ptxas-options=-v", "--ptxas-options=--warn-on-spills"];

/// Reason why a compilation failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NvrtcError {
    /// The file does not exist or is not NVRTC.
    Open(String),
    /// A call failed; contains the function and NVRTC's message.
    Call(&'static str, String),
    /// The program is invalid or the chip is unknown; contains the compiler's messages.
    Compile(String),
}

impl std::fmt::Display for NvrtcError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Open(reason) => write!(f, "NVRTC cannot be opened: {reason}"),
            Self::Call(call, reason) => write!(f, "{call} failed: {reason}"),
            Self::Compile(log) => write!(f, "NVRTC refuses the program:\n{log}"),
        }
    }
}

impl std::error::Error for NvrtcError {}

/// Result of a compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// Machine code, or PTX that ends with a zero; the driver loads both unchanged.
    pub code: Vec<u8>,
    /// Warnings; for machine code also the resources that each kernel uses ([`usage`](crate::usage)).
    pub log: String,
}

type Program = *mut c_void;
type Status = c_int;

/// The required functions, as declared in `nvrtc.h`.
#[derive(Debug)]
struct Functions {
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    arch_count: unsafe extern "C" fn(*mut c_int) -> Status,
    archs: unsafe extern "C" fn(*mut c_int) -> Status,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

/// An opened library.
#[derive(Debug)]
pub struct Nvrtc {
    functions: Functions,
    version: (u32, u32),
    archs: Vec<u32>,
    /// The library is the last field, because the functions belong to it.
    _library: Library,
}

impl Nvrtc {
    /// Opens the library at `path`, or searches for that name where the system looks for libraries.
    pub fn open(path: &Path) -> Result<Self, NvrtcError> {
        let reason = |e: libloading::Error| NvrtcError::Open(format!("{}: {}", path.display(), loaders_words(&e)));
        // SAFETY: initialisers of NVRTC have no preconditions; the caller is responsible for any other library at this
        // path.
        let library = unsafe { Library::new(path) }.map_err(reason)?;
        /// Looks up a function.
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the field that it initialises has the type of this function in `nvrtc.h`, and the library is
                // kept as long as the pointer.
                *unsafe { library.get($name.as_bytes()) }.map_err(reason)?
            };
        }
        let functions = Functions {
            error_string: symbol!("nvrtcGetErrorString"),
            version: symbol!("nvrtcVersion"),
            arch_count: symbol!("nvrtcGetNumSupportedArchs"),
            archs: symbol!("nvrtcGetSupportedArchs"),
            create: symbol!("nvrtcCreateProgram"),
            destroy: symbol!("nvrtcDestroyProgram"),
            compile: symbol!("nvrtcCompileProgram"),
            cubin_size: symbol!("nvrtcGetCUBINSize"),
            cubin: symbol!("nvrtcGetCUBIN"),
            ptx_size: symbol!("nvrtcGetPTXSize"),
            ptx: symbol!("nvrtcGetPTX"),
            log_size: symbol!("nvrtcGetProgramLogSize"),
            log: symbol!("nvrtcGetProgramLog"),
        };
        let mut nvrtc = Self { functions, version: (0, 0), archs: Vec::new(), _library: library };
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: both write the numbers whose addresses they get.
        nvrtc.check("nvrtcVersion", unsafe { (nvrtc.functions.version)(&mut major, &mut minor) })?;
        // SAFETY: as above.
        nvrtc.check("nvrtcGetNumSupportedArchs", unsafe { (nvrtc.functions.arch_count)(&mut count) })?;
        let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the function writes as many numbers as the call before returned.
        nvrtc.check("nvrtcGetSupportedArchs", unsafe { (nvrtc.functions.archs)(archs.as_mut_ptr()) })?;
        nvrtc.version = (major.unsigned_abs(), minor.unsigned_abs());
        nvrtc.archs = archs.into_iter().map(i32::unsigned_abs).collect();
        Ok(nvrtc)
    }

    /// Returns the release, such as `(12, 9)`.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Returns whether it generates code for the chip. Version 13 does not for a V100.
    pub fn supports(&self, chip: Chip) -> bool {
        self.archs.contains(&(chip.major * 10 + chip.minor))
    }

    /// Compiles the text of a [`program`](crate::manifest::program) for `target`. `name` appears in messages.
    pub fn compile(&self, name: &str, text: &str, target: Target) -> Result<Compiled, NvrtcError> {
        let (program, log) = self.compiled(name, text, options(target))?;
        let Functions { cubin_size, cubin, ptx_size, ptx, .. } = self.functions;
        let code = match target {
            Target::Code(_) => self.read("nvrtcGetCUBIN", program.handle, cubin_size, cubin)?,
            Target::Ptx(_) => self.read("nvrtcGetPTX", program.handle, ptx_size, ptx)?,
        };
        Ok(Compiled { code, log })
    }

    /// Returns a compiled program and the compiler's messages.
    fn compiled(&self, name: &str, text: &str, options: Vec<String>) -> Result<(Handle<'_>, String), NvrtcError> {
        let program = self.create(name, text)?;
        let options = options.into_iter().map(c_string).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
        // SAFETY: the program exists, and `count` is the number of options.
        let status = unsafe { (self.functions.compile)(program.handle, count, pointers.as_ptr()) };
        let log = self.read("nvrtcGetProgramLog", program.handle, self.functions.log_size, self.functions.log)?;
        let log = String::from_utf8_lossy(log.strip_suffix(&[0]).unwrap_or(&log)).into_owned();
        if status != 0 {
            return Err(NvrtcError::Compile(if log.trim().is_empty() { self.message(status) } else { log }));
        }
        Ok((program, log))
    }

    fn create(&self, name: &str, text: &str) -> Result<Handle<'_>, NvrtcError> {
        let (name, text) = (c_string(name)?, c_string(text)?);
        let include_names = HEADERS.iter().map(|h| c_string(h.0)).collect::<Result<Vec<_>, _>>()?;
        let headers = HEADERS.iter().map(|h| c_string(h.1)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (include_names, headers) = (pointers(&include_names), pointers(&headers));
        let mut handle = ptr::null_mut();
        // SAFETY: all strings end with 0 and outlive the call, which copies them; there are as many headers as names.
        let status = unsafe {
            let count = c_int::try_from(headers.len()).unwrap_or(0);
            (self.functions.create)(
                &mut handle,
                text.as_ptr(),
                name.as_ptr(),
                count,
                headers.as_ptr(),
                include_names.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", status)?;
        Ok(Handle { nvrtc: self, handle })
    }

    /// Reads the result of a pair of functions: its size, then its bytes.
    fn read(
        &self,
        call: &'static str,
        program: Program,
        size_of: unsafe extern "C" fn(Program, *mut usize) -> Status,
        read: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut size = 0;
        // SAFETY: the function writes the number whose address it gets.
        self.check(call, unsafe { size_of(program, &mut size) })?;
        let mut bytes = vec![0; size];
        // SAFETY: the function writes as many bytes as the call before returned.
        self.check(call, unsafe { read(program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), NvrtcError> {
        if status == 0 { Ok(()) } else { Err(NvrtcError::Call(call, self.message(status))) }
    }

    fn message(&self, status: Status) -> String {
        // SAFETY: the function returns a constant string for every number.
        let message = unsafe { CStr::from_ptr((self.functions.error_string)(status)) };
        message.to_string_lossy().into_owned()
    }
}

/// A program that is destroyed with its handle.
struct Handle<'a> {
    nvrtc: &'a Nvrtc,
    handle: Program,
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        // SAFETY: the program exists and is not used again. A failure would only leave memory in use.
        unsafe { (self.nvrtc.functions.destroy)(&mut self.handle) };
    }
}

/// Returns the system's message about a library that is not loaded or lacks a function, which the error itself has only
/// in its source.
pub fn loaders_words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the options for a target.
pub fn options(target: Target) -> Vec<String> {
    let arch = format!("--gpu-architecture={}", target.arch());
    let assembler: &[&str] = if matches!(target, Target::Code(_)) { ASSEMBLER_OPTIONS } else { &[] };
    std::iter::once(arch).chain([OPTIONS, assembler].concat().into_iter().map(str::to_owned)).collect()
}

fn c_string(text: impl Into<Vec<u8>>) -> Result<CString, NvrtcError> {
    CString::new(text).map_err(|_| NvrtcError::Compile("a text with a zero byte".into()))
}
