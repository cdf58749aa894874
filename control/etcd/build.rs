//! Compiles the part of etcd's protocol that is used, in pure Rust: no protoc is needed.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["etcd.proto", "mvcc.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .emit_rerun_if_changed(false)
        .compile_fds(files)?;
    Ok(())
}
