//! Entry point: loads the driver and lists its devices.

use crate::Device;
use crate::description::{self, DeviceDescription};
use crate::error::{CudaError, DriverVersion, Unavailable};
use crate::library::{self, Library, code};

/// A started driver with at least one device.
#[derive(Debug, Clone, Copy)]
pub struct Cuda {
    library: &'static Library,
    devices: i32,
}

impl Cuda {
    /// Loads the driver's library and starts it. The first call is slow (the driver initialises each device);
    /// it makes no context and allocates nothing on a device.
    pub fn open() -> Result<Self, Unavailable> {
        let library = library::load()?;
        let version = library.version();
        let started = |error: CudaError| match error.code {
            code::NO_DEVICE => Unavailable::NoDevice { version },
            _ => Unavailable::Initialisation { version, error },
        };
        // SAFETY: the flags must be zero.
        library.check("cuInit", unsafe { (library.initialise)(0) }).map_err(started)?;
        let mut devices = 0;
        // SAFETY: writes one integer; the driver is initialised.
        let counted = unsafe { (library.device_count)(&mut devices) };
        library.check("cuDeviceGetCount", counted).map_err(started)?;
        if devices == 0 {
            return Err(Unavailable::NoDevice { version });
        }
        Ok(Self { library, devices })
    }

    /// Returns the CUDA version of the driver.
    #[must_use]
    pub fn driver_version(&self) -> DriverVersion {
        self.library.version()
    }

    /// Returns the properties of each device. Makes no context.
    pub fn devices(&self) -> Result<Vec<DeviceDescription>, CudaError> {
        (0..self.devices).map(|ordinal| Ok(description::describe(self.library, ordinal)?.1)).collect()
    }

    /// Opens a device with its primary context, which engines in this process use too. The first open of a
    /// device is slow and takes some of the device's memory.
    pub fn device(&self, ordinal: u32) -> Result<Device, CudaError> {
        Device::open(self.library, ordinal)
    }
}
