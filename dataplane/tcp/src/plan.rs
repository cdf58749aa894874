//! Layout of the next receive: the payloads of the current batch in their places, then the staging buffer.

use dataplane_memory::Slab;

use crate::extent::Extent;
use crate::lane::Lane;
use crate::receive_target::ReceiveTarget;
use crate::wire::Header;

/// Largest number of pieces of one receive.
pub(crate) const VECTORS_MAX: usize = 512;

/// A receive whose pieces are being laid out.
pub(crate) struct Plan<'a> {
    pub(crate) vectors: &'a mut Vec<libc::iovec>,
    pub(crate) bytes: usize,
    pub(crate) bytes_max: usize,
}

/// The part of a receive that may follow a landing.
#[derive(PartialEq, Eq)]
pub(crate) enum Next {
    /// The next landing.
    Following,
    /// Only the staging buffer.
    Staging,
    /// Nothing: the landing did not fit into the receive.
    Nothing,
}

impl Plan<'_> {
    /// Adds the pieces of a landing.
    pub(crate) fn add(&mut self, receive_target: &mut ReceiveTarget, slab: &Slab, lane: &Lane) -> Next {
        if !receive_target.is_current(slab) {
            // The slot was reused: its bytes go to the staging buffer, where they change nothing, and the
            // connection is closed.
            return Next::Staging;
        }
        let mut ahead = 0;
        while ahead < receive_target.missing() {
            let Some((start, len)) = receive_target.run(slab, lane, ahead) else { return Next::Staging };
            // The last vector is reserved for the staging buffer.
            let room = if self.vectors.len() < VECTORS_MAX - 1 { self.bytes_max - self.bytes } else { 0 };
            let len = room.min(len as usize);
            if len == 0 {
                return Next::Nothing;
            }
            self.vectors.push(libc::iovec { iov_base: start.as_ptr().cast(), iov_len: len });
            self.bytes += len;
            ahead += len as u32;
        }
        Next::Following
    }
}

pub(crate) enum Planned {
    /// The header has no payload.
    Nothing,
    Payload(ReceiveTarget),
    /// The position of the bytes behind this header is not known yet.
    NotYet,
}

/// Returns the landing that a header of the current batch will begin.
pub(crate) fn planned_target(header: &Header, lane: &Lane) -> Planned {
    match *header {
        Header::Write { len, target, rows, immediate } => {
            match Extent::new(target.slot, target.offset, len, rows) {
                Some(extent) => Planned::Payload(ReceiveTarget::Write {
                    extent,
                    generation: target.generation,
                    immediate,
                    at: 0,
                }),
                None => Planned::NotYet,
            }
        }
        Header::Response { number, at, len, is_verified } => {
            Planned::Payload(ReceiveTarget::Response { number, first: at, at, end: at + len, is_verified })
        }
        Header::Message { .. } => Planned::NotYet,
        Header::Fence { counts } if !lane.is_satisfied(&counts) => Planned::NotYet,
        Header::Fence { .. }
        | Header::Landed { .. }
        | Header::Immediate { .. }
        | Header::Read { .. }
        | Header::Verified { .. } => Planned::Nothing,
    }
}
