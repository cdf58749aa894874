//! Protection domains: only objects of the same domain can be used together.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::VerbsError;
use crate::device::Device;
use crate::error::from_code;
use crate::ffi;

/// A protection domain, kept by every region, queue and queue pair made in it.
#[derive(Debug)]
pub struct ProtectionDomain {
    pub(crate) device: Arc<Device>,
    pub(crate) raw: NonNull<ffi::ProtectionDomain>,
}

// SAFETY: libibverbs is thread-safe by its specification.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// Allocates a domain of `device`.
    pub fn new(device: &Arc<Device>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open as long as the device.
        let raw = unsafe { (device.library.allocate_domain)(device.context.as_ptr()) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| device.failed("ibv_alloc_pd", String::new(), std::io::Error::last_os_error()))?;
        Ok(Arc::new(Self { device: Arc::clone(device), raw }))
    }

    /// Returns the device of the domain.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: everything made in the domain holds an `Arc` of it, so nothing is left in it.
        let code = unsafe { (self.device.library.free_domain)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::warn!(device = self.device.name(), error = %from_code(code), "ibv_dealloc_pd");
        }
    }
}
