//! The CUDA C++ text of the kernels and how to compile it.

/// The files in the order in which they make one translation unit.
pub const FILES: [(&str, &str); 3] = [
    ("base.cu", include_str!("../kernels/base.cu")),
    ("checksum.cu", include_str!("../kernels/checksum.cu")),
    ("copy.cu", include_str!("../kernels/copy.cu")),
];

/// All of it as one text for the run-time compiler. It includes nothing.
pub const SOURCE: &str = concat!(
    include_str!("../kernels/base.cu"),
    include_str!("../kernels/checksum.cu"),
    include_str!("../kernels/copy.cu"),
);

/// Options beside `--gpu-architecture`.
pub const COMPILE_OPTIONS: [&str; 1] = ["--std=c++17"];

/// Every kernel's name, as [`Launch::function`](crate::Launch::function) gives it. The names are not mangled.
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
