//! Reads and writes of one size at one depth, closed loop, beside fio on the same file with the same engine, size and depth.
//!
//! A round is ours and then fio's, a few times in turn; ratios are taken round by round and their median is printed, as
//! machines are shared and noisy. Offsets are random and aligned to the size. CPU is what the process used, all
//! its threads, by bytes moved. The file is filled before, since unwritten ranges are read without the disk.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use hdrhistogram::Histogram;
use kvstore_io::files::{DeviceConfig, Files, open_device, open_file};
use kvstore_io::passthrough::{self, NvmeDevice, NvmeDeviceConfig};
use kvstore_io::pread::{PreadConfig, PreadEngine};
use kvstore_io::testing::Random;
use kvstore_io::uring::{self, RingConfig};
use kvstore_io::{Buffer, Completion, IoEngine, Operation, Request};

/// Latencies up to a minute.
const LATENCY_NS_MAX: u64 = 60_000_000_000;
const GIB: f64 = (1_u64 << 30) as f64;

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Either, with equal chances.
    Mixed,
}

/// Which engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// io_uring on a file or a block device.
    #[value(name = "io_uring")]
    IoUring,
    /// pread and pwrite on threads.
    Pread,
    /// NVMe commands through the kernel, on /dev/ngXnY.
    #[value(name = "nvme_passthrough")]
    NvmePassthrough,
}

/// What stands beside our figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Against {
    /// The program fio.
    Fio,
    /// Nothing.
    None,
}

/// Reads and writes of aligned ranges.
#[derive(Debug, Clone, Args)]
pub(crate) struct DiskArgs {
    /// A file (made and filled), a folder to make one in, a block device, or an NVMe character device. Devices are
    /// overwritten, and only with --force.
    #[arg(long, default_value = ".")]
    pub(crate) path: PathBuf,
    /// Bytes of the file, if it is made.
    #[arg(long, default_value = "1GiB", value_parser = bytes)]
    pub(crate) file_size: u64,
    /// Bytes of a request: a list.
    #[arg(long, default_value = "4KiB,128KiB,1MiB,5MiB", value_parser = bytes, value_delimiter = ',')]
    pub(crate) size: Vec<u64>,
    /// Requests in flight: a list.
    #[arg(long, default_value = "1,4,16,64", value_delimiter = ',')]
    pub(crate) depth: Vec<usize>,
    /// Reads, writes, or both: a list.
    #[arg(long, value_enum, default_value = "read,write,mixed", value_delimiter = ',')]
    pub(crate) mode: Vec<Mode>,
    /// What does them.
    #[arg(long, value_enum, default_value = "io_uring")]
    pub(crate) engine: Engine,
    /// Seconds of one measurement.
    #[arg(long, default_value_t = 2.0)]
    pub(crate) seconds: f64,
    /// Rounds, of which the median counts.
    #[arg(long, default_value_t = 3)]
    pub(crate) rounds: usize,
    /// What to measure beside.
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) against: Against,
    /// Polls the device for completions (fio: --hipri).
    #[arg(long)]
    pub(crate) io_poll: bool,
    /// Overwrites a device that seems to have something on it.
    #[arg(long)]
    pub(crate) force: bool,
    /// Seed of the offsets.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

impl DiskArgs {
    /// What the command line would give without arguments, over a file that is made for it in the folder for temporary
    /// files.
    pub(crate) fn with_defaults() -> Self {
        Self {
            path: std::env::temp_dir(),
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
            seed: 1,
        }
    }
}

/// `4096`, `4K`, `4KiB`, `5MiB`, `1GiB`.
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| format!("'{text}' does not start with a number"))?;
    let shift = match unit {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        _ => return Err(format!("'{unit}' is no unit of bytes: KiB, MiB and GiB are")),
    };
    number.checked_mul(1 << shift).filter(|&bytes| bytes > 0).ok_or_else(|| format!("'{text}' is not usable"))
}

/// One measurement.
#[derive(Debug, Clone, Copy, Default)]
struct Measured {
    bytes_per_s: f64,
    cpu_s_per_gib: f64,
    p50_us: f64,
    p99_us: f64,
    p99_9_us: f64,
}

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
    let target = Target::prepare(&args)?;
    let against = match args.against {
        Against::Fio => " | fio: GB/s, CPU s/GiB, p50/p99/p99.9 us | ratios: throughput, CPU, p99",
        Against::None => "",
    };
    println!(
        "# disk: {:?} on {}, {} rounds of {} s",
        args.engine,
        target.path.display(),
        args.rounds,
        args.seconds
    );
    println!("# mode size depth: GB/s, CPU s/GiB, p50/p99/p99.9 us{against}");
    for &mode in &args.mode {
        for &size in &args.size {
            for &depth in &args.depth {
                compare(&args, &target, Point { size, depth, mode })?;
            }
        }
    }
    Ok(())
}

fn compare(args: &DiskArgs, target: &Target, point: Point) -> Result<()> {
    let (mut ours, mut fios) = (Vec::new(), Vec::new());
    for round in 0..args.rounds {
        let measure_ours = || measure(args, target, point, args.seed + round as u64);
        match args.against {
            Against::None => ours.push(measure_ours()?),
            // Who comes first changes, as the first may find a device that rests.
            Against::Fio if round % 2 == 0 => {
                ours.push(measure_ours()?);
                fios.push(fio(args, target, point)?);
            }
            Against::Fio => {
                fios.push(fio(args, target, point)?);
                ours.push(measure_ours()?);
            }
        }
    }
    let mut line =
        format!("{:?} {} {}: {}", point.mode, human(point.size), point.depth, render(&ours)).to_lowercase();
    if !fios.is_empty() {
        let ratio = |of: fn(&Measured) -> f64| {
            median(ours.iter().zip(&fios).map(|(ours, fio)| of(ours) / of(fio)).collect())
        };
        line += &format!(
            " | {} | {:.3} {:.3} {:.3}",
            render(&fios),
            ratio(|m| m.bytes_per_s),
            ratio(|m| m.cpu_s_per_gib),
            ratio(|m| m.p99_us)
        );
    }
    println!("{line}");
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn render(rounds: &[Measured]) -> String {
    let of = |field: fn(&Measured) -> f64| median(rounds.iter().map(field).collect());
    format!(
        "{:.3}, {:.3}, {:.0}/{:.0}/{:.0}",
        of(|m| m.bytes_per_s) / 1e9,
        of(|m| m.cpu_s_per_gib),
        of(|m| m.p50_us),
        of(|m| m.p99_us),
        of(|m| m.p99_9_us)
    )
}

fn human(bytes: u64) -> String {
    match bytes {
        _ if bytes.is_multiple_of(1 << 20) => format!("{}MiB", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{}KiB", bytes >> 10),
        _ => format!("{bytes}B"),
    }
}

/// What is read and written; a file that was made for it goes away again.
struct Target {
    path: PathBuf,
    bytes: u64,
    is_device: bool,
    made: bool,
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.made {
            // What is left over then is a file with a telling name.
            let _gone = std::fs::remove_file(&self.path);
        }
    }
}

impl Target {
    fn prepare(args: &DiskArgs) -> Result<Self> {
        let mut path = args.path.clone();
        if path.is_dir() {
            path.push(format!("kvasir-bench-disk-{}", std::process::id()));
        }
        let found = std::fs::metadata(&path).ok();
        let is_file = found.as_ref().is_none_or(std::fs::Metadata::is_file);
        if !is_file {
            ensure!(
                args.force,
                "{} is a device: its contents would be lost; --force says so",
                path.display()
            );
            return Ok(Self { path, bytes: 0, is_device: true, made: false });
        }
        let only_reads = args.mode.iter().all(|mode| *mode == Mode::Read);
        ensure!(
            found.is_none() || args.force || only_reads,
            "{} exists and would be overwritten; --force says so, or --mode read",
            path.display()
        );
        // A block is the granularity of direct I/O.
        let bytes = match &found {
            Some(found) if found.len() > 0 => found.len(),
            _ => args.file_size - args.file_size % 4096,
        };
        ensure!(
            bytes > 0 && bytes.is_multiple_of(4096),
            "{} has {bytes} bytes, no multiple of 4096",
            path.display()
        );
        let target = Self { path, bytes, is_device: false, made: found.is_none() };
        // Opening makes, preallocates and fills it.
        drop(open_file(&target.path, target.bytes, true, true)?);
        Ok(target)
    }

    fn open(&self, args: &DiskArgs, depth: usize, size: u64) -> Result<Box<dyn IoEngine>> {
        let ring = RingConfig {
            depth,
            transfer_bytes_max: size as usize,
            io_poll: args.io_poll,
            ..RingConfig::default()
        };
        Ok(match args.engine {
            Engine::IoUring => Box::new(uring::open(self.files(args)?, &ring)?),
            Engine::Pread => {
                let threads = depth.min(64);
                let config = PreadConfig { threads, depth, transfer_bytes_max: size as usize };
                Box::new(PreadEngine::new(self.files(args)?, &config)?)
            }
            Engine::NvmePassthrough => {
                let config =
                    NvmeDeviceConfig { path: self.path.clone(), force: args.force, block_bytes: 4096 };
                Box::new(passthrough::open(NvmeDevice::open(&config)?, &ring)?)
            }
        })
    }

    fn files(&self, args: &DiskArgs) -> Result<Files> {
        Ok(if self.is_device {
            let config = DeviceConfig { path: self.path.clone(), force: args.force, block_bytes: 4096 };
            open_device(&config)?
        } else {
            open_file(&self.path, self.bytes, true, true)?
        })
    }
}

/// One of ours.
fn measure(args: &DiskArgs, target: &Target, point: Point, seed: u64) -> Result<Measured> {
    let mut engine = target.open(args, point.depth, point.size)?;
    let places = engine.geometry().files[0] / point.size;
    ensure!(places > 0, "{} is smaller than {}", target.path.display(), human(point.size));
    let layout = SlabLayout { slot_bytes: point.size as usize, slot_count: point.depth as u32 };
    let slab = Arc::new(Slab::create("bench-disk", layout, PageSize::HugeIfAvailable)?);
    slab.populate(usize::MAX)?;
    let pool = SlotPool::new(Arc::clone(&slab));
    engine.register(&slab)?;
    let mut random = Random(seed);
    let mut histogram = Histogram::<u64>::new_with_bounds(1, LATENCY_NS_MAX, 3)?;
    let mut sent_at = vec![Instant::now(); point.depth];
    let mut arrived: Vec<Completion> = Vec::with_capacity(point.depth);
    let mut next = |id: u64, buffer: Buffer| {
        let operation = match point.mode {
            Mode::Read => Operation::Read,
            Mode::Write => Operation::Write,
            Mode::Mixed if random.chance(0.5) => Operation::Read,
            Mode::Mixed => Operation::Write,
        };
        Request { id, operation, file: 0, offset: random.below(places) * point.size, buffer }
    };
    // What completes together is continued in parts, so that the device has work while the rest is looked at.
    let batch = point.depth.div_ceil(4);
    let length = Duration::from_secs_f64(args.seconds);
    let (cpu, started) = (cpu_seconds(), Instant::now());
    for id in 0..point.depth as u64 {
        let slot = pool.acquire().context("a slot for each request")?;
        let buffer = Buffer::Slot { slot, offset: 0, len: point.size as usize };
        sent_at[id as usize] = Instant::now();
        ensure!(engine.submit(next(id, buffer)).is_ok(), "the depth is what was asked for");
    }
    let mut moved = 0_u64;
    let mut now = started;
    while engine.in_flight() > 0 {
        // Hands over what was submitted, and sleeps: one system call.
        engine.wait(None)?;
        engine.poll(batch, &mut arrived);
        now = Instant::now();
        let running = now - started < length;
        for Completion { id, buffer, result } in arrived.drain(..) {
            result?;
            moved += point.size;
            histogram.saturating_record((now - sent_at[id as usize]).as_nanos() as u64);
            if running {
                sent_at[id as usize] = now;
                ensure!(engine.submit(next(id, buffer)).is_ok(), "a request that completed made room");
            }
        }
    }
    let seconds = (now - started).as_secs_f64();
    let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Measured {
        bytes_per_s: moved as f64 / seconds,
        cpu_s_per_gib: (cpu_seconds() - cpu) / (moved as f64 / GIB),
        p50_us: at(0.5),
        p99_us: at(0.99),
        p99_9_us: at(0.999),
    })
}

/// User and system time of this process so far, all threads.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The same by fio, in one process, as fast as it can be told to.
fn fio(args: &DiskArgs, target: &Target, point: Point) -> Result<Measured> {
    let mut command = Command::new("fio");
    let engine = match args.engine {
        Engine::IoUring => "io_uring",
        Engine::Pread => "psync",
        Engine::NvmePassthrough => "io_uring_cmd",
    };
    command
        .args(["--name=disk", "--output-format=json", "--direct=1", "--norandommap"])
        .args(["--random_generator=tausworthe64", "--percentile_list=50:99:99.9", "--group_reporting"])
        // From submission to completion, as ours.
        .args(["--lat_percentiles=1", "--clat_percentiles=0"])
        .args(["--time_based", "--invalidate=0", "--allow_file_create=0"])
        .arg(format!("--filename={}", target.path.display()))
        .arg(format!("--ioengine={engine}"))
        .arg(format!("--bs={}", point.size))
        .arg(format!("--runtime={}ms", (args.seconds * 1e3) as u64))
        .arg(match point.mode {
            Mode::Read => "--rw=randread",
            Mode::Write => "--rw=randwrite",
            Mode::Mixed => "--rw=randrw",
        });
    if !target.is_device {
        command.arg(format!("--size={}", target.bytes));
    }
    match args.engine {
        // One request for each thread.
        Engine::Pread => command.arg(format!("--numjobs={}", point.depth)),
        Engine::IoUring | Engine::NvmePassthrough => {
            command.arg(format!("--iodepth={}", point.depth)).args(["--fixedbufs=1", "--registerfiles=1"])
        }
    };
    if args.engine == Engine::NvmePassthrough {
        command.arg("--cmd_type=nvme");
    }
    if args.io_poll {
        command.arg("--hipri");
    }
    let output = command.stdin(Stdio::null()).output().context("start fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("fio: {}{}", text, String::from_utf8_lossy(&output.stderr));
    }
    parse(&text).with_context(|| format!("output of fio on {}", Path::new(&target.path).display()))
}

/// fio's figures. Reads and writes together; percentiles of the slower of both.
fn parse(text: &str) -> Result<Measured> {
    // Notes of fio may stand before the object.
    let start = text.find('{').context("no JSON")?;
    let report: serde_json::Value = serde_json::from_str(&text[start..])?;
    let job = report.pointer("/jobs/0").context("no job")?;
    let number = |path: &str| job.pointer(path).and_then(serde_json::Value::as_f64).unwrap_or(0.0);
    let moved = number("/read/io_bytes") + number("/write/io_bytes");
    let run_ms = number("/read/runtime").max(number("/write/runtime"));
    ensure!(moved > 0.0 && run_ms > 0.0, "fio moved nothing");
    // Percentages of a core, for the sum of the jobs' times.
    let cpu = (number("/usr_cpu") + number("/sys_cpu")) / 100.0 * number("/job_runtime") / 1e3;
    let at = |name: &str| {
        let of = |way: &str| number(&format!("/{way}/lat_ns/percentile/{name}"));
        of("read").max(of("write")) / 1e3
    };
    Ok(Measured {
        bytes_per_s: moved / (run_ms / 1e3),
        cpu_s_per_gib: cpu / (moved / GIB),
        p50_us: at("50.000000"),
        p99_us: at("99.000000"),
        p99_9_us: at("99.900000"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, expected) in
            [("4096", 4096), ("4K", 4096), ("128KiB", 131_072), ("5MiB", 5 << 20), ("1G", 1 << 30)]
        {
            assert_eq!(bytes(text), Ok(expected));
        }
        for text in ["", "KiB", "4kb", "0", "99999999999GiB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_output_of_fio_is_read_and_other_output_is_an_error() {
        let text = r#"note: something
            {"jobs": [{"job_runtime": 2000, "usr_cpu": 10.0, "sys_cpu": 15.0,
            "read": {"io_bytes": 1073741824, "runtime": 1000, "lat_ns": {"percentile": {"50.000000": 82000, "99.000000": 90000}}},
            "write": {"io_bytes": 1073741824, "runtime": 1001, "lat_ns": {"percentile": {"50.000000": 93000}}}}]}"#;
        let measured = parse(text).expect("a report");
        assert_eq!((measured.p50_us, measured.p99_us, measured.p99_9_us), (93.0, 90.0, 0.0));
        assert_eq!(measured.cpu_s_per_gib, 0.25);
        assert!((measured.bytes_per_s - 2.0 * GIB / 1.001).abs() < 1.0);
        for text in ["", "{}", "fio: no such file", r#"{"jobs": [{"read": {"io_bytes": 0}}]}"#] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
