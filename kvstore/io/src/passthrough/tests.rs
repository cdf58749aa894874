//! The contract on a real namespace. Its contents are destroyed, so it must be named:
//! KVASIR_IO_NVME=/dev/ng0n1. The lab's VM has one.

use std::path::PathBuf;

use super::*;
use crate::testing::{Conformance, conformance};
use crate::{Buffer, IoEngine, IoErrorKind, Operation, PageBuffer, Request};

fn device(block_bytes: usize) -> Option<NvmeDevice> {
    let Some(path) = std::env::var_os("KVASIR_IO_NVME") else {
        eprintln!("SKIPPED: KVASIR_IO_NVME does not name a namespace that may be overwritten");
        return None;
    };
    let config = NvmeDeviceConfig { path: PathBuf::from(path), force: true, block_bytes };
    Some(NvmeDevice::open(&config).expect("the namespace"))
}

fn run(config: &RingConfig, block_bytes: usize, options: &Conformance) {
    let Some(first) = device(block_bytes) else { return };
    eprintln!("{first:?}");
    drop(first);
    let mut make = || {
        let device = device(block_bytes).expect("named above");
        Box::new(open(device, config).expect("a ring")) as Box<dyn IoEngine>
    };
    conformance(&mut make, options);
}

#[test]
fn keeps_the_contract() {
    let config = RingConfig { depth: 32, transfer_bytes_max: 1 << 20, ..RingConfig::default() };
    let options = Conformance { seed: 11, requests: 600, bytes_max: 8 << 20, ..Conformance::default() };
    run(&config, 4096, &options);
    run(&RingConfig { depth: 3, ..config }, 512, &Conformance { requests: 100, ..options });
}

#[test]
fn polling_keeps_the_contract_or_says_why_not() {
    let config = RingConfig { depth: 8, transfer_bytes_max: 1 << 20, io_poll: true, ..RingConfig::default() };
    let Some(named) = device(4096) else { return };
    match open(named, &config) {
        Err(error) => {
            assert_eq!(error.kind, IoErrorKind::Unsupported, "{error}");
            eprintln!("{error}");
        }
        Ok(engine) => {
            drop(engine);
            run(&config, 4096, &Conformance { requests: 200, bytes_max: 4 << 20, ..Conformance::default() });
        }
    }
}

#[test]
fn two_engines_never_share_a_namespace() {
    let Some(first) = device(4096) else { return };
    let path = PathBuf::from(std::env::var_os("KVASIR_IO_NVME").expect("named"));
    let error =
        NvmeDevice::open(&NvmeDeviceConfig { path, force: true, block_bytes: 4096 }).expect_err("in use");
    assert!(error.reason.contains("in use"), "{error}");
    drop(first);
}

/// A read beyond the end, past the engine's own check: the device's status becomes the error.
#[test]
fn the_devices_status_is_an_error() {
    let Some(device) = device(4096) else { return };
    let config = RingConfig { depth: 2, transfer_bytes_max: 1 << 20, ..RingConfig::default() };
    let mut engine = open(device, &config).expect("a ring");
    engine.extend_for_test(1 << 20);
    let offset = engine.geometry().files[0] - 4096;
    let buffer = Buffer::Pages(PageBuffer::zeroed(4096));
    assert!(engine.submit(Request { id: 1, operation: Operation::Read, file: 0, offset, buffer }).is_ok());
    let mut arrived = Vec::new();
    while engine.poll(1, &mut arrived) == 0 {
        engine.wait(None).expect("wait");
    }
    let error = arrived.pop().expect("one").result.expect_err("no such block");
    eprintln!("{error}");
    assert!(error.kind == IoErrorKind::Invalid && error.reason.contains("LBA out of range"), "{error}");
}
