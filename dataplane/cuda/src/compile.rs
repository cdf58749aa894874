//! Kernels from source text, by NVRTC: found at run time, as the driver is. It needs neither a driver nor a device.

use std::ffi::{CStr, CString, NulError, c_char, c_int, c_uint};
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use libloading::Library;

/// PTX, which the driver compiles for its device, or machine code: what [`Module::load`](crate::Module::load) takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    bytes: Vec<u8>,
    is_machine_code: bool,
    /// What the compiler said all the same.
    log: String,
}

impl Image {
    /// The text, without a final zero, or the machine code.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether it is machine code, so that the driver has nothing left to compile.
    #[must_use]
    pub fn is_machine_code(&self) -> bool {
        self.is_machine_code
    }

    /// Warnings.
    #[must_use]
    pub fn log(&self) -> &str {
        &self.log
    }
}

/// Why there is no image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// The compiler's library is not installed, or cannot be loaded.
    #[error("the CUDA compiler's library was not found: none of {tried} can be loaded")]
    NoLibrary {
        /// The file names that were tried.
        tried: String,
    },
    /// The library lacks a function.
    #[error("the CUDA compiler's library has no function {symbol}")]
    MissingFunction {
        /// The function.
        symbol: &'static str,
    },
    /// Source, name or option has a zero inside.
    #[error("{0}")]
    Zero(#[from] NulError),
    /// The source does not compile, or an option is unknown.
    #[error("{operation} of {name}: {reason}\n{log}")]
    Refused {
        /// The compiler's function.
        operation: &'static str,
        /// The source's name.
        name: String,
        /// The compiler's name for the error.
        reason: String,
        /// Its log.
        log: String,
    },
}

type Create = unsafe extern "C" fn(
    *mut nvrtcProgram,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_uint;
type Size = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> c_uint;
type Text = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> c_uint;

/// The compiler's functions. Codes are integers, for the reason that `library.rs` gives.
struct Compiler {
    create: Create,
    compile: unsafe extern "C" fn(nvrtcProgram, c_int, *const *const c_char) -> c_uint,
    destroy: unsafe extern "C" fn(*mut nvrtcProgram) -> c_uint,
    log_size: Size,
    log: Text,
    ptx_size: Size,
    ptx: Text,
    /// Machine code: since 11.1, its size and itself.
    cubin: Option<(Size, Text)>,
    error_text: unsafe extern "C" fn(c_uint) -> *const c_char,
}

/// Each type is that of `cudarc`'s function of the same name, but for the code that it returns.
const _: () = {
    let _: unsafe fn(
        *mut nvrtcProgram,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> nvrtcResult = sys::nvrtcCreateProgram;
    let _: unsafe fn(nvrtcProgram, c_int, *const *const c_char) -> nvrtcResult = sys::nvrtcCompileProgram;
    let _: unsafe fn(*mut nvrtcProgram) -> nvrtcResult = sys::nvrtcDestroyProgram;
    let _: [unsafe fn(nvrtcProgram, *mut usize) -> nvrtcResult; 3] =
        [sys::nvrtcGetProgramLogSize, sys::nvrtcGetPTXSize, sys::nvrtcGetCUBINSize];
    let _: [unsafe fn(nvrtcProgram, *mut c_char) -> nvrtcResult; 3] =
        [sys::nvrtcGetProgramLog, sys::nvrtcGetPTX, sys::nvrtcGetCUBIN];
};

/// A program, until it is dropped.
struct Program<'a> {
    compiler: &'a Compiler,
    name: &'a str,
    raw: nvrtcProgram,
}

/// Compiles CUDA C++ to PTX. `name` appears in errors; `options` are the compiler's own, such as
/// `--gpu-architecture=compute_90`. Slow: for start-up.
pub fn compile(source: &str, name: &str, options: &[&str]) -> Result<Image, CompileError> {
    let compiler = Compiler::load()?;
    compile_to(compiler, source, name, options, (compiler.ptx_size, compiler.ptx), false)
}

/// Compiles CUDA C++ for a device of that compute capability: to machine code, since a driver that is older than the
/// compiler takes that and not its PTX. A compiler that has no machine code for the device (it is older than the
/// device, or than 11.1) makes PTX, by `options` alone. As [`compile`] else.
pub fn compile_for(
    (major, minor): (u32, u32),
    source: &str,
    name: &str,
    options: &[&str],
) -> Result<Image, CompileError> {
    let compiler = Compiler::load()?;
    if let Some(cubin) = compiler.cubin {
        let architecture = format!("--gpu-architecture=sm_{major}{minor}");
        let with: Vec<&str> = options.iter().copied().chain([architecture.as_str()]).collect();
        match compile_to(compiler, source, name, &with, cubin, true) {
            // The architecture, or an option of the caller's: then it is refused again below.
            Err(CompileError::Refused { reason, .. }) if reason == INVALID_OPTION => {}
            compiled => return compiled,
        }
    }
    compile(source, name, options)
}

/// The compiler's name for an option, or an architecture, that it does not know.
const INVALID_OPTION: &str = "NVRTC_ERROR_INVALID_OPTION";

fn compile_to(
    compiler: &Compiler,
    source: &str,
    name: &str,
    options: &[&str],
    (size, bytes): (Size, Text),
    is_machine_code: bool,
) -> Result<Image, CompileError> {
    let options = options.iter().map(|option| CString::new(*option)).collect::<Result<Vec<_>, _>>()?;
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let program = Program::new(compiler, &CString::new(source)?, name)?;
    // SAFETY: the program lives, and the options are that many texts that end with a zero.
    let compiled = unsafe { (compiler.compile)(program.raw, options.len() as c_int, options.as_ptr()) };
    let log = program.bytes("nvrtcGetProgramLog", compiler.log_size, compiler.log).unwrap_or_default();
    let log = String::from_utf8_lossy(without_zeros(&log)).into_owned();
    program.check("nvrtcCompileProgram", compiled, &log)?;
    let operation = if is_machine_code { "nvrtcGetCUBIN" } else { "nvrtcGetPTX" };
    let mut bytes = program.bytes(operation, size, bytes)?;
    if !is_machine_code {
        bytes.truncate(without_zeros(&bytes).len());
    }
    Ok(Image { bytes, is_machine_code, log })
}

fn without_zeros(text: &[u8]) -> &[u8] {
    text.split(|byte| *byte == 0).next().unwrap_or_default()
}

impl Compiler {
    fn load() -> Result<&'static Self, CompileError> {
        static COMPILER: OnceLock<Compiler> = OnceLock::new();
        if let Some(compiler) = COMPILER.get() {
            return Ok(compiler);
        }
        let mut candidates = crate::library::names("nvrtc");
        candidates.push("libnvrtc.so.13".to_owned());
        // SAFETY: opening the library runs its initialisers, which have no preconditions.
        let library = candidates.iter().find_map(|name| unsafe { Library::new(name) }.ok());
        let library = library.ok_or_else(|| CompileError::NoLibrary { tried: candidates.join(", ") })?;
        // Never unloaded: its functions are kept for the life of the process.
        let compiler = Self::resolve(Box::leak(Box::new(library)))?;
        Ok(COMPILER.get_or_init(|| compiler))
    }

    fn resolve(library: &'static Library) -> Result<Self, CompileError> {
        Ok(Self {
            // SAFETY: the function's type, by `nvrtc.h`, as compared below.
            create: unsafe { entry(library, "nvrtcCreateProgram") }?,
            // SAFETY: as above.
            compile: unsafe { entry(library, "nvrtcCompileProgram") }?,
            // SAFETY: as above.
            destroy: unsafe { entry(library, "nvrtcDestroyProgram") }?,
            // SAFETY: as above.
            log_size: unsafe { entry(library, "nvrtcGetProgramLogSize") }?,
            // SAFETY: as above.
            log: unsafe { entry(library, "nvrtcGetProgramLog") }?,
            // SAFETY: as above.
            ptx_size: unsafe { entry(library, "nvrtcGetPTXSize") }?,
            // SAFETY: as above.
            ptx: unsafe { entry(library, "nvrtcGetPTX") }?,
            // SAFETY: as above.
            cubin: (unsafe { entry(library, "nvrtcGetCUBINSize") }.ok())
                // SAFETY: as above.
                .zip(unsafe { entry(library, "nvrtcGetCUBIN") }.ok()),
            // SAFETY: as above.
            error_text: unsafe { entry(library, "nvrtcGetErrorString") }?,
        })
    }
}

/// # Safety
/// `F` is the type of the function of that name.
unsafe fn entry<F: Copy>(library: &'static Library, symbol: &'static str) -> Result<F, CompileError> {
    // SAFETY: the caller vouches for the type, and the library is never unloaded.
    let found = unsafe { library.get::<F>(symbol) };
    found.map(|found| *found).map_err(|_| CompileError::MissingFunction { symbol })
}

impl<'a> Program<'a> {
    fn new(compiler: &'a Compiler, source: &CStr, name: &'a str) -> Result<Self, CompileError> {
        let mut program = Self { compiler, name, raw: std::ptr::null_mut() };
        let c_name = CString::new(name)?;
        let none = std::ptr::null();
        // SAFETY: writes one handle; the texts end with a zero and are copied; there are no headers.
        let created =
            unsafe { (compiler.create)(&mut program.raw, source.as_ptr(), c_name.as_ptr(), 0, none, none) };
        program.check("nvrtcCreateProgram", created, "")?;
        Ok(program)
    }

    fn check(&self, operation: &'static str, code: c_uint, log: &str) -> Result<(), CompileError> {
        if code == nvrtcResult::NVRTC_SUCCESS as c_uint {
            return Ok(());
        }
        // SAFETY: the library answers any code with a constant text.
        let text = unsafe { (self.compiler.error_text)(code) };
        // SAFETY: as above; it ends with a zero.
        let reason = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        Err(CompileError::Refused {
            operation,
            name: self.name.to_owned(),
            reason,
            log: log.trim().to_owned(),
        })
    }

    fn bytes(&self, operation: &'static str, size: Size, text: Text) -> Result<Vec<u8>, CompileError> {
        let mut bytes = 0;
        // SAFETY: writes one length; the program lives.
        self.check(operation, unsafe { size(self.raw, &mut bytes) }, "")?;
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: writes as many bytes as it said.
        self.check(operation, unsafe { text(self.raw, buffer.as_mut_ptr().cast()) }, "")?;
        Ok(buffer)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: created by this value, destroyed once.
            let _ = unsafe { (self.compiler.destroy)(&mut self.raw) };
        }
    }
}
