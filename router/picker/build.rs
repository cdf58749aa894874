//! Compiles the protocol files in pure Rust: no protoc is needed.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    println!("cargo::rerun-if-changed=../kserve/proto/health.proto");
    let files = protox::compile(["external_processor.proto", "health.proto"], ["proto", "../kserve/proto"])?;
    // Bytes are views of the message that came in.
    tonic_prost_build::configure()
        .build_client(false)
        .build_transport(false)
        .emit_rerun_if_changed(false)
        .btree_map(".")
        .bytes(".")
        .compile_fds(files)?;
    Ok(())
}
