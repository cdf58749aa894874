//! Compiled kernels, loaded onto a device.

use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUjit_option, CUmodule};

use crate::Device;
use dataplane_memory::DeviceError;

/// Size of the buffer for the driver's messages about an image, in bytes.
const LOG_BYTES: usize = 8 << 10;

/// A loaded image: PTX, which the driver compiles now, or machine code.
#[derive(Debug, Clone)]
pub struct Module {
    loaded: Arc<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    device: Device,
    raw: CUmodule,
}

// SAFETY: a module is used from any thread; the driver does its own locking.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// A kernel of a module. Keeps the module loaded.
#[derive(Debug, Clone)]
pub struct Function {
    raw: CUfunction,
    _module: Module,
}

// SAFETY: as for `Loaded`.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Loads an image onto a device. Text needs no final zero.
    pub fn load(device: &Device, image: &[u8]) -> Result<Self, DeviceError> {
        let operation = "cuModuleLoadDataEx";
        let context = device.context();
        let failed = |reason: String| DeviceError { operation, reason };
        let _entered = context.enter().map_err(|error| failed(error.to_string()))?;
        // Text must end with a zero; machine code contains its own length.
        let image: Vec<u8> = image.iter().copied().chain([0]).collect();
        let mut log = vec![0_u8; LOG_BYTES];
        let mut options =
            [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The driver expects a size in the place of a pointer.
        let mut values = [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(LOG_BYTES - 1)];
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image ends with a zero; the log has the given length, and its last byte stays zero.
        let loaded = unsafe {
            (context.library.load_module)(
                &mut raw,
                image.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        context.library.check(operation, loaded).map_err(|error| {
            let said = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            failed(format!("{} ({}): {}", error.name, error.code, said.trim()))
        })?;
        Ok(Self { loaded: Arc::new(Loaded { device: device.clone(), raw }) })
    }

    /// Returns the kernel with this exported name: the kernels are declared `extern "C"`.
    pub fn function(&self, name: &str) -> Result<Function, DeviceError> {
        let operation = "cuModuleGetFunction";
        let failed = |reason: String| DeviceError { operation, reason: format!("{name}: {reason}") };
        let context = self.loaded.device.context();
        let _entered = context.enter().map_err(|error| failed(error.to_string()))?;
        let c_name = CString::new(name).map_err(|error| failed(error.to_string()))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; the module is loaded and the name ends with a zero.
        let found = unsafe { (context.library.function)(&mut raw, self.loaded.raw, c_name.as_ptr()) };
        context
            .library
            .check(operation, found)
            .map_err(|error| failed(format!("{} ({})", error.name, error.code)))?;
        Ok(Function { raw, _module: self.clone() })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let context = self.device.context();
        let Ok(_entered) = context.enter() else { return };
        // SAFETY: loaded by this value, unloaded once; every function of it held the module.
        let _ = unsafe { (context.library.unload_module)(self.raw) };
    }
}

impl Function {
    pub(crate) fn raw(&self) -> CUfunction {
        self.raw
    }
}
