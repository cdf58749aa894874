//! Copies between host memory and a worker's pool that lies in a device's memory: they run beside the store's
//! thread, which starts them, rings one doorbell for the copies started in a round, and polls for their ends.
//! One thread; a start and an end cost a hash map's entry each, besides the copier's work.
//!
//! The processor cannot read the bytes that arrived on the device. A block that goes there is verified in
//! host memory right before its copy begins; a block that comes from there gets its checksum from the bytes
//! that arrived here. Where the caller lets the device take the checksums, on its side of the copies, neither
//! is done.
//!
//! Until its copy has ended, a block in host memory stays leased, and so do the slots on both sides, even if
//! the request ends before: nothing is reused under a copy.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use dataplane_memory::{Copier, CopyDone, CopyRefused, SlotCopy, SlotRef};
use kvstore_catalog::{Filling, Lease};

use crate::job::NewBlock;

/// Longer than any copy of a block takes.
const SPIN_MAX: Duration = Duration::from_millis(1);
const ASK_AGAIN: Duration = Duration::from_micros(50);

/// Purpose of a copy.
pub(crate) enum Purpose {
    /// A block comes from the pool.
    In { block: NewBlock, filling: Filling, bytes: usize },
    /// A block goes to the pool: the load's number, and the block's index in the load.
    Out { load: u64, index: usize, lease: Lease },
}

struct InFlightCopy {
    purpose: Purpose,
    started: Instant,
    /// Whether no other copy was in flight at the start, so that the elapsed time is that of one copy.
    is_alone: bool,
}

/// The copies that are under way.
pub(crate) struct DeviceCopies {
    /// `None`: no pool lies in a device's memory.
    copier: Option<Box<dyn Copier>>,
    under_way: HashMap<u64, InFlightCopy>,
    next_token: u64,
    done: Vec<CopyDone>,
    /// Copies that have ended and have not been handled yet.
    ended: VecDeque<Ended>,
    is_due: bool,
    /// When a copy ended last, or the first of those under way was started.
    last_progress: Instant,
}

impl DeviceCopies {
    pub(crate) fn new(copier: Option<Box<dyn Copier>>) -> Self {
        Self {
            copier,
            under_way: HashMap::new(),
            next_token: 0,
            done: Vec::new(),
            ended: VecDeque::new(),
            is_due: false,
            last_progress: Instant::now(),
        }
    }

    /// Yields the processor: copies take microseconds, and no event reports their end. A device that has not
    /// ended one for [`SPIN_MAX`] is asked every [`ASK_AGAIN`].
    pub(crate) fn wait(&self) {
        if self.last_progress.elapsed() > SPIN_MAX {
            std::thread::sleep(ASK_AGAIN);
        } else {
            std::thread::yield_now();
        }
    }

    /// Whether a copy is in flight, or has ended and has not been handled.
    pub(crate) fn is_busy(&self) -> bool {
        !self.under_way.is_empty() || !self.ended.is_empty()
    }

    /// Returns the next copy that has ended, in the order in which they ended.
    pub(crate) fn next_ended(&mut self) -> Option<Ended> {
        self.ended.pop_front()
    }

    /// Starts a copy between slots of which one lies in a device's memory.
    #[expect(clippy::result_large_err, reason = "what is refused is handed back, not passed up")]
    pub(crate) fn start(
        &mut self,
        from: SlotRef,
        to: SlotRef,
        len: usize,
        purpose: Purpose,
    ) -> Result<(), UnstartedCopy> {
        let (Some(copier), Ok(len)) = (&mut self.copier, u32::try_from(len)) else {
            return Err(UnstartedCopy { purpose, is_full: false });
        };
        let token = self.next_token;
        let copy = SlotCopy { token, from, from_offset: 0, to, to_offset: 0, len };
        match copier.submit(copy) {
            Ok(()) => {
                self.next_token += 1;
                let (started, is_alone) = (Instant::now(), self.under_way.is_empty());
                if is_alone {
                    self.last_progress = started;
                }
                self.under_way.insert(token, InFlightCopy { purpose, started, is_alone });
                self.is_due = true;
                Ok(())
            }
            Err(CopyRefused::Full(_)) => Err(UnstartedCopy { purpose, is_full: true }),
            Err(CopyRefused::Outside(_) | CopyRefused::Unreachable(_)) => {
                Err(UnstartedCopy { purpose, is_full: false })
            }
        }
    }

    /// Rings the doorbell for the started copies, and collects those that have ended for
    /// [`DeviceCopies::next_ended`].
    pub(crate) fn poll(&mut self) {
        let Some(copier) = &mut self.copier else { return };
        if std::mem::take(&mut self.is_due) {
            copier.flush();
        }
        if self.under_way.is_empty() {
            return;
        }
        copier.poll(&mut self.done);
        for CopyDone { token, result } in self.done.drain(..) {
            let Some(InFlightCopy { purpose, started, is_alone }) = self.under_way.remove(&token) else {
                continue;
            };
            self.last_progress = Instant::now();
            if let Err(error) = &result {
                tracing::debug!("a copy to or from the device failed: {error}");
            }
            let took = is_alone.then(|| started.elapsed());
            self.ended.push_back(Ended { purpose, is_good: result.is_ok(), took });
        }
    }
}

/// A copy that has ended.
pub(crate) struct Ended {
    pub(crate) purpose: Purpose,
    pub(crate) is_good: bool,
    /// Duration of the copy; `None` if another copy was in flight at its start.
    pub(crate) took: Option<Duration>,
}

/// A copy that was not started.
pub(crate) struct UnstartedCopy {
    pub(crate) purpose: Purpose,
    /// Whether the copier is full now.
    pub(crate) is_full: bool,
}
