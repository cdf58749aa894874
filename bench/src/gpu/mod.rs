//! Copies to, from and on a GPU, and the layout kernels, each beside one plain copy of the same bytes: the two in turn, and
//! the median of the rounds' ratios is what counts. Timed from the host, around as many passes as take some
//! milliseconds, with a wait for the last one; single operations by the host's clock, from submission to the poll that
//! sees their end.

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

/// How the GPU is measured.
#[derive(Debug, Clone, Args)]
pub struct GpuArgs {
    /// Which device, by the driver's number.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Rounds of each comparison.
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// The most device memory that is used, for all of it together.
    #[arg(long, value_parser = size::parse, default_value = "96GiB")]
    memory: u64,
}

/// How much is done.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    pub(crate) rounds: usize,
    /// Device memory for all buffers together.
    pub(crate) memory_bytes: u64,
    /// Bytes of one pass of copies.
    pub(crate) copy_bytes: usize,
    /// The largest block of those.
    pub(crate) block_max: usize,
    /// Single operations that are timed.
    pub(crate) singles: usize,
    /// How long one timing takes at least, in so many passes as that needs.
    pub(crate) timing_seconds: f64,
    /// Layers of a model, and blocks of a batch, are cut to this.
    pub(crate) layers_max: u32,
    pub(crate) blocks_max: u32,
}

impl Effort {
    /// Tiny input, to see that everything runs.
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
            // The rest of the device's memory is the driver's, and that of whoever else is there.
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

/// Measures, or says why not: with tiny input that is no failure.
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

/// As one of all benchmarks: the others go on without it.
pub(crate) fn run_if_present(smoke: bool) -> Result<()> {
    let args = GpuArgs { device: 0, rounds: 11, memory: 96 << 30 };
    // Why was printed.
    run(smoke, &args).or_else(|error| if error.is::<Unavailable>() { Ok(()) } else { Err(error) })
}

/// The device with its kernels, or why there is none.
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

/// All of it, on a device whose kernels are ready. Parts that fail are told, and named in the error.
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
    // What fails is told where it does, and hinders no other part: on somebody's first run each line counts.
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
