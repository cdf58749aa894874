//! The error of this crate: the reason why a feature is off, in one sentence that an operator can act on.

use std::path::PathBuf;

/// Reason why an eBPF feature is unavailable or has failed.
#[derive(Debug, thiserror::Error)]
pub enum EbpfError {
    /// The binary was built without the programs.
    #[error("built without eBPF: {0}")]
    NotBuilt(&'static str),
    /// The process lacks a capability.
    #[error(
        "{feature} needs {missing}: grant it (setcap, AmbientCapabilities=, securityContext) or run as root"
    )]
    Capability {
        /// Name of the feature.
        feature: &'static str,
        /// The capabilities that are not in the effective set.
        missing: String,
    },
    /// The kernel offers no type information (BTF).
    #[error(
        "{feature} needs the kernel's type information, and /sys/kernel/btf/vmlinux is not there (CONFIG_DEBUG_INFO_BTF)"
    )]
    NoBtf {
        /// Name of the feature.
        feature: &'static str,
    },
    /// No cgroup v2 hierarchy is mounted.
    #[error("no cgroup v2 hierarchy is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")]
    NoCgroup2,
    /// The path is not a directory of a cgroup v2 hierarchy.
    #[error("{path} is no cgroup v2 directory: {reason}", path = path.display())]
    NotACgroup {
        /// The path that was given.
        path: PathBuf,
        /// Fault of the path.
        reason: String,
    },
    /// There is no such network interface in this network namespace.
    #[error("no network interface {0:?} in this network namespace")]
    NoInterface(String),
    /// Another XDP program is attached to the interface.
    #[error("network interface {0:?} has an XDP program of somebody else attached: see `ip link show`")]
    InterfaceBusy(String),
    /// A value is out of its range.
    #[error("{key}: {reason}")]
    Configuration {
        /// Name of the key.
        key: &'static str,
        /// Fault of the value, with the allowed range.
        reason: String,
    },
    /// The process is not in the machine's PID namespace, so that its process numbers differ from the
    /// kernel's.
    #[error(
        "{feature} needs the machine's own process numbers: run it in the host's PID namespace (hostPID: true)"
    )]
    PidNamespace {
        /// Name of the feature.
        feature: &'static str,
    },
    /// The kernel refused an operation.
    #[error("the kernel refused {step}: {reason}")]
    Refused {
        /// The operation and its object.
        step: String,
        /// The errno, and the end of the verifier's log where there is one.
        reason: String,
    },
}
