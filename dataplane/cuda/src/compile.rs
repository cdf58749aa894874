//! Compilation of kernels from source text by NVRTC, which is found at run time, as the driver is. Needs
//! neither a driver nor a device.

use std::ffi::{CStr, CString, NulError, c_char, c_int, c_uint};

use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};

use crate::compiler::{Compiler, Size, Text};

/// A compiled program for [`Module::load`](crate::Module::load): PTX, which the driver compiles for its
/// device, or machine code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    bytes: Vec<u8>,
    is_machine_code: bool,
    why_text: Option<String>,
    /// Messages of the successful compilation.
    log: String,
}

impl Image {
    /// Returns the PTX, without a final zero, or the machine code.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether the image is machine code, so that the driver need not compile it.
    #[must_use]
    pub fn is_machine_code(&self) -> bool {
        self.is_machine_code
    }

    /// Returns the reason why the image is PTX although machine code was requested; `None` otherwise.
    #[must_use]
    pub fn why_text(&self) -> Option<&str> {
        self.why_text.as_deref()
    }

    /// Returns the compiler's warnings.
    #[must_use]
    pub fn log(&self) -> &str {
        &self.log
    }
}

/// A failure to compile a program.
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
        /// Name of the function.
        symbol: &'static str,
    },
    /// Source, name or option contains a zero byte.
    #[error("{0}")]
    Zero(#[from] NulError),
    /// The source does not compile, or an option is unknown.
    #[error("{operation} of {name}: {reason}\n{log}")]
    Refused {
        /// Name of the compiler's function.
        operation: &'static str,
        /// Name of the source.
        name: String,
        /// Name of the compiler's error.
        reason: String,
        /// Log of the compiler.
        log: String,
    },
}

/// A program of the compiler, destroyed on drop.
struct Program<'a> {
    compiler: &'a Compiler,
    name: &'a str,
    raw: nvrtcProgram,
}

/// Compiles CUDA C++ to PTX. `name` appears in errors; `options` are the compiler's, such as
/// `--gpu-architecture=compute_90`. Slow: for start-up.
pub fn compile(source: &str, name: &str, options: &[&str]) -> Result<Image, CompileError> {
    let compiler = Compiler::load()?;
    compile_to(compiler, source, name, options, (compiler.ptx_size, compiler.ptx), false)
}

/// Compiles CUDA C++ for a device of this compute capability: to machine code, since a driver that is older
/// than the compiler accepts machine code but not its PTX. A compiler that is older than the device (or than
/// 11.1) cannot make machine code for it; the result is then PTX of the newest architecture that both know,
/// and [`Image::why_text`] gives the reason. A compiler that makes machine code but cannot list its
/// architectures is assumed to know the device, and fails if it does not. Otherwise like [`compile`].
pub fn compile_for(
    (major, minor): (u32, u32),
    source: &str,
    name: &str,
    options: &[&str],
) -> Result<Image, CompileError> {
    let compiler = Compiler::load()?;
    let device = 10 * major + minor;
    let compile = |architecture: String, (size, bytes), is_machine_code| {
        let with: Vec<&str> = options.iter().copied().chain([architecture.as_str()]).collect();
        compile_to(compiler, source, name, &with, (size, bytes), is_machine_code)
    };
    let newest = compiler.newest_architecture(device).unwrap_or(device);
    let why_text = match compiler.cubin {
        Some(cubin) if newest == device => {
            return compile(format!("--gpu-architecture=sm_{device}"), cubin, true);
        }
        Some(_) => format!("the compiler knows no sm_{device}: its newest before that is sm_{newest}"),
        None => "the compiler's library has no function nvrtcGetCUBIN".to_owned(),
    };
    let text = (compiler.ptx_size, compiler.ptx);
    let image = compile(format!("--gpu-architecture=compute_{newest}"), text, false)?;
    Ok(Image { why_text: Some(why_text), ..image })
}

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
    // SAFETY: the program lives, and the options are `options.len()` texts that end with a zero.
    let compiled = unsafe { (compiler.compile)(program.raw, options.len() as c_int, options.as_ptr()) };
    let log = program.bytes("nvrtcGetProgramLog", compiler.log_size, compiler.log).unwrap_or_default();
    let log = String::from_utf8_lossy(without_zeros(&log)).into_owned();
    program.check("nvrtcCompileProgram", compiled, &log)?;
    let operation = if is_machine_code { "nvrtcGetCUBIN" } else { "nvrtcGetPTX" };
    let mut bytes = program.bytes(operation, size, bytes)?;
    if !is_machine_code {
        bytes.truncate(without_zeros(&bytes).len());
    }
    Ok(Image { bytes, is_machine_code, why_text: None, log })
}

fn without_zeros(text: &[u8]) -> &[u8] {
    text.split(|byte| *byte == 0).next().unwrap_or_default()
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
        // SAFETY: the library returns a constant text for any code.
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
        // SAFETY: writes the number of bytes that it reported.
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
