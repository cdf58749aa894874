//! Warnings: each has a stable code, by which it can be looked up and silenced.

use std::fmt;

/// Severity of a warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// For information.
    Note,
    /// Transfers are slower.
    Slow,
    /// A transport or a device cannot be used at all.
    Blocks,
}

impl Severity {
    /// Returns the severity as one word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Slow => "slow",
            Self::Blocks => "blocks",
        }
    }
}

macro_rules! codes {
    ($($name:ident = $number:literal, $severity:ident, $doc:literal;)*) => {
        /// Kind of a warning. Numbers are never reused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code {
            $(#[doc = $doc] $name = $number,)*
        }

        impl Code {
            /// All codes.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Returns one line that explains the code.
            #[must_use]
            pub fn doc(self) -> &'static str {
                match self { $(Self::$name => $doc,)* }
            }

            /// Returns the severity.
            #[must_use]
            pub fn severity(self) -> Severity {
                match self { $(Self::$name => Severity::$severity,)* }
            }
        }
    };
}

codes! {
    PortDown = 1, Blocks, "An RDMA port carries no data: disabled, no cable, or no subnet manager.";
    PortSlow = 2, Slow, "A port runs slower than others of the same card type, or on one lane: cable, transceiver or negotiation.";
    PcieSlow = 3, Slow, "A PCIe link runs below the speed or width that the device on it is capable of.";
    NoRoutableGid = 4, Blocks, "A RoCE port has no RoCE v2 address that is valid beyond its own link.";
    MtuSmall = 5, Slow, "A RoCE port's interface MTU does not hold 4096 bytes of payload, so more of the link is headers.";
    GpuFar = 6, Slow, "Every usable NIC is on another socket than the GPU.";
    GpuDirectUnusable = 7, Slow, "NICs cannot reach GPU memory, so its bytes are copied through host memory.";
    MemlockSmall = 8, Blocks, "The limit of locked memory is smaller than the slab that is to be registered.";
    VerbsNotLoaded = 9, Blocks, "A NIC that can do RDMA is there, but the kernel shows no RDMA device or no user access.";
    IommuTranslates = 10, Slow, "The IOMMU translates addresses: traffic between a GPU and a NIC goes up to the root.";
    AcsRedirects = 11, Slow, "PCIe Access Control Services send traffic between devices below one switch up to the root.";
    HugePagesMissing = 12, Slow, "Not enough huge pages are free for the slab.";
    RailsDiffer = 13, Note, "The chosen rails are in different subnets or of different link layers: each reaches only its own kind.";
    ReversePathStrict = 14, Blocks, "Several RoCE ports share a subnet under a strict reverse-path filter, which drops what arrives on the other one.";
    TcpBuffersSmall = 15, Slow, "TCP buffers cannot hold what is in flight on the fastest link.";
    MemoryFar = 16, Slow, "No usable NIC is on the socket of the host memory.";
    SoftwareRdma = 17, Note, "RDMA is done by the CPU (Soft-RoCE): it works, but is slower than TCP.";
    SharedDirectoryDiffers = 18, Blocks, "Two nodes on one host do not see the same shared directory, so they cannot use shared memory.";
    NoCommonFabric = 19, Blocks, "Both nodes have RDMA ports, but no two of them are on one fabric.";
    NumaUnknown = 20, Note, "The firmware does not say which NUMA node a NIC belongs to.";
}

impl fmt::Display for Code {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "KV-NET-{:02}", *self as u8)
    }
}

/// A problem that keeps a better path from being used, or makes the chosen one slower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Kind of the warning.
    pub code: Code,
    /// Observation, with the device's name.
    pub cause: String,
    /// Command or setting that removes the cause.
    pub fix: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({}) {}; fix: {}", self.code, self.code.severity().name(), self.cause, self.fix)
    }
}
