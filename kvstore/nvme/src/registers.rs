//! Registers of a controller on PCIe (NVM Express Base Specification 2.0, 3.1.3).

use std::time::Duration;

/// Controller capabilities, 64 bits.
pub(crate) const CAP: usize = 0x00;
/// Controller configuration.
pub(crate) const CC: usize = 0x14;
/// Controller status.
pub(crate) const CSTS: usize = 0x1c;
/// Admin queue attributes.
pub(crate) const AQA: usize = 0x24;
/// Admin submission queue base, 64 bits.
pub(crate) const ASQ: usize = 0x28;
/// Admin completion queue base, 64 bits.
pub(crate) const ACQ: usize = 0x30;
/// The first doorbell.
pub(crate) const DOORBELLS: usize = 0x1000;

/// CC: enable.
pub(crate) const CC_ENABLE: u32 = 1;
/// CC: the shutdown field, and its value for a normal shutdown.
pub(crate) const CC_SHUTDOWN_MASK: u32 = 3 << 14;
pub(crate) const CC_SHUTDOWN_NORMAL: u32 = 1 << 14;
/// CC while enabled: the NVM command set, 4 KiB pages, round robin, submission entries of 2^6 bytes and completion
/// entries of 2^4.
pub(crate) const CC_RUN: u32 = CC_ENABLE | 6 << 16 | 4 << 20;

/// Value of a read from a device that was removed.
pub(crate) const ALL_ONES: u32 = u32::MAX;

/// CSTS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ControllerStatus(pub(crate) u32);

impl ControllerStatus {
    pub(crate) fn is_removed(self) -> bool {
        self.0 == ALL_ONES
    }

    pub(crate) fn is_ready(self) -> bool {
        self.0 & 1 == 1
    }

    pub(crate) fn is_fatal(self) -> bool {
        self.0 & 2 == 2
    }

    pub(crate) fn is_shut_down(self) -> bool {
        self.0 >> 2 & 3 == 2
    }
}

/// CAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Capabilities(pub(crate) u64);

impl Capabilities {
    /// Maximum number of entries of a queue.
    pub(crate) fn queue_entries_max(self) -> u32 {
        (self.0 as u32 & 0xffff) + 1
    }

    /// Maximum duration of enabling and disabling. Zero is outside of the specification and is taken as 500 ms.
    pub(crate) fn timeout(self) -> Duration {
        Duration::from_millis(500 * (self.0 >> 24 & 0xff).max(1))
    }

    /// Bytes from one doorbell to the next.
    pub(crate) fn doorbell_stride_bytes(self) -> usize {
        4 << (self.0 >> 32 & 0xf)
    }

    pub(crate) fn has_nvm_command_set(self) -> bool {
        self.0 >> 37 & 1 == 1
    }

    /// The smallest memory page of the controller.
    pub(crate) fn page_bytes_min(self) -> u64 {
        4096 << (self.0 >> 48 & 0xf)
    }
}

/// Offset of a queue's doorbell.
pub(crate) fn doorbell(queue: u16, is_completion: bool, stride_bytes: usize) -> usize {
    DOORBELLS + (2 * usize::from(queue) + usize::from(is_completion)) * stride_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_capabilities() {
        // QEMU's: 2048 entries, 7.5 s, stride 4, NVM.
        let capabilities = Capabilities(0x0008_0020_0f01_07ff & !(0xf << 48));
        assert_eq!(capabilities.queue_entries_max(), 2048);
        assert_eq!(capabilities.timeout(), Duration::from_millis(7500));
        assert_eq!((capabilities.doorbell_stride_bytes(), capabilities.page_bytes_min()), (4, 4096));
        assert!(capabilities.has_nvm_command_set());
        let other = Capabilities(2 << 48 | 3 << 32);
        assert_eq!((other.doorbell_stride_bytes(), other.page_bytes_min()), (32, 16384));
        assert!(!other.has_nvm_command_set() && other.timeout() == Duration::from_millis(500));
        assert_eq!((doorbell(0, false, 4), doorbell(2, true, 8)), (0x1000, 0x1028));
    }
}
