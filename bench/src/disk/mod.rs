//! Reads and writes of one size at one depth, closed loop, beside fio on the same file with the same engine,
//! size and depth.
//!
//! A round is ours and then fio's, a few times in turn; ratios are taken round by round and their median is printed, as
//! machines are shared and noisy, with how far the rounds lie apart. Offsets are random and aligned to the size; our
//! draws and fio's have the same seed, though not the same generator. The file is filled before, since unwritten ranges are
//! read without the disk, and one with holes is refused. A mixed load is fio's `rwmixread=70`.
//!
//! Settings of both: O_DIRECT; buffers of standard pages (shared memory; fio: `iomem=mmapshared`), registered with the
//! ring (`fixedbufs`), as is the file (`registerfiles`), full of random bytes that are made once (`scramble_buffers=0`,
//! no `refill_buffers`); up to a batch is submitted by one system call, which waits for one completion, and up to a
//! batch is taken at a time (`iodepth_batch_submit=N`, `iodepth_batch_complete_min=1`, `iodepth_batch_complete_max=N`).
//! With pread: as many threads here as fio has jobs, which are processes. CPU is the processor time that the
//! kernel has counted for the process, its io_uring workers and the generation of buffers included, divided by
//! bytes moved; for fio, over the whole life of the process. fio's start is no work: its time is measured and
//! printed, and ratios of CPU are meaningful only if `--seconds` makes it small.
//!
//! Not here: the user-space NVMe driver. It needs the device taken from the kernel, so that fio could only be measured
//! on another one, or before and after; `tests/lab/nvme.sh` runs it.

mod closed_loop;
mod fio;
mod folders;
mod table;
mod target;

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

use crate::size;
use closed_loop::measure;
use fio::{fio, start_seconds};
use table::{Measured, Row};
use target::Target;

const GIB: f64 = (1_u64 << 30) as f64;
/// Reads among the requests of a mixed load, in percent.
const MIXED_READS: u64 = 70;

/// Direction of the requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// Reads only.
    Read,
    /// Writes only.
    Write,
    /// Seven reads to three writes.
    Mixed,
}

/// I/O engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// io_uring on a file or a block device.
    #[value(name = "uring", alias = "io_uring")]
    IoUring,
    /// pread and pwrite on threads.
    Pread,
    /// NVMe commands through the kernel, on /dev/ngXnY.
    #[value(name = "passthrough", alias = "nvme_passthrough")]
    NvmePassthrough,
}

/// Program to compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Against {
    /// The program fio.
    Fio,
    /// No comparison.
    None,
}

/// Reads and writes of aligned ranges.
#[derive(Debug, Clone, Args)]
pub(crate) struct DiskArgs {
    /// A file (created and filled), a folder to create one in, a block device, or an NVMe character device.
    /// Devices are overwritten, and only with --force.
    #[arg(long, default_value = ".")]
    pub(crate) path: PathBuf,
    /// Folders, one on each device: measure the disk tier's log over all of them, instead of `--path`.
    #[arg(long, value_delimiter = ',')]
    pub(crate) folders: Vec<PathBuf>,
    /// Bytes of the file, if it is created; with `--folders`, of the file in each folder.
    #[arg(long, default_value = "1GiB", value_parser = size::parse)]
    pub(crate) file_size: u64,
    /// Bytes of a request; a list.
    #[arg(long, default_value = "4KiB,128KiB,1MiB,5MiB", value_parser = size::parse, value_delimiter = ',')]
    pub(crate) size: Vec<u64>,
    /// Requests in flight; a list.
    #[arg(long, default_value = "1,4,16,64", value_delimiter = ',')]
    pub(crate) depth: Vec<usize>,
    /// Direction: reads, writes, or both; a list.
    #[arg(long, value_enum, default_value = "read,write,mixed", value_delimiter = ',')]
    pub(crate) mode: Vec<Mode>,
    /// I/O engine.
    #[arg(long, value_enum, default_value = "uring")]
    pub(crate) engine: Engine,
    /// Seconds of one measurement.
    #[arg(long, default_value_t = 2.0)]
    pub(crate) seconds: f64,
    /// Rounds; the median is reported.
    #[arg(long, default_value_t = 3)]
    pub(crate) rounds: usize,
    /// Program to measure in the same run.
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) against: Against,
    /// Poll the device for completions (fio: --hipri); not with pread.
    #[arg(long)]
    pub(crate) io_poll: bool,
    /// Overwrite a device that seems to hold data.
    #[arg(long)]
    pub(crate) force: bool,
    /// Completions taken before further requests are submitted, also by fio; 0: a quarter of the depth.
    #[arg(long, default_value_t = 0)]
    pub(crate) batch: usize,
    /// Seed of the offsets; each round adds its number.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

impl DiskArgs {
    /// Number of requests submitted, and of completions taken, at a time, on both sides.
    fn batch(&self, depth: usize) -> usize {
        if self.batch == 0 { depth.div_ceil(4) } else { self.batch.min(depth) }
    }

    /// Returns the defaults of the command line, with a file created for the run in the folder for temporary files.
    pub(crate) fn with_defaults() -> Self {
        Self {
            path: std::env::temp_dir(),
            folders: Vec::new(),
            file_size: 1 << 30,
            size: vec![4 << 10, 128 << 10, 1 << 20, 5 << 20],
            depth: vec![1, 4, 16, 64],
            mode: vec![Mode::Read, Mode::Write, Mode::Mixed],
            engine: Engine::IoUring,
            seconds: 2.0,
            rounds: 3,
            against: Against::None,
            io_poll: false,
            force: false,
            batch: 0,
            seed: 1,
        }
    }
}

/// One point of the measurement.
#[derive(Debug, Clone, Copy)]
struct Point {
    size: u64,
    depth: usize,
    mode: Mode,
}

/// Runs every size, depth and mode.
pub(crate) fn run(args: &DiskArgs, smoke: bool) -> Result<()> {
    let mut args = args.clone();
    if smoke {
        args.file_size = args.file_size.min(64 << 20);
        args.size.truncate(2);
        args.depth.truncate(2);
        args.seconds = args.seconds.min(0.1);
        args.rounds = 1;
    }
    ensure!(args.rounds > 0 && args.seconds > 0.0, "no rounds or no time");
    ensure!(
        !args.io_poll || args.engine != Engine::Pread,
        "--io-poll is for io_uring: threads that pread only wait"
    );
    if !args.folders.is_empty() {
        return folders::run(&args);
    }
    let target = Target::prepare(&args)?;
    println!(
        "# disk: {:?} on {}, {} rounds of {} s, seed {}",
        args.engine,
        target.path().display(),
        args.rounds,
        args.seconds,
        args.seed
    );
    if args.against == Against::Fio {
        println!("# fio's CPU has {:.3} s in it, each run, that its start takes", start_seconds()?);
    }
    println!("{}", table::LEGEND);
    let mut rows = Vec::new();
    for &mode in &args.mode {
        for &size in &args.size {
            for &depth in &args.depth {
                let row = compare(&args, &target, Point { size, depth, mode })?;
                println!("{}", row.line());
                rows.push(row);
            }
        }
    }
    if args.against == Against::Fio {
        println!("\n{}", table::render(&rows));
    }
    Ok(())
}

fn compare(args: &DiskArgs, target: &Target, point: Point) -> Result<Row> {
    let (mut ours, mut fios) = (Vec::new(), Vec::new());
    for round in 0..args.rounds {
        let seed = args.seed + round as u64;
        // The sides take turns in going first, because the first may find an idle device.
        let is_first = round % 2 == 0;
        if is_first {
            ours.push(measure(args, target, point, seed)?);
        }
        if args.against == Against::Fio {
            fios.push(fio(args, target, point, seed)?);
        }
        if !is_first {
            ours.push(measure(args, target, point, seed)?);
        }
    }
    table::add_results(point, &ours, &fios);
    Ok(Row::new(point, &ours, &fios))
}
