//! The CUDA C++ source of the kernels and its compiler options.

/// The files, in the order in which they form one translation unit.
pub const FILES: [(&str, &str); 3] = [
    ("base.cu", include_str!("../kernels/base.cu")),
    ("checksum.cu", include_str!("../kernels/checksum.cu")),
    ("copy.cu", include_str!("../kernels/copy.cu")),
];

/// The files as one text for the run-time compiler. It has no includes.
pub const SOURCE: &str = concat!(
    include_str!("../kernels/base.cu"),
    include_str!("../kernels/checksum.cu"),
    include_str!("../kernels/copy.cu"),
);

/// Compiler options in addition to `--gpu-architecture`.
pub const COMPILE_OPTIONS: [&str; 1] = ["--std=c++17"];

/// Names of all kernels, as in [`Launch::function`](crate::Launch::function). The names are not mangled.
pub const FUNCTIONS: [&str; 16] = [
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
];
