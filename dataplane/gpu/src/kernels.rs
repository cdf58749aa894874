//! The kernels of one device: compiled or loaded at start-up, looked up by name for each launch.

use std::time::{Duration, Instant};

use dataplane_cuda::{CudaError, Device, Function, Module, Stream, compile};
use dataplane_kernels::{COMPILE_OPTIONS, FUNCTIONS, Launch, SOURCE};

use crate::error::KernelsError;

/// Every layout kernel, ready on one device.
#[derive(Debug)]
pub struct LayoutKernels {
    device: Device,
    /// In the order of the names.
    functions: Vec<(&'static str, Function)>,
    took: Duration,
}

impl LayoutKernels {
    /// Compiles the kernels for the device's compute capability and loads them. Takes a second or so.
    pub fn compile(device: &Device) -> Result<Self, KernelsError> {
        let started = Instant::now();
        let (major, minor) = device.description().compute_capability;
        let architecture = format!("--gpu-architecture=compute_{major}{minor}");
        let options: Vec<&str> = std::iter::once(architecture.as_str()).chain(COMPILE_OPTIONS).collect();
        let image = compile(SOURCE, "layout kernels", &options);
        let image = image.map_err(|error| KernelsError::Compile { major, minor, error })?;
        // SAFETY: the image is the compiled text of the kernels.
        let kernels = unsafe { Self::load(device, image.bytes()) }?;
        Ok(Self { took: started.elapsed(), ..kernels })
    }

    /// Loads an image that was compiled elsewhere.
    ///
    /// # Safety
    /// The image was made of [`SOURCE`] of this very version: what its kernels take and touch is not checked.
    pub unsafe fn load(device: &Device, image: &[u8]) -> Result<Self, KernelsError> {
        let started = Instant::now();
        let module = Module::load(device, image)?;
        let mut names = FUNCTIONS;
        names.sort_unstable();
        let functions = names.map(|name| module.function(name).map(|function| (name, function)));
        let functions = functions.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(Self { device: device.clone(), functions, took: started.elapsed() })
    }

    /// The device that they run on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How long it took to make them ready.
    #[must_use]
    pub fn took(&self) -> Duration {
        self.took
    }

    /// What of the device decides how batches are cut.
    pub(crate) fn shape(&self) -> dataplane_kernels::Device {
        dataplane_kernels::Device { multiprocessors: self.device.description().multiprocessors }
    }

    /// Puts a planned launch on a stream of the device.
    ///
    /// # Safety
    /// 1. Every address of the launch's batch, and every block and slot of its items, lies in memory of the device
    ///    that lives until the kernel is over; the items are in place when it runs.
    /// 2. The kernels live until then.
    pub(crate) unsafe fn launch(&self, stream: &Stream, launch: &Launch) -> Result<(), CudaError> {
        let found = self.functions.binary_search_by_key(&launch.function, |(name, _)| *name);
        // A plan names one of `FUNCTIONS`, all of which were loaded.
        let function = &self.functions[found.unwrap_or_else(|_| unreachable!("{}", launch.function))].1;
        let mut parameters = [launch.parameters.as_bytes().as_ptr().cast_mut().cast()];
        let Launch { grid, block, shared_bytes, .. } = *launch;
        // SAFETY: a layout kernel has one parameter, the structure that the plan made for it, which is read during
        // the call; the caller vouches for the memory and the module.
        unsafe { stream.launch(function, grid, block, shared_bytes, &mut parameters) }
    }
}
