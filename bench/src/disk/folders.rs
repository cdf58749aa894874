//! The disk tier's log over several folders, one on each device, then fio on a file in each of them, all at once.
//!
//! The log verifies blocks that it reads and checksums blocks that it writes, which fio does not do. fio has
//! the depth on each device; the log has as many requests in flight as all of them together, on whichever
//! device their blocks are. Writes of the log go round all slots in order, as the tier's do; fio's are random.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_disk::{
    Area, Block, ClockReading, DiskCompletion, DiskConfig, DiskLog, ReadCheck, ReadOutcome, WriteOutcome,
};
use kvstore_io::IoEngine;
use kvstore_io::files::{Files, FolderConfig, open_folders};
use kvstore_io::pread::{PreadConfig, PreadEngine};
use kvstore_io::testing::Random;
use kvstore_io::uring::{self, RingConfig};

use super::{Against, DiskArgs, Engine, Mode, Point, Target, fio, table};
use crate::results::{self, Better};
use crate::size;

const PAGE_BYTES: usize = 4096;

/// Folders created by this process; removed on drop.
struct Scratch(Vec<PathBuf>);

impl Drop for Scratch {
    fn drop(&mut self) {
        for folder in &self.0 {
            // A folder that cannot be removed has the process id in its name.
            let _gone = std::fs::remove_dir_all(folder);
        }
    }
}

/// Runs every size and depth, reads and writes.
pub(super) fn run(args: &DiskArgs) -> Result<()> {
    ensure!(args.engine != Engine::NvmePassthrough, "--folders has files: uring or pread");
    println!(
        "# disk tier over {} folders, {:?}, {} rounds of {} s, seed {}",
        args.folders.len(),
        args.engine,
        args.rounds,
        args.seconds,
        args.seed
    );
    println!(
        "# mode size depth-of-each: log GB/s [| fio in each folder at the same time, GB/s: sum = each | log / sum: median, least to most]"
    );
    if args.mode.contains(&Mode::Mixed) {
        println!("# mixed loads are left out");
    }
    for mode in args.mode.iter().copied().filter(|mode| *mode != Mode::Mixed) {
        for &size in &args.size {
            for &depth in &args.depth {
                compare(args, Point { size, depth, mode })?;
            }
        }
    }
    Ok(())
}

fn compare(args: &DiskArgs, point: Point) -> Result<()> {
    let (mut ours, mut ratios, mut each) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..args.rounds {
        let seed = args.seed + round as u64;
        let log = measure(args, point, seed)?;
        ours.push(log);
        if args.against == Against::Fio {
            each = fio_in_each(args, point, seed)?;
            ratios.push(log / each.iter().sum::<f64>());
        }
    }
    let gb = |rate: f64| rate / 1e9;
    let name = format!("{:?} {} {}", point.mode, size::render(point.size), point.depth);
    let values: Vec<f64> = ours.iter().copied().map(gb).collect();
    let row = format!("log over {} folders, {name}", args.folders.len());
    results::add("disk", &row, ("GB/s", Better::Higher), &values);
    results::add("disk", &format!("{row}: over fio's"), ("ratio", Better::Higher), &ratios);
    let mut line = format!("{name}: {:.3}", gb(table::median(ours)));
    if args.against == Against::Fio {
        let parts: Vec<String> = each.iter().map(|rate| format!("{:.3}", gb(*rate))).collect();
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        line += &format!(
            " | {:.3} = {} | {:.2}, {least:.2} to {most:.2}",
            gb(each.iter().sum()),
            parts.join(" + "),
            table::median(ratios)
        );
    }
    println!("{line}");
    Ok(())
}

/// Returns fio's bytes per second in each folder, all at once.
fn fio_in_each(args: &DiskArgs, point: Point, seed: u64) -> Result<Vec<f64>> {
    let prepare = |path: &PathBuf| Target::prepare(&DiskArgs { path: path.clone(), ..args.clone() });
    let targets = args.folders.iter().map(prepare).collect::<Result<Vec<Target>>>()?;
    std::thread::scope(|scope| {
        let running: Vec<_> =
            targets.iter().map(|target| scope.spawn(move || fio::fio(args, target, point, seed))).collect();
        let ended = running.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("fio's thread"))?);
        ended.map(|measured| Ok(measured?.bytes_per_s)).collect()
    })
}

/// Returns the log's bytes per second. Reads follow after all slots have been written once.
fn measure(args: &DiskArgs, point: Point, seed: u64) -> Result<f64> {
    let folders: Vec<PathBuf> = args
        .folders
        .iter()
        .map(|folder| folder.join(format!("kvasir-bench-log-{}", std::process::id())))
        .collect();
    let _scratch = Scratch(folders.clone());
    let segments = FolderConfig::new(PathBuf::new(), args.file_size, folders.len() as u32);
    let files = open_folders(&folders, &FolderConfig { write_zeros: true, ..segments })?;
    let depth = point.depth * folders.len();
    let mut log = open(args, files, point, folders.len(), depth)?;
    let layout = SlabLayout { slot_bytes: point.size as usize, slot_count: depth as u32 };
    let slab = Arc::new(Slab::create("bench-log", layout, PageSize::Standard)?);
    slab.populate(usize::MAX)?;
    log.register(&slab)?;
    let pool = SlotPool::new(slab);
    let mut work = Work {
        log,
        pool,
        size: point.size as u32,
        scratch: Vec::new(),
        depth,
        random: Random(seed),
        written: 0,
        writing: HashSet::new(),
        done: Vec::new(),
    };
    work.fill_memory()?;
    let slots = work.log.slot_count();
    ensure!(slots as usize > depth, "{} slots for {depth} requests: a larger --file-size", slots);
    if point.mode == Mode::Write {
        return work.write(Duration::from_secs_f64(args.seconds), u64::MAX);
    }
    work.write(Duration::MAX, slots.into())?;
    work.read(Duration::from_secs_f64(args.seconds))
}

fn open(args: &DiskArgs, files: Files, point: Point, stripes: usize, depth: usize) -> Result<DiskLog> {
    let transfer_bytes_max = point.size as usize;
    let engine: Box<dyn IoEngine> = if args.engine == Engine::Pread {
        Box::new(PreadEngine::new(files, &PreadConfig { threads: depth, depth, transfer_bytes_max })?)
    } else {
        let ring = RingConfig { depth, transfer_bytes_max, io_poll: args.io_poll, ..RingConfig::default() };
        Box::new(uring::open(files, &ring)?)
    };
    let areas: Vec<Area> =
        (0..).zip(&engine.geometry().files).map(|(file, &bytes)| Area { file, offset: 0, bytes }).collect();
    let slot_bytes = u32::try_from(point.size).context("a block is at most 1 GiB")?;
    let config = DiskConfig {
        slot_bytes,
        stripes: stripes as u32,
        operations_max: depth as u32,
        ..DiskConfig::default()
    };
    Ok(DiskLog::open(config, &areas, engine, 1, ClockReading::now())?.0)
}

struct Work {
    log: DiskLog,
    pool: Arc<SlotPool>,
    size: u32,
    scratch: Vec<u8>,
    depth: usize,
    random: Random,
    /// Number of blocks written so far. The slot of a block is its number modulo the number of slots.
    written: u32,
    /// Slots of the disk that are being written.
    writing: HashSet<u32>,
    done: Vec<DiskCompletion>,
}

impl Work {
    /// Fills the memory with random bytes, once.
    fn fill_memory(&mut self) -> Result<()> {
        let slots: Vec<SlotRef> = (0..self.depth).filter_map(|_| self.pool.acquire()).collect();
        let mut page = [0; PAGE_BYTES];
        for slot in &slots {
            for at in (0..self.size as usize).step_by(PAGE_BYTES) {
                page.as_chunks_mut::<8>()
                    .0
                    .iter_mut()
                    .for_each(|word| *word = self.random.draw().to_le_bytes());
                slot.slab().write(slot.slot(), at, &page);
            }
        }
        ensure!(slots.len() == self.depth, "a slot of memory for each request");
        Ok(())
    }

    /// Computes the checksum of a block to write, as its producer does.
    fn checksum(&mut self, memory: &SlotRef) -> u64 {
        self.scratch.resize(self.size as usize, 0);
        memory.slab().read(memory.slot(), 0, &mut self.scratch);
        dataplane_checksum::checksum(&self.scratch)
    }

    fn identity(number: u32) -> BlockIdentity {
        BlockIdentity(u128::from(number).to_le_bytes())
    }

    /// Writes for `length` or for `blocks` blocks, round all slots in order. Waits for a slot whose previous
    /// write is still in flight.
    fn write(&mut self, length: Duration, blocks: u64) -> Result<f64> {
        self.run(length, blocks, |work, memory| {
            let slot = work.written % work.log.slot_count();
            if work.writing.contains(&slot) {
                return false;
            }
            work.log.forget(slot);
            let parent = BlockIdentity([0; 16]);
            let checksum = work.checksum(&memory);
            let block = Block { identity: Self::identity(slot), parent, tenant: 0, checksum, meta: &[] };
            let is_submitted = work.log.write(slot, block, memory, work.size, 0).is_ok();
            work.written = work.written.wrapping_add(is_submitted.into());
            work.writing.extend(is_submitted.then_some(slot));
            is_submitted
        })
    }

    /// Reads random blocks for `length`; all of them are present.
    fn read(&mut self, length: Duration) -> Result<f64> {
        self.run(length, u64::MAX, |work, memory| {
            let slot = work.random.below(work.log.slot_count().into()) as u32;
            work.log.read(slot, Self::identity(slot), memory, ReadCheck::Log, 0).is_ok()
        })
    }

    /// Keeps the depth full with requests that `begin` starts; `false`: it could not start one. Returns bytes
    /// per second. Blocks still in flight when the time is over do not count.
    fn run(
        &mut self,
        length: Duration,
        blocks: u64,
        begin: impl Fn(&mut Self, SlotRef) -> bool,
    ) -> Result<f64> {
        let started = Instant::now();
        let (mut submitted, mut ended, mut rate) = (0, 0, None);
        loop {
            let elapsed = started.elapsed();
            let is_over = elapsed >= length || submitted >= blocks;
            if is_over {
                let bytes = f64::from(self.size) * ended as f64;
                rate.get_or_insert(bytes / elapsed.as_secs_f64());
                if submitted == ended {
                    return Ok(rate.unwrap_or_default());
                }
            }
            while !is_over
                && submitted < blocks
                && let Some(memory) = self.pool.acquire()
                && begin(self, memory)
            {
                submitted += 1;
            }
            for done in self.next()? {
                if let DiskCompletion::Written { slot, .. } = &done {
                    self.writing.remove(slot);
                }
                match done {
                    DiskCompletion::Read { outcome: ReadOutcome::Verified { .. }, .. }
                    | DiskCompletion::Written { outcome: WriteOutcome::Stored, .. } => ended += 1,
                    DiskCompletion::Flushed { .. } => {}
                    failed => bail!("{failed:?}"),
                }
            }
        }
    }

    /// Returns the ended requests, after a sleep if there were none.
    fn next(&mut self) -> Result<Vec<DiskCompletion>> {
        self.log.poll(ClockReading::now(), &mut self.done);
        if self.done.is_empty() {
            self.log.wait(None)?;
            self.log.poll(ClockReading::now(), &mut self.done);
        }
        Ok(std::mem::take(&mut self.done))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_go_through_a_log_over_two_folders() {
        let paths = ["one", "two"]
            .map(|name| std::env::temp_dir().join(format!("bench-{name}-{}", std::process::id())));
        paths.iter().for_each(|path| std::fs::create_dir_all(path).expect("a folder"));
        let args = DiskArgs {
            folders: paths.to_vec(),
            file_size: 2 << 20,
            engine: Engine::Pread,
            seconds: 0.05,
            rounds: 1,
            ..DiskArgs::with_defaults()
        };
        for mode in [Mode::Read, Mode::Write] {
            let rate = measure(&args, Point { size: 64 << 10, depth: 2, mode }, 1).expect("a rate");
            assert!(rate > 0.0, "{mode:?}");
        }
        assert!(
            paths.iter().all(|path| std::fs::read_dir(path).expect("a folder").next().is_none()),
            "all gone"
        );
        paths.iter().for_each(|path| std::fs::remove_dir(path).expect("empty"));
    }
}
