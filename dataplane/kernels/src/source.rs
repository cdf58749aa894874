//! The CUDA C++ text of the kernels and how to compile it.

/// The files in the order in which they make one translation unit.
pub const FILES: [(&str, &str); 6] = [
    ("base.cu", include_str!("../kernels/base.cu")),
    ("checksum.cu", include_str!("../kernels/checksum.cu")),
    ("copy.cu", include_str!("../kernels/copy.cu")),
    ("element.cu", include_str!("../kernels/element.cu")),
    ("quantise.cu", include_str!("../kernels/quantise.cu")),
    ("dequantise.cu", include_str!("../kernels/dequantise.cu")),
];

/// Which of the kernels a program needs: those of 8-bit formats take six times as long to compile as the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelSet {
    /// Copies and checksums.
    Copies,
    /// Those and the 8-bit formats.
    All,
}

impl KernelSet {
    /// Their text for the run-time compiler. It includes nothing.
    #[must_use]
    pub fn source(self) -> &'static str {
        match self {
            Self::Copies => COPIES_SOURCE,
            Self::All => SOURCE,
        }
    }

    /// Their names.
    #[must_use]
    pub fn functions(self) -> &'static [&'static str] {
        match self {
            Self::Copies => &FUNCTIONS[..COPIES],
            Self::All => &FUNCTIONS,
        }
    }
}

/// How many of [`FUNCTIONS`] are copies and checksums: they come first.
const COPIES: usize = 16;

const COPIES_SOURCE: &str = concat!(
    include_str!("../kernels/base.cu"),
    include_str!("../kernels/checksum.cu"),
    include_str!("../kernels/copy.cu"),
);

/// All of it as one text for the run-time compiler. It includes nothing.
pub const SOURCE: &str = concat!(
    include_str!("../kernels/base.cu"),
    include_str!("../kernels/checksum.cu"),
    include_str!("../kernels/copy.cu"),
    include_str!("../kernels/element.cu"),
    include_str!("../kernels/quantise.cu"),
    include_str!("../kernels/dequantise.cu"),
);

/// Options beside `--gpu-architecture`. Never `--use_fast_math` and never `--ftz=true`: codes and scales are
/// exact to the bit, denormals included. `--define-macro=KVASIR_PORTABLE` takes the hand-written fp8
/// conversion on every architecture in place of the machine's (8.9 and later); both give the same bits.
pub const COMPILE_OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// Every kernel's name, as [`Launch::function`](crate::Launch::function) gives it. The names are not mangled.
pub const FUNCTIONS: [&str; 40] = [
    "kvasir_checksum_16",
    "kvasir_checksum_1",
    "kvasir_gather_16",
    "kvasir_gather_8",
    "kvasir_gather_4",
    "kvasir_gather_2",
    "kvasir_gather_1",
    "kvasir_gather_sum_16",
    "kvasir_gather_sum_8",
    "kvasir_scatter_16",
    "kvasir_scatter_8",
    "kvasir_scatter_4",
    "kvasir_scatter_2",
    "kvasir_scatter_1",
    "kvasir_scatter_sum_16",
    "kvasir_scatter_sum_8",
    "kvasir_quantise_bf16_fp8_8",
    "kvasir_quantise_bf16_fp8_1",
    "kvasir_quantise_bf16_int8_8",
    "kvasir_quantise_bf16_int8_1",
    "kvasir_quantise_f16_fp8_8",
    "kvasir_quantise_f16_fp8_1",
    "kvasir_quantise_f16_int8_8",
    "kvasir_quantise_f16_int8_1",
    "kvasir_quantise_f32_fp8_8",
    "kvasir_quantise_f32_fp8_1",
    "kvasir_quantise_f32_int8_8",
    "kvasir_quantise_f32_int8_1",
    "kvasir_dequantise_bf16_fp8_8",
    "kvasir_dequantise_bf16_fp8_1",
    "kvasir_dequantise_bf16_int8_8",
    "kvasir_dequantise_bf16_int8_1",
    "kvasir_dequantise_f16_fp8_8",
    "kvasir_dequantise_f16_fp8_1",
    "kvasir_dequantise_f16_int8_8",
    "kvasir_dequantise_f16_int8_1",
    "kvasir_dequantise_f32_fp8_8",
    "kvasir_dequantise_f32_fp8_1",
    "kvasir_dequantise_f32_int8_8",
    "kvasir_dequantise_f32_int8_1",
];
