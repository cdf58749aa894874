//! Test double of a device's copier: bytes move late, and copies may fail.

use std::collections::VecDeque;

use crate::{Copier, CopyDone, CopyRefused, DeviceError, Slab, SlotCopy};

/// Delay and faults of a [`CopierDouble`].
#[derive(Debug, Clone, Copy)]
pub struct CopyFaults {
    /// A copy completes at most this many polls after its flush (at least 1), the number drawn from the seed.
    pub polls_max: u64,
    /// One in this many copies fails, and leaves garbage in a part of its target; 0: none.
    pub fail_one_in: u64,
}

impl Default for CopyFaults {
    fn default() -> Self {
        Self { polls_max: 1, fail_one_in: 0 }
    }
}

#[derive(Debug)]
struct Running {
    copy: SlotCopy,
    due: u64,
    fails: bool,
}

/// Copies between host slabs and slabs of any device memory, each completing a seeded number of polls after
/// its flush. Copies of one direction complete in order, those of different directions do not. The bytes
/// are read when the copy completes, so that a source that is reused too early is detected.
#[derive(Debug)]
pub struct CopierDouble {
    random: fastrand::Rng,
    faults: CopyFaults,
    capacity: usize,
    polls: u64,
    is_dead: bool,
    /// Copies submitted and not flushed yet.
    submitted: VecDeque<SlotCopy>,
    /// Running copies, by the kind of source and target.
    running: [VecDeque<Running>; 4],
    scratch: Vec<u8>,
    doorbells: u64,
    copied: u64,
}

impl CopierDouble {
    /// Makes a copier that takes `capacity` copies at a time.
    #[must_use]
    pub fn new(seed: u64, capacity: usize, faults: CopyFaults) -> Self {
        // A stream of its own beside that of a test with the same seed.
        let random = fastrand::Rng::with_seed(seed ^ 0xC0F1);
        Self {
            random,
            faults,
            capacity,
            polls: 0,
            is_dead: false,
            submitted: VecDeque::with_capacity(capacity),
            running: std::array::from_fn(|_| VecDeque::with_capacity(capacity)),
            scratch: Vec::new(),
            doorbells: 0,
            copied: 0,
        }
    }

    /// Changes the faults from now on.
    pub fn set_faults(&mut self, faults: CopyFaults) {
        self.faults = faults;
    }

    /// Loses the device: copies in flight and later ones end with an error.
    pub fn kill(&mut self) {
        self.is_dead = true;
    }

    /// Returns the number of copies that have ended, successfully or not.
    #[must_use]
    pub fn copied(&self) -> u64 {
        self.copied
    }

    /// Returns the number of flushes that started copies.
    #[must_use]
    pub fn doorbells(&self) -> u64 {
        self.doorbells
    }

    fn draw(&mut self) -> u64 {
        self.random.u64(..)
    }

    fn carry_out(&mut self, running: Running) -> CopyDone {
        let Running { copy, fails, .. } = running;
        let failed =
            |reason: &str| DeviceError { operation: "copy of the double", reason: reason.to_owned() };
        let result = if self.is_dead {
            Err(failed("the device is gone"))
        } else if fails {
            self.scratch.resize(copy.len as usize / 2, 0xDB);
            self.scratch.fill(0xDB);
            let _lost = put(copy.to.slab(), (copy.to.slot(), copy.to_offset), &self.scratch);
            Err(failed("told to fail"))
        } else {
            self.scratch.resize(copy.len as usize, 0);
            take(copy.from.slab(), (copy.from.slot(), copy.from_offset), &mut self.scratch)
                .and_then(|()| put(copy.to.slab(), (copy.to.slot(), copy.to_offset), &self.scratch))
        };
        CopyDone { token: copy.token, result }
    }
}

/// Returns the offset of a slot's bytes in the device's memory.
fn offset_of(slab: &Slab, at: (u32, u32)) -> usize {
    at.0 as usize * slab.layout().stride() + at.1 as usize
}

fn take(slab: &Slab, at: (u32, u32), bytes: &mut [u8]) -> Result<(), DeviceError> {
    match slab.device() {
        Some(device) => device.read(offset_of(slab, at), bytes),
        None => {
            slab.read(at.0, at.1 as usize, bytes);
            Ok(())
        }
    }
}

fn put(slab: &Slab, at: (u32, u32), bytes: &[u8]) -> Result<(), DeviceError> {
    match slab.device() {
        Some(device) => device.write(offset_of(slab, at), bytes),
        None => {
            slab.write(at.0, at.1 as usize, bytes);
            Ok(())
        }
    }
}

impl Copier for CopierDouble {
    fn submit(&mut self, copy: SlotCopy) -> Result<(), CopyRefused> {
        if self.in_flight() >= self.capacity {
            return Err(CopyRefused::Full(copy));
        }
        if !copy.is_inside() || copy.overlaps() {
            return Err(CopyRefused::Outside(copy));
        }
        self.submitted.push_back(copy);
        Ok(())
    }

    fn flush(&mut self) {
        self.doorbells += u64::from(!self.submitted.is_empty());
        while let Some(copy) = self.submitted.pop_front() {
            let due = self.polls + 1 + self.draw() % self.faults.polls_max.max(1);
            let fails = self.faults.fail_one_in > 0 && self.draw().is_multiple_of(self.faults.fail_one_in);
            let direction = 2 * usize::from(copy.from.slab().device().is_some())
                + usize::from(copy.to.slab().device().is_some());
            self.running[direction].push_back(Running { copy, due, fails });
        }
    }

    fn poll(&mut self, done: &mut Vec<CopyDone>) -> usize {
        self.polls += 1;
        let before = done.len();
        for direction in 0..self.running.len() {
            let (polls, is_dead) = (self.polls, self.is_dead);
            while let Some(running) =
                self.running[direction].pop_front_if(|running| is_dead || running.due <= polls)
            {
                self.copied += 1;
                done.push(self.carry_out(running));
            }
        }
        done.len() - before
    }

    fn in_flight(&self) -> usize {
        self.submitted.len() + self.running.iter().map(VecDeque::len).sum::<usize>()
    }

    fn is_lost(&self) -> bool {
        self.is_dead
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use super::*;
    use crate::testing::{Abilities, DeviceDouble};
    use crate::{PageSize, SlabLayout, SlotPool, SlotRef};

    const LAYOUT: SlabLayout = SlabLayout { slot_bytes: 1000, slot_count: 12 };

    fn pools() -> [Arc<SlotPool>; 2] {
        let host = Slab::create("host", LAYOUT, PageSize::Standard).expect("slab");
        let memory = DeviceDouble::new(LAYOUT.slots_bytes(), Abilities::default());
        let device = Slab::on_device("device", LAYOUT, memory).expect("slab");
        [host, device].map(|slab| SlotPool::new(Arc::new(slab)))
    }

    fn fill(slot: &SlotRef, seed: u64) {
        put(slot.slab(), (slot.slot(), 0), &content(seed)).expect("alive");
    }

    fn content(seed: u64) -> Vec<u8> {
        (0..1000).map(|at| (at * 7 + seed * 31) as u8).collect()
    }

    fn bytes_of(slot: &SlotRef) -> Vec<u8> {
        let mut bytes = vec![0; 1000];
        take(slot.slab(), (slot.slot(), 0), &mut bytes).expect("alive");
        bytes
    }

    /// Random copies in all four directions, with refusals and faults: each accepted token ends once,
    /// success means equal bytes, and no slot is held afterwards, nor reused during its copy.
    #[test]
    fn every_copy_ends_once_and_holds_its_slots_until_then() {
        for seed in 1..=20_u64 {
            println!("seed {seed}");
            let pools = pools();
            let faults = CopyFaults { polls_max: 1 + seed % 7, fail_one_in: [0, 3][seed as usize % 2] };
            let mut copier = CopierDouble::new(seed, 3, faults);
            let mut open: HashMap<u64, SlotRef> = HashMap::new();
            let mut done = Vec::new();
            let (mut ended, mut failures, mut refused, mut crossed, mut last) = (0, 0, 0, 0, 0);
            for token in 0..400_u64 {
                let draw = copier.draw();
                let from = pools[draw as usize % 2].acquire();
                let to = pools[draw as usize / 2 % 2].acquire();
                if let Some((from, to)) = from.zip(to) {
                    fill(&from, token);
                    let copy =
                        SlotCopy { token, from, from_offset: 0, to: to.clone(), to_offset: 0, len: 1000 };
                    match copier.submit(copy) {
                        Ok(()) => drop(open.insert(token, to)),
                        Err(CopyRefused::Full(back)) => refused += u64::from(back.token == token),
                        Err(other) => panic!("{other:?}"),
                    }
                }
                copier.flush();
                copier.poll(&mut done);
                for CopyDone { token, result } in done.drain(..) {
                    let to = open.remove(&token).expect("each token once, and only accepted ones");
                    assert!(result.is_err() || bytes_of(&to) == content(token), "seed {seed}, token {token}");
                    ended += 1;
                    failures += u64::from(result.is_err());
                    crossed += u64::from(token < last);
                    last = token;
                }
                assert_eq!(copier.in_flight(), open.len());
            }
            for _ in 0..faults.polls_max {
                copier.poll(&mut done);
            }
            done.drain(..).for_each(|done| drop(open.remove(&done.token).expect("once")));
            assert!(open.is_empty() && ended > 50, "seed {seed}: {ended}");
            assert_eq!(failures > 0, faults.fail_one_in > 0);
            assert!(faults.polls_max < 5 || (crossed > 0 && refused > 0), "seed {seed}: {crossed} {refused}");
            assert!(pools.iter().all(|pool| pool.used_count() == 0), "seed {seed}: slots leaked");
        }
    }

    #[test]
    fn nothing_starts_before_the_doorbell_and_a_dead_device_ends_everything() {
        let [host, device] = pools();
        let mut copier = CopierDouble::new(1, 4, CopyFaults { polls_max: 50, fail_one_in: 0 });
        let copy = |token| SlotCopy {
            token,
            from: host.acquire().expect("slot"),
            from_offset: 0,
            to: device.acquire().expect("slot"),
            to_offset: 0,
            len: 1000,
        };
        let mut done = Vec::new();
        (0..2).for_each(|token| copier.submit(copy(token)).expect("room"));
        for _ in 0..100 {
            assert_eq!(copier.poll(&mut done), 0, "nobody rang");
        }
        copier.flush();
        copier.flush();
        assert_eq!(copier.doorbells(), 1, "one for both, none for nothing");
        copier.kill();
        copier.submit(copy(2)).expect("taken, to end with an error");
        copier.flush();
        copier.poll(&mut done);
        assert_eq!(done.iter().filter(|done| done.result.is_err()).count(), 3);
        assert_eq!((copier.in_flight(), host.used_count(), device.used_count()), (0, 0, 0));
    }
}
