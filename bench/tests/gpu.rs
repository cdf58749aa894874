//! `bench gpu`: all of it over the doubles of the driver and its compiler and the kernels' emulator, with tiny
//! sizes; and its output and exit code without a GPU. PyTorch's side of the comparison, on the processor.

#[path = "../../dataplane/cuda/tests/double/mod.rs"]
mod double;
#[allow(dead_code, reason = "of the emulator only the library is used")]
#[path = "../../dataplane/kernels/tests/emulator/harness.rs"]
mod harness;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use bench::gpu::{Effort, measure};
use dataplane_cuda::Cuda;
use dataplane_gpu::LayoutKernels;
use double::Double;

fn emulator() -> Option<PathBuf> {
    harness::build("libkvasir_emulator.so", &["emulator.cpp"], &["-O2", "-shared", "-fPIC"])
}

#[test]
fn a_part_that_fails_hinders_no_other() {
    let Some(double) = Double::load() else { return };
    let Some(library) = emulator() else { return };
    let device = Cuda::open().expect("the double starts").device(0).expect("device");
    let image = format!("emulator:{}\n", library.display());
    // SAFETY: the emulator is compiled from the kernels' own text.
    let kernels = Arc::new(unsafe { LayoutKernels::load(&device, image.as_bytes()) }.expect("kernels"));
    measure(&device, &kernels, &Effort::smoke()).expect("measured");
    double.set("refuse_register", 801);
    let error = measure(&device, &kernels, &Effort::smoke()).expect_err("nothing can be pinned");
    assert_eq!(error.to_string(), "failed: copies, layouts");
}

/// Starts the program. Returns its exit code and its output.
fn run(arguments: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvasir-bench"));
    let output = command.args(arguments).envs(environment.iter().copied()).output().expect("starts");
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code(), format!("{out}{error}"))
}

/// Number of lines with this start and these contents.
fn rows(text: &str, start: &str, contents: &[&str]) -> usize {
    let is_row = |line: &&str| line.starts_with(start) && contents.iter().all(|part| line.contains(part));
    text.lines().filter(is_row).count()
}

/// The loader gives the program the doubles for the libraries that it opens by name: its code is the same as on
/// a GPU.
#[test]
fn the_program_compiles_its_kernels_and_prints_every_row() {
    let Some(driver) = double::compiled(&[]) else { return };
    let Some(emulator) = emulator() else { return };
    let compiler = double::nvrtc::compiled().expect("a compiler compiled the driver's double");
    let doubles = format!("{}:{}", driver.display(), compiler.display());
    let emulator = emulator.display().to_string();
    let environment = [("LD_PRELOAD", doubles.as_str()), ("KVASIR_DOUBLE_EMULATOR", &emulator)];
    let (code, text) = run(&["--smoke", "gpu"], &environment);
    assert_eq!(code, Some(0), "{text}");
    println!("{text}");
    assert_eq!(rows(&text, "# gpu: Double 0 (9.0), 2 multiprocessors", &["kernels ready in"]), 1, "{text}");
    for way in ["h2d", "d2h", "d2d"] {
        assert_eq!(rows(&text, way, &["GB/s = ", " calls; ", " / "]), 2, "{way} of two sizes: {text}");
    }
    // Three models, each with one block and with two.
    for work in ["gather", "scatter"] {
        assert_eq!(rows(&text, &format!("{work} "), &["GB/s = ", " of 3"]), 6, "{work}: {text}");
    }
    for work in ["checksum in gather, over gather", "checksum in scatter, over scatter"] {
        assert_eq!(rows(&text, work, &[" % ("]), 6, "{work}: {text}");
    }
    assert_eq!(rows(&text, "# d2n: NICs", &[]), 1, "{text}");
    assert!(!text.contains("NaN") && !text.contains("inf") && !text.contains("failed"), "{text}");
    let (code, text) = run(&["--smoke", "gpu", "--device", "7"], &environment);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("CUDA_ERROR_INVALID_DEVICE"), "{text}");
}

/// Run in processes of their own: this one may hold the double.
#[test]
fn without_a_gpu_it_says_so() {
    let (code, text) = run(&["--smoke", "gpu"], &[]);
    assert_eq!(code, Some(0), "{text}");
    if !text.contains("skipped: ") {
        return eprintln!("SKIPPED: there is a GPU: {text}");
    }
    let (code, text) = run(&["gpu"], &[]);
    assert_eq!(code, Some(77), "{text}");
    assert!(text.contains("CUDA"), "{text}");
}

#[test]
fn the_torch_side_runs_on_the_processor() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/gpu/torch_copies.py");
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut command = Command::new(&python);
    let Ok(output) = command.arg("-B").arg(script).args(["--device", "cpu"]).output() else {
        return eprintln!("SKIPPED: {python} cannot be run (PYTHON)");
    };
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.code() == Some(77) {
        assert!(text.starts_with("SKIPPED: no torch"), "{text}{error}");
        return eprintln!("{}", text.trim());
    }
    assert!(output.status.success(), "{text}{error}");
    assert_eq!(
        (rows(&text, "torch gather", &["GB/s"]), rows(&text, "torch scatter", &["GB/s"])),
        (6, 6),
        "{text}"
    );
}
