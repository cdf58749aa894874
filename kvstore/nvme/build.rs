//! Asks pkg-config where SPDK's libraries are, for the feature `spdk`. Without an answer the loader's own path is used.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=PKG_CONFIG_PATH");
    if std::env::var_os("CARGO_FEATURE_SPDK").is_none() {
        return;
    }
    let asked = Command::new("pkg-config").args(["--variable=libdir", "spdk_nvme"]).output();
    let Ok(answer) = asked else { return };
    if let (true, Ok(folder)) = (answer.status.success(), String::from_utf8(answer.stdout)) {
        println!("cargo::rustc-env=KVSTORE_SPDK_FOLDER={}", folder.trim());
    }
}
