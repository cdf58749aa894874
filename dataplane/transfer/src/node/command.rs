//! Commands to a node and its notices.

use std::ops::Range;
use std::time::Instant;

use dataplane_memory::SlotRef;

/// Id of a transfer on both of its ends; drawn at random by the router of the request.
pub type TransferId = u64;

/// Command of the owner to a node.
#[derive(Debug)]
pub enum Command {
    /// Receive blocks `first_block..` of this transfer into `slots` from the node at `address`. If a
    /// transfer of this id is being received already: [`Outcome::Duplicate`].
    Expect {
        /// The transfer.
        transfer: TransferId,
        /// The sender, in the fabric's notation.
        address: String,
        /// Index of the first block wanted; the node holds the ones before it.
        first_block: u32,
        /// Name of the content: equal on both legs of one request, and on no others.
        content: [u8; 16],
        /// Destination slots: all in host memory, or all in a device's ([`TransferNode::with_checksummer`]
        /// or [`crate::Staging`]). Device work that reads or writes these slots must be over when this is
        /// submitted, or, with staging, ordered before the copies of its
        /// [`Copier`](dataplane_memory::Copier), which waits for no other work.
        ///
        /// [`TransferNode::with_checksummer`]: crate::TransferNode::with_checksummer
        slots: Vec<SlotRef>,
        /// Time at which the transfer ends with the blocks received so far.
        deadline: Instant,
    },
    /// These layers of these blocks are computed; send them when the receiver is known.
    Push {
        /// The transfer.
        transfer: TransferId,
        /// Name of the content of the whole transfer, as in `Expect`.
        content: [u8; 16],
        /// Index of the first block.
        first_block: u32,
        /// The blocks' slots, in which these layers are not written any more. In host memory, or all in a
        /// device's ([`TransferNode::with_checksummer`] or [`crate::Staging`]). The kernels that computed
        /// these layers must be over when this is submitted (an event after them has passed), or, with
        /// staging, ordered before the copies of its [`Copier`](dataplane_memory::Copier): a launch alone
        /// is not enough.
        ///
        /// [`TransferNode::with_checksummer`]: crate::TransferNode::with_checksummer
        slots: Vec<SlotRef>,
        /// The computed layers.
        layers: Range<u16>,
    },
    /// No further pushes for this transfer.
    PushEnd {
        /// The transfer.
        transfer: TransferId,
    },
    /// Tell the sender at `address` that no block of this transfer is wanted.
    Decline {
        /// The transfer.
        transfer: TransferId,
        /// The sender.
        address: String,
    },
    /// Stop the transfer, whether this node sends or receives it.
    Cancel {
        /// The transfer.
        transfer: TransferId,
    },
}

/// Result of a received transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Every block has arrived and is verified.
    Complete,
    /// A checksum did not match.
    Corrupted,
    /// The sender stopped before the end.
    SenderStopped,
    /// The connection could not be made, or ended.
    PeerDown,
    /// The deadline passed.
    Deadline,
    /// The transfer could not start: too many transfers, more than 65,536 blocks, a bad address, slots in
    /// unreachable memory, or a device that cannot verify this sender's blocks.
    Refused,
    /// A transfer of this id is being received already. The earlier one continues, and ends with a notice
    /// of its own.
    Duplicate,
    /// The device could not verify arrived blocks, or, with a [`crate::Staging`], a copy into its memory
    /// failed; the blocks before the failure are kept.
    DeviceFailed,
}

/// Notice of a node to its owner.
#[derive(Debug)]
pub enum Notice {
    /// An expected transfer is over; `slots` are the leading blocks that are complete and verified.
    Arrived {
        /// The transfer.
        transfer: TransferId,
        /// The verified blocks, from `first_block` on.
        slots: Vec<SlotRef>,
        /// Result of the transfer.
        outcome: Outcome,
    },
    /// A pushed transfer is over; the node holds none of its slots any more. A device may still checksum
    /// one without effect; that sum holds the slot.
    Pushed {
        /// The transfer.
        transfer: TransferId,
        /// Whether every pushed block that the receiver has reserved was sent to it.
        complete: bool,
    },
}
