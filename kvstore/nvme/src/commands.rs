//! Table of the command ids of a queue pair and their owners. Fixed size, no allocation after start-up.

use std::time::Instant;

/// Owner of a command in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A part of the request with this index in the request table: offset of its first byte and its length, and
    /// the bounce buffer that it is copied through.
    Piece { request: u16, offset: usize, bytes: usize, bounce: Option<u16> },
    /// The one command that `sync` waits for.
    Blocking,
}

/// A command in flight.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InFlight {
    pub(crate) owner: Owner,
    pub(crate) deadline: Instant,
}

/// Command ids of one pair: one less than its queue has entries, so that neither ring can overflow.
#[derive(Debug)]
pub(crate) struct Commands {
    slots: Box<[Option<InFlight>]>,
    free: Vec<u16>,
}

impl Commands {
    pub(crate) fn new(entries: u16) -> Self {
        let count = entries - 1;
        Self { slots: (0..count).map(|_| None).collect(), free: (0..count).rev().collect() }
    }

    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(crate) fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes a free id.
    #[inline]
    pub(crate) fn begin(&mut self, in_flight: InFlight) -> Option<u16> {
        let id = self.free.pop()?;
        self.slots[usize::from(id)] = Some(in_flight);
        Some(id)
    }

    /// Frees an id that the controller named; `None` when no such command is in flight.
    #[inline]
    pub(crate) fn end(&mut self, id: u16) -> Option<InFlight> {
        let ended = self.slots.get_mut(usize::from(id))?.take()?;
        self.free.push(id);
        Some(ended)
    }

    /// Returns the id of a command past its deadline.
    pub(crate) fn overdue(&self, now: Instant) -> Option<u16> {
        let overdue = |slot: &Option<InFlight>| slot.is_some_and(|in_flight| in_flight.deadline <= now);
        self.slots.iter().position(overdue).map(|id| id as u16)
    }

    /// Returns the id of any command in flight.
    pub(crate) fn any(&self) -> Option<u16> {
        self.slots.iter().position(Option::is_some).map(|id| id as u16)
    }
}
