//! Every interleaving of readers and evictor: `tests/loom.sh` builds this with `--cfg loom`.
#![cfg(loom)]

use std::ops::ControlFlow;

use kvstore_block::BlockIdentity;
use kvstore_catalog::index::Index;
use kvstore_catalog::record::{Record, State, TakeOutcome};
use kvstore_catalog::returns::Returns;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

const OLD: [u64; 2] = [1, 0];
const NEW: [u64; 2] = [2, 0];

fn identity(number: u64) -> BlockIdentity {
    BlockIdentity(u128::from(number).to_le_bytes())
}

fn publish(record: &Record, number: u64) {
    record.reserve();
    record.publish(&identity(number), None, number, 1, 0);
}

/// A slot with block 1, its bytes, and the stack of returned slots.
struct Slot {
    records: [Record; 1],
    returns: Returns,
    bytes: UnsafeCell<u64>,
}

impl Slot {
    fn new() -> Arc<Self> {
        let slot =
            Self { records: [Record::default()], returns: Returns::default(), bytes: UnsafeCell::new(1) };
        publish(&slot.records[0], 1);
        Arc::new(slot)
    }

    fn unpin(&self) {
        if self.records[0].unpin() {
            self.returns.push(&self.records, 0);
        }
    }

    fn read(&self) -> u64 {
        // SAFETY: the reader has a pin: that nobody writes meanwhile is what loom checks.
        self.bytes.with(|bytes| unsafe { *bytes })
    }

    /// Evicts block 1 and moves block 2 in, if block 1 is not pinned.
    fn replace(&self) -> TakeOutcome {
        let taking = self.records[0].take();
        if taking == TakeOutcome::Taken {
            // SAFETY: the evictor owns the slot: that nobody reads meanwhile is what loom checks.
            self.bytes.with_mut(|bytes| unsafe { *bytes = 2 });
            self.records[0].free();
            publish(&self.records[0], 2);
        }
        taking
    }
}

/// Two readers and the evictor: a reader with a pin reads the bytes that it asked for.
#[test]
fn a_pin_holds_the_bytes() {
    loom::model(|| {
        let slot = Slot::new();
        let reader = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || {
                for wanted in [OLD, NEW] {
                    if slot.records[0].pin(wanted) {
                        assert_eq!(slot.read(), wanted[0]);
                        slot.unpin();
                    }
                }
            })
        };
        let taking = slot.replace();
        reader.join().expect("reader");
        // A slot that was found in use is handed back, once.
        let returned = slot.returns.take();
        assert_eq!(returned.is_some(), taking == TakeOutcome::Pinned);
        assert_eq!(slot.records[0].pins(), 0);
        assert!(returned.is_none() || Returns::below(&slot.records, 0).is_none());
    });
}

/// The rig: a reader that checks first and counts then must be found out.
#[test]
#[should_panic]
fn a_pin_that_is_not_a_swap_is_found_out() {
    loom::model(|| {
        let slot = Slot::new();
        let reader = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || {
                if slot.records[0].pin_without_swap(OLD) {
                    assert_eq!(slot.read(), 1);
                    slot.unpin();
                }
            })
        };
        slot.replace();
        reader.join().expect("reader");
    });
}

/// A look-up without a pin never takes one block for the other.
#[test]
fn a_look_up_tells_blocks_apart() {
    loom::model(|| {
        let slot = Slot::new();
        let writer = {
            let slot = Arc::clone(&slot);
            thread::spawn(move || {
                slot.replace();
            })
        };
        let new = slot.records[0].holds(NEW);
        let old = slot.records[0].holds(OLD);
        assert!(!(new && old), "once block 2 is here, block 1 is not");
        writer.join().expect("writer");
        assert!(slot.records[0].holds(NEW));
    });
}

/// A block is parked, handed back and removed while two readers come and go: its slot is pushed once or freed by
/// the remover, never both, never neither.
#[test]
fn a_doomed_slot_comes_back_once() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let slot = Slot::new();
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let slot = Arc::clone(&slot);
                thread::spawn(move || {
                    if slot.records[0].pin(OLD) {
                        slot.unpin();
                    }
                })
            })
            .collect();
        let record = &slot.records[0];
        let parked = match record.take() {
            TakeOutcome::Taken => {
                record.restore();
                false
            }
            taking => taking == TakeOutcome::Pinned,
        };
        let freed = record.remove(parked);
        readers.into_iter().for_each(|reader| reader.join().expect("reader"));
        let returned = slot.returns.take();
        assert_eq!((record.state(), record.pins()), (State::PendingFree, 0));
        assert_eq!(returned.is_some(), !freed, "parked {parked}");
        assert!(returned.is_none() || Returns::below(&slot.records, 0).is_none());
    });
}

/// An entry that stays is found while its neighbours come and go.
#[test]
fn an_entry_that_stays_is_found() {
    loom::model(|| {
        let index = Arc::new(Index::new(1));
        assert!(index.insert(7, 0, 0));
        assert!(index.insert(7, 0, 1));
        let writer = {
            let index = Arc::clone(&index);
            thread::spawn(move || {
                assert!(index.remove(7, 0, 0));
                assert!(index.insert(7, 0, 2));
            })
        };
        let found = index.visit(7, |_, slot| match slot {
            1 => ControlFlow::Break(slot),
            _ => ControlFlow::Continue(()),
        });
        assert_eq!(found, Some(1));
        writer.join().expect("writer");
    });
}
