//! Table of connections by peer id: an array, since every request looks one up.
//!
//! The low 16 bits of a peer id are the index, the rest a number that is never used twice; so ids are not
//! reused while indices are, and the id of an ended connection finds nothing. Ids stay below 2^56, which a
//! set of several fabrics requires.

use dataplane_fabric::PeerId;

use crate::connection::Connection;

const INDEX_BITS: u32 = 16;

#[derive(Debug)]
pub(crate) struct Table {
    entries: Vec<Option<Connection>>,
    /// Indices in use.
    used: Vec<u16>,
    free: Vec<u16>,
    next: u64,
}

impl Table {
    /// Makes a table for at most `capacity` connections (at most 65,535).
    pub(crate) fn new(capacity: usize) -> Self {
        let count = u16::try_from(capacity).unwrap_or(u16::MAX);
        Self {
            entries: (0..count).map(|_| None).collect(),
            used: Vec::with_capacity(count.into()),
            free: (0..count).rev().collect(),
            next: 1,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.used.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Adds the connection that `make` builds for its new id; `None` when the table is full.
    pub(crate) fn insert(&mut self, make: impl FnOnce(PeerId) -> Connection) -> Option<PeerId> {
        let index = self.free.pop()?;
        let peer = PeerId(self.next << INDEX_BITS | u64::from(index));
        assert!(self.next < 1 << (56 - INDEX_BITS), "a trillion connections");
        self.next += 1;
        self.entries[usize::from(index)] = Some(make(peer));
        self.used.push(index);
        Some(peer)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, peer: PeerId) -> Option<&mut Connection> {
        let index = (peer.0 & ((1 << INDEX_BITS) - 1)) as usize;
        self.entries.get_mut(index)?.as_mut().filter(|connection| connection.peer == peer)
    }

    pub(crate) fn get(&self, peer: PeerId) -> Option<&Connection> {
        let index = (peer.0 & ((1 << INDEX_BITS) - 1)) as usize;
        self.entries.get(index)?.as_ref().filter(|connection| connection.peer == peer)
    }

    pub(crate) fn remove(&mut self, peer: PeerId) -> Option<Connection> {
        self.get_mut(peer)?;
        let index = (peer.0 & ((1 << INDEX_BITS) - 1)) as u16;
        self.used.retain(|&used| used != index);
        self.free.push(index);
        self.entries[usize::from(index)].take()
    }

    /// Returns all connections.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.used.iter().filter_map(|&index| self.entries[usize::from(index)].as_ref())
    }

    /// Returns the `number`th connection, counted from `first` with wrap-around.
    #[inline]
    pub(crate) fn nth_from(&mut self, first: usize, number: usize) -> Option<&mut Connection> {
        let position = (first + number) % self.used.len().max(1);
        let index = *self.used.get(position)?;
        self.entries[usize::from(index)].as_mut()
    }
}

#[cfg(test)]
mod tests {
    use dataplane_fabric::handshake::SocketId;

    use super::*;
    use crate::connection::State;
    use crate::ring::Inbound;

    fn connection(peer: PeerId) -> Connection {
        let inbound = Inbound::create(256 << 10).expect("rings");
        let (state, remote, reason) = (State::Open, None, String::new());
        Connection { peer, socket_id: SocketId(peer.0), pid: 1, state, inbound, remote, reason }
    }

    #[test]
    fn an_old_id_never_finds_a_new_connection() {
        let mut table = Table::new(2);
        let first = table.insert(connection).expect("room");
        let second = table.insert(connection).expect("room");
        assert!(table.is_full() && table.insert(connection).is_none());
        assert!(table.remove(first).is_some() && table.remove(first).is_none());
        let third = table.insert(connection).expect("room");
        assert_eq!(third.0 & 0xFFFF, first.0 & 0xFFFF, "the position is used again");
        assert!(table.get_mut(first).is_none() && table.get_mut(third).is_some());
        assert!(table.get_mut(PeerId(0)).is_none() && table.get_mut(PeerId(u64::MAX)).is_none());
        let peers: Vec<PeerId> = table.iter().map(|connection| connection.peer).collect();
        assert_eq!(peers, [second, third]);
        assert_eq!(table.nth_from(1, 0).map(|connection| connection.peer), Some(third));
        assert_eq!(table.nth_from(1, 1).map(|connection| connection.peer), Some(second));
    }
}
