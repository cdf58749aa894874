//! The disk tier of a configuration: its files or device, the engine that reads and writes them, and its log.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use kvstore_catalog::PolicyKind;
use kvstore_disk::{AdmissionConfig, Area, ClockReading, DiskConfig, DiskLog, Recovered};
use kvstore_io::files::{
    DeviceConfig, Files, FolderConfig, SIGNATURE_BYTES, open_device, open_folders, remove_surplus, signature,
};
use kvstore_io::passthrough::{self, NvmeDevice, NvmeDeviceConfig};
use kvstore_io::pread::{PreadConfig, PreadEngine};
use kvstore_io::ring::RingConfig;
use kvstore_io::{IoEngine, uring};
use kvstore_nvme::spdk::{SpdkConfig, SpdkEngine};
use kvstore_nvme::{NvmeConfig, NvmeEngine, PciAddress};

use crate::DISK_META_BYTES_MAX;
use crate::builder::DiskTier;

/// The longest single read or write: longer blocks are moved in pieces of this.
const TRANSFER_BYTES_MAX: usize = 1 << 20;
/// Unit of slots and segments, and of a raw device's format.
const PAGE_BYTES: usize = 4096;

type OpenError = Box<dyn std::error::Error + Send + Sync>;

/// I/O engine of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskEngine {
    /// io_uring where it can be had, else pread.
    Auto,
    /// io_uring.
    IoUring,
    /// Threads that call pread and pwrite.
    Pread,
    /// NVMe commands through the kernel, on `/dev/ngXnY`.
    NvmePassthrough,
    /// The driver in user space, on a device bound to vfio-pci.
    NvmeUser,
    /// SPDK's driver, on the same.
    Spdk,
}

impl DiskEngine {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Auto, Self::IoUring, Self::Pread, Self::NvmePassthrough, Self::NvmeUser, Self::Spdk];

    /// As in `disk_tier.engine`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Pread => "pread",
            Self::NvmePassthrough => "nvme-passthrough",
            Self::NvmeUser => "nvme-user",
            Self::Spdk => "spdk",
        }
    }

    /// The inverse of [`Self::name`].
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|engine| engine.name() == name)
    }

    /// Whether it takes a device of its own and no folders.
    #[must_use]
    pub fn takes_device(self) -> bool {
        matches!(self, Self::NvmePassthrough | Self::NvmeUser | Self::Spdk)
    }
}

/// A disk tier as a configuration names it (`[disk_tier]`).
#[derive(Debug, Clone)]
pub struct DiskTierConfig {
    /// I/O engine that reads and writes the tier.
    pub engine: DiskEngine,
    /// Folders, one on each device, or one device as the engine wants it: a block device, `/dev/ngXnY` or a PCI address.
    pub paths: Vec<String>,
    /// The name of the folder in each of these; `None`: the folders themselves.
    pub folder: Option<String>,
    /// Bytes of its space.
    pub capacity: u64,
    /// Bytes of one file.
    pub segment: u64,
    /// Operations that may be under way.
    pub depth: usize,
    /// Policy that chooses the block that goes when one must.
    pub eviction: PolicyKind,
    /// Only blocks that were seen so often are written.
    pub write_frequency: u32,
    /// Bytes written per second at most; 0 is no limit.
    pub write_bandwidth: u64,
    /// Bytes written per day at most; 0 is no limit.
    pub write_per_day: u64,
    /// Whether a log that was written for other blocks is made anew, and a device with something on it is overwritten.
    pub reformat: bool,
    /// Identity of the blocks' format: a log of another one is refused.
    pub fingerprint: u64,
    /// Bytes of the largest block.
    pub block_bytes: usize,
}

/// The tier's folders, and the segments in all of them.
type Segments = (Vec<PathBuf>, FolderConfig);

impl DiskTierConfig {
    /// The tier; it is opened when the store starts, on the thread that drives it.
    #[must_use]
    pub fn tier(self) -> DiskTier {
        self.tier_over(|engine| engine)
    }

    /// The same over what `wrap` makes of the engine, for tests.
    pub fn tier_over(
        self,
        wrap: impl FnOnce(Box<dyn IoEngine>) -> Box<dyn IoEngine> + Send + 'static,
    ) -> DiskTier {
        let admission = AdmissionConfig {
            frequency_min: self.write_frequency,
            bytes_per_second: self.write_bandwidth,
            burst_bytes: self.write_bandwidth.max(self.slot_bytes() as u64),
            bytes_per_day: self.write_per_day,
        };
        let (depth, eviction) = (self.depth, self.eviction);
        let open = move || {
            let named = |error| format!("disk_tier.path = {}: {error}", self.path_text());
            self.open_log(wrap).map_err(|error| named(error).into())
        };
        DiskTier { open: Box::new(open), depth, eviction, admission }
    }

    /// The paths as they are configured.
    fn path_text(&self) -> String {
        match &self.paths[..] {
            [only] => format!("{only:?}"),
            all => format!("{all:?}"),
        }
    }

    fn slot_bytes(&self) -> usize {
        self.block_bytes.next_multiple_of(PAGE_BYTES)
    }

    fn open_log(
        &self,
        wrap: impl FnOnce(Box<dyn IoEngine>) -> Box<dyn IoEngine>,
    ) -> Result<(DiskLog, Vec<Recovered>), OpenError> {
        let config = DiskConfig {
            fingerprint: self.fingerprint,
            slot_bytes: u32::try_from(self.slot_bytes()).map_err(|_| "a block is too large for a disk")?,
            meta_bytes_max: DISK_META_BYTES_MAX as u16,
            stripes: self.paths.len().max(1) as u32,
            reformat: self.reformat,
            operations_max: self.depth as u32,
            ..DiskConfig::default()
        };
        let segments = self.segments()?;
        let engine = wrap(self.engine(segments.as_ref())?);
        let (name, areas) = (engine.name(), self.areas(&engine.geometry().files));
        let (log, recovered, report) =
            DiskLog::open(config, &areas, engine, fresh_id(), ClockReading::now())?;
        if let Some((folders, config)) = &segments {
            remove_surplus(folders, config)?;
        }
        tracing::info!(
            "disk tier: {} slots of {} bytes in {} over {name}; {} blocks from before, found in {:.1} ms",
            log.slot_count(),
            self.slot_bytes(),
            self.path_text(),
            report.recovered,
            report.elapsed.as_secs_f64() * 1e3
        );
        Ok((log, recovered))
    }

    /// Bytes of a segment, in whole pages.
    fn segment_bytes(&self) -> u64 {
        whole_pages(self.segment.min(self.capacity))
    }

    /// Areas of the log: a segment of each file, or as many as fit into a device.
    fn areas(&self, files: &[u64]) -> Vec<Area> {
        let mut areas = Vec::new();
        for (file, &bytes) in (0..).zip(files) {
            let usable = whole_pages(bytes.min(self.capacity));
            let segment = self.segment_bytes().min(usable);
            let mut offset = 0;
            while offset + segment <= usable && offset < usable {
                areas.push(Area { file, offset, bytes: segment });
                offset += segment;
            }
        }
        areas
    }

    /// The tier's folders, made where they are missing; none where the tier lies on a device.
    fn segments(&self) -> Result<Option<Segments>, OpenError> {
        let is_device = |path: &str| std::fs::metadata(path).is_ok_and(|of| of.file_type().is_block_device());
        if self.engine.takes_device() || matches!(&self.paths[..], [only] if is_device(only)) {
            return Ok(None);
        }
        if self.paths.is_empty() || self.paths.iter().any(String::is_empty) {
            return Err("an empty path".into());
        }
        let mut folders = Vec::with_capacity(self.paths.len());
        for path in &self.paths {
            if is_device(path) {
                return Err(
                    format!("{path} is a block device and not the only path: name a folder on it").into()
                );
            }
            std::fs::create_dir_all(path).map_err(|error| format!("{path}: {error}"))?;
            let folder = self.folder.as_ref().map(|folder| Path::new(path).join(folder));
            folders.push(folder.unwrap_or_else(|| PathBuf::from(path)));
        }
        let segment_bytes = self.segment_bytes();
        let count = u32::try_from(self.capacity / segment_bytes.max(1))
            .map_err(|_| "disk_tier.segment: too many segments")?;
        Ok(Some((folders, FolderConfig::new(PathBuf::new(), segment_bytes, count))))
    }

    fn engine(&self, segments: Option<&Segments>) -> Result<Box<dyn IoEngine>, OpenError> {
        let depth = self.depth;
        let ring = RingConfig { depth, transfer_bytes_max: TRANSFER_BYTES_MAX, ..RingConfig::default() };
        match self.engine {
            DiskEngine::NvmePassthrough => {
                let path = self.device()?.into();
                let config = NvmeDeviceConfig { path, force: self.reformat, block_bytes: PAGE_BYTES };
                return Ok(Box::new(passthrough::open(NvmeDevice::open(&config)?, &ring)?));
            }
            DiskEngine::NvmeUser => {
                let config = NvmeConfig { requests_max: depth, ..NvmeConfig::default() };
                let mut engine = NvmeEngine::open(self.pci_address()?, &config)?;
                self.keep_what_is_there(&engine.first_bytes(SIGNATURE_BYTES)?)?;
                return Ok(Box::new(engine));
            }
            DiskEngine::Spdk => {
                let transport = format!("trtype:PCIe traddr:{}", self.pci_address()?);
                let config = SpdkConfig { requests_max: depth, ..SpdkConfig::new(transport) };
                let mut engine = SpdkEngine::open(&config)?;
                self.keep_what_is_there(&engine.first_bytes(SIGNATURE_BYTES)?)?;
                return Ok(Box::new(engine));
            }
            DiskEngine::Auto | DiskEngine::IoUring | DiskEngine::Pread => {}
        }
        if self.engine != DiskEngine::Pread {
            match uring::open(self.files(segments)?, &ring) {
                Ok(engine) => return Ok(Box::new(engine)),
                Err(error) if self.engine == DiskEngine::IoUring => return Err(error.into()),
                // Kernels that do not permit it (ENOSYS, EPERM), and old ones that have too little locked memory or too few files for it.
                Err(error) => tracing::warn!("disk tier: io_uring is not used: {error}"),
            }
        }
        let config = PreadConfig { depth, transfer_bytes_max: TRANSFER_BYTES_MAX, ..PreadConfig::default() };
        Ok(Box::new(PreadEngine::new(self.files(segments)?, &config)?))
    }

    fn files(&self, segments: Option<&Segments>) -> Result<Files, OpenError> {
        if let Some((folders, config)) = segments {
            return Ok(open_folders(folders, config)?);
        }
        let path = self.device()?.into();
        Ok(open_device(&DeviceConfig { path, force: self.reformat, block_bytes: PAGE_BYTES })?)
    }

    /// The only path.
    fn device(&self) -> Result<&str, OpenError> {
        match &self.paths[..] {
            [only] => Ok(only),
            _ => Err(format!("disk_tier.engine = \"{}\" takes one device", self.engine.name()).into()),
        }
    }

    fn pci_address(&self) -> Result<PciAddress, OpenError> {
        let (address, engine) = (self.device()?, self.engine.name());
        address.parse().map_err(|_| {
            format!("\"{address}\" is not a PCI address like `0000:01:00.0`, which `{engine}` needs").into()
        })
    }

    fn keep_what_is_there(&self, first: &[u8]) -> Result<(), OpenError> {
        match signature(first) {
            Some(what) if !self.reformat => {
                Err(format!("{what} is on it, and disk_tier.reformat is not set").into())
            }
            _ => Ok(()),
        }
    }
}

fn whole_pages(bytes: u64) -> u64 {
    bytes - bytes % PAGE_BYTES as u64
}

/// A number that differs from store to store.
fn fresh_id() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(engine: DiskEngine, paths: &[&str]) -> DiskTierConfig {
        DiskTierConfig {
            engine,
            paths: paths.iter().map(|&path| path.to_owned()).collect(),
            folder: None,
            capacity: 10 << 20,
            segment: 4 << 20,
            depth: 4,
            eviction: PolicyKind::Lru,
            write_frequency: 1,
            write_bandwidth: 0,
            write_per_day: 0,
            reformat: false,
            fingerprint: 1,
            block_bytes: 5000,
        }
    }

    #[test]
    fn a_device_is_used_in_whole_segments_and_files_as_they_are() {
        let config = config(DiskEngine::Auto, &["/nowhere"]);
        let bytes = |files: &[u64]| -> Vec<(u32, u64, u64)> {
            config.areas(files).iter().map(|area| (area.file, area.offset, area.bytes)).collect()
        };
        let segment = 4 << 20;
        assert_eq!(bytes(&[1 << 30]), [(0, 0, segment), (0, segment, segment)], "and no rest");
        assert_eq!(bytes(&[segment, segment]), [(0, 0, segment), (1, 0, segment)]);
        assert_eq!(bytes(&[1 << 20]), [(0, 0, 1 << 20)], "a small device is one segment");
        assert_eq!(bytes(&[]), []);
        let odd = DiskTierConfig { segment: segment + 5000, ..config };
        let areas = odd.areas(&[1 << 30]);
        assert!(areas.len() == 2 && areas.iter().all(|area| (area.offset | area.bytes).is_multiple_of(4096)));
    }

    #[test]
    fn paths_that_an_engine_cannot_take_are_named() {
        let folder = std::env::temp_dir().join(format!("kvasir-disk-open-{}", std::process::id()));
        let folder = folder.to_str().expect("text");
        for (engine, paths, text) in [
            (DiskEngine::Auto, &[][..], "an empty path"),
            (DiskEngine::Pread, &["", folder][..], "an empty path"),
            (
                DiskEngine::NvmeUser,
                &[folder][..],
                "is not a PCI address like `0000:01:00.0`, which `nvme-user` needs",
            ),
            (
                DiskEngine::Spdk,
                &["0000:01:00.0", "0000:02:00.0"][..],
                "disk_tier.engine = \"spdk\" takes one device",
            ),
            (DiskEngine::NvmePassthrough, &[folder][..], folder),
        ] {
            let error = (config(engine, paths).tier().open)().err().expect("no such disk").to_string();
            assert!(error.starts_with("disk_tier.path = ") && error.contains(text), "{engine:?}: {error}");
        }
        assert!(!Path::new(folder).exists(), "nothing was made");
        for engine in DiskEngine::ALL {
            assert_eq!(DiskEngine::from_name(engine.name()), Some(engine));
        }
        assert_eq!(DiskEngine::from_name("floppy"), None);
    }
}
