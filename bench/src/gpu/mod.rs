//! Copies to, from and on a GPU, and the layout kernels, each beside one plain copy of the same bytes. The two
//! take turns, and the median of the rounds' ratios is reported. Times are taken on the host around as many
//! passes as last some milliseconds, with a wait for the last one; single operations by the host's clock, from
//! submission to the poll that sees their end.

mod copies;
mod direct;
mod layouts;
mod rig;

use std::sync::Arc;

use anyhow::{Result, bail};
use clap::Args;
use dataplane_cuda::{CompileError, Cuda, Device};
use dataplane_gpu::{KernelsError, LayoutKernels};

use crate::size;
use crate::transfer::Unavailable;

/// Options of the GPU benchmark.
#[derive(Debug, Clone, Args)]
pub struct GpuArgs {
    /// Ordinal of the device in the driver.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Rounds of each comparison.
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// Most device memory used, for all buffers together.
    #[arg(long, value_parser = size::parse, default_value = "96GiB")]
    memory: u64,
}

/// Amount of work.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    pub(crate) rounds: usize,
    /// Device memory for all buffers together.
    pub(crate) memory_bytes: u64,
    /// Bytes of one pass of copies.
    pub(crate) copy_bytes: usize,
    /// Largest block of these copies.
    pub(crate) block_max: usize,
    /// Number of single operations that are timed.
    pub(crate) singles: usize,
    /// Least time of one timing in seconds; as many passes are made as that needs.
    pub(crate) timing_seconds: f64,
    /// Upper limits for the layers of a model and the blocks of a batch.
    pub(crate) layers_max: u32,
    pub(crate) blocks_max: u32,
}

impl Effort {
    /// Tiny input, to check that everything runs.
    #[must_use]
    pub fn smoke() -> Self {
        Self {
            rounds: 1,
            memory_bytes: 64 << 20,
            copy_bytes: 64 << 10,
            block_max: 16 << 10,
            singles: 3,
            timing_seconds: 0.0,
            layers_max: 1,
            blocks_max: 2,
        }
    }

    fn full(args: &GpuArgs, device: &Device) -> Self {
        Self {
            rounds: args.rounds.max(1) | 1,
            // The rest of the device's memory is left to the driver and to other processes.
            memory_bytes: args.memory.min(device.description().memory_bytes as u64 / 4 * 3),
            copy_bytes: 256 << 20,
            block_max: 16 << 20,
            singles: 2000,
            timing_seconds: 0.02,
            layers_max: u32::MAX,
            blocks_max: 4096,
        }
    }
}

/// Measures, or prints why not; with tiny input a missing GPU is no failure.
pub(crate) fn run(smoke: bool, args: &GpuArgs) -> Result<()> {
    match open(args.device)? {
        Ok((device, kernels)) => {
            measure(&device, &kernels, &if smoke { Effort::smoke() } else { Effort::full(args, &device) })
        }
        Err(reason) => {
            println!("skipped: {reason}");
            if smoke { Ok(()) } else { Err(Unavailable("bench gpu measured nothing".to_owned()).into()) }
        }
    }
}

/// Runs as one of all benchmarks: a missing GPU does not stop the others.
pub(crate) fn run_if_present(smoke: bool) -> Result<()> {
    let args = GpuArgs { device: 0, rounds: 11, memory: 96 << 30 };
    // The reason has been printed.
    run(smoke, &args).or_else(|error| if error.is::<Unavailable>() { Ok(()) } else { Err(error) })
}

/// Returns the device with its kernels, or the reason why there is none.
fn open(ordinal: u32) -> Result<Result<(Device, Arc<LayoutKernels>), String>> {
    let cuda = match Cuda::open() {
        Ok(cuda) => cuda,
        Err(reason) => return Ok(Err(reason.to_string())),
    };
    let device = cuda.device(ordinal)?;
    match LayoutKernels::compile(&device) {
        Ok(kernels) => Ok(Ok((device, Arc::new(kernels)))),
        Err(reason @ KernelsError::Compile { error: CompileError::NoLibrary { .. }, .. }) => {
            Ok(Err(reason.to_string()))
        }
        Err(error) => Err(error.into()),
    }
}

/// Measures all parts on a device whose kernels are ready. Failed parts are printed, and named in the error.
pub fn measure(device: &Device, kernels: &Arc<LayoutKernels>, effort: &Effort) -> Result<()> {
    let description = device.description();
    let (major, minor) = description.compute_capability;
    println!(
        "# gpu: {} ({major}.{minor}), {} multiprocessors, {:.1} GiB, driver {}; kernels ready in {:.0} ms; median of {} rounds",
        description.name,
        description.multiprocessors,
        description.memory_bytes as f64 / (1_u64 << 30) as f64,
        description.driver_version,
        kernels.took().as_secs_f64() * 1e3,
        effort.rounds
    );
    if let Some(reason) = kernels.why_text() {
        println!("# kernels compiled by the driver, from text: {reason}");
    }
    // A failed part is printed at once and does not stop the others: on a first run on a machine each line counts.
    let mut failed = Vec::new();
    let mut part = |name, measured: Result<()>| {
        if let Err(error) = measured {
            println!("{name} failed: {error:#}");
            failed.push(name);
        }
    };
    part("copies", copies::run(device, effort));
    part("layouts", layouts::run(device, kernels, effort));
    part("d2n", direct::run(device));
    if failed.is_empty() { Ok(()) } else { bail!("failed: {}", failed.join(", ")) }
}
