//! Recovery when SPDK reports a failed queue pair, or a command takes too long: one reset; if it fails, the
//! engine is dead. The memory of commands that were in flight then is never used again. Not a hot path.

use std::time::Instant;

use kvstore_io::Buffer;

use super::engine::{SpdkEngine, dead};
use crate::NvmeError;
use crate::commands::Owner;
use crate::request_queue::describe;
use crate::status::Status;

/// Status of commands that SPDK ends itself: "Command aborted due to SQ deletion".
const ABORTED: Status = Status::new(0, 0x08);

impl SpdkEngine {
    /// Resets the controller if a command has exceeded its timeout.
    pub(super) fn watch(&mut self, now: Instant) {
        if self.commands.overdue(now).is_some() {
            let waited_ms = self.command_timeout.as_millis() as u64;
            let device = self.device.clone();
            self.reset(NvmeError::Timeout { device, operation: "a command", waited_ms });
        }
    }

    /// Resets the controller and makes a new queue pair. SPDK's reset waits, so this blocks for as long as the
    /// controller takes. Freeing the old pair calls the callbacks of all its commands, which proves nothing
    /// about the device: after a reset that failed it may still have those commands.
    pub(super) fn reset(&mut self, reason: NvmeError) {
        self.resets += 1;
        self.cache.note_reset();
        // SAFETY: the controller is attached, and no other thread uses it.
        let failed = unsafe { (self.library.reset)(self.controller) } != 0;
        if failed {
            self.abandon();
        }
        // SAFETY: the pair is alive, this code does not run inside of its completions, and it is not used after
        // this.
        unsafe { (self.library.free_pair)(self.pair) };
        self.pair = std::ptr::null_mut();
        self.collect();
        while let Some(id) = self.commands.any() {
            if let Some(ended) = self.commands.end(id) {
                self.end(ended.owner, Some(ABORTED));
            }
        }
        if failed || !self.reopen() {
            self.give_up(reason);
        }
        self.issue();
    }

    /// Ends every command in flight while the device may still access its memory: a reference to the slot is
    /// leaked, so that the slot never returns to its pool and its slab is never freed, and dropping the engine
    /// leaks the bounce buffers, which are not used again either. No SPDK call that is used here proves that a
    /// controller let go of memory (detaching succeeds also when the shutdown does not), and without an IOMMU
    /// nothing else would stop it. At most `COMMANDS_MAX` commands, once, since the engine is dead afterwards.
    /// The requests complete all the same, with an error: a caller that kept a reference to the slot must not
    /// put anything else there. Callbacks that follow find no command any more.
    #[cold]
    fn abandon(&mut self) {
        while let Some(id) = self.commands.any() {
            let Some(ended) = self.commands.end(id) else { continue };
            if let Owner::Piece { request, bounce, .. } = ended.owner {
                self.abandoned_commands += 1;
                let active = self.queue.requests.get(request);
                if let (None, Some(Buffer::Slot { slot, .. })) =
                    (bounce, active.map(|active| &active.request.buffer))
                {
                    std::mem::forget(slot.clone());
                }
            }
            self.end(ended.owner, Some(ABORTED));
        }
    }

    fn give_up(&mut self, error: NvmeError) {
        self.dead = Some(error.clone());
        self.queue.fail_pending(|request| dead(&error, describe(request)));
    }
}
