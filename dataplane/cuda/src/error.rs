//! What the driver says when it refuses, and why there may be no driver at all.

/// A call of the driver that failed. Two words and two static strings: making one allocates nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {name} ({code})")]
pub struct CudaError {
    /// The driver's function.
    pub operation: &'static str,
    /// The driver's code: `CUresult` of `cuda.h`, or a later driver's.
    pub code: u32,
    /// The driver's name for it.
    pub name: &'static str,
}

/// Codes after which the context is lost for good and the device works on nothing of it any more: the failures of
/// which `cuda.h` says that the process must be ended, and a context that is destroyed.
const FINAL: [u32; 14] = [46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721];
/// Codes that speak of somebody's recording of a graph (`CUDA_ERROR_STREAM_CAPTURE_*`), not of the device.
const CAPTURE: std::ops::RangeInclusive<u32> = 900..=907;

impl CudaError {
    /// Whether the device is lost for this process: nothing is under way any more, and nothing will work again.
    #[must_use]
    pub fn is_final(&self) -> bool {
        FINAL.contains(&self.code)
    }
}

/// Whether the code only says that some thread records a graph at present. The call can be tried again.
pub(crate) fn is_of_capture(code: u32) -> bool {
    CAPTURE.contains(&code)
}

/// Why no device can be used on this machine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// The driver's library is not installed, or cannot be loaded.
    #[error("the CUDA driver's library was not found: none of {tried} can be loaded")]
    NoLibrary {
        /// The file names that were tried.
        tried: String,
    },
    /// There is a library, but no device, or none that this process may see.
    #[error("the CUDA driver {version} is installed, but there is no device that this process may use")]
    NoDevice {
        /// The driver's version.
        version: DriverVersion,
    },
    /// The driver is older than what this crate calls.
    #[error("the CUDA driver speaks {version}; {needed} is needed")]
    DriverTooOld {
        /// The CUDA version that the driver speaks.
        version: DriverVersion,
        /// The oldest one that is good enough.
        needed: DriverVersion,
    },
    /// The library is not one of this driver's versions after all.
    #[error("the CUDA driver's library has no function {symbol}")]
    MissingFunction {
        /// The function that is missing.
        symbol: &'static str,
    },
    /// The driver does not start.
    #[error("the CUDA driver {version} does not start: {error}")]
    Initialisation {
        /// The driver's version.
        version: DriverVersion,
        /// What it said.
        error: CudaError,
    },
}

/// A version of CUDA, as drivers count them: 12.8 is 12080.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion(pub i32);

impl std::fmt::Display for DriverVersion {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}
