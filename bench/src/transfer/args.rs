//! The options of `kvasir bench transfer`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::sizes::{RowShape, Sizes, parse_bytes, parse_seconds};

/// Operation that moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// One-sided writes; the last of a batch is signalled.
    Write,
    /// One-sided reads; the last of a batch is signalled.
    Read,
    /// Two-sided messages, at most 64 KiB.
    Send,
    /// Writes whose batches end with an immediate, which notifies the target of each.
    WriteImm,
}

impl Op {
    /// Name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Send => "send",
            Self::WriteImm => "write-imm",
        }
    }
}

/// Quantity to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Test {
    /// Bytes per second.
    Bw,
    /// One-way time: half a round trip of writes with immediate (or messages); for reads, a whole read.
    Lat,
    /// Messages per second.
    Rate,
    /// Time that the posting thread needs for 10,000 descriptors.
    Post,
}

/// Threads that drive the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Threads {
    /// One thread drives both ends in turn.
    One,
    /// One thread for each end.
    Two,
}

/// Memory of the slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MemoryKind {
    /// Host memory, 4 KiB pages.
    Host,
    /// Host memory, 2 MiB pages if there are enough.
    Huge,
    /// Device memory.
    Gpu,
}

/// Program or copy to compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Against {
    /// Copies of the same pieces by this process, in turn.
    Memcpy,
    /// `ib_write_bw` and its kin on the same device, in turn.
    Perftest,
    /// No comparison.
    None,
}

/// Transfers between two nodes.
#[derive(Debug, Clone, Args)]
pub struct TransferArgs {
    /// Transport: shm, tcp, rdma, or all of them one after the other.
    #[arg(long, default_value = "all")]
    pub transport: String,
    /// Operation.
    #[arg(long, value_enum, default_value = "write-imm")]
    pub op: Op,
    /// Quantity to measure; may be repeated.
    #[arg(long, value_enum, default_values_t = [Test::Bw, Test::Lat])]
    pub test: Vec<Test>,
    /// Sizes of a piece: a list (4K,64K), a range doubled (64..64M) or quadrupled (64..64M:4).
    #[arg(long, default_value = "4K,64K,1M,16M")]
    pub sizes: Sizes,
    /// Pieces of a batch; the last is signalled.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch: u32,
    /// Batches in flight.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub depth: u32,
    /// Cut each piece into rows: bytes of a row, local stride, remote stride.
    #[arg(long, value_name = "BYTES:LOCAL:REMOTE")]
    pub rows: Option<RowShape>,
    /// Both ends move at once.
    #[arg(long)]
    pub bidirectional: bool,
    /// Threads that drive the two ends if both are in this process.
    #[arg(long, value_enum, default_value = "two")]
    pub threads: Threads,
    /// Be the far end at this address and wait for `--connect`; with several rails a list.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "connect", value_delimiter = ',')]
    pub listen: Vec<String>,
    /// Address of the far end; with several rails a list.
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    pub connect: Vec<String>,
    /// Parallel connections, each over its own fabric; batches take turns.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub rails: u32,
    /// Devices of the rails, in order.
    #[arg(long, value_delimiter = ',')]
    pub devices: Vec<String>,
    /// GID index, for RDMA and perftest.
    #[arg(long)]
    pub gid_index: Option<u32>,
    /// Memory of the slots. With gpu a NIC moves the bytes without the processor; latency of plain writes then
    /// includes the copies with which their last byte is polled.
    #[arg(long, value_enum, default_value = "host")]
    pub memory: MemoryKind,
    /// Memory of the far end, if it is in this process; otherwise the far end has its own --memory.
    #[arg(long, value_enum, value_name = "MEMORY")]
    pub far_memory: Option<MemoryKind>,
    /// Ordinal of the GPU in the driver.
    #[arg(long, default_value_t = 0)]
    pub gpu: u32,
    /// Bytes of memory of each end; batches are reduced to fit.
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = parse_bytes)]
    pub memory_bytes: u64,
    /// Time for each size, rounds and peer together.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_seconds)]
    pub duration: Duration,
    /// Batches of a round (bw, rate) or round trips (lat), instead of a duration.
    #[arg(long)]
    pub iterations: Option<u64>,
    /// Batches or round trips before the first round.
    #[arg(long, default_value_t = 16)]
    pub warmup: u64,
    /// Rounds; the median is reported.
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=1001))]
    pub rounds: u32,
    /// lat: send at this fixed rate per second, whether or not answers have arrived, and measure from the
    /// scheduled time.
    #[arg(long, value_name = "PER_SECOND")]
    pub rate: Option<u32>,
    /// Program or copy to measure in the same run.
    #[arg(long, value_enum, default_value = "memcpy")]
    pub against: Against,
    /// Compare every byte of the last batches. Always with --smoke.
    #[arg(long)]
    pub check: bool,
    /// SVG file to draw throughput by size to.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Transports that do not reach device memory.
pub(super) const HOST_ONLY: [&str; 2] = ["shm", "tcp"];

/// Transports that `all` stands for.
pub(super) const TRANSPORTS: [&str; 3] = ["shm", "tcp", "rdma"];

impl TransferArgs {
    /// The same options with small sizes, to check that everything runs.
    #[must_use]
    pub(super) fn smoke(mut self) -> Self {
        self.check = true;
        self.rounds = self.rounds.min(3);
        self.warmup = self.warmup.min(2);
        self.iterations = Some(self.iterations.unwrap_or(4).min(50));
        self.memory_bytes = self.memory_bytes.min(64 << 20);
        self
    }
}

/// Lets clap supply the defaults.
#[derive(clap::Parser)]
struct Defaults {
    #[command(flatten)]
    args: TransferArgs,
}

impl TransferArgs {
    /// Returns the options of an empty command line.
    #[must_use]
    pub fn with_defaults() -> Self {
        <Defaults as clap::Parser>::parse_from(["transfer"]).args
    }
}
