//! Tests that compare this crate's view of the driver with NVIDIA's libraries and headers. `tests/driver.sh`
//! fetches them and names them; without them each test reports that it is skipped. No device is needed.

use std::ffi::{c_int, c_void};
use std::fmt::Write;
use std::mem::{align_of, offset_of, size_of};
use std::process::Command;

use cudarc::driver::sys;

use crate::library::{self, SIGNATURES, code};
use crate::{Cuda, Unavailable};

/// Returns the value of a variable, or reports that a test is skipped.
fn named(variable: &str, what: &str) -> Option<String> {
    let value = std::env::var(variable).ok();
    if value.is_none() {
        eprintln!("SKIPPED: {variable} names no {what}: tests/driver.sh fetches some");
    }
    value
}

/// Returns the library's entry point of this name, which is the oldest form of the function.
fn own(driver: &libloading::Library, symbol: &str) -> Option<*const c_void> {
    // SAFETY: the address is compared and never called.
    unsafe { driver.get::<*const c_void>(symbol) }.ok().map(|found| *found)
}

#[test]
fn a_real_driver_has_what_its_version_promises() {
    let Some(path) = named("KVASIR_LIBCUDA", "library of a driver") else { return };
    // The driver is loaded here first; when the crate looks for the library by name, it gets this one.
    // SAFETY: opening the driver's library runs its initialisers, which have no preconditions.
    let driver = unsafe { libloading::Library::new(&path) }.expect("NVIDIA's library loads");
    let library = match library::load() {
        Ok(library) => library,
        Err(old @ Unavailable::DriverTooOld { version, .. }) => {
            assert!(version < library::VERSION_MIN);
            return println!("{path}: {old}");
        }
        Err(error) => panic!("{path}: {error}"),
    };
    let version = library.version();
    println!("{path}: CUDA {version}, {} functions", SIGNATURES.len());
    for (symbol, since, found) in library.newer() {
        println!("  {symbol} since {since}: {}", if found.is_some() { "there" } else { "not there" });
        assert_eq!(found.is_some(), version.0 >= since, "{symbol} in {version}");
        assert_eq!(found, own(&driver, symbol), "{symbol} of {version} is the form of {since}");
        let later = own(&driver, &format!("{symbol}_v2"));
        assert!(later.is_none() || later != found, "{symbol} is not the later form");
    }
    match Cuda::open() {
        Err(error @ (Unavailable::NoDevice { .. } | Unavailable::Initialisation { .. })) => {
            println!("  {error}")
        }
        Err(error) => panic!("{path}: {error}"),
        Ok(cuda) => println!("  devices: {:?}", cuda.devices()),
    }
}

/// Returns the C type of a Rust type in this crate.
fn in_c(rust: &str) -> String {
    let rust = rust.replace(' ', "");
    for (pointer, constant) in [("*mut", ""), ("*const", "const ")] {
        if let Some(to) = rust.strip_prefix(pointer) {
            return format!("{constant}{} *", in_c(to));
        }
    }
    match rust.trim_start_matches("sys::") {
        "c_int" => "int",
        "c_uint" => "unsigned int",
        "c_ulonglong" => "unsigned long long",
        "c_char" => "char",
        "c_void" => "void",
        "usize" => "size_t",
        "u8" => "unsigned char",
        name => name,
    }
    .to_owned()
}

/// Constants of `cudarc` that this crate uses, with their names in the header.
macro_rules! constants {
    ($($kind:ident::$name:ident)* ; $($plain:ident)*) => {
        [$((stringify!($name), sys::$kind::$name as i64),)* $((stringify!($plain), i64::from(sys::$plain)),)*]
    };
}

/// Size and alignment of a structure, and offsets of its fields.
macro_rules! structure {
    ($name:ident { $($field:ident = $in_c:literal),* }) => {
        (
            stringify!($name),
            [size_of::<sys::$name>(), align_of::<sys::$name>()],
            vec![$(($in_c, offset_of!(sys::$name, $field)),)*],
        )
    };
}

/// Returns a C file that compiles only when the header agrees with this crate.
fn statements() -> String {
    let mut text = "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n#include <stddef.h>\n".to_owned();
    let mut say = |line: String| writeln!(text, "{line}").expect("text grows");
    for (symbol, arguments) in SIGNATURES {
        let arguments: Vec<String> = arguments.iter().map(|rust| in_c(rust)).collect();
        let kind = format!("CUresult (*)({})", arguments.join(", "));
        say(format!("_Static_assert(_Generic(&{symbol}, {kind}: 1, default: 0), \"{symbol}: {kind}\");"));
    }
    let constants = constants! {
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_PITCH
        CUevent_flags::CU_EVENT_DISABLE_TIMING
        CUstream_flags::CU_STREAM_NON_BLOCKING
        CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED
        CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
        CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
        CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
        CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
        CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID
        CUmemorytype::CU_MEMORYTYPE_DEVICE
        CUmemorytype::CU_MEMORYTYPE_UNIFIED
        CUmemRangeFlags_enum::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE
        CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
        CU_MEMHOSTREGISTER_DEVICEMAP
        CU_MEMHOSTREGISTER_PORTABLE
    };
    for (name, value) in constants {
        say(format!("_Static_assert({name} == {value}, \"{name}\");"));
    }
    let codes = [
        ("CUDA_SUCCESS", code::SUCCESS),
        ("CUDA_ERROR_INVALID_VALUE", code::INVALID_VALUE),
        ("CUDA_ERROR_NOT_SUPPORTED", code::NOT_SUPPORTED),
        ("CUDA_ERROR_OUT_OF_MEMORY", code::OUT_OF_MEMORY),
        ("CUDA_ERROR_NO_DEVICE", code::NO_DEVICE),
        ("CUDA_ERROR_OPERATING_SYSTEM", code::OPERATING_SYSTEM),
        ("CUDA_ERROR_NOT_FOUND", code::NOT_FOUND),
        ("CUDA_ERROR_NOT_READY", code::NOT_READY),
        ("CUDA_ERROR_NOT_PERMITTED", code::NOT_PERMITTED),
        ("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", code::ALREADY_REGISTERED),
    ];
    for (name, value) in codes {
        say(format!("_Static_assert({name} == {value}, \"{name}\");"));
    }
    let structures = [
        structure!(CUmemcpyAttributes {
            srcAccessOrder = "srcAccessOrder",
            srcLocHint = "srcLocHint",
            dstLocHint = "dstLocHint",
            flags = "flags"
        }),
        structure!(CUmemLocation { type_ = "type", id = "id" }),
        structure!(CUDA_MEMCPY2D {
            srcMemoryType = "srcMemoryType",
            srcDevice = "srcDevice",
            srcPitch = "srcPitch",
            dstMemoryType = "dstMemoryType",
            dstDevice = "dstDevice",
            dstPitch = "dstPitch",
            WidthInBytes = "WidthInBytes",
            Height = "Height"
        }),
        structure!(CUipcMemHandle { reserved = "reserved" }),
        structure!(CUuuid { bytes = "bytes" }),
    ];
    for (name, [size, alignment], fields) in structures {
        say(format!("_Static_assert(sizeof({name}) == {size}, \"size of {name}\");"));
        say(format!("_Static_assert(_Alignof({name}) == {alignment}, \"alignment of {name}\");"));
        for (field, offset) in fields {
            say(format!("_Static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");"));
        }
    }
    text
}

#[test]
fn the_header_says_the_same() {
    let Some(folder) = named("KVASIR_CUDA_INCLUDE", "folder with cuda.h") else { return };
    let file = std::env::temp_dir().join(format!("kvasir-against-{}.c", std::process::id()));
    let text = statements();
    std::fs::write(&file, &text).expect("the statements are written");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-fsyntax-only", "-Wall", "-Werror", "-Wno-deprecated-declarations", "-I"]);
    let compiled = compiler.arg(&folder).arg(&file).output().expect("cc runs");
    std::fs::remove_file(&file).expect("the statements");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let version: c_int = sys::CUDA_VERSION as c_int;
    println!(
        "{folder}: {} statements of a table for CUDA {version} hold",
        text.matches("_Static_assert").count()
    );
}
