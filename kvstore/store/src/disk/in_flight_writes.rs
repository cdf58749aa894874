//! Writes to the disk that are under way. The block stays in host memory until its write has ended.

use std::collections::HashMap;

use kvstore_block::BlockIdentity;

/// State of the copy in host memory after the write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostCopy {
    Stays,
    /// The copy is evicted. `removal_published`: listeners know already that host memory does not have the block.
    Leaves {
        removal_published: bool,
    },
}

/// Whether the block is registered on the disk after the write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskCopy {
    Wanted,
    /// The block was forgotten while it was being written.
    Forgotten,
}

/// A write that is under way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InFlightWrite {
    /// The slot on the disk.
    slot: u32,
    pub(crate) host_copy: HostCopy,
    pub(crate) disk_copy: DiskCopy,
    /// The device has not answered in its time. An answer may still come.
    is_stuck: bool,
}

/// At most one write of a block, by the block.
#[derive(Debug, Default)]
pub(crate) struct InFlightWrites(HashMap<BlockIdentity, InFlightWrite>);

impl InFlightWrites {
    pub(crate) fn begin(&mut self, identity: BlockIdentity, slot: u32, host_copy: HostCopy) {
        let write = InFlightWrite { slot, host_copy, disk_copy: DiskCopy::Wanted, is_stuck: false };
        let other = self.0.insert(identity, write);
        assert!(other.is_none(), "two writes of a block are under way: {other:?}");
    }

    /// The write has ended, whether the block was written or not.
    pub(crate) fn end(&mut self, identity: &BlockIdentity) -> InFlightWrite {
        self.0.remove(identity).expect("a write that ends has begun")
    }

    /// Slots of writes whose blocks were forgotten since they began.
    pub(crate) fn forgotten_slots(&self) -> impl Iterator<Item = u32> {
        let is_forgotten = |write: &&InFlightWrite| write.disk_copy == DiskCopy::Forgotten;
        self.0.values().filter(is_forgotten).map(|write| write.slot)
    }

    pub(crate) fn contains(&self, identity: &BlockIdentity) -> bool {
        self.0.contains_key(identity)
    }

    /// All writes, those that the device does not answer among them.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Writes that the device is expected to answer.
    pub(crate) fn answering(&self) -> usize {
        self.0.values().filter(|write| !write.is_stuck).count()
    }

    /// Whether the device is expected to answer a write of the block.
    pub(crate) fn is_answering(&self, identity: &BlockIdentity) -> bool {
        self.0.get(identity).is_some_and(|write| !write.is_stuck)
    }

    /// Whether the block is leaving host memory and listeners still believe that it is there.
    pub(crate) fn is_published_on_host(&self, identity: &BlockIdentity) -> bool {
        let leaves = HostCopy::Leaves { removal_published: false };
        self.0.get(identity).is_some_and(|write| write.host_copy == leaves)
    }

    /// Listeners know now that host memory does not have the block.
    pub(crate) fn removal_published(&mut self, identity: &BlockIdentity) {
        if let Some(InFlightWrite { host_copy: HostCopy::Leaves { removal_published }, .. }) =
            self.0.get_mut(identity)
        {
            *removal_published = true;
        }
    }

    /// The block is not wanted on the disk any more.
    pub(crate) fn forget(&mut self, identity: &BlockIdentity) {
        if let Some(write) = self.0.get_mut(identity) {
            write.disk_copy = DiskCopy::Forgotten;
        }
    }

    /// The device has not answered in its time.
    pub(crate) fn stuck(&mut self, identity: &BlockIdentity) {
        if let Some(write) = self.0.get_mut(identity) {
            write.is_stuck = true;
        }
    }
}
