//! Errors of NVMe commands and of the driver.

use kvstore_io::{IoError, IoErrorKind};

use crate::PciAddress;
use crate::status::Status;

/// Errors of the driver and of the device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NvmeError {
    /// Not a PCI address.
    #[error("{0:?} is not a PCI address (0000:01:00.0)")]
    Address(String),
    /// A setting is out of range.
    #[error("nvme: {key} = {value}: {expected}")]
    Config {
        /// Name of the setting.
        key: &'static str,
        /// The value that was given.
        value: u64,
        /// The range that is allowed.
        expected: &'static str,
    },
    /// There is no such PCI function.
    #[error("{address}: there is no such PCI function; `lspci -D -d ::0108` lists NVMe controllers")]
    Absent {
        /// Address that was given.
        address: PciAddress,
    },
    /// The PCI function is another class of device.
    #[error("{address} is not an NVMe controller: its PCI class is {class}, not 0x0108xx")]
    NotNvme {
        /// Address of the function.
        address: PciAddress,
        /// PCI class as sysfs shows it.
        class: String,
    },
    /// A kernel driver holds the device. It is never taken away from there: a file system on it may be mounted.
    #[error(
        "{address} is bound to {driver}, not to vfio-pci. If nothing on it is in use, hand it over as root: \
         `modprobe vfio-pci; echo vfio-pci > /sys/bus/pci/devices/{address}/driver_override; \
         echo {address} > /sys/bus/pci/devices/{address}/driver/unbind; \
         echo {address} > /sys/bus/pci/drivers_probe`"
    )]
    Driver {
        /// Address of the function.
        address: PciAddress,
        /// Name of the driver, or "no driver".
        driver: String,
    },
    /// The function is in no IOMMU group.
    #[error(
        "{address} is in no IOMMU group, so that its accesses to memory cannot be confined: switch the IOMMU on in \
         the firmware (VT-d, AMD-Vi, SMMU), and on Intel boot with intel_iommu=on"
    )]
    NoIommu {
        /// Address of the function.
        address: PciAddress,
    },
    /// Another driver holds a device of the same group.
    #[error(
        "IOMMU group {group} of {address} is not viable: all of its devices ({members}) must be bound to vfio-pci \
         or to no driver"
    )]
    NotViable {
        /// Address of the function.
        address: PciAddress,
        /// Number of its IOMMU group.
        group: String,
        /// All functions of the group.
        members: String,
    },
    /// The process lacks the permission.
    #[error("{operation} {object}: permission denied; run as root, or `chown $USER {object}`")]
    Permission {
        /// The system call.
        operation: &'static str,
        /// Path of the device node.
        object: String,
    },
    /// Another process holds the device.
    #[error("{object} is in use by another process")]
    Busy {
        /// Device node of the IOMMU group.
        object: String,
    },
    /// The memory cannot be pinned within the limit of locked memory.
    #[error(
        "VFIO_IOMMU_MAP_DMA of {bytes} bytes for {device}: the memory cannot be pinned; locked memory of this process \
         is limited to {limit_bytes} bytes (`ulimit -l unlimited`, LimitMEMLOCK=infinity, or CAP_IPC_LOCK)"
    )]
    LockedMemory {
        /// Name of the device: its PCI address or SPDK transport id.
        device: String,
        /// Number of bytes that were to be mapped.
        bytes: usize,
        /// RLIMIT_MEMLOCK of the process, in bytes.
        limit_bytes: u64,
    },
    /// A system call failed.
    #[error("{operation} {object}: {} ({errno})", std::io::Error::from_raw_os_error(*.errno))]
    System {
        /// The system call.
        operation: &'static str,
        /// The file or device that the call was made on.
        object: String,
        /// Error number of the call.
        errno: i32,
    },
    /// A mapping does not fit into a resource of the device.
    #[error("{device}: no room for {bytes} bytes: {limit}")]
    NoRoom {
        /// Name of the device: its PCI address or SPDK transport id.
        device: String,
        /// Number of bytes that were to be mapped.
        bytes: usize,
        /// The resource that is exhausted.
        limit: &'static str,
    },
    /// The controller or namespace needs a feature that this driver lacks.
    #[error("{device}: {what}")]
    Unsupported {
        /// Name of the device: its PCI address or SPDK transport id.
        device: String,
        /// The missing feature.
        what: String,
    },
    /// The device did not answer in time.
    #[error("{device}: {operation}: no answer in {waited_ms} ms")]
    Timeout {
        /// Name of the device: its PCI address or SPDK transport id.
        device: String,
        /// The step that timed out.
        operation: &'static str,
        /// Time waited, in milliseconds.
        waited_ms: u64,
    },
    /// A command failed.
    #[error("{device}: {operation}: {status}")]
    Command {
        /// Name of the device: its PCI address or SPDK transport id.
        device: String,
        /// The command.
        operation: &'static str,
        /// Status in the completion of the command.
        status: Status,
    },
    /// The controller reports a fatal status (`CSTS.CFS`).
    #[error("{device}: the controller reports a fatal status (CSTS {status:#x})")]
    Fatal {
        /// Name of the device: its PCI address or SPDK transport id.
        device: String,
        /// Value of CSTS.
        status: u32,
    },
    /// Registers read as all ones: the device was removed.
    #[error("{device}: the device is gone (its registers read as all ones)")]
    Removed {
        /// Name of the device: its PCI address or SPDK transport id.
        device: String,
    },
    /// SPDK's libraries cannot be loaded.
    #[error(
        "SPDK cannot be loaded: {reason}; install its shared libraries, and name their folder in LD_LIBRARY_PATH if the loader does not know it"
    )]
    Library {
        /// Error of the dynamic loader.
        reason: String,
    },
    /// A call of SPDK failed.
    #[error("{device}: {operation}: {}", spdk_reason(*.errno))]
    Spdk {
        /// Transport id of the device.
        device: String,
        /// The function that failed.
        operation: &'static str,
        /// The errno that it returned; 0 when it reports a failure only.
        errno: i32,
    },
    /// The owner of the engine requested a reset.
    #[error("{device}: a reset was asked for")]
    ResetRequested {
        /// Name of the device: its PCI address or SPDK transport id.
        device: String,
    },
    /// The device violated the specification.
    #[error("{device}: {what}")]
    Protocol {
        /// Name of the device: its PCI address or SPDK transport id.
        device: String,
        /// The violation.
        what: String,
    },
}

impl NvmeError {
    pub(crate) fn system(operation: &'static str, object: impl Into<String>, error: &std::io::Error) -> Self {
        Self::System { operation, object: object.into(), errno: error.raw_os_error().unwrap_or(0) }
    }

    /// The kind of this error, as callers of an engine distinguish it.
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
