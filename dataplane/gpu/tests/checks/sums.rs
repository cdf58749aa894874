//! Ranges of slots, summed by the device, against the processor's sums of the same bytes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_cuda::{DeviceMemory, DeviceSlab};
use dataplane_gpu::SlotChecksummer;
use dataplane_kernels::checksum;
use dataplane_memory::{Checksummer, Slab, SlotPool, SlotSum, SumDone, SumRefused};

use super::Rig;
use crate::harness::Random;

/// A device that gives nothing back for so long gives nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// Slots on the first device, and who sums them.
pub(crate) struct Summed {
    pub(crate) summer: SlotChecksummer,
    pub(crate) memory: Arc<DeviceSlab>,
    pub(crate) pool: Arc<SlotPool>,
    pub(crate) bytes: Vec<u8>,
}

impl Summed {
    /// So many slots of random bytes, and at most `sums_max` sums at a time.
    pub(crate) fn new(
        rig: Rig,
        random: &mut Random,
        slot_bytes: usize,
        slot_count: u32,
        sums_max: usize,
    ) -> Self {
        let [side, _] = rig.sides;
        let memory = side.slots(random, slot_bytes, slot_count);
        let bytes = random.bytes(memory.bytes());
        memory.write(0, &bytes).expect("write");
        let pool = Self::pool_of(&memory);
        let mut summer = SlotChecksummer::new(side.queue, sums_max);
        summer.add_device(pool.slab(), &memory).expect("its own memory");
        Self { summer, memory, pool, bytes }
    }

    pub(crate) fn pool_of(memory: &Arc<DeviceSlab>) -> Arc<SlotPool> {
        let device = Arc::clone(memory) as Arc<dyn DeviceMemory>;
        SlotPool::new(Arc::new(Slab::on_device("sums", memory.layout(), device).expect("slab")))
    }

    /// Waits for what is in flight.
    pub(crate) fn finish(&mut self) -> Vec<SumDone> {
        let mut done = Vec::new();
        self.summer.flush();
        let started = Instant::now();
        while self.summer.in_flight() > 0 {
            self.summer.poll(&mut done);
            assert!(started.elapsed() < PATIENCE, "{} sums do not end", self.summer.in_flight());
        }
        done
    }
}

pub(crate) fn sums_of_ranges_are_those_of_the_processor(rig: Rig, random: &mut Random, count: u64) {
    let mut summed = Summed::new(rig, random, 9000, 120, 90);
    let stride = summed.memory.layout().stride();
    // Layers of several sizes, and odd ranges of which each is a kind of its own.
    let (mut open, mut done, mut refused) = (HashMap::new(), Vec::new(), 0_u64);
    for token in 0..count {
        let (odd_len, odd_offset) = (1 + random.below(300) as u32, random.below(4000) as u32);
        let len = random.one_of(&[512, 512, 1000, 4096, odd_len]);
        let offset = random.one_of(&[0, 512, 1024, odd_offset]);
        let slot = summed.pool.acquire().expect("returned below");
        let start = slot.slot() as usize * stride + offset as usize;
        match summed.summer.submit(SlotSum { token, slot, offset, len }) {
            Ok(()) => _ = open.insert(token, checksum(&summed.bytes[start..start + len as usize])),
            Err(SumRefused::Full(back)) => refused += u64::from(back.token == token),
            Err(other) => panic!("{other:?}"),
        }
        if random.below(6) == 0 {
            summed.summer.flush();
        }
        if random.below(3) == 0 || summed.pool.free_count() == 0 {
            summed.summer.flush();
            let started = Instant::now();
            while summed.summer.poll(&mut done) == 0 && summed.pool.free_count() == 0 {
                assert!(started.elapsed() < PATIENCE, "no sum ends");
            }
        }
        for SumDone { token, result } in done.drain(..) {
            assert_eq!(result, Ok(open.remove(&token).expect("each once, and only accepted ones")));
        }
        assert_eq!(summed.summer.in_flight(), open.len());
    }
    for SumDone { token, result } in summed.finish() {
        assert_eq!(result, Ok(open.remove(&token).expect("each once, and only accepted ones")));
    }
    assert!(open.is_empty());
    assert_eq!(summed.pool.used_count(), 0, "slots leaked");
    eprintln!("{count} sums, {refused} refused");
}
