//! The NVRTC library, loaded at run time: a table of the compiler's functions, as `library.rs` is of the
//! driver's.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use libloading::Library;

use crate::compile::CompileError;

pub(crate) type Create = unsafe extern "C" fn(
    *mut nvrtcProgram,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_uint;
pub(crate) type Size = unsafe extern "C" fn(nvrtcProgram, *mut usize) -> c_uint;
type Count = unsafe extern "C" fn(*mut c_int) -> c_uint;
pub(crate) type Text = unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> c_uint;

/// The compiler's functions. Codes are integers, for the reason given in `library.rs`.
pub(crate) struct Compiler {
    pub(crate) create: Create,
    pub(crate) compile: unsafe extern "C" fn(nvrtcProgram, c_int, *const *const c_char) -> c_uint,
    pub(crate) destroy: unsafe extern "C" fn(*mut nvrtcProgram) -> c_uint,
    pub(crate) log_size: Size,
    pub(crate) log: Text,
    pub(crate) ptx_size: Size,
    pub(crate) ptx: Text,
    /// Size and bytes of the machine code: since 11.1.
    pub(crate) cubin: Option<(Size, Text)>,
    /// Number and list of the architectures for which the compiler makes machine code: since 11.2.
    architectures: Option<(Count, Count)>,
    pub(crate) error_text: unsafe extern "C" fn(c_uint) -> *const c_char,
}

/// Each type is that of `cudarc`'s function of the same name, except for the returned code.
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
    let _: [unsafe fn(*mut c_int) -> nvrtcResult; 2] =
        [sys::nvrtcGetNumSupportedArchs, sys::nvrtcGetSupportedArchs];
};

impl Compiler {
    /// Returns the compiler, which is loaded once and kept for the life of the process.
    pub(crate) fn load() -> Result<&'static Self, CompileError> {
        static COMPILER: OnceLock<Compiler> = OnceLock::new();
        if let Some(compiler) = COMPILER.get() {
            return Ok(compiler);
        }
        let mut candidates = crate::library::names("nvrtc");
        candidates.push("libnvrtc.so.13".to_owned());
        // The toolkit's installation folder, which the loader may not search.
        candidates.push("/usr/local/cuda/lib64/libnvrtc.so".to_owned());
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
            architectures: (unsafe { entry(library, "nvrtcGetNumSupportedArchs") }.ok())
                // SAFETY: as above.
                .zip(unsafe { entry(library, "nvrtcGetSupportedArchs") }.ok()),
            // SAFETY: as above.
            error_text: unsafe { entry(library, "nvrtcGetErrorString") }?,
        })
    }

    /// Returns the newest architecture that has machine code and is no newer than a device's; `None`: the
    /// compiler cannot be asked, or all architectures are newer.
    pub(crate) fn newest_architecture(&self, device: u32) -> Option<u32> {
        let (count, list) = self.architectures?;
        let mut length = 0;
        // SAFETY: writes one number.
        let counted = unsafe { count(&mut length) };
        let mut architectures = vec![0; usize::try_from(length).ok()?];
        // SAFETY: writes the number of entries that it reported.
        let listed = unsafe { list(architectures.as_mut_ptr()) };
        let is_known = [counted, listed] == [nvrtcResult::NVRTC_SUCCESS as c_uint; 2];
        let known = architectures.into_iter().filter_map(|known| u32::try_from(known).ok());
        known.filter(|known| is_known && *known <= device).max()
    }
}

/// # Safety
/// `F` is the type of the function `symbol`.
unsafe fn entry<F: Copy>(library: &'static Library, symbol: &'static str) -> Result<F, CompileError> {
    // SAFETY: the caller vouches for the type, and the library is never unloaded.
    let found = unsafe { library.get::<F>(symbol) };
    found.map(|found| *found).map_err(|_| CompileError::MissingFunction { symbol })
}
