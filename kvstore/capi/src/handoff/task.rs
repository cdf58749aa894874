//! Copy tasks of hand-offs, and the steps that follow a copy.

use std::sync::Arc;

use dataplane_memory::SlotRef;
use dataplane_transfer::{Command, TransferId};

use super::copy::{BlockCopier, HostCopier};
use super::state::Copied;
use super::{Ending, HandOffs, Push, outcome};
use crate::device::DeviceEvent;
use crate::lock::lock;
use crate::operation::Outcome;
use crate::registry::TensorsGuard;
use crate::status::{Failure, Status};

/// A copy of a hand-off, carried out by one thread.
#[derive(Debug)]
pub(crate) struct CopyTask {
    pub(super) handoffs: Arc<HandOffs>,
    pub(super) task: Task,
}

#[derive(Debug)]
pub(super) enum Task {
    /// A push, and its number among the pushes of its hand-off.
    Push(Push, u64),
    Arrived {
        tensors: TensorsGuard,
        blocks: Vec<u64>,
        slots: Vec<SlotRef>,
        ending: Ending,
        event: DeviceEvent,
    },
}

impl CopyTask {
    /// Number of blocks that the task counts for in the queue.
    pub(crate) fn blocks(&self) -> usize {
        match &self.task {
            Task::Push(push, _) => push.blocks.len(),
            Task::Arrived { blocks, .. } => blocks.len(),
        }
    }

    /// Returns a call that gives the push up: its receivers and later pushes stop waiting for it.
    pub(super) fn given_up(&self) -> impl FnOnce() + use<> {
        let handoffs = Arc::clone(&self.handoffs);
        let push = match &self.task {
            Task::Push(push, number) => Some((push.transfers.clone(), *number)),
            Task::Arrived { .. } => None,
        };
        move || {
            let Some((transfers, number)) = push else { return };
            handoffs.give_up(&transfers);
            handoffs.copied(transfers[0], number, None);
        }
    }

    pub(super) fn is_push(&self) -> bool {
        matches!(self.task, Task::Push(..))
    }

    /// Carries out the task for blocks in host memory.
    ///
    /// # Safety
    /// As for [`Self::carry_out`].
    pub(crate) unsafe fn carry_out_on_host(self) -> Result<Outcome, Failure> {
        let mut copier = HostCopier(self.handoffs.shape);
        // SAFETY: handed on to the caller.
        unsafe { self.carry_out(&mut copier) }
    }

    /// Carries out the copy.
    ///
    /// # Safety
    /// The blocks of the tensors must be usable for the time of the call: a push's for reads, an arrival's for
    /// writes. The event must live for that time too.
    pub(super) unsafe fn carry_out(self, copier: &mut impl BlockCopier) -> Result<Outcome, Failure> {
        let Self { handoffs, task } = self;
        match task {
            Task::Push(push, number) => {
                let (first, count) = (push.transfers[0], push.blocks.len());
                // SAFETY: readable by the contract of this function.
                let copied = unsafe { handoffs.copy(push, copier) };
                let (copied, outcome) = match copied {
                    Ok(copied) => (Some(copied), Ok(outcome(Status::Ok, count, Ending::Complete))),
                    Err(CopyError::Outcome(status)) => (None, Ok(outcome(status, 0, Ending::Complete))),
                    Err(CopyError::Failed(failure)) => (None, Err(failure)),
                };
                handoffs.copied(first, number, copied);
                outcome
            }
            Task::Arrived { tensors, blocks, slots, ending, event } => {
                if !slots.is_empty() {
                    let places = (&blocks[..slots.len()], &slots[..]);
                    // SAFETY: writable by the contract of this function; the slots are verified and no longer
                    // written to.
                    unsafe { copier.scatter(&tensors, places, event) }?;
                }
                let status = if slots.len() == blocks.len() { Status::Ok } else { Status::Miss };
                Ok(outcome(status, slots.len(), ending))
            }
        }
    }
}

/// Reason for which a push was not copied into its slots.
enum CopyError {
    /// The copy is no longer wanted, or no slot is free.
    Outcome(Status),
    /// The device has failed.
    Failed(Failure),
}

impl HandOffs {
    /// Gives a hand-off's pushed blocks up, and tells its receivers.
    fn give_up(&self, transfers: &[TransferId]) {
        if let Some(pushed) = lock(&self.transfers).pushed.get_mut(&transfers[0]) {
            pushed.abandon();
        }
        transfers.iter().for_each(|&transfer| self.command(Command::Cancel { transfer }));
    }

    /// Copies a push into its slots. A push that cannot be copied is given up, and its receivers are told.
    ///
    /// # Safety
    /// As for [`CopyTask::carry_out`].
    unsafe fn copy(&self, push: Push, copier: &mut impl BlockCopier) -> Result<Copied, CopyError> {
        let slots = self.slots_of(&push).map_err(|status| {
            if status == Status::Throttled {
                self.give_up(&push.transfers);
            }
            CopyError::Outcome(status)
        })?;
        let Push { transfers, content, first_block, layers, tensors, blocks, event } = push;
        // SAFETY: readable by the contract of this function; these layers of the slots were not pushed before.
        let copied = unsafe { copier.gather(&tensors, (&blocks, &slots), layers.clone(), event) };
        copied.map_err(|failure| {
            self.give_up(&transfers);
            CopyError::Failed(failure)
        })?;
        Ok(Copied { content, first_block, slots, layers })
    }
}
