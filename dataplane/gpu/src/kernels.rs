//! The kernels of one device: compiled or loaded at start-up, looked up by name for each launch.

use std::time::{Duration, Instant};

use dataplane_cuda::{CudaError, Device, Function, Module, Stream, compile, compile_for};
use dataplane_kernels::{COMPILE_OPTIONS, FUNCTIONS, Launch, SOURCE};

use crate::error::KernelsError;

/// The layout kernels, loaded on one device.
#[derive(Debug)]
pub struct LayoutKernels {
    device: Device,
    /// Kernels by name, sorted by name.
    functions: Vec<(&'static str, Function)>,
    why_text: Option<String>,
    took: Duration,
}

/// Name of the kernels in the compiler's messages.
const NAME: &str = "layout kernels";

impl LayoutKernels {
    /// Compiles the kernels for the device and loads them: as machine code, or as text that the driver
    /// compiles when there is no machine code or the driver rejects it ([`why_text`](Self::why_text)).
    /// Machine code takes two seconds of one core; text takes half of that, plus the driver's compilation.
    pub fn compile(device: &Device) -> Result<Self, KernelsError> {
        let started = Instant::now();
        let (major, minor) = device.description().compute_capability;
        let failed = |error| KernelsError::Compile { major, minor, error };
        let image = compile_for((major, minor), SOURCE, NAME, &COMPILE_OPTIONS).map_err(failed)?;
        // SAFETY: the image is the compiled text of the kernels.
        let kernels = match unsafe { Self::load(device, image.bytes()) } {
            Err(KernelsError::Device(refused)) if image.is_machine_code() => {
                let architecture = format!("--gpu-architecture=compute_{major}{minor}");
                let options: Vec<&str> = COMPILE_OPTIONS.into_iter().chain([architecture.as_str()]).collect();
                let text = compile(SOURCE, NAME, &options).map_err(failed)?;
                let why_text = format!("the driver takes no machine code of this compiler: {refused}");
                // SAFETY: the image is the compiled text of the kernels.
                let kernels = unsafe { Self::load(device, text.bytes()) };
                Self { why_text: Some(why_text), ..kernels? }
            }
            loaded => Self { why_text: image.why_text().map(str::to_owned), ..loaded? },
        };
        Ok(Self { took: started.elapsed(), ..kernels })
    }

    /// Loads an image that was compiled elsewhere.
    ///
    /// # Safety
    /// The image was made of [`SOURCE`] of this very version: the parameters that its kernels take and the
    /// memory that they access are not checked.
    pub unsafe fn load(device: &Device, image: &[u8]) -> Result<Self, KernelsError> {
        let started = Instant::now();
        let module = Module::load(device, image)?;
        let function = |name: &'static str| module.function(name).map(|function| (name, function));
        let mut functions = FUNCTIONS.into_iter().map(function).collect::<Result<Vec<_>, _>>()?;
        functions.sort_unstable_by_key(|(name, _)| *name);
        Ok(Self { device: device.clone(), functions, why_text: None, took: started.elapsed() })
    }

    /// Returns the device that the kernels run on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the reason why the driver compiled the kernels from text; `None` when they were loaded as
    /// machine code.
    #[must_use]
    pub fn why_text(&self) -> Option<&str> {
        self.why_text.as_deref()
    }

    /// Returns the time that it took to compile and load the kernels.
    #[must_use]
    pub fn took(&self) -> Duration {
        self.took
    }

    /// Returns the property of the device that decides how batches are divided.
    pub(crate) fn shape(&self) -> dataplane_kernels::Device {
        dataplane_kernels::Device { multiprocessors: self.device.description().multiprocessors }
    }

    /// Launches a planned kernel on a stream of the device.
    ///
    /// # Safety
    /// 1. Every address of the launch's batch, and every block and slot of its items, lies in memory that the device
    ///    reaches, and that lives until the kernel is over; the items are in place when it runs.
    /// 2. The kernels live until then.
    pub(crate) unsafe fn launch(&self, stream: &Stream, launch: &Launch) -> Result<(), CudaError> {
        let found = self.functions.binary_search_by_key(&launch.function, |(name, _)| *name);
        let function = &self.functions[found.unwrap_or_else(|_| unreachable!("{}", launch.function))].1;
        let mut parameters = [launch.parameters.as_bytes().as_ptr().cast_mut().cast()];
        let Launch { grid, block, shared_bytes, .. } = *launch;
        // SAFETY: a layout kernel has one parameter, the structure that the plan made for it, which is read during
        // the call; the caller vouches for the memory and the module.
        unsafe { stream.launch(function, grid, block, shared_bytes, &mut parameters) }
    }
}
