//! Handles by which another process of this machine attaches device memory.

use cudarc::driver::sys::{CUipcMem_flags, CUipcMemHandle};

use crate::device::Context;
use crate::error::CudaError;

/// A handle of 64 bytes that only the driver interprets. Every process that has it can access the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle([u8; 64]);

impl IpcHandle {
    /// Creates the handle from the bytes of [`Self::to_bytes`] of the exporting process.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 64]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes for the process that attaches the memory.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 64] {
        self.0
    }

    pub(crate) fn of(context: &Context, address: u64) -> Result<Self, CudaError> {
        let _entered = context.enter()?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes one handle.
        let exported = unsafe { (context.library.ipc_export)(&mut handle, address) };
        context.library.check("cuIpcGetMemHandle", exported)?;
        Ok(Self(handle.reserved.map(|byte| byte.cast_unsigned())))
    }

    /// Returns the address in this process. The driver checks the bytes, which may come from an untrusted
    /// process.
    pub(crate) fn open(self, context: &Context) -> Result<u64, CudaError> {
        let handle = CUipcMemHandle { reserved: self.0.map(|byte| byte.cast_signed()) };
        let lazily = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: writes one address.
        let opened = unsafe { (context.library.ipc_open)(&mut address, handle, lazily) };
        context.library.check("cuIpcOpenMemHandle", opened)?;
        Ok(address)
    }
}
