//! The disk tier's files, and a temporary folder for them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kvstore_catalog::PolicyKind;
use kvstore_disk::{AdmissionConfig, Area, ClockReading, DiskConfig, DiskLog};
use kvstore_io::files::{FolderConfig, open_folder};
use kvstore_io::ring::RingConfig;
use kvstore_io::{IoEngine, pread, uring};
use kvstore_store::{DISK_META_BYTES_MAX, DiskTier};

/// Returns a disk tier in one file of `bytes`, its log's tables included, over io_uring if the kernel allows it.
pub(super) fn disk(folder: &Path, block_bytes: usize, bytes: u64) -> DiskTier {
    const DEPTH: usize = 64;
    let slot_bytes = block_bytes.next_multiple_of(4096);
    let folder = folder.to_owned();
    let open = move || {
        let files = || open_folder(&FolderConfig::new(&folder, bytes, 1));
        let ring = RingConfig { depth: DEPTH, ..RingConfig::default() };
        let engine: Box<dyn IoEngine> = match uring::open(files()?, &ring) {
            Ok(engine) => Box::new(engine),
            Err(error) => {
                println!("SKIPPED: io_uring ({error}); the disk is read and written with pread");
                Box::new(pread::PreadEngine::new(files()?, &pread::PreadConfig::default())?)
            }
        };
        let config = DiskConfig {
            slot_bytes: slot_bytes as u32,
            meta_bytes_max: DISK_META_BYTES_MAX as u16,
            operations_max: DEPTH as u32,
            ..DiskConfig::default()
        };
        let areas = [Area { file: 0, offset: 0, bytes }];
        Ok((DiskLog::format(config, &areas, engine, 1, ClockReading::now())?, Vec::new()))
    };
    let admission = AdmissionConfig { frequency_min: 1, ..AdmissionConfig::default() };
    DiskTier { open: Box::new(open), depth: DEPTH, eviction: PolicyKind::Lru, admission }
}

/// A temporary folder, removed on drop.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new(parent: &Path) -> Result<Self> {
        let path = parent.join(format!("kvasir-bench-tier-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that cannot be removed has a recognisable name.
        let _left = std::fs::remove_dir_all(&self.0);
    }
}
