//! Errors of the driver, and the reasons why no device is available.

/// A failed call of the driver. Two words and two static strings: making one allocates nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {name} ({code})")]
pub struct CudaError {
    /// Name of the driver's function.
    pub operation: &'static str,
    /// The driver's code: a `CUresult` of `cuda.h`, or of a later driver.
    pub code: u32,
    /// The driver's name of the code.
    pub name: &'static str,
}

/// Codes after which the context is lost and the device runs none of its work any more: the failures of
/// which `cuda.h` says that the process must be ended, and a context that is destroyed.
const FINAL: [u32; 14] = [46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721];
/// Codes about a graph recording of some thread (`CUDA_ERROR_STREAM_CAPTURE_*`), not about the device.
const CAPTURE: std::ops::RangeInclusive<u32> = 900..=907;

impl CudaError {
    /// Whether the device is lost for this process: no work is running any more, and every later call fails.
    #[must_use]
    pub fn is_final(&self) -> bool {
        FINAL.contains(&self.code)
    }
}

/// Whether the code only says that some thread is recording a graph. The call can be tried again.
pub(crate) fn is_of_capture(code: u32) -> bool {
    CAPTURE.contains(&code)
}

/// Reason why no device can be used on this machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// The driver's library is not installed, or cannot be loaded.
    #[error("the CUDA driver's library was not found: none of {tried} can be loaded")]
    NoLibrary {
        /// The file names that were tried.
        tried: String,
    },
    /// The library is installed, but there is no device, or none that this process may use.
    #[error("the CUDA driver {version} is installed, but there is no device that this process may use")]
    NoDevice {
        /// Version of the driver.
        version: DriverVersion,
    },
    /// The driver is older than the oldest supported one.
    #[error("the CUDA driver speaks {version}; {needed} is needed")]
    DriverTooOld {
        /// CUDA version of the driver.
        version: DriverVersion,
        /// Oldest supported CUDA version.
        needed: DriverVersion,
    },
    /// The library lacks a function that its version should have.
    #[error("the CUDA driver's library has no function {symbol}")]
    MissingFunction {
        /// Name of the function.
        symbol: &'static str,
    },
    /// The driver fails to start.
    #[error("the CUDA driver {version} does not start: {error}")]
    Initialisation {
        /// Version of the driver.
        version: DriverVersion,
        /// Error of the driver.
        error: CudaError,
    },
}

/// A CUDA version in the driver's encoding: 12.8 is 12080.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion(pub i32);

impl std::fmt::Display for DriverVersion {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}
