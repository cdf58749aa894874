//! For tests of whoever has a double of the driver.

use dataplane_cuda::Device;
use dataplane_gpu::{KernelsError, LayoutKernels};

use crate::interface::{Handle, open_with};

/// As `kvasir_kv_open`, with kernels that `kernels` makes instead of the driver's compiler. `Err` has the reason.
pub fn open(
    configuration: &str,
    kernels: impl Fn(&Device) -> Result<LayoutKernels, KernelsError>,
) -> Result<*mut Handle, String> {
    open_with(configuration, &kernels).map_err(|failure| failure.text)
}
