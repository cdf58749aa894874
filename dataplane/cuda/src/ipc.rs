//! A name for device memory that another process of this machine understands.

use cudarc::driver::sys::{CUipcMem_flags, CUipcMemHandle};

use crate::device::Context;
use crate::error::CudaError;

/// The name: 64 bytes that mean something to the driver only. They give whoever has them the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle([u8; 64]);

impl IpcHandle {
    /// From the bytes that [`Self::to_bytes`] gave in the exporting process.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 64]) -> Self {
        Self(bytes)
    }

    /// To be sent to the process that shall attach the memory.
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

    /// The address in this process. The driver checks the bytes: they may come from anybody.
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
