//! The entry: is there a driver, and which devices does it have?

use crate::description::{self, DeviceDescription};
use crate::error::{CudaError, DriverVersion, Unavailable};
use crate::library::{self, Library, code};
use crate::{Device, PeerLink, peer};

/// A driver that is there, started, and has at least one device.
#[derive(Debug, Clone, Copy)]
pub struct Cuda {
    library: &'static Library,
    devices: i32,
}

impl Cuda {
    /// Loads the driver's library and starts it. Takes a while the first time (the driver looks at each device),
    /// makes no context, and allocates nothing on a device.
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

    /// The version of CUDA that the driver speaks.
    #[must_use]
    pub fn driver_version(&self) -> DriverVersion {
        self.library.version()
    }

    /// What the driver tells about each device. Makes no context.
    pub fn devices(&self) -> Result<Vec<DeviceDescription>, CudaError> {
        (0..self.devices).map(|ordinal| Ok(description::describe(self.library, ordinal)?.1)).collect()
    }

    /// One device, with its primary context: the one that engines in this process use too. The first one made takes
    /// a while, and some memory of the device.
    pub fn device(&self, ordinal: u32) -> Result<Device, CudaError> {
        Device::open(self.library, ordinal)
    }

    /// How two devices reach each other.
    pub fn link(&self, from: u32, to: u32) -> Result<PeerLink, CudaError> {
        let (from, _) = description::describe(self.library, from as i32)?;
        let (to, _) = description::describe(self.library, to as i32)?;
        peer::link(self.library, from, to)
    }
}
