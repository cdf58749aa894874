//! What a node is asked, and what it tells.

use std::ops::Range;
use std::time::Instant;

use dataplane_memory::SlotRef;

/// Names a transfer on both of its ends; drawn at random by whoever routes the request.
pub type TransferId = u64;

/// What the owner of a node asks of it.
#[derive(Debug)]
pub enum Command {
    /// Receive blocks `first_block..` of this transfer into `slots` from the node at `address`. While a transfer of the same
    /// id is being received: [`Outcome::Duplicate`].
    Expect {
        /// The transfer.
        transfer: TransferId,
        /// The sender, in the fabric's notation.
        address: String,
        /// Index of the first block wanted; the ones before it are here already.
        first_block: u32,
        /// What is wanted: equal on both legs of one request, and on no others.
        content: [u8; 16],
        /// Where the blocks go: all in host memory, or all in a device's ([`TransferNode::with_checksummer`] or
        /// [`crate::Staging`]). Work of a device that still reads or writes these slots is over when this is submitted,
        /// or, of a staging, ordered before the copies of its [`Copier`](dataplane_memory::Copier), which waits for
        /// nobody.
        ///
        /// [`TransferNode::with_checksummer`]: crate::TransferNode::with_checksummer
        slots: Vec<SlotRef>,
        /// When to make do with what has come.
        deadline: Instant,
    },
    /// These layers of these blocks are computed; send them when the receiver is known.
    Push {
        /// The transfer.
        transfer: TransferId,
        /// What the transfer as a whole brings, as in `Expect`.
        content: [u8; 16],
        /// Index of the first block.
        first_block: u32,
        /// The blocks' slots. Nobody writes these layers of them any more. In host memory, or all in a device's
        /// ([`TransferNode::with_checksummer`] or [`crate::Staging`]). The kernels that made these layers are over when
        /// this is submitted (an event after them has passed), or, of a staging, ordered before the copies of its
        /// [`Copier`](dataplane_memory::Copier): that they were launched is not enough.
        ///
        /// [`TransferNode::with_checksummer`]: crate::TransferNode::with_checksummer
        slots: Vec<SlotRef>,
        /// Which layers.
        layers: Range<u16>,
    },
    /// Nothing more will be pushed for this transfer.
    PushEnd {
        /// The transfer.
        transfer: TransferId,
    },
    /// Tell the sender at `address` that nothing of this transfer is wanted.
    Decline {
        /// The transfer.
        transfer: TransferId,
        /// The sender.
        address: String,
    },
    /// Stop, on whichever side this node is.
    Cancel {
        /// The transfer.
        transfer: TransferId,
    },
}

/// How a received transfer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Every block is here and verified.
    Complete,
    /// A checksum did not match.
    Corrupted,
    /// The sender stopped before the end.
    SenderStopped,
    /// The connection could not be made or ended.
    PeerDown,
    /// The deadline passed.
    Deadline,
    /// It could not start: too many transfers, more than 65,536 blocks, a bad address, slots in a memory that is out of
    /// reach, or a device that cannot verify what this sender has.
    Refused,
    /// A transfer of this id is being received already. That one goes on, and ends with a notice of its own.
    Duplicate,
    /// The device could not verify what has come, or, of a [`crate::Staging`], a copy into its memory failed; the leading
    /// blocks are those before it.
    DeviceFailed,
}

/// What a node tells its owner.
#[derive(Debug)]
pub enum Notice {
    /// A transfer that was expected is over; `slots` are the leading blocks that are complete and verified.
    Arrived {
        /// The transfer.
        transfer: TransferId,
        /// The verified blocks, from `first_block` on.
        slots: Vec<SlotRef>,
        /// How it ended.
        outcome: Outcome,
    },
    /// A transfer that was pushed is over; the node holds none of its slots any more. A device may still sum one, which
    /// changes nothing; the sum holds it.
    Pushed {
        /// The transfer.
        transfer: TransferId,
        /// Whether the receiver has been sent everything.
        complete: bool,
    },
}
