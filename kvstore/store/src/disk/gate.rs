//! What is written to the disk at all: blocks that are offered often enough, as far as its limits go.

use kvstore_block::BlockIdentity;
use kvstore_catalog::FrequencySketch;
use kvstore_disk::{Admission, AdmissionConfig, Moment, Usage, Verdict};

/// Entries of the sketch for each slot of host memory.
const SKETCH_ENTRIES: u32 = 4;

pub(crate) struct WriteGate {
    /// How often blocks are offered: what is seen once need not be written.
    seen: FrequencySketch,
    admission: Admission,
    /// Whether blocks that were offered once are not written.
    is_selective: bool,
    /// What the disk has been written so far.
    usage: Usage,
    /// This block was admitted, and waits for bandwidth.
    admitted: Option<BlockIdentity>,
}

impl WriteGate {
    pub(crate) fn new(config: AdmissionConfig, host_slots: u32, usage: Usage) -> Self {
        Self {
            seen: FrequencySketch::new(host_slots.saturating_mul(SKETCH_ENTRIES)),
            is_selective: config.frequency_min > 1,
            admission: Admission::new(config, Moment::now()),
            usage,
            admitted: None,
        }
    }

    /// Whether blocks that were offered once are not written.
    pub(crate) fn is_selective(&self) -> bool {
        self.is_selective
    }

    /// The block was offered.
    pub(crate) fn saw(&self, identity: &BlockIdentity) {
        self.seen.increment(identity);
    }

    /// Whether the block may be written; its bytes are charged if so, once. `is_retained`: it need not have been seen often.
    pub(crate) fn admits(&mut self, identity: BlockIdentity, bytes: u32, is_retained: bool) -> bool {
        if self.admitted.take() == Some(identity) {
            return true;
        }
        // The sketch forgets; this block was offered just now.
        let seen = if is_retained { u32::MAX } else { u32::from(self.seen.estimate(&identity)).max(1) };
        self.admission.decide(seen, u64::from(bytes), &self.usage, Moment::now()) == Verdict::Admit
    }

    /// A block that was admitted has to wait.
    pub(crate) fn keep(&mut self, identity: BlockIdentity) {
        self.admitted = Some(identity);
    }

    /// The disk tells what it has been written.
    pub(crate) fn used(&mut self, usage: Usage) {
        self.usage = usage;
    }
}
