//! Page faults ahead of use: a thread allocates the pages of the slots that will be given out next.
//!
//! Host memory is allocated as it is used, and the first copy into a page stops for its fault: 1.2 GB/s where later copies are ten times as
//! fast. Free slots are given out in ascending order at first, so that the pages behind the highest slot in use are kept allocated: a
//! sixteenth of the memory, within [`AHEAD_MIN`] and [`AHEAD_MAX`]. Once all are, the thread ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use dataplane_memory::Slab;

const AHEAD_MIN: usize = 64 << 20;
const AHEAD_MAX: usize = 1 << 30;
/// The part of the memory that is allocated ahead, as a divisor.
const AHEAD_SHARE: usize = 16;
/// Pages that are allocated in one call: closing waits for it.
const CHUNK_BYTES: usize = 16 << 20;
/// Less memory is not worth a thread.
const MEMORY_MIN: usize = AHEAD_MIN;
/// No slot wakes the thread.
const NEVER: u32 = u32::MAX;

/// Ends its thread when it is dropped.
#[derive(Debug)]
pub(crate) struct PagesAhead {
    /// The first slot whose use wakes the thread. Relaxed: a use that is missed costs page faults.
    trigger: Arc<AtomicU32>,
    is_closing: Arc<AtomicBool>,
    used: Option<Sender<u32>>,
    thread: Option<JoinHandle<()>>,
}

impl PagesAhead {
    /// `None`: there is little memory, or no thread to be had.
    pub(crate) fn start(slab: &Arc<Slab>) -> Option<Self> {
        if slab.mapped_bytes() < MEMORY_MIN {
            return None;
        }
        let (used, inbox) = bounded(1);
        let (trigger, is_closing) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let work = {
            let (slab, trigger, is_closing) =
                (Arc::clone(slab), Arc::clone(&trigger), Arc::clone(&is_closing));
            move || populate(&slab, &inbox, &trigger, &is_closing)
        };
        let thread = std::thread::Builder::new().name("kvasir-pages".to_owned()).spawn(work).ok()?;
        let ahead = Self { trigger, is_closing, used: Some(used), thread: Some(thread) };
        ahead.note_use(0);
        Some(ahead)
    }

    /// The slot is about to be used.
    #[inline]
    pub(crate) fn note_use(&self, slot: u32) {
        if slot >= self.trigger.load(Ordering::Relaxed) {
            self.wake(slot);
        }
    }

    #[cold]
    fn wake(&self, slot: u32) {
        // Of several threads one sends; the queue is empty then.
        if self.trigger.swap(NEVER, Ordering::Relaxed) != NEVER
            && let Some(used) = &self.used
        {
            let _ended = used.try_send(slot);
        }
    }
}

impl Drop for PagesAhead {
    fn drop(&mut self) {
        self.is_closing.store(true, Ordering::Relaxed);
        self.used = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed already.
            let _panicked = thread.join();
        }
    }
}

fn populate(slab: &Slab, inbox: &Receiver<u32>, trigger: &AtomicU32, is_closing: &AtomicBool) {
    let (count, stride) = (slab.layout().slot_count, slab.layout().stride());
    let slots_of = |bytes: usize| u32::try_from(bytes / stride).unwrap_or(count).max(1);
    let ahead_bytes = (slab.mapped_bytes() / AHEAD_SHARE).clamp(AHEAD_MIN, AHEAD_MAX);
    let (ahead, chunk) = (slots_of(ahead_bytes), slots_of(CHUNK_BYTES));
    let mut populated = 0;
    while let Ok(used) = inbox.recv() {
        let end = used.saturating_add(1).saturating_add(ahead).min(count);
        while populated < end {
            if is_closing.load(Ordering::Relaxed) {
                return;
            }
            let next = populated.saturating_add(chunk).min(end);
            if let Err(error) = slab.populate_slots(populated..next) {
                return tracing::debug!("pages of host memory are not allocated ahead: {error}");
            }
            populated = next;
        }
        if populated == count {
            return;
        }
        trigger.store(populated - ahead / 2, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::time::{Duration, Instant};

    use dataplane_memory::{PageSize, SlabLayout};

    use super::*;

    /// Bytes of the slab that are allocated.
    fn allocated(slab: &Slab) -> u64 {
        let memory = slab.memory().try_clone_to_owned().expect("a memfd");
        File::from(memory).metadata().expect("a memfd").blocks() * 512
    }

    #[test]
    fn pages_are_allocated_some_way_ahead_of_use_and_no_further() {
        const SLOT: usize = 1 << 20;
        let layout = SlabLayout { slot_bytes: SLOT, slot_count: 200 };
        let slab = Arc::new(Slab::create("pages", layout, PageSize::Standard).expect("memory"));
        let ahead = PagesAhead::start(&slab).expect("a thread");
        // A use that is noted while the thread is at work is missed: the next one counts.
        let use_until = |slot: u32, wanted: u64| {
            let started = Instant::now();
            while allocated(&slab) < wanted << 20 {
                let found = allocated(&slab) >> 20;
                assert!(started.elapsed() < Duration::from_secs(20), "{found} MiB of {wanted}");
                ahead.note_use(slot);
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        use_until(0, 65);
        // Nothing happens while the slots in use are far behind; near the end of what is allocated more is.
        ahead.note_use(20);
        std::thread::sleep(Duration::from_millis(50));
        assert!(allocated(&slab) < 67 << 20, "{} MiB", allocated(&slab) >> 20);
        use_until(40, 105);
        use_until(190, 200);
        drop(ahead);
        let few = SlabLayout { slot_bytes: SLOT, slot_count: 9 };
        let slab = Arc::new(Slab::create("pages", few, PageSize::Standard).expect("memory"));
        assert!(PagesAhead::start(&slab).is_none());
    }
}
