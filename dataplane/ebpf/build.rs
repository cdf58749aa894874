//! Compiles the C programs with clang and writes `programs.rs`, which embeds them.
//!
//! A machine without clang, or with one that cannot compile them, still builds the crate: every entry then
//! answers with the reason that is recorded here. `CLANG` names another compiler.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAMS: [&str; 4] = ["redirect", "admission", "latency", "engines"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-env-changed=CLANG");
    println!("cargo::rerun-if-env-changed=PATH");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let sources =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR")).join("bpf");
    let mut reason = "";
    for program in PROGRAMS {
        match compile(&sources, program, &out) {
            Ok(()) => {}
            Err(Failure::NoClang) => {
                reason = "no clang at build time";
                break;
            }
            Err(Failure::Refused(text)) => {
                println!(
                    "cargo::warning=eBPF is left out: {}",
                    text.lines().next().unwrap_or("clang failed")
                );
                reason = "clang could not compile the programs at build time";
                break;
            }
        }
    }
    let mut module = String::new();
    for program in PROGRAMS {
        let name = program.to_uppercase();
        let value = if reason.is_empty() {
            format!("Ok(aya::include_bytes_aligned!(concat!(env!(\"OUT_DIR\"), \"/{program}.o\")))")
        } else {
            format!("Err({reason:?})")
        };
        writeln!(module, "pub(crate) const {name}: Result<&[u8], &str> = {value};")
            .expect("a String takes it");
    }
    fs::write(out.join("programs.rs"), module).expect("OUT_DIR is writable");
}

enum Failure {
    NoClang,
    Refused(String),
}

fn compile(sources: &Path, program: &str, out: &Path) -> Result<(), Failure> {
    let clang = env::var_os("CLANG").unwrap_or_else(|| "clang".into());
    let big = env::var("CARGO_CFG_TARGET_ENDIAN").is_ok_and(|endian| endian == "big");
    let output = Command::new(clang)
        .args(["-target", if big { "bpfeb" } else { "bpfel" }])
        // v3 has the compare-and-swap of the token buckets (Linux 5.12).
        .args(["-mcpu=v3", "-O2", "-g", "-Wall", "-Wextra", "-Werror"])
        // The paths of the machine that builds do not belong into the binary.
        .arg(format!("-ffile-prefix-map={}=bpf", sources.display()))
        .arg("-c")
        .arg(sources.join(format!("{program}.bpf.c")))
        .arg("-o")
        .arg(out.join(format!("{program}.o")))
        .output()
        .map_err(|_| Failure::NoClang)?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    // A clang without this back end is no clang for us.
    if text.contains("unable to create target") || text.contains("unknown target triple") {
        return Err(Failure::NoClang);
    }
    Err(Failure::Refused(text))
}
