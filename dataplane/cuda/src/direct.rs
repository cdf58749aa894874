//! Path of bytes between a NIC and device memory, decided from probed properties, for reports and metrics.

use dataplane_memory::DmaBufError;

use crate::DeviceDescription;

/// Path of bytes between a NIC and device memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuDirect {
    /// The NIC accesses device memory that the kernel maps for it from a DMA buffer.
    DmaBuf,
    /// The NIC accesses device memory by bare device addresses, which a kernel module translates.
    PeerMemory,
    /// Bytes are copied through host memory.
    Staged {
        /// Reason why neither direct path is possible.
        reason: String,
    },
}

/// Probed properties of one device and one NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectProbe {
    /// Whether a NIC that registers memory exists.
    pub has_nic: bool,
    /// Whether the NIC's library can register a DMA buffer.
    pub nic_takes_dma_buf: bool,
    /// Whether the device reports that a NIC can access its memory.
    pub has_direct_access: bool,
    /// Whether the device reports that it exports DMA buffers.
    pub has_dma_buf: bool,
    /// Result of a trial export of real memory; `None`: not tried. The kernel may refuse an export that the
    /// device reports.
    pub export: Option<Result<(), DmaBufError>>,
    /// Whether the kernel module for bare addresses is loaded.
    pub has_peer_memory: bool,
}

impl DirectProbe {
    /// Returns the properties that the driver reports, with a NIC that has all abilities.
    #[must_use]
    pub fn of(device: &DeviceDescription) -> Self {
        Self {
            has_nic: true,
            nic_takes_dma_buf: true,
            has_direct_access: device.has_direct_access,
            has_dma_buf: device.has_dma_buf,
            export: None,
            has_peer_memory: device.has_peer_memory,
        }
    }
}

impl GpuDirect {
    /// Returns the best path that the probe allows: a DMA buffer, else peer memory, else through host memory.
    #[must_use]
    pub fn choose(probe: &DirectProbe) -> Self {
        let staged = |reason: String| Self::Staged { reason };
        if !probe.has_nic {
            return staged("no NIC of this machine registers memory".to_owned());
        }
        let refused = match &probe.export {
            _ if !probe.nic_takes_dma_buf => "the NIC's library cannot register a DMA buffer".to_owned(),
            Some(Err(error)) => format!("the device's memory cannot be exported: {error}"),
            None if !probe.has_dma_buf => "the device exports no DMA buffers".to_owned(),
            Some(Ok(())) | None => return Self::DmaBuf,
        };
        if !probe.has_direct_access {
            return staged(format!("{refused}, and the device says that no NIC can reach its memory"));
        }
        if !probe.has_peer_memory {
            return staged(format!("{refused}, and the kernel module nvidia-peermem is not loaded"));
        }
        Self::PeerMemory
    }

    /// Returns a short name for a metric's label.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::DmaBuf => "dma_buf",
            Self::PeerMemory => "peer_memory",
            Self::Staged { .. } => "staged",
        }
    }
}

impl std::fmt::Display for GpuDirect {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::DmaBuf => formatter.write_str("direct, through a DMA buffer"),
            Self::PeerMemory => formatter.write_str("direct, through nvidia-peermem"),
            Self::Staged { reason } => write!(formatter, "through host memory: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_its_conditions_and_the_last_one_a_reason() {
        let best = DirectProbe {
            has_nic: true,
            nic_takes_dma_buf: true,
            has_direct_access: true,
            has_dma_buf: true,
            export: Some(Ok(())),
            has_peer_memory: true,
        };
        let refused = || Some(Err(DmaBufError { operation: "export", reason: "no".to_owned() }));
        let no_module = DirectProbe { has_peer_memory: false, ..best.clone() };
        for (probe, label, words) in [
            (best.clone(), "dma_buf", ""),
            (DirectProbe { export: None, ..best.clone() }, "dma_buf", ""),
            (DirectProbe { export: refused(), ..best.clone() }, "peer_memory", ""),
            (DirectProbe { nic_takes_dma_buf: false, ..best.clone() }, "peer_memory", ""),
            (DirectProbe { export: None, has_dma_buf: false, ..best.clone() }, "peer_memory", ""),
            (DirectProbe { has_nic: false, ..best.clone() }, "staged", "no NIC"),
            (DirectProbe { export: refused(), ..no_module.clone() }, "staged", "export: no, and"),
            (
                DirectProbe { export: None, has_dma_buf: false, ..no_module.clone() },
                "staged",
                "nvidia-peermem is not",
            ),
            (
                DirectProbe { nic_takes_dma_buf: false, has_direct_access: false, ..best.clone() },
                "staged",
                "no NIC can",
            ),
        ] {
            let chosen = GpuDirect::choose(&probe);
            assert!(chosen.label() == label && chosen.to_string().contains(words), "{probe:?}: {chosen}");
        }
    }
}
