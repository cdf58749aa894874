//! Limits and settings of the kernel: locked memory, modules, IOMMU, buffer sizes.
//!
//! Source: proc(5), Documentation/ABI/testing/sysfs-kernel-iommu_groups, ip-sysctl.rst.

use std::collections::BTreeMap;

use crate::mount;
use crate::sysfs::Tree;

/// Default directory of shared-memory peers.
const SHARED_DIRECTORY: &str = "/dev/shm";

/// Capability numbers of include/uapi/linux/capability.h.
const CAP_IPC_LOCK: u32 = 14;

/// Kernel modules that affect the choice of a path.
const MODULES: [&str; 7] =
    ["ib_uverbs", "mlx5_ib", "nvidia", "nvidia_peermem", "nv_peer_mem", "rdma_rxe", "amdgpu"];

/// Limits and settings of the running kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Host {
    /// Host name.
    pub hostname: Option<String>,
    /// Boot id: equal for all containers on one running kernel.
    pub boot_id: Option<String>,
    /// Kernel release.
    pub kernel: Option<String>,
    /// Limit of locked memory in bytes; `u64::MAX`: unlimited.
    pub memlock_bytes: Option<u64>,
    /// Whether this process may exceed `memlock_bytes` (CAP_IPC_LOCK).
    pub may_lock_any: Option<bool>,
    /// Modules that are loaded or built in, among those that affect the choice of a path.
    pub modules: Vec<&'static str>,
    /// Whether the NVIDIA kernel module is the open one. Only the open module exports dma-buf.
    pub nvidia_open: Option<bool>,
    /// Address translation of the IOMMU.
    pub iommu: Iommu,
    /// IOMMU group number → group type: `DMA`, `DMA-FQ` or `identity`.
    pub iommu_groups: BTreeMap<u32, String>,
    /// Largest buffers in bytes that a socket may ask for: receive, send.
    pub socket_buffer_max_bytes: (Option<u64>, Option<u64>),
    /// Largest buffers in bytes that TCP grows to by itself: receive, send.
    pub tcp_buffer_max_bytes: (Option<u64>, Option<u64>),
    /// Name of the congestion control algorithm.
    pub congestion_control: Option<String>,
    /// Mode of transparent huge pages: `always`, `madvise`, `never`.
    pub transparent_huge_pages: Option<String>,
    /// Id of the directory `/dev/shm` itself, independent of the name under which a container sees it.
    pub shared_directory_id: Option<String>,
    /// Size of `/dev/shm`, in bytes.
    pub shared_directory_bytes: Option<u64>,
    pub(crate) mountinfo: String,
}

/// Translation of device addresses by the IOMMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Iommu {
    /// No groups: off or absent.
    Off,
    /// On, but addresses pass unchanged.
    Passthrough,
    /// Addresses are translated: traffic between devices goes up to the root.
    Translating,
    /// Not known.
    #[default]
    Unknown,
}

/// Way in which a NIC can access GPU memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuDirect {
    /// The kernel exports GPU memory as dma-buf.
    DmaBuf,
    /// A peer-memory module is loaded.
    PeerMemory,
    /// A NIC cannot access GPU memory, for this reason.
    Unusable(&'static str),
}

impl Host {
    /// Whether a module of `modules` is present.
    #[must_use]
    pub fn has_module(&self, name: &str) -> bool {
        self.modules.contains(&name)
    }

    /// Returns an id of a directory, by which two nodes can tell whether both see it. `None` for a relative
    /// path.
    #[must_use]
    pub fn directory_id(&self, directory: &str) -> Option<String> {
        directory.starts_with('/').then(|| mount::directory_id(&self.mountinfo, directory))?
    }

    /// Returns the major and minor version of the kernel.
    #[must_use]
    pub fn kernel_version(&self) -> Option<(u32, u32)> {
        let mut parts = self.kernel.as_deref()?.split(['.', '-', '+']);
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    }

    /// Returns the way in which a NIC can access the memory of an NVIDIA GPU (or with `amd`, of an AMD one).
    #[must_use]
    pub fn gpu_direct(&self, amd: bool) -> GpuDirect {
        // ib_umem_dmabuf_get came with 5.12; amdgpu and the open NVIDIA module export dma-buf.
        const DMA_BUF_KERNEL: (u32, u32) = (5, 12);
        let dma_buf = self.kernel_version().is_some_and(|version| version >= DMA_BUF_KERNEL);
        if !amd && !self.has_module("nvidia") {
            return GpuDirect::Unusable("the nvidia kernel module is not loaded");
        }
        if amd && !self.has_module("amdgpu") {
            return GpuDirect::Unusable("the amdgpu kernel module is not loaded");
        }
        if dma_buf && (amd || self.nvidia_open != Some(false)) {
            return GpuDirect::DmaBuf;
        }
        if !amd && (self.has_module("nvidia_peermem") || self.has_module("nv_peer_mem")) {
            return GpuDirect::PeerMemory;
        }
        GpuDirect::Unusable(if dma_buf {
            "the proprietary nvidia module exports no dma-buf and nvidia_peermem is not loaded"
        } else {
            "the kernel is older than 5.12 (no dma-buf regions) and nvidia_peermem is not loaded"
        })
    }
}

pub(crate) fn read(tree: &Tree) -> Host {
    let mountinfo = tree.text("proc/self/mountinfo").unwrap_or_default();
    let iommu_groups = read_groups(tree);
    let capabilities = tree.text("proc/self/status").and_then(|text| {
        let hex = text.lines().find_map(|line| line.strip_prefix("CapEff:"))?.trim().to_owned();
        u64::from_str_radix(&hex, 16).ok()
    });
    let driver = tree.text("proc/driver/nvidia/version");
    let sysctl = |name: &str| tree.number(&format!("proc/sys/net/core/{name}"));
    let tcp = |name: &str| {
        let text = tree.label(&format!("proc/sys/net/ipv4/{name}"))?;
        text.split_whitespace().nth(2)?.parse().ok()
    };
    Host {
        hostname: tree.label("proc/sys/kernel/hostname"),
        boot_id: tree.label("proc/sys/kernel/random/boot_id"),
        kernel: tree.label("proc/sys/kernel/osrelease"),
        memlock_bytes: tree.text("proc/self/limits").and_then(|text| parse_memlock(&text)),
        may_lock_any: capabilities.map(|set| set >> CAP_IPC_LOCK & 1 == 1),
        modules: MODULES.into_iter().filter(|module| tree.exists(&format!("sys/module/{module}"))).collect(),
        nvidia_open: driver.map(|text| text.contains("Open Kernel Module")),
        iommu: classify(
            tree.exists("sys/kernel/iommu_groups"),
            &iommu_groups,
            tree.text("proc/cmdline").as_deref(),
        ),
        iommu_groups,
        socket_buffer_max_bytes: (sysctl("rmem_max"), sysctl("wmem_max")),
        tcp_buffer_max_bytes: (tcp("tcp_rmem"), tcp("tcp_wmem")),
        congestion_control: tree.label("proc/sys/net/ipv4/tcp_congestion_control"),
        transparent_huge_pages: tree
            .label("sys/kernel/mm/transparent_hugepage/enabled")
            .and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())),
        shared_directory_id: mount::directory_id(&mountinfo, SHARED_DIRECTORY),
        shared_directory_bytes: mount::size_bytes(&mountinfo, SHARED_DIRECTORY),
        mountinfo,
    }
}

fn read_groups(tree: &Tree) -> BTreeMap<u32, String> {
    const GROUPS: &str = "sys/kernel/iommu_groups";
    let groups = tree.names(GROUPS).into_iter().filter_map(|name| {
        let kind = tree.label(&format!("{GROUPS}/{name}/type")).unwrap_or_else(|| "unknown".to_owned());
        Some((name.parse().ok()?, kind))
    });
    groups.collect()
}

fn classify(known: bool, groups: &BTreeMap<u32, String>, command_line: Option<&str>) -> Iommu {
    if groups.is_empty() {
        return if known { Iommu::Off } else { Iommu::Unknown };
    }
    if groups.values().any(|kind| kind.starts_with("DMA")) {
        return Iommu::Translating;
    }
    if groups.values().all(|kind| kind == "identity") {
        return Iommu::Passthrough;
    }
    // Kernels before 5.11 do not have type files for all groups; then the command line decides.
    match command_line {
        Some(line)
            if line.split_whitespace().any(|word| matches!(word, "iommu=pt" | "iommu.passthrough=1")) =>
        {
            Iommu::Passthrough
        }
        _ => Iommu::Unknown,
    }
}

/// Parses `Max locked memory         8388608              8388608              bytes`.
fn parse_memlock(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        bytes => bytes.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_direct_needs_dma_buf_or_a_peer_module() {
        let cases: [(&str, &[&'static str], Option<bool>, bool); 7] = [
            ("5.15.0-1-generic", &["nvidia"], Some(true), true),
            ("5.15.0", &["nvidia"], None, true),
            ("5.15.0", &["nvidia"], Some(false), false),
            ("5.15.0", &["nvidia", "nvidia_peermem"], Some(false), true),
            ("5.4.0", &["nvidia"], Some(true), false),
            ("5.4.0", &["nvidia", "nv_peer_mem"], None, true),
            ("6.8", &[], None, false),
        ];
        for (kernel, modules, nvidia_open, usable) in cases {
            let host = Host {
                kernel: Some(kernel.to_owned()),
                modules: modules.to_vec(),
                nvidia_open,
                ..Host::default()
            };
            let found = !matches!(host.gpu_direct(false), GpuDirect::Unusable(_));
            assert_eq!(found, usable, "{kernel} {modules:?} {nvidia_open:?}");
        }
    }

    #[test]
    fn the_type_of_the_groups_beats_the_command_line() {
        let groups = |kinds: &[&str]| {
            kinds.iter().enumerate().map(|(n, kind)| (n as u32, (*kind).to_owned())).collect()
        };
        assert_eq!(classify(true, &groups(&[]), None), Iommu::Off);
        assert_eq!(classify(false, &groups(&[]), None), Iommu::Unknown);
        assert_eq!(classify(true, &groups(&["identity", "DMA-FQ"]), Some("iommu=pt")), Iommu::Translating);
        assert_eq!(classify(true, &groups(&["identity"]), None), Iommu::Passthrough);
        assert_eq!(classify(true, &groups(&["unknown"]), Some("a iommu=pt")), Iommu::Passthrough);
        assert_eq!(classify(true, &groups(&["unknown"]), None), Iommu::Unknown);
    }

    #[test]
    fn memlock() {
        assert_eq!(parse_memlock("x\nMax locked memory         8388608   8388608   bytes"), Some(8 << 20));
        assert_eq!(parse_memlock("Max locked memory         unlimited  unlimited bytes"), Some(u64::MAX));
        assert_eq!(parse_memlock("Max locked memory"), None);
    }
}
