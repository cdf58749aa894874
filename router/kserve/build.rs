//! Compiles the protocol files in pure Rust: no protoc is needed.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["inference.proto", "health.proto"], ["proto"])?;
    // Maps are ordered, so that equal requests give equal bodies; bytes are views of the message that came in.
    tonic_prost_build::configure()
        .build_transport(false)
        .emit_rerun_if_changed(false)
        .btree_map(".")
        .bytes(".")
        .codec_path("crate::codec::CountingCodec")
        .compile_fds(files)?;
    Ok(())
}
