//! The double of the driver: the files of `driver`, compiled here and loaded in the place of `libcuda`. The
//! library has the driver's own name (`soname`), so that code that loads the driver by name gets the double,
//! which is loaded already; a second, empty library has the shorter name.
//!
//! The double's state is global to the process. A [`Double`] is held by one test at a time and starts from
//! the defaults.

#![allow(dead_code, reason = "each test uses its part of it")]

pub(crate) mod nvrtc;

use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libloading::Library;

/// The content of a file, with its name for the C compiler's messages.
macro_rules! named {
    ($name:literal) => {
        concat!("#line 1 \"", $name, "\"\n", include_str!($name))
    };
}

/// Source of the double, in the order of its dependencies.
const DRIVER: &str = concat!(
    named!("driver/libcuda.c"),
    named!("driver/abi.h"),
    named!("driver/faults.c"),
    named!("driver/objects.c"),
    named!("driver/devices.c"),
    named!("driver/contexts.c"),
    named!("driver/memory.c"),
    named!("driver/sharing.c"),
    named!("driver/streams.c"),
    named!("driver/events.c"),
    named!("driver/copies.c"),
    named!("driver/modules.c"),
);

/// Faults and settings, with their defaults.
const SETTINGS: [(&str, i64); 24] = [
    ("devices", 2),
    ("version", 12_080),
    ("initialise", 0),
    ("delay_us", 0),
    ("memory", 1 << 30),
    ("no_dmabuf", 0),
    ("no_pcie_flag", 0),
    ("no_ipc", 0),
    ("fault_copy", 0),
    ("fault_launch", 0),
    ("damage_copies", 0),
    ("refuse_copy", 0),
    ("refuse_batch", 0),
    ("refuse_register", 0),
    ("refuse_record", 0),
    ("refuse_synchronise", 0),
    ("refuse_unregister", 0),
    ("capturing", 0),
    ("no_capture_mode", 0),
    ("wrong_pop", 0),
    ("refuse_machine_code", 0),
    ("range_bytes", 0),
    ("flush_options", 1),
    ("writes_ordering", 0),
];

/// Counts that must be zero after all values were dropped.
const LIVE: [&str; 7] =
    ["allocations", "events", "streams", "registrations", "modules", "contexts", "imports"];

/// The loaded double.
pub(crate) struct Double {
    library: Library,
    _turn: MutexGuard<'static, ()>,
}

impl Double {
    /// Compiles and loads the double. `None`, with the reason on standard error, without a compiler.
    pub(crate) fn load() -> Option<Self> {
        Self::load_compiled(&[])
    }

    /// Loads a double of the oldest supported driver: without the functions that came after CUDA 11.4.
    pub(crate) fn load_old() -> Option<Self> {
        Self::load_compiled(&["-DKVASIR_DOUBLE_OLD"])
    }

    fn load_compiled(flags: &[&str]) -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        static COMPILED: Mutex<Option<PathBuf>> = Mutex::new(None);
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut loaded = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
        if loaded.is_none() {
            let driver = compiled(flags)?;
            let double = driver.display().to_string();
            let behind = ["-Wl,-soname,libcuda.so", "-Wl,--no-as-needed", &double];
            let alias = shared_object("libcuda-alias", "typedef int nothing;\n", &behind)?;
            for library in [&driver, &alias] {
                // Never closed: the crate keeps the library's functions.
                // SAFETY: the library has no initialisers.
                std::mem::forget(unsafe { Library::new(library) });
            }
            *loaded = Some(driver);
        }
        // SAFETY: the library has no initialisers.
        let library = unsafe { Library::new(loaded.as_ref()?) }.expect("the double loads");
        Some(Self { library, _turn: turn })
    }

    /// Sets a fault or a setting.
    pub(crate) fn set(&self, name: &str, value: i64) {
        // SAFETY: the variable lives as long as the library; the double reads it whole.
        unsafe { variable(&self.library, name).write_volatile(value) };
    }

    /// Returns the value of a count.
    pub(crate) fn get(&self, name: &str) -> i64 {
        // SAFETY: as in `set`.
        unsafe { variable(&self.library, name).read_volatile() }
    }

    /// Returns the growth of the count during `work`.
    pub(crate) fn growth(&self, name: &str, work: impl FnOnce()) -> i64 {
        let before = self.get(name);
        work();
        self.get(name) - before
    }

    /// Asserts that all of [`LIVE`] are zero.
    pub(crate) fn assert_nothing_leaked(&self) {
        for name in LIVE {
            assert_eq!(self.get(name), 0, "{name} are left");
        }
        assert!(self.current_context().is_null(), "each call leaves this thread's context as it was");
    }

    /// Returns the context that is current on this thread.
    pub(crate) fn current_context(&self) -> *mut c_void {
        type Current = unsafe extern "C" fn(*mut *mut c_void) -> u32;
        // SAFETY: the function's type, by the driver's header.
        let current = unsafe { self.library.get::<Current>("cuCtxGetCurrent") }.expect("function");
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        unsafe { current(&mut context) };
        context
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        for (name, value) in SETTINGS {
            self.set(name, value);
        }
        if !std::thread::panicking() {
            self.assert_nothing_leaked();
        }
    }
}

/// Compiles the double of the driver, for a program that is started with it; `None`, with the reason on
/// standard error, without a compiler.
pub(crate) fn compiled(flags: &[&str]) -> Option<PathBuf> {
    let mut all = vec!["-Wl,-soname,libcuda.so.1"];
    all.extend_from_slice(flags);
    shared_object("libcuda", DRIVER, &all)
}

/// Returns a setting or a count of a double.
fn variable(library: &Library, name: &str) -> *mut i64 {
    let name = format!("kvasir_double_{name}");
    // SAFETY: every variable of that prefix is an `int64_t`.
    let symbol = unsafe { library.get::<*mut i64>(name.as_bytes()) };
    *symbol.expect(&name)
}

/// Compiles C source to a shared object in the tests' scratch folder, unless it exists from an earlier run;
/// `None` without a compiler.
pub(crate) fn shared_object(name: &str, source: &str, flags: &[&str]) -> Option<PathBuf> {
    let mut hasher = DefaultHasher::new();
    (source, flags).hash(&mut hasher);
    let object = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{:016x}.so", hasher.finish()));
    if object.exists() {
        return Some(object);
    }
    // Several processes may compile at a time: each writes its own files, and the last one's result stays.
    let (text, mine) = (
        object.with_extension(format!("{}.c", process::id())),
        object.with_extension(format!("{}", process::id())),
    );
    std::fs::write(&text, source).expect("source");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]).args(flags);
    let compiled = compiler.arg("-o").arg(&mine).arg(&text).arg("-ldl").status();
    std::fs::remove_file(&text).expect("source");
    match compiled {
        Err(error) => {
            eprintln!("skipped: cc cannot be run: {error}");
            None
        }
        Ok(status) => {
            assert!(status.success(), "cc failed on {name}.c");
            std::fs::rename(&mine, &object).expect("rename");
            Some(object)
        }
    }
}
