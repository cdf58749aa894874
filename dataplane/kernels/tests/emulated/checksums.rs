//! The verifying kernel.

use dataplane_kernels::{Batch, ChecksumArrays, ChecksumPlan, alignment_of, checksum, status};

use crate::engine::{DEVICE, with_sums};
use crate::harness::{Emulator, Memory, Random, seed};

#[test]
fn the_kernel_gives_the_checksum_of_any_length_and_alignment() {
    let Some(mut emulator) = Emulator::start() else { return };
    let mut random = Random(seed(201));
    for bytes in [1, 7, 8, 9, 15, 16, 17, 64, 100, 4095, 4096, 4097, 16_384, 70_001] {
        for remainder in [0, 16, 1, 8] {
            let mut memory = Memory::default();
            let slots: Vec<u64> =
                (0..1 + random.below(4)).map(|_| memory.put(random.bytes(bytes), remainder)).collect();
            let words: Vec<u64> = slots.iter().flat_map(|slot| [*slot, u64::MAX]).collect();
            let batch = Batch {
                items: memory.put_words(&words),
                count: slots.len() as u32,
                planes: 0,
                status: memory.put(vec![0; slots.len() * 4], 0),
                sums: None,
            };
            let mut batch = with_sums(&mut memory, batch);
            let mut wanted: Vec<u64> = slots.iter().map(|slot| checksum(memory.at(*slot))).collect();
            let sums = batch.sums.expect("sums");
            let plan = ChecksumPlan::new(bytes as u64, alignment_of(slots.iter().copied())).expect("a plan");
            emulator.run(&plan.launch(&batch, DEVICE).expect("a launch"), &mut memory, random.bits());
            assert_eq!(memory.words(sums.checksums), wanted, "{bytes} bytes at {remainder}");

            // The last one was expected to be another.
            let last = wanted.len() - 1;
            wanted[last] ^= 1 << 40;
            let expected = memory.put_words(&wanted);
            batch.sums = Some(ChecksumArrays { expected, ..sums });
            emulator.run(&plan.launch(&batch, DEVICE).expect("a launch"), &mut memory, random.bits());
            let mut words = vec![0; slots.len() * 4];
            words[last * 4] = status::CHECKSUM as u8;
            assert_eq!(memory.at(batch.status), words);
        }
    }
}
