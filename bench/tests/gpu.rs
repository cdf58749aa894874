//! `bench gpu`: all of it over the double of the driver and the kernels' emulator, with tiny sizes; and what it says and how
//! it ends without a GPU.

#[path = "../../dataplane/cuda/tests/double/mod.rs"]
mod double;
#[allow(dead_code, reason = "of the emulator only the library is used")]
#[path = "../../dataplane/kernels/tests/emulator/harness.rs"]
mod harness;

use std::process::Command;
use std::sync::Arc;

use bench::gpu::{Effort, measure};
use dataplane_cuda::Cuda;
use dataplane_gpu::LayoutKernels;
use double::Double;

#[test]
fn everything_runs_over_the_double() {
    let Some(_double) = Double::load() else { return };
    let options = ["-O2", "-shared", "-fPIC"];
    let Some(library) = harness::build("libkvasir_emulator.so", &["emulator.cpp"], &options) else { return };
    let device = Cuda::open().expect("the double starts").device(0).expect("device");
    let image = format!("emulator:{}\n", library.display());
    // SAFETY: the emulator is compiled from the kernels' own text.
    let kernels = unsafe { LayoutKernels::load(&device, image.as_bytes()) }.expect("kernels");
    measure(&device, &Arc::new(kernels), &Effort::smoke()).expect("measured");
}

/// In processes of their own: this one may hold the double.
#[test]
fn without_a_gpu_it_says_so() {
    let run = |arguments: &[&str]| {
        let command =
            Command::new(env!("CARGO_BIN_EXE_kvasir-bench")).args(arguments).output().expect("starts");
        let (out, error) =
            (String::from_utf8_lossy(&command.stdout), String::from_utf8_lossy(&command.stderr));
        (command.status.code(), format!("{out}{error}"))
    };
    let (code, text) = run(&["--smoke", "gpu"]);
    assert_eq!(code, Some(0), "{text}");
    if !text.contains("skipped: ") {
        return eprintln!("SKIPPED: there is a GPU: {text}");
    }
    let (code, text) = run(&["gpu"]);
    assert_eq!(code, Some(77), "{text}");
    assert!(text.contains("CUDA"), "{text}");
}
