//! Random reads and writes under random faults of every kind, against a model.

use kvstore_io::testing::Random;
use kvstore_io::{Buffer, IoErrorKind, Operation, PageBuffer};
use kvstore_nvme::NvmeConfig;
use kvstore_nvme::testing::{Faults, SoftwareDevice};

use crate::rig::{Rig, SLOT_BYTES, short_timeouts};

const PLACES: u64 = 40;
/// One request in this many takes memory of its own, through a bounce buffer.
const BOUNCED_ONE_IN: u64 = 4;

fn bytes_of(tag: u64, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (tag.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u8 ^ (at / 512) as u8).collect()
}

fn fill(buffer: &mut Buffer, bytes: &[u8]) {
    match buffer {
        Buffer::Slot { slot, .. } => slot.slab().write(slot.slot(), 0, bytes),
        Buffer::Pages(pages) => pages.copy_from_slice(bytes),
    }
}

fn contents(buffer: &Buffer) -> Vec<u8> {
    match buffer {
        Buffer::Slot { slot, len, .. } => {
            let mut bytes = vec![0; *len];
            slot.slab().read(slot.slot(), 0, &mut bytes);
            bytes
        }
        Buffer::Pages(pages) => pages.to_vec(),
    }
}

/// Runs random requests against a model: a place holds zeroes at first, then the bytes written; `None` after a
/// failed write.
fn run(seed: u64, faults: Faults) -> (u64, u64) {
    eprintln!("chaos: seed {seed}");
    let config = NvmeConfig { queue_pairs: 2, queue_entries: 12, bounce_buffers: 3, ..short_timeouts() };
    let config = NvmeConfig { command_timeout: std::time::Duration::from_millis(60), ..config };
    let device = SoftwareDevice {
        transfer_exponent: 2,
        takes_sgl: seed.is_multiple_of(2),
        ..SoftwareDevice::default()
    };
    let mut rig = Rig::new(device, Faults::default(), &config);
    rig.controller.set_faults(faults);
    let mut random = Random(seed);
    let mut model: Vec<Option<Vec<u8>>> = (0..PLACES).map(|_| Some(vec![0; SLOT_BYTES])).collect();
    let (mut errors, mut tag) = (0, 0);
    for _ in 0..60 {
        // Places of one batch differ, since requests under way are not ordered.
        let mut places: Vec<u64> = (0..PLACES).collect();
        let mut wanted = Vec::new();
        for id in 0..random.below(30) + 1 {
            let place = places.swap_remove(random.below(places.len() as u64) as usize);
            let mut buffer = match random.below(BOUNCED_ONE_IN) {
                0 => Buffer::Pages(PageBuffer::zeroed(SLOT_BYTES)),
                _ => rig.buffer(SLOT_BYTES),
            };
            let is_write = random.below(2) == 0;
            tag += 1;
            let bytes = bytes_of(tag, SLOT_BYTES);
            fill(&mut buffer, &bytes);
            wanted.push((place as usize, is_write.then_some(bytes)));
            let operation = if is_write { Operation::Write } else { Operation::Read };
            rig.submit(id, operation, place * SLOT_BYTES as u64, buffer);
        }
        let completions = rig.collect();
        assert_eq!(completions.len(), wanted.len(), "seed {seed}");
        let mut seen = vec![false; wanted.len()];
        for completion in completions {
            let id = completion.id as usize;
            assert!(!std::mem::replace(&mut seen[id], true), "request {id} completed twice (seed {seed})");
            let (place, written) = &wanted[id];
            match (completion.result, written) {
                (Err(error), _) => {
                    assert!(
                        matches!(error.kind, IoErrorKind::Device | IoErrorKind::Media),
                        "{error} (seed {seed})"
                    );
                    errors += 1;
                    if written.is_some() {
                        model[*place] = None;
                    }
                }
                (Ok(()), Some(bytes)) => model[*place] = Some(bytes.clone()),
                (Ok(()), None) => {
                    if let Some(bytes) = &model[*place] {
                        assert!(contents(&completion.buffer) == *bytes, "place {place} (seed {seed})");
                    }
                }
            }
        }
    }
    let resets = rig.engine.counters().resets;
    rig.controller.set_faults(Faults::default());
    for (place, expected) in model.iter().enumerate() {
        let buffer = rig.buffer(SLOT_BYTES);
        let Ok(buffer) = rig.run(Operation::Read, (place * SLOT_BYTES) as u64, buffer) else {
            // A fault from before may fail the first of these requests.
            continue;
        };
        if let Some(bytes) = expected {
            assert!(contents(&buffer) == *bytes, "place {place} at the end (seed {seed})");
        }
    }
    rig.check_write_and_read();
    rig.close();
    (errors, resets)
}

#[test]
fn nothing_is_lost_doubled_or_mixed_up() {
    let (mut errors, mut resets) = (0, 0);
    for seed in 1..=6 {
        let faults = Faults {
            seed,
            media_errors_per_mille: 5,
            internal_errors_per_mille: 5,
            lost_per_mille: if seed <= 3 { 2 } else { 0 },
            wrong_phase_per_mille: if seed == 2 { 1 } else { 0 },
            wrong_id_per_mille: if seed == 3 { 2 } else { 0 },
            reordered_per_mille: 100,
            ..Faults::default()
        };
        let found = run(seed, faults);
        (errors, resets) = (errors + found.0, resets + found.1);
    }
    eprintln!("chaos: {errors} requests failed, {resets} resets");
    assert!(errors > 20 && resets > 0, "the faults happened: {errors} errors, {resets} resets");
}
