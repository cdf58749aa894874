//! The kernels' own text, run by the emulator beside this file under the address and undefined-behaviour
//! sanitizers, against the reference on a processor.

#[path = "../emulator/harness.rs"]
mod harness;

mod checksums;
mod copies;
mod engine;
mod faults;
