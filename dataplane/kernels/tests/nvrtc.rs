//! Compilation of the kernels with NVIDIA's run-time compiler, if present: `KVASIR_NVRTC` (a path) or the
//! loader's path. `tests/nvrtc.sh` fetches one. No GPU is needed. With `KVASIR_PTXAS` (a path), prints
//! registers and checks spills.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::process::Command;

use dataplane_kernels::{COMPILE_OPTIONS, FUNCTIONS, SOURCE};
use libloading::Library;

type Program = *mut c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Fetch = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;

struct Nvrtc(Library);

impl Nvrtc {
    fn load() -> Option<Self> {
        let named = std::env::var("KVASIR_NVRTC").ok();
        let names: Vec<String> = match named {
            Some(path) => vec![path],
            None => ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"].map(str::to_owned).to_vec(),
        };
        for name in &names {
            // SAFETY: the name is that of NVIDIA's compiler; its initialisers are trusted as those of any library.
            if let Ok(library) = unsafe { Library::new(name) } {
                return Some(Self(library));
            }
        }
        eprintln!(
            "SKIPPED: none of {names:?} can be loaded (KVASIR_NVRTC), so the kernels were not compiled"
        );
        None
    }

    fn version(&self) -> (i32, i32) {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the type is that of nvrtcVersion in nvrtc.h.
        let ask = unsafe { self.0.get::<Version>(b"nvrtcVersion") }.expect("nvrtcVersion");
        // SAFETY: both are places for one number.
        assert_eq!(unsafe { ask(&raw mut major, &raw mut minor) }, 0);
        (major, minor)
    }

    fn output(&self, program: Program, size: &[u8], fetch: &[u8]) -> Vec<u8> {
        let mut bytes = 0;
        // SAFETY: the type is that of the nvrtcGet…Size functions.
        let ask = unsafe { self.0.get::<Size>(size) }.expect("a size function");
        // SAFETY: the program is alive.
        assert_eq!(unsafe { ask(program, &raw mut bytes) }, 0);
        let mut output = vec![0_u8; bytes];
        // SAFETY: the type is that of the nvrtcGet… functions.
        let get = unsafe { self.0.get::<Fetch>(fetch) }.expect("a fetch function");
        // SAFETY: the buffer has the size that was reported.
        assert_eq!(unsafe { get(program, output.as_mut_ptr().cast()) }, 0);
        output
    }

    /// Compiles to PTX for a virtual architecture, to machine code for a real one.
    fn compile(&self, architecture: &str) -> Vec<u8> {
        let source = CString::new(SOURCE).expect("no zero");
        let mut program = std::ptr::null_mut();
        // SAFETY: the type is that of nvrtcCreateProgram.
        let create = unsafe { self.0.get::<Create>(b"nvrtcCreateProgram") }.expect("nvrtcCreateProgram");
        let none = std::ptr::null();
        // SAFETY: the text ends with a zero; there are no headers, so their lists may be null.
        let made = unsafe { create(&raw mut program, source.as_ptr(), c"kvasir.cu".as_ptr(), 0, none, none) };
        assert_eq!(made, 0);
        let architecture_option = format!("--gpu-architecture={architecture}");
        let all = COMPILE_OPTIONS.into_iter().chain([architecture_option.as_str()]);
        let options: Vec<CString> = all.map(|option| CString::new(option).expect("no zero")).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the type is that of nvrtcCompileProgram.
        let compile = unsafe { self.0.get::<Compile>(b"nvrtcCompileProgram") }.expect("nvrtcCompileProgram");
        // SAFETY: the options end with zeros and live until the call returns.
        let result = unsafe { compile(program, pointers.len() as c_int, pointers.as_ptr()) };
        let log = self.output(program, b"nvrtcGetProgramLogSize", b"nvrtcGetProgramLog");
        let log = CStr::from_bytes_until_nul(&log).expect("text").to_string_lossy().into_owned();
        assert_eq!(result, 0, "{architecture}: {log}");
        assert!(!log.contains("warning"), "{architecture}: {log}");
        if architecture.starts_with("sm_") {
            self.output(program, b"nvrtcGetCUBINSize", b"nvrtcGetCUBIN")
        } else {
            self.output(program, b"nvrtcGetPTXSize", b"nvrtcGetPTX")
        }
    }
}

/// Returns the text of one kernel.
fn entry<'a>(ptx: &'a str, function: &str) -> &'a str {
    let start = ptx.find(&format!(".entry {function}(")).expect("every kernel is in the output");
    let end = ptx[start..].find("\n}").expect("it ends");
    &ptx[start..start + end]
}

/// Returns the number of 16-byte accesses of a kernel: (loads, stores).
fn wide(text: &str) -> (usize, usize) {
    let count = |access: &str| {
        let is_wide = |line: &&str| {
            line.contains(access)
                && (line.contains(".v4.") || line.contains(".v2.u64") || line.contains(".v2.b64"))
        };
        text.lines().filter(is_wide).count()
    };
    (count("ld.global"), count("st.global"))
}

/// Kernels whose inner loops use 16-byte accesses: least number of (loads, stores).
const WIDE: [(&str, usize, usize); 5] = [
    // One load more than in the loop: that of the item.
    ("kvasir_gather_16", 5, 4),
    ("kvasir_gather_sum_16", 5, 4),
    ("kvasir_scatter_16", 5, 4),
    ("kvasir_scatter_sum_16", 5, 4),
    ("kvasir_checksum_16", 5, 0),
];

fn check_ptx(architecture: &str, ptx: &str) {
    assert_eq!(ptx.matches(".entry ").count(), FUNCTIONS.len());
    for function in FUNCTIONS {
        assert!(!entry(ptx, function).contains(".local "), "{function} keeps an array in local memory");
    }
    for (function, loads, stores) in WIDE {
        let found = wide(entry(ptx, function));
        println!("{architecture} {function}: {} loads and {} stores of 16 bytes", found.0, found.1);
        assert!(found.0 >= loads && found.1 >= stores, "{function}: {found:?}, not ({loads}, {stores})");
    }
}

/// Checks with the assembler that no kernel spills registers, and prints the registers of each.
fn check_registers(architecture: &str, ptx: &str) {
    let Ok(ptxas) = std::env::var("KVASIR_PTXAS") else {
        eprintln!("SKIPPED: KVASIR_PTXAS names no assembler, so registers and spills are unknown");
        return;
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (input, output) = (folder.join("kernels.ptx"), folder.join("kernels.cubin"));
    std::fs::write(&input, ptx).expect("the PTX is written");
    let machine = architecture.replace("compute", "sm");
    let result = Command::new(ptxas)
        .args(["-v", "-arch", &machine])
        .arg(&input)
        .arg("-o")
        .arg(&output)
        .output()
        .expect("the assembler runs");
    let text = String::from_utf8_lossy(&result.stderr);
    assert!(result.status.success(), "{text}");
    let mut function = "";
    for line in text.lines() {
        if let Some(name) = line.split('\'').nth(1) {
            function = name;
        }
        if let Some((_, used)) = line.split_once("Used ") {
            println!("{machine} {function}: {used}");
        }
        if line.contains("spill") {
            assert!(
                line.contains("0 bytes spill stores, 0 bytes spill loads"),
                "{machine} {function}: {line}"
            );
            assert!(line.contains(" 0 bytes stack frame"), "{machine} {function}: {line}");
        }
    }
}

#[test]
fn the_source_compiles_with_accesses_of_16_bytes_and_no_spills() {
    let Some(nvrtc) = Nvrtc::load() else { return };
    let version = nvrtc.version();
    println!("NVRTC {}.{}", version.0, version.1);
    let mut architectures = vec!["80", "90"];
    // This architecture is known from 12.8 on.
    if version >= (12, 8) {
        architectures.push("100");
    }
    if let Ok(only) = std::env::var("KVASIR_NVRTC_ONLY") {
        architectures.retain(|number| *number == only);
        assert!(!architectures.is_empty(), "KVASIR_NVRTC_ONLY={only}: none of 80, 90, 100");
    }
    for number in architectures {
        let virtual_architecture = format!("compute_{number}");
        let ptx = nvrtc.compile(&virtual_architecture);
        let ptx = CStr::from_bytes_until_nul(&ptx).expect("text").to_str().expect("ASCII");
        check_ptx(&virtual_architecture, ptx);
        check_registers(&virtual_architecture, ptx);
        let machine_code = nvrtc.compile(&format!("sm_{number}"));
        assert!(machine_code.starts_with(b"\x7fELF"), "sm_{number}");
        println!("sm_{number}: {} bytes of machine code", machine_code.len());
    }
}
