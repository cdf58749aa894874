//! The compiler, where it is installed. It needs no device: `LD_LIBRARY_PATH` with `libnvrtc` is enough.

use dataplane_cuda::{CompileError, compile, compile_for};

const SOURCE: &str = "extern \"C\" __global__ void fill(unsigned *words, unsigned count, unsigned value) {
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread < count) words[thread] = value;
}";

#[test]
fn source_becomes_an_image_or_an_error_that_says_where() {
    match compile(SOURCE, "fill.cu", &["--gpu-architecture=compute_90"]) {
        Err(error @ CompileError::NoLibrary { .. }) => {
            assert!(error.to_string().contains("libnvrtc.so"), "{error}");
            assert_eq!(compile(SOURCE, "fill.cu", &[]), Err(error));
            eprintln!("skipped: libnvrtc is not installed");
            return;
        }
        compiled => {
            let image = compiled.expect("it compiles");
            let text = std::str::from_utf8(image.bytes()).expect("text");
            assert!(text.contains(".target sm_90") && text.contains(".entry fill"), "{text}");
            assert!(!text.ends_with('\0'));
        }
    }
    let image = compile_for((9, 0), SOURCE, "fill.cu", &[]).expect("it compiles");
    assert!(image.is_machine_code() && image.bytes().starts_with(b"\x7fELF"));
    let image = compile_for((99, 0), SOURCE, "fill.cu", &[]).expect("text, for a device of the future");
    assert!(!image.is_machine_code() && image.bytes().windows(6).any(|word| word == b".entry"));
    assert!(compile_for((9, 0), "nonsense", "broken.cu", &[]).is_err());
    let error = compile("__global__ void broken() { nonsense; }", "broken.cu", &[]).expect_err("broken");
    let text = error.to_string();
    assert!(text.contains("nvrtcCompileProgram of broken.cu: NVRTC_ERROR_COMPILATION"), "{text}");
    assert!(text.contains("broken.cu(1): error") && text.contains("nonsense"), "{text}");
    let unknown = compile(SOURCE, "fill.cu", &["--no-such-option"]).expect_err("unknown").to_string();
    assert!(unknown.contains("NVRTC_ERROR_INVALID_OPTION"), "{unknown}");
    assert!(matches!(compile("a\0b", "zero.cu", &[]), Err(CompileError::Zero(_))));
}
