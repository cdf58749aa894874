//! Admission to the disk: blocks that are offered often enough, within the limits on writes.

use kvstore_block::BlockIdentity;
use kvstore_catalog::FrequencySketch;
use kvstore_disk::{Admission, AdmissionConfig, ClockReading, Usage, WriteAdmission};

/// Entries of the sketch for each slot of host memory.
const SKETCH_ENTRIES: u32 = 4;

pub(crate) struct WriteGate {
    /// Approximate number of offers of each block: a block offered once need not be written.
    seen: FrequencySketch,
    admission: Admission,
    /// Whether blocks that were offered once are not written.
    is_selective: bool,
    /// Usage of the disk, as it reported last.
    usage: Usage,
    /// The block that was admitted, and charged, and waits for bandwidth.
    admitted: Option<BlockIdentity>,
}

impl WriteGate {
    pub(crate) fn new(config: AdmissionConfig, host_slots: u32, usage: Usage) -> Self {
        Self {
            seen: FrequencySketch::new(host_slots.saturating_mul(SKETCH_ENTRIES)),
            is_selective: config.frequency_min > 1,
            admission: Admission::new(config, ClockReading::now()),
            usage,
            admitted: None,
        }
    }

    /// Whether blocks that were offered once are not written.
    pub(crate) fn is_selective(&self) -> bool {
        self.is_selective
    }

    /// Counts an offer of the block.
    pub(crate) fn count_offer(&self, identity: &BlockIdentity) {
        self.seen.increment(identity);
    }

    /// Whether the block may be written; its bytes are charged if so, once. `is_retained`: the number of
    /// offers is not compared.
    pub(crate) fn admits(&mut self, identity: BlockIdentity, bytes: u32, is_retained: bool) -> bool {
        if self.admitted.take() == Some(identity) {
            return true;
        }
        // The sketch forgets; this block was offered just now.
        let seen = if is_retained { u32::MAX } else { u32::from(self.seen.estimate(&identity)).max(1) };
        self.admission.decide(seen, u64::from(bytes), &self.usage, ClockReading::now())
            == WriteAdmission::Admit
    }

    /// Remembers that an admitted block has to wait.
    pub(crate) fn keep(&mut self, identity: BlockIdentity) {
        self.admitted = Some(identity);
    }

    /// Takes in the usage that the disk reports.
    pub(crate) fn used(&mut self, usage: Usage) {
        self.usage = usage;
    }
}
