//! Hand-offs in progress.
//!
//! ```text
//! sender:    push, push, …      end        all copied, ended
//!            Pushed ───────────▶ is_ended ─────────────────▶ forgotten (PushEnd to each receiver that wants it)
//!              └ declined, cancelled, lease over, no memory: `wanted` is empty, slots are released; forgotten as above
//! receiver:  expect             each transfer over           all over
//!            Expected ─────────▶ waiting shrinks ───────────▶ forgotten (the leading blocks are copied out)
//!              └ cancelled: forgotten at once
//! ```

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use dataplane_memory::SlotRef;
use dataplane_transfer::TransferId;

use super::{Content, Ending};
use crate::device::DeviceEvent;
use crate::registry::TensorsGuard;

/// Hand-offs in progress, by their first transfer.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    pub(super) expected: HashMap<TransferId, Expected>,
    pub(super) pushed: HashMap<TransferId, Pushed>,
    /// The first transfer of the hand-off that each of the other transfers belongs to.
    pub(super) hand_off_of: HashMap<TransferId, TransferId>,
}

#[derive(Debug)]
pub(super) struct Expected {
    pub(super) user: u64,
    pub(super) tensors: TensorsGuard,
    pub(super) blocks: Vec<u64>,
    pub(super) event: DeviceEvent,
    /// Transfers that have not ended.
    pub(super) waiting: Vec<TransferId>,
    /// Every transfer of the expectation.
    pub(super) transfers: Vec<TransferId>,
    /// The slots that hold the leading blocks of every finished transfer; `None` until the first finishes.
    pub(super) arrived: Option<Vec<SlotRef>>,
    /// Ending of the first share that was not complete, if there is one.
    pub(super) ending: Ending,
}

#[derive(Debug)]
pub(super) struct Pushed {
    pub(super) transfers: Vec<TransferId>,
    /// Transfers whose receiver has not declined.
    pub(super) wanted: Vec<TransferId>,
    /// The slot of each block.
    pub(super) slots: HashMap<u32, SlotRef>,
    /// Number of pushes whose layers are not copied yet.
    pub(super) copying: usize,
    /// Number of pushes so far: the number of the next one.
    pub(super) count: u64,
    /// Pushes that wait for earlier ones. `None`: the push could not be copied.
    pub(super) copied: BTreeMap<u64, Option<Copied>>,
    /// Number of the push that is submitted next.
    pub(super) next_push: u64,
    /// Whether all pushes have been made.
    pub(super) is_ended: bool,
}

/// A push that is copied into its slots.
#[derive(Debug)]
pub(super) struct Copied {
    pub(super) content: Content,
    pub(super) first_block: u32,
    pub(super) slots: Vec<SlotRef>,
    pub(super) layers: Range<u16>,
}

impl Transfers {
    pub(super) fn hand_off_of(&self, transfer: TransferId) -> TransferId {
        self.hand_off_of.get(&transfer).copied().unwrap_or(transfer)
    }

    pub(super) fn remember(&mut self, transfers: &[TransferId]) {
        for &transfer in &transfers[1..] {
            self.hand_off_of.insert(transfer, transfers[0]);
        }
    }

    pub(super) fn forget(&mut self, transfers: &[TransferId]) {
        for transfer in &transfers[1..] {
            self.hand_off_of.remove(transfer);
        }
    }

    pub(super) fn end_expected(&mut self, first: TransferId) -> Option<Expected> {
        let expected = self.expected.remove(&first)?;
        self.forget(&expected.transfers);
        Some(expected)
    }

    /// Removes a hand-off whose pushes are over. Returns the transfers whose receivers must be told of the end.
    pub(super) fn end_pushed(&mut self, first: TransferId) -> Vec<TransferId> {
        let is_over = |pushed: &Pushed| pushed.is_ended && pushed.copying == 0;
        if !self.pushed.get(&first).is_some_and(is_over) {
            return Vec::new();
        }
        let Some(pushed) = self.pushed.remove(&first) else { return Vec::new() };
        self.forget(&pushed.transfers);
        pushed.wanted
    }
}

impl Pushed {
    pub(super) fn new(transfers: &[TransferId]) -> Self {
        let (transfers, wanted) = (transfers.to_vec(), transfers.to_vec());
        let (slots, copied) = (HashMap::new(), BTreeMap::new());
        Self { transfers, wanted, slots, copying: 0, count: 0, copied, next_push: 0, is_ended: false }
    }

    /// Registers a push. Returns its number.
    pub(super) fn begin(&mut self) -> u64 {
        self.copying += 1;
        self.count += 1;
        self.count - 1
    }

    /// Records that a push was copied, or could not be. Returns the pushes that can be submitted now, in order.
    pub(super) fn end(&mut self, number: u64, copied: Option<Copied>) -> Vec<Copied> {
        // A push that panicked is given up at any stage: it may have been recorded already.
        if number < self.next_push || self.copied.contains_key(&number) {
            return Vec::new();
        }
        self.copying -= 1;
        self.copied.insert(number, copied);
        let mut ready = Vec::new();
        while let Some(next) = self.copied.remove(&self.next_push) {
            self.next_push += 1;
            ready.extend(next);
        }
        ready
    }

    pub(super) fn abandon(&mut self) {
        self.wanted.clear();
        self.slots.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(layer: u16) -> Option<Copied> {
        Some(Copied { content: [0; 16], first_block: 0, slots: Vec::new(), layers: layer..layer + 1 })
    }

    /// Threads copy pushes concurrently; a receiver takes the layers of a block in order.
    #[test]
    fn pushes_leave_in_the_order_in_which_they_came() {
        let mut pushed = Pushed::new(&[7]);
        assert_eq!([pushed.begin(), pushed.begin(), pushed.begin(), pushed.begin()], [0, 1, 2, 3]);
        let mut end = |number, copied| -> Vec<u16> {
            pushed.end(number, copied).into_iter().map(|copied| copied.layers.start).collect()
        };
        assert!(end(2, copied(2)).is_empty());
        assert_eq!(end(0, copied(0)), [0]);
        assert!(end(3, copied(3)).is_empty());
        // A push that could not be copied does not delay later ones.
        assert_eq!(end(1, None), [2, 3]);
        assert!(end(1, copied(1)).is_empty(), "told twice, counted once");
        assert_eq!(pushed.copying, 0);
    }

    #[test]
    fn a_hand_off_is_known_by_each_of_its_transfers_until_it_is_over() {
        let mut transfers = Transfers::default();
        transfers.remember(&[1, 2, 3]);
        transfers.pushed.insert(1, Pushed::new(&[1, 2, 3]));
        assert_eq!([1, 2, 3, 4].map(|transfer| transfers.hand_off_of(transfer)), [1, 1, 1, 4]);
        assert!(transfers.end_pushed(1).is_empty(), "more may be pushed");
        let pushed = transfers.pushed.get_mut(&1).expect("known");
        pushed.wanted.retain(|&transfer| transfer != 2);
        (pushed.is_ended, pushed.copying) = (true, 1);
        assert!(transfers.end_pushed(1).is_empty(), "a push is still copied");
        transfers.pushed.get_mut(&1).expect("known").copying = 0;
        assert_eq!(transfers.end_pushed(1), [1, 3], "those that want the end");
        assert!(transfers.pushed.is_empty() && transfers.hand_off_of.is_empty());
    }
}
