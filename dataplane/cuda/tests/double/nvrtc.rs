//! The double of NVRTC: `libnvrtc.c`, loaded in the place of `libnvrtc` as the driver's double is in that of
//! `libcuda`. The double must be loaded before any compilation: the crate keeps the first compiler that it
//! finds.

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};

use libloading::Library;

use super::{shared_object, variable};

/// The loaded double.
pub(crate) struct Compiler {
    library: Library,
}

/// Compiles the double; `None`, with the reason on standard error, without a compiler.
pub(crate) fn compiled() -> Option<PathBuf> {
    shared_object("libnvrtc", include_str!("libnvrtc.c"), &["-Wl,-soname,libnvrtc.so"])
}

impl Compiler {
    /// Loads the double. Its images name this emulator.
    pub(crate) fn load(emulator: &Path) -> Option<Self> {
        // SAFETY: the library has no initialisers.
        let library = unsafe { Library::new(compiled()?) }.expect("the double loads");
        // Never closed: the crate keeps the library's functions.
        // SAFETY: as above.
        std::mem::forget(unsafe { Library::new(compiled()?) });
        let double = Self { library };
        double.set_emulator(emulator);
        Some(double)
    }

    /// Sets the emulator that later images name.
    pub(crate) fn set_emulator(&self, emulator: &Path) {
        type Set = unsafe extern "C" fn(*const c_char);
        // SAFETY: the function's type.
        let set = unsafe { self.library.get::<Set>("kvasir_double_set_emulator") }.expect("function");
        let path = CString::new(emulator.as_os_str().as_encoded_bytes()).expect("a path without zeros");
        // SAFETY: the text ends with a zero and is copied.
        unsafe { set(path.as_ptr()) };
    }

    /// Sets the value of a setting.
    pub(crate) fn set(&self, name: &str, value: i64) {
        // SAFETY: the variable lives as long as the library; the double reads it whole.
        unsafe { variable(&self.library, name).write_volatile(value) };
    }

    /// Returns the value of a count.
    pub(crate) fn get(&self, name: &str) -> i64 {
        // SAFETY: as in `set`.
        unsafe { variable(&self.library, name).read_volatile() }
    }
}
