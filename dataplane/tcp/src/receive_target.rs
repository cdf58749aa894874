//! One payload that is being received: the positions of its bytes, and the number of missing bytes.

use std::ptr::NonNull;

use dataplane_memory::Slab;

use crate::extent::Extent;
use crate::lane::Lane;

#[derive(Debug)]
pub(crate) enum ReceiveTarget {
    Message {
        bytes: Box<[u8]>,
        at: u32,
    },
    Write {
        extent: Extent,
        generation: u32,
        immediate: Option<u32>,
        at: u32,
    },
    /// Bytes `at..end` of a local read.
    Response {
        number: u32,
        first: u32,
        at: u32,
        end: u32,
        is_verified: bool,
    },
}

impl ReceiveTarget {
    pub(crate) fn missing(&self) -> u32 {
        match self {
            Self::Message { bytes, at } => bytes.len() as u32 - at,
            Self::Write { extent, at, .. } => extent.len - at,
            Self::Response { at, end, .. } => end - at,
        }
    }

    /// Returns the address of the missing byte `ahead`, and the number of contiguous bytes there. `None`: the
    /// runs are too short for a vector, and the bytes are copied out of the staging buffer.
    pub(crate) fn run(&mut self, slab: &Slab, lane: &Lane, ahead: u32) -> Option<(NonNull<u8>, u32)> {
        match self {
            Self::Message { bytes, at } => {
                let rest = bytes.get_mut((*at + ahead) as usize..).filter(|rest| !rest.is_empty())?;
                let len = rest.len() as u32;
                Some((NonNull::from_mut(&mut rest[0]), len))
            }
            Self::Write { extent, at, .. } => {
                (!extent.has_short_runs()).then(|| extent.run_at(slab, *at + ahead))
            }
            Self::Response { number, at, end, .. } => {
                let read = lane.reads.get(*number).filter(|read| !read.into.has_short_runs())?;
                let (start, len) = read.into.run_at(read.slot.slab(), *at + ahead);
                Some((start, len.min(*end - *at - ahead)))
            }
        }
    }

    /// Records that `len` bytes arrived at the address of [`ReceiveTarget::run`].
    pub(crate) fn advance(&mut self, len: u32) {
        match self {
            Self::Message { at, .. } | Self::Write { at, .. } | Self::Response { at, .. } => *at += len,
        }
    }

    /// Copies bytes that arrived in the staging buffer.
    pub(crate) fn copy_in(&mut self, slab: &Slab, lane: &Lane, arrived: &[u8]) {
        match self {
            Self::Message { bytes, at } => {
                bytes[*at as usize..*at as usize + arrived.len()].copy_from_slice(arrived);
            }
            Self::Write { extent, at, .. } => extent.copy_in(slab, *at, arrived),
            Self::Response { number, at, .. } => {
                if let Some(read) = lane.reads.get(*number) {
                    read.into.copy_in(read.slot.slab(), *at, arrived);
                }
            }
        }
        self.advance(arrived.len() as u32);
    }

    /// Whether the slot still has the generation of the header.
    pub(crate) fn is_current(&self, slab: &Slab) -> bool {
        match self {
            Self::Write { extent, generation, .. } => slab.generation(extent.slot) == *generation,
            Self::Message { .. } | Self::Response { .. } => true,
        }
    }
}
