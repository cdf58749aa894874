//! Time that opening a store takes, on sparse files with real tables.
//!
//! `RECOVERY_GB=100 cargo test --release -p kvstore-disk --test recovery -- --nocapture` makes segments of 100 GB in
//! the temporary folder. Payloads are 4 KiB in slots of 1 and 5 MiB, so the files stay sparse; every record is
//! written by the log itself, with 128 meta bytes. Reads are O_DIRECT: no page cache of this machine helps.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_block::BlockIdentity;
use kvstore_disk::{Area, Block, ClockReading, DiskCompletion, DiskConfig, DiskLog};
use kvstore_io::files::{FolderConfig, open_folder};
use kvstore_io::ring::RingConfig;
use kvstore_io::{IoEngine, uring};

const GB: u64 = 1_000_000_000;
const FILES: u32 = 10;
const DEPTH: u32 = 64;

fn engine(folder: &Path, file_bytes: u64) -> Box<dyn IoEngine> {
    let files = open_folder(&FolderConfig::new(folder, file_bytes, FILES)).expect("segments");
    Box::new(uring::open(files, &RingConfig::default()).expect("io_uring"))
}

fn fill(log: &mut DiskLog, memory: &Arc<SlotPool>) {
    let mut targets = 0..log.slot_count();
    let (mut done, mut written) = (Vec::new(), 0);
    while written < log.slot_count() {
        while let Some(slot) = memory.acquire() {
            let Some(target) = targets.next() else { break };
            let mut identity = [7; 16];
            identity[..4].copy_from_slice(&target.to_le_bytes());
            let identity = BlockIdentity(identity);
            let block = Block { identity, parent: identity, tenant: 0, checksum: 0, meta: &[3; 128] };
            log.write(target, block, slot, 4096, 0).expect("accepted");
        }
        log.poll(ClockReading::now(), &mut done);
        written += done.iter().filter(|done| matches!(done, DiskCompletion::Written { .. })).count() as u32;
        if done.is_empty() {
            log.wait(None).expect("wait");
        }
        done.clear();
    }
}

fn measure(total_gb: u64, slot_bytes: u32) -> Duration {
    let folder = std::env::temp_dir().join(format!("kvasir-recovery-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file_bytes = total_gb * GB / u64::from(FILES) / 4096 * 4096;
    for index in 0..FILES {
        let file = std::fs::File::create(folder.join(format!("segment-{index:04}"))).expect("a file");
        file.set_len(file_bytes).expect("a sparse file");
    }
    let config = DiskConfig { slot_bytes, operations_max: DEPTH, ..DiskConfig::default() };
    let areas: Vec<Area> = (0..FILES).map(|file| Area { file, offset: 0, bytes: file_bytes }).collect();
    let open = || {
        DiskLog::open(config.clone(), &areas, engine(&folder, file_bytes), 1, ClockReading::now())
            .expect("a store")
    };
    let layout = SlabLayout { slot_bytes: 4096, slot_count: DEPTH };
    let memory = SlotPool::new(Arc::new(Slab::create("recovery", layout, PageSize::Standard).expect("slab")));
    let (mut log, ..) = open();
    let started = Instant::now();
    fill(&mut log, &memory);
    let slots = log.slot_count();
    let filling = started.elapsed();
    assert!(log.close(Duration::from_mins(1)).is_clean);
    let mut times = Vec::new();
    for _ in 0..5 {
        let (log, recovered, report) = open();
        assert_eq!(recovered.len() as u32, slots);
        times.push((report.elapsed, report.table_bytes));
        drop(log);
    }
    times.sort_unstable();
    let (median, table_bytes) = times[2];
    println!(
        "{total_gb} GB of segments, slots of {} KiB: {slots} blocks written in {filling:.1?}; opening reads {table_bytes} \
         bytes of tables, median {median:.1?} of 5 (least {:.1?}, most {:.1?}), {:.2} ns a table byte",
        slot_bytes >> 10,
        times[0].0,
        times[4].0,
        median.as_nanos() as f64 / table_bytes as f64
    );
    std::fs::remove_dir_all(&folder).expect("removed");
    median
}

#[test]
fn opening_takes_less_than_a_second_for_100_gb() {
    let total_gb = std::env::var("RECOVERY_GB").ok().and_then(|gb| gb.parse().ok()).unwrap_or(4);
    for slot_bytes in [1 << 20, 5 << 20] {
        let median = measure(total_gb, slot_bytes);
        assert!(median < Duration::from_secs(1) * (total_gb.div_ceil(100) as u32), "{median:?}");
    }
}
