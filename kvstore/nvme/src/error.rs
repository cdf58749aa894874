use kvstore_io::{IoError, IoErrorKind};

use crate::PciAddress;
use crate::status::Status;

/// What can go wrong between here and a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NvmeError {
    /// Not a PCI address.
    #[error("{0:?} is not a PCI address (0000:01:00.0)")]
    Address(String),
    /// A key is out of range.
    #[error("nvme: {key} = {value}: {expected}")]
    Config {
        /// Which.
        key: &'static str,
        /// What was given.
        value: u64,
        /// What is possible.
        expected: &'static str,
    },
    /// No such PCI function.
    #[error("{address}: there is no such PCI function; `lspci -D -d ::0108` lists NVMe controllers")]
    Absent {
        /// Which.
        address: PciAddress,
    },
    /// Another class of device.
    #[error("{address} is not an NVMe controller: its PCI class is {class}, not 0x0108xx")]
    NotNvme {
        /// Which.
        address: PciAddress,
        /// As sysfs says it.
        class: String,
    },
    /// A kernel driver has it. It is never taken away from there: there may be a mounted file system on it.
    #[error(
        "{address} is bound to {driver}, not to vfio-pci. If nothing on it is in use, hand it over as root: \
         `modprobe vfio-pci; echo vfio-pci > /sys/bus/pci/devices/{address}/driver_override; \
         echo {address} > /sys/bus/pci/devices/{address}/driver/unbind; \
         echo {address} > /sys/bus/pci/drivers_probe`"
    )]
    Driver {
        /// Which.
        address: PciAddress,
        /// The driver, or "no driver".
        driver: String,
    },
    /// The function is in no IOMMU group.
    #[error(
        "{address} is in no IOMMU group, so that its accesses to memory cannot be confined: switch the IOMMU on in \
         the firmware (VT-d, AMD-Vi, SMMU), and on Intel boot with intel_iommu=on"
    )]
    NoIommu {
        /// Which.
        address: PciAddress,
    },
    /// Another driver holds a device of the same group.
    #[error(
        "IOMMU group {group} of {address} is not viable: all of its devices ({members}) must be bound to vfio-pci \
         or to no driver"
    )]
    NotViable {
        /// Which function.
        address: PciAddress,
        /// Its group.
        group: String,
        /// All functions of the group.
        members: String,
    },
    /// The process may not.
    #[error("{operation} {object}: permission denied; run as root, or `chown $USER {object}`")]
    Permission {
        /// The call.
        operation: &'static str,
        /// On what.
        object: String,
    },
    /// Somebody else has it.
    #[error("{object} is in use by another process")]
    Busy {
        /// The group's node.
        object: String,
    },
    /// Pinning exceeds a limit.
    #[error(
        "VFIO_IOMMU_MAP_DMA of {bytes} bytes for {device}: the memory cannot be pinned; locked memory of this process \
         is limited to {limit_bytes} bytes (`ulimit -l unlimited`, LimitMEMLOCK=infinity, or CAP_IPC_LOCK)"
    )]
    LockedMemory {
        /// Which device.
        device: String,
        /// What was to be mapped.
        bytes: usize,
        /// RLIMIT_MEMLOCK.
        limit_bytes: u64,
    },
    /// A system call failed.
    #[error("{operation} {object}: {} ({errno})", std::io::Error::from_raw_os_error(*.errno))]
    System {
        /// The call.
        operation: &'static str,
        /// On what.
        object: String,
        /// Why.
        errno: i32,
    },
    /// No room for a mapping.
    #[error("{device}: no room for {bytes} bytes: {limit}")]
    NoRoom {
        /// Which device.
        device: String,
        /// Asked for.
        bytes: usize,
        /// What is exhausted.
        limit: &'static str,
    },
    /// The controller or namespace needs what this driver has not.
    #[error("{device}: {what}")]
    Unsupported {
        /// Which.
        device: String,
        /// What is missing.
        what: String,
    },
    /// No answer.
    #[error("{device}: {operation}: no answer in {waited_ms} ms")]
    Timeout {
        /// Which.
        device: String,
        /// What was waited for.
        operation: &'static str,
        /// How long.
        waited_ms: u64,
    },
    /// A command failed.
    #[error("{device}: {operation}: {status}")]
    Command {
        /// Which.
        device: String,
        /// The command.
        operation: &'static str,
        /// What the controller said.
        status: Status,
    },
    /// `CSTS.CFS`.
    #[error("{device}: the controller reports a fatal status (CSTS {status:#x})")]
    Fatal {
        /// Which.
        device: String,
        /// The register.
        status: u32,
    },
    /// Registers read as all ones.
    #[error("{device}: the device is gone (its registers read as all ones)")]
    Removed {
        /// Which.
        device: String,
    },
    /// SPDK's libraries are not there.
    #[error(
        "SPDK cannot be loaded: {reason}; install its shared libraries, and name their folder in LD_LIBRARY_PATH if the loader does not know it"
    )]
    Library {
        /// What the loader says.
        reason: String,
    },
    /// A call of SPDK failed.
    #[error("{device}: {operation}: {}", spdk_reason(*.errno))]
    Spdk {
        /// Which device.
        device: String,
        /// The function.
        operation: &'static str,
        /// What it returned: an errno, or 0 where it says no more than that it failed.
        errno: i32,
    },
    /// The owner of the engine asked for it.
    #[error("{device}: a reset was asked for")]
    ResetRequested {
        /// Which.
        device: String,
    },
    /// It answered something that no controller may answer.
    #[error("{device}: {what}")]
    Protocol {
        /// Which.
        device: String,
        /// What it did.
        what: String,
    },
}

impl NvmeError {
    pub(crate) fn system(operation: &'static str, object: impl Into<String>, error: &std::io::Error) -> Self {
        Self::System { operation, object: object.into(), errno: error.raw_os_error().unwrap_or(0) }
    }

    /// What it means for the user of an engine.
    #[must_use]
    pub fn kind(&self) -> IoErrorKind {
        match self {
            Self::Address(_) | Self::Config { .. } => IoErrorKind::Invalid,
            Self::Absent { .. }
            | Self::NotNvme { .. }
            | Self::Driver { .. }
            | Self::NoIommu { .. }
            | Self::NotViable { .. }
            | Self::Permission { .. }
            | Self::Busy { .. }
            | Self::Library { .. }
            | Self::Unsupported { .. } => IoErrorKind::Unsupported,
            Self::LockedMemory { .. } | Self::NoRoom { .. } => IoErrorKind::Unmapped,
            Self::Spdk { .. } => IoErrorKind::Device,
            Self::System { .. } => IoErrorKind::Other,
            Self::Command { status, .. } => status.kind(),
            Self::Timeout { .. }
            | Self::Fatal { .. }
            | Self::Removed { .. }
            | Self::ResetRequested { .. }
            | Self::Protocol { .. } => IoErrorKind::Device,
        }
    }

    pub(crate) fn into_io(self, operation: impl Into<String>) -> IoError {
        IoError {
            engine: crate::ENGINE_NAME,
            operation: operation.into(),
            kind: self.kind(),
            reason: self.to_string(),
        }
    }
}

fn spdk_reason(errno: i32) -> String {
    match errno {
        0 => "failed; SPDK's own log says why".to_owned(),
        errno => std::io::Error::from_raw_os_error(errno.saturating_abs()).to_string(),
    }
}
