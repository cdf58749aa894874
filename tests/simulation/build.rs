//! Exports the executable's own symbols, so that a lookup at run time (`dlsym`) finds the simulated functions, too.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bins=-rdynamic");
}
