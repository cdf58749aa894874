//! Kernels from source text, by NVRTC: found at run time, as the driver is. It needs neither a driver nor a device.

use std::ffi::{CStr, CString, NulError, c_char, c_int, c_uint};
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use libloading::Library;

/// PTX: what [`Module::load`](crate::Module::load) takes, and the driver compiles for its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    text: Vec<u8>,
    /// What the compiler said all the same.
    log: String,
}

impl Image {
    /// The text, without a final zero.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.text
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
    let _: [unsafe fn(nvrtcProgram, *mut usize) -> nvrtcResult; 2] =
        [sys::nvrtcGetProgramLogSize, sys::nvrtcGetPTXSize];
    let _: [unsafe fn(nvrtcProgram, *mut c_char) -> nvrtcResult; 2] =
        [sys::nvrtcGetProgramLog, sys::nvrtcGetPTX];
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
    let options = options.iter().map(|option| CString::new(*option)).collect::<Result<Vec<_>, _>>()?;
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let program = Program::new(compiler, &CString::new(source)?, name)?;
    // SAFETY: the program lives, and the options are that many texts that end with a zero.
    let compiled = unsafe { (compiler.compile)(program.raw, options.len() as c_int, options.as_ptr()) };
    let log = program.text("nvrtcGetProgramLog", compiler.log_size, compiler.log);
    program.check("nvrtcCompileProgram", compiled, log.as_deref().unwrap_or_default())?;
    let text = program.text("nvrtcGetPTX", compiler.ptx_size, compiler.ptx)?;
    Ok(Image { text: text.into_bytes(), log: log.unwrap_or_default() })
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

    fn text(&self, operation: &'static str, size: Size, text: Text) -> Result<String, CompileError> {
        let mut bytes = 0;
        // SAFETY: writes one length; the program lives.
        self.check(operation, unsafe { size(self.raw, &mut bytes) }, "")?;
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: writes as many bytes as it said.
        self.check(operation, unsafe { text(self.raw, buffer.as_mut_ptr().cast()) }, "")?;
        while buffer.last() == Some(&0) {
            buffer.pop();
        }
        Ok(String::from_utf8_lossy(&buffer).into_owned())
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
