//! Test double of a device's checksummer: sums arrive late, and may fail.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Checksummer, DeviceError, Slab, SlotSum, SumDone, SumRefused};

/// Delay and faults of a [`ChecksummerDouble`].
#[derive(Debug, Clone, Copy)]
pub struct SumFaults {
    /// A sum completes at most this many polls after its flush (at least 1), the number drawn from the seed.
    pub polls_max: u64,
    /// One in this many sums fails; 0: none.
    pub fail_one_in: u64,
    /// One in this many sums has a wrong bit; 0: none.
    pub wrong_one_in: u64,
}

impl Default for SumFaults {
    fn default() -> Self {
        Self { polls_max: 1, fail_one_in: 0, wrong_one_in: 0 }
    }
}

#[derive(Debug)]
struct Running {
    sum: SlotSum,
    due: u64,
    fails: bool,
    is_wrong: bool,
}

/// Checksums slots of any device memory, each completing a seeded number of polls after its flush and in no
/// order. The bytes are read when the sum completes, so that a slot that is reused too early is detected.
#[derive(Debug)]
pub struct ChecksummerDouble {
    random: fastrand::Rng,
    faults: SumFaults,
    capacity: usize,
    polls: u64,
    is_dead: bool,
    /// Sums submitted and not flushed yet.
    submitted: VecDeque<SlotSum>,
    running: Vec<Running>,
    scratch: Vec<u8>,
    doorbells: u64,
}

impl ChecksummerDouble {
    /// Makes a checksummer that takes `capacity` sums at a time.
    #[must_use]
    pub fn new(seed: u64, capacity: usize, faults: SumFaults) -> Self {
        Self {
            // A stream of its own beside that of a test with the same seed.
            random: fastrand::Rng::with_seed(seed ^ 0x5A33),
            faults,
            capacity,
            polls: 0,
            is_dead: false,
            submitted: VecDeque::with_capacity(capacity),
            running: Vec::with_capacity(capacity),
            scratch: Vec::new(),
            doorbells: 0,
        }
    }

    /// Changes the faults from now on.
    pub fn set_faults(&mut self, faults: SumFaults) {
        self.faults = faults;
    }

    /// Loses the device: sums in flight and later ones end with an error.
    pub fn kill(&mut self) {
        self.is_dead = true;
    }

    /// Returns the number of flushes that started sums.
    #[must_use]
    pub fn doorbells(&self) -> u64 {
        self.doorbells
    }

    fn draw(&mut self) -> u64 {
        self.random.u64(..)
    }

    fn one_in(&mut self, period: u64) -> bool {
        period > 0 && self.draw().is_multiple_of(period)
    }

    fn carry_out(&mut self, running: Running) -> SumDone {
        let Running { sum, fails, is_wrong, .. } = running;
        let failed = |reason: &str| DeviceError { operation: "sum of the double", reason: reason.to_owned() };
        let slab = sum.slot.slab();
        let result = match slab.device() {
            _ if self.is_dead => Err(failed("the device is gone")),
            _ if fails => Err(failed("told to fail")),
            None => Err(failed("not in a device's memory")),
            Some(device) => {
                self.scratch.resize(sum.len as usize, 0);
                let start = sum.slot.slot() as usize * slab.layout().stride() + sum.offset as usize;
                let read = device.read(start, &mut self.scratch);
                read.map(|()| dataplane_checksum::checksum(&self.scratch) ^ u64::from(is_wrong))
            }
        };
        SumDone { token: sum.token, result }
    }
}

impl Checksummer for ChecksummerDouble {
    fn reaches(&self, slab: &Arc<Slab>) -> bool {
        slab.device().is_some()
    }

    fn submit(&mut self, sum: SlotSum) -> Result<(), SumRefused> {
        if !self.reaches(sum.slot.slab()) {
            return Err(SumRefused::Unreachable(sum));
        }
        if !sum.is_inside() {
            return Err(SumRefused::Outside(sum));
        }
        if self.in_flight() >= self.capacity {
            return Err(SumRefused::Full(sum));
        }
        self.submitted.push_back(sum);
        Ok(())
    }

    fn flush(&mut self) {
        self.doorbells += u64::from(!self.submitted.is_empty());
        while let Some(sum) = self.submitted.pop_front() {
            let due = self.polls + 1 + self.draw() % self.faults.polls_max.max(1);
            let fails = self.one_in(self.faults.fail_one_in);
            let is_wrong = self.one_in(self.faults.wrong_one_in);
            self.running.push(Running { sum, due, fails, is_wrong });
        }
    }

    fn poll(&mut self, done: &mut Vec<SumDone>) -> usize {
        self.polls += 1;
        let before = done.len();
        let mut at = 0;
        while let Some(running) = self.running.get(at) {
            if self.is_dead || running.due <= self.polls {
                let running = self.running.swap_remove(at);
                done.push(self.carry_out(running));
            } else {
                at += 1;
            }
        }
        done.len() - before
    }

    fn in_flight(&self) -> usize {
        self.submitted.len() + self.running.len()
    }
}

/// Lets the double's user and the test that injects faults share one double.
impl Checksummer for Arc<Mutex<ChecksummerDouble>> {
    fn reaches(&self, slab: &Arc<Slab>) -> bool {
        locked(self).reaches(slab)
    }

    fn submit(&mut self, sum: SlotSum) -> Result<(), SumRefused> {
        locked(self).submit(sum)
    }

    fn flush(&mut self) {
        locked(self).flush();
    }

    fn poll(&mut self, done: &mut Vec<SumDone>) -> usize {
        locked(self).poll(done)
    }

    fn in_flight(&self) -> usize {
        locked(self).in_flight()
    }
}

fn locked(shared: &Mutex<ChecksummerDouble>) -> MutexGuard<'_, ChecksummerDouble> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::testing::{Abilities, DeviceDouble};
    use crate::{DeviceMemory, PageSize, SlabLayout, SlotPool, SlotRef};

    const LAYOUT: SlabLayout = SlabLayout { slot_bytes: 1000, slot_count: 8 };

    fn pool() -> (Arc<SlotPool>, Arc<DeviceDouble>) {
        let memory = DeviceDouble::new(LAYOUT.slots_bytes(), Abilities::default());
        let shared = Arc::clone(&memory) as Arc<dyn DeviceMemory>;
        let slab = Slab::on_device("device", LAYOUT, shared).expect("slab");
        (SlotPool::new(Arc::new(slab)), memory)
    }

    fn content(seed: u64) -> Vec<u8> {
        (0..1000).map(|at| (at * 7 + seed * 31) as u8).collect()
    }

    fn sum(token: u64, slot: &SlotRef, offset: u32, len: u32) -> SlotSum {
        SlotSum { token, slot: slot.clone(), offset, len }
    }

    /// Random ranges with refusals and faults: each accepted token ends once with the sum of the bytes that
    /// were there when it was submitted, although its owner drops the slot at once, and no slot is held
    /// afterwards.
    #[test]
    fn every_sum_ends_once_and_holds_its_slot_until_then() {
        for seed in 1..=20_u64 {
            println!("seed {seed}");
            let (pool, memory) = pool();
            let faults = SumFaults {
                polls_max: 1 + seed % 7,
                fail_one_in: [0, 5][seed as usize % 2],
                wrong_one_in: [0, 0, 6][seed as usize % 3],
            };
            let mut summer = ChecksummerDouble::new(seed, 4, faults);
            let mut open: HashMap<u64, u64> = HashMap::new();
            let mut done = Vec::new();
            let (mut good, mut wrong, mut failures, mut refused, mut crossed, mut last) = (0, 0, 0, 0, 0, 0);
            for token in 0..500_u64 {
                if let Some(slot) = pool.acquire() {
                    let bytes = content(token);
                    memory.write(slot.slot() as usize * LAYOUT.stride(), &bytes).expect("alive");
                    let (offset, len) = (summer.draw() as u32 % 500, 1 + summer.draw() as u32 % 500);
                    match summer.submit(sum(token, &slot, offset, len)) {
                        Ok(()) => {
                            let bytes = &bytes[offset as usize..][..len as usize];
                            open.insert(token, dataplane_checksum::checksum(bytes));
                        }
                        Err(SumRefused::Full(back)) => refused += u64::from(back.token == token),
                        Err(other) => panic!("{other:?}"),
                    }
                }
                summer.flush();
                summer.poll(&mut done);
                for SumDone { token, result } in done.drain(..) {
                    let expected = open.remove(&token).expect("each token once, and only accepted ones");
                    failures += u64::from(result.is_err());
                    good += u64::from(result == Ok(expected));
                    wrong += u64::from(result.is_ok_and(|found| found != expected));
                    crossed += u64::from(token < last);
                    last = token;
                }
                assert_eq!(summer.in_flight(), open.len());
            }
            for _ in 0..faults.polls_max {
                summer.poll(&mut done);
            }
            done.drain(..).for_each(|done| assert!(open.remove(&done.token).is_some(), "once"));
            assert!(open.is_empty() && good > 50, "seed {seed}: {good}");
            assert_eq!((failures > 0, wrong > 0), (faults.fail_one_in > 0, faults.wrong_one_in > 0));
            assert!(faults.polls_max < 5 || (crossed > 0 && refused > 0), "seed {seed}: {crossed} {refused}");
            assert_eq!(pool.used_count(), 0, "seed {seed}: slots leaked");
        }
    }

    #[test]
    fn nothing_starts_before_the_doorbell_and_a_dead_device_ends_everything() {
        let (pool, _) = pool();
        let slot = pool.acquire().expect("slot");
        let host = SlotPool::new(Arc::new(Slab::create("host", LAYOUT, PageSize::Standard).expect("slab")));
        let here = host.acquire().expect("slot");
        let faults = SumFaults { polls_max: 50, ..SumFaults::default() };
        let mut summer = ChecksummerDouble::new(1, 4, faults);
        assert!(matches!(summer.submit(sum(9, &here, 0, 8)), Err(SumRefused::Unreachable(_))));
        assert!(
            matches!(summer.submit(sum(9, &slot, 993, 8)), Err(SumRefused::Outside(back)) if back.token == 9)
        );
        assert!(matches!(summer.submit(sum(9, &slot, 0, 0)), Err(SumRefused::Outside(_))));
        let mut done = Vec::new();
        (0..2).for_each(|token| summer.submit(sum(token, &slot, 0, 8)).expect("room"));
        (0..100).for_each(|_| assert_eq!(summer.poll(&mut done), 0, "nobody rang"));
        summer.flush();
        summer.flush();
        assert_eq!(summer.doorbells(), 1, "one for both, none for nothing");
        summer.kill();
        summer.submit(sum(2, &slot, 0, 8)).expect("taken, to end with an error");
        summer.flush();
        summer.poll(&mut done);
        assert_eq!(done.iter().filter(|done| done.result.is_err()).count(), 3);
        drop(slot);
        assert_eq!((summer.in_flight(), pool.used_count()), (0, 0));
    }
}
