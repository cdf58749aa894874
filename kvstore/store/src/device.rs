//! Copies between host memory and a worker's pool that lies in a device's memory: they go on beside the store's thread,
//! which starts them, rings one doorbell for what it started in a round, and asks how they ended. One thread; a start and
//! an end cost a hash map's entry each, besides what the copier does.
//!
//! The processor cannot read what arrived on the device. A block that goes there is verified in host memory right before
//! its copy begins; one that comes from there gets its checksum from what arrived here. Where the caller lets the device take
//! the checksums, on its side of the copies, neither is done.
//!
//! Until its copy is over a block in host memory stays leased, and so do the slots on both sides, whatever becomes of the
//! request: nothing is reused under a copy.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use dataplane_memory::{Copier, CopyDone, CopyRefused, SlotCopy, SlotRef};
use kvstore_catalog::{Filling, Lease};

use crate::job::NewBlock;

/// Longer than any copy of a block takes.
const SPIN_MAX: Duration = Duration::from_millis(1);
const ASK_AGAIN: Duration = Duration::from_micros(50);

/// What a copy is for.
pub(crate) enum Purpose {
    /// A block comes from the pool.
    In { block: NewBlock, filling: Filling, bytes: usize },
    /// A block goes to the pool: the load's number, and which block of it.
    Out { load: u64, index: usize, lease: Lease },
}

struct UnderWay {
    purpose: Purpose,
    started: Instant,
    /// Nothing else was under way, so its time is that of a copy.
    is_alone: bool,
}

/// The copies that are under way.
pub(crate) struct DeviceCopies {
    /// `None`: no pool lies in a device's memory.
    copier: Option<Box<dyn Copier>>,
    under_way: HashMap<u64, UnderWay>,
    next_token: u64,
    done: Vec<CopyDone>,
    /// Copies that are over and were not looked at yet.
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

    /// Lets others run: copies take microseconds, and nobody rings when they are over. A device that has not ended one for
    /// long is asked less often.
    pub(crate) fn wait(&self) {
        if self.last_progress.elapsed() > SPIN_MAX {
            std::thread::sleep(ASK_AGAIN);
        } else {
            std::thread::yield_now();
        }
    }

    /// Whether the end of some copy is to come, or to be looked at.
    pub(crate) fn is_busy(&self) -> bool {
        !self.under_way.is_empty() || !self.ended.is_empty()
    }

    /// A copy that is over, in the order in which they ended.
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
    ) -> Result<(), Refused> {
        let (Some(copier), Ok(len)) = (&mut self.copier, u32::try_from(len)) else {
            return Err(Refused { purpose, is_full: false });
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
                self.under_way.insert(token, UnderWay { purpose, started, is_alone });
                self.is_due = true;
                Ok(())
            }
            Err(CopyRefused::Full(_)) => Err(Refused { purpose, is_full: true }),
            Err(CopyRefused::Outside(_) | CopyRefused::Unreachable(_)) => {
                Err(Refused { purpose, is_full: false })
            }
        }
    }

    /// Rings the doorbell for what was started, and asks what has ended: [`DeviceCopies::next_ended`].
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
            let Some(UnderWay { purpose, started, is_alone }) = self.under_way.remove(&token) else {
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

/// A copy that is over.
pub(crate) struct Ended {
    pub(crate) purpose: Purpose,
    pub(crate) is_good: bool,
    /// Its time, where that is the time of a copy.
    pub(crate) took: Option<Duration>,
}

/// A copy that was not started.
pub(crate) struct Refused {
    pub(crate) purpose: Purpose,
    /// There is no room for it now.
    pub(crate) is_full: bool,
}
