//! Opens stores over a double of the driver, for tests of other crates.

use std::sync::Arc;

use dataplane_cuda::Device;
use dataplane_gpu::{KernelsError, LayoutKernels};
use dataplane_verbs::Library;

use crate::interface::{Handle, open_with};

/// As `kvasir_kv_open`, with kernels that `kernels` loads instead of the driver's compiler, and with another
/// verbs library than this machine's if one is given. `Err` has the reason.
pub fn open(
    configuration: &str,
    kernels: impl Fn(&Device) -> Result<LayoutKernels, KernelsError>,
    verbs_library: Option<Arc<Library>>,
) -> Result<*mut Handle, String> {
    open_with(configuration, &kernels, verbs_library).map_err(|failure| failure.text)
}
