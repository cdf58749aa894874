//! Compilation of the kernels over the doubles of the driver and of its compiler: machine code for the
//! device, else text with the reason, else an error. A process of its own, since a process keeps the first
//! compiler that it finds.

#[path = "../../cuda/tests/double/mod.rs"]
mod double;
#[allow(dead_code, reason = "of the emulator only the library is used")]
#[path = "../../kernels/tests/emulator/harness.rs"]
mod harness;

use std::path::Path;

use dataplane_cuda::{CompileError, Cuda};
use dataplane_gpu::{KernelsError, LayoutKernels};
use double::Double;
use double::nvrtc::Compiler;

/// Returns the number of machine codes and of texts made, and the architecture that was compiled for last.
fn counts(compiler: &Compiler) -> (i64, i64, i64) {
    (compiler.get("machine_codes"), compiler.get("texts"), compiler.get("compiled_for"))
}

#[test]
fn machine_code_where_it_can_be_and_text_with_the_reason_where_not() {
    let Some(double) = Double::load() else { return };
    let options = ["-O2", "-shared", "-fPIC"];
    let Some(emulator) = harness::build("libkvasir_emulator.so", &["emulator.cpp"], &options) else { return };
    let compiler = Compiler::load(&emulator).expect("a compiler compiled the driver's double");
    let device = Cuda::open().expect("the double starts").device(0).expect("device");
    let why_text = || {
        let kernels = LayoutKernels::compile(&device).expect("kernels");
        kernels.why_text().map(str::to_owned)
    };

    assert_eq!((why_text(), counts(&compiler)), (None, (1, 0, 90)));

    compiler.set("architecture", 86);
    let reason = why_text().expect("a reason");
    assert_eq!(reason, "the compiler knows no sm_90: its newest before that is sm_86");
    assert_eq!(counts(&compiler), (1, 1, 86));

    compiler.set("architecture", 100);
    double.set("refuse_machine_code", 209);
    let reason = why_text().expect("a reason");
    assert!(reason.starts_with("the driver takes no machine code of this compiler: "), "{reason}");
    assert!(reason.contains("CUDA_ERROR_NO_BINARY_FOR_GPU (209)"), "{reason}");
    assert_eq!(counts(&compiler), (2, 2, 90));

    compiler.set_emulator(Path::new("/nonexistent"));
    let error = LayoutKernels::compile(&device).expect_err("the driver takes neither");
    assert!(matches!(error, KernelsError::Device(_)), "{error}");
    assert!(error.to_string().contains("CUDA_ERROR_INVALID_IMAGE (200)"), "{error}");

    compiler.set("architecture", 0);
    let error = LayoutKernels::compile(&device).expect_err("a compiler that knows newer devices only");
    let KernelsError::Compile { major: 9, minor: 0, error: CompileError::Refused { reason, log, .. } } =
        error
    else {
        panic!("{error}")
    };
    assert_eq!(reason, "NVRTC_ERROR_INVALID_OPTION");
    assert!(log.contains("--gpu-architecture=sm_90"), "{log}");
    assert_eq!(compiler.get("programs"), 0, "every program is destroyed");
}
