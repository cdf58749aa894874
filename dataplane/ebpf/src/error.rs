//! Why a program is off: one sentence that an operator can act on.

use std::path::PathBuf;

/// Why an eBPF feature is not available, or no longer answers.
#[derive(Debug, thiserror::Error)]
pub enum Off {
    /// The binary holds no programs.
    #[error("built without eBPF: {0}")]
    NotBuilt(&'static str),
    /// The process lacks a capability.
    #[error(
        "{feature} needs {missing}: grant it (setcap, AmbientCapabilities=, securityContext) or run as root"
    )]
    Capability {
        /// What was asked for.
        feature: &'static str,
        /// The capabilities that are not in the effective set.
        missing: String,
    },
    /// The kernel does not describe its structures.
    #[error(
        "{feature} needs the kernel's type information, and /sys/kernel/btf/vmlinux is not there (CONFIG_DEBUG_INFO_BTF)"
    )]
    NoBtf {
        /// What was asked for.
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
        /// What is wrong with it.
        reason: String,
    },
    /// There is no such network interface in this network namespace.
    #[error("no network interface {0:?} in this network namespace")]
    NoInterface(String),
    /// Another XDP program is attached there.
    #[error("network interface {0:?} has an XDP program of somebody else attached: see `ip link show`")]
    InterfaceBusy(String),
    /// A value is out of its range.
    #[error("{key}: {reason}")]
    Configuration {
        /// The key.
        key: &'static str,
        /// What is wrong, with the range.
        reason: String,
    },
    /// Processes of the machine have other numbers here.
    #[error(
        "{feature} needs the machine's own process numbers: run it in the host's PID namespace (hostPID: true)"
    )]
    PidNamespace {
        /// What was asked for.
        feature: &'static str,
    },
    /// The kernel said no.
    #[error("the kernel refused {step}: {reason}")]
    Refused {
        /// What was being done, with its object.
        step: String,
        /// The errno, and the end of the verifier's log where there is one.
        reason: String,
    },
}
