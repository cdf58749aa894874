//! Gives the shared library its name for the loader: the number changes with the ABI, so that a program that was linked
//! against another one does not start.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libkvasir_kv.so.0");
    }
}
