//! The first bytes of a device, for a look at what is on it.

use kvstore_io::{Buffer, IoEngine, IoErrorKind, Operation, PageBuffer};
use kvstore_nvme::NvmeConfig;
use kvstore_nvme::testing::{Faults, SoftwareDevice};

use crate::rig::Rig;

fn rig(blocks: u64, faults: Faults, transfer_bytes_max: usize) -> Rig {
    let device = SoftwareDevice { blocks, ..SoftwareDevice::default() };
    Rig::new(device, faults, &NvmeConfig { transfer_bytes_max, ..NvmeConfig::default() })
}

/// Fills the first pages with numbers and returns them.
fn fill(rig: &mut Rig, bytes: usize) -> Vec<u8> {
    let contents: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    for offset in (0..bytes).step_by(4096) {
        let mut pages = PageBuffer::zeroed(4096);
        pages.copy_from_slice(&contents[offset..offset + 4096]);
        rig.run(Operation::Write, offset as u64, Buffer::Pages(pages)).expect("write");
    }
    contents
}

#[test]
fn they_are_what_was_written_in_one_piece_or_several() {
    for transfer_bytes_max in [16 << 10, 1 << 20] {
        let mut rig = rig(1 << 10, Faults::default(), transfer_bytes_max);
        let contents = fill(&mut rig, 80 << 10);
        for bytes in [0, 1, 4096, 4097, 72 << 10] {
            assert!(rig.engine.first_bytes(bytes).expect("read") == contents[..bytes], "{bytes} bytes");
        }
        rig.close();
    }
}

#[test]
fn a_small_device_gives_what_it_has() {
    // Nine blocks are a whole page and a part of one.
    let mut rig = rig(9, Faults::default(), 1 << 20);
    assert!(rig.engine.first_bytes(72 << 10).expect("read") == [0; 4096]);
    rig.close();
}

#[test]
fn what_cannot_be_read_is_an_error_and_not_zeros() {
    let mut rig = rig(1 << 10, Faults { bad_blocks: 16..17, ..Faults::default() }, 1 << 20);
    assert_eq!(rig.engine.first_bytes(8192).expect("before it").len(), 8192);
    assert_eq!(rig.engine.first_bytes(72 << 10).expect_err("a bad block").kind, IoErrorKind::Media);
    rig.close();
}

#[test]
fn an_engine_in_use_refuses_and_loses_no_completion() {
    let mut rig = rig(1 << 10, Faults::default(), 1 << 20);
    let buffer = rig.buffer(4096);
    rig.submit(0, Operation::Read, 0, buffer);
    assert_eq!(rig.engine.first_bytes(4096).expect_err("in use").kind, IoErrorKind::Invalid);
    assert_eq!(rig.engine.in_flight(), 1);
    assert_eq!(rig.collect().len(), 1);
    rig.close();
}
