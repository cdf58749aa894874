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
