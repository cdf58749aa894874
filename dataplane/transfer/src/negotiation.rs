//! The terms that two nodes agree on when they connect, computed from their greetings.
//!
//! Blocks must have the same meaning on both sides ([`SharedHeads`]). The checksum is the sum over lanes as soon as
//! one of the two asks for it, because its blocks may stay in a device's memory, and xxh3 otherwise. Both
//! sides see the same two greetings and compute the same terms; an incompatibility ends the connection with
//! a reason.
//!
//! Pure arithmetic.

use dataplane_fabric::auth::Versions;

use crate::checksum::Checksum;
use crate::shard::{PieceLayout, SharedHeads};
use crate::wire::VERSIONS;

/// First message of a node. Checksums are the numbers as received, known or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Greeting {
    /// Supported message versions: both sides use the newest common one.
    pub(crate) versions: Versions,
    /// Layout of the node's slots.
    pub(crate) layout: PieceLayout,
    /// The checksums that the node can compute and verify: a bit for each [`Checksum::code`].
    pub(crate) checksums: u8,
    /// Code of the checksum that the node asks for.
    pub(crate) wanted: u8,
}

/// Every checksum that this version supports.
const ALL: [Checksum; 2] = [Checksum::Xxh3, Checksum::Lanes];

impl Checksum {
    /// Returns the checksum's number on the wire.
    fn code(self) -> u8 {
        match self {
            Self::Xxh3 => 0,
            Self::Lanes => 1,
        }
    }

    fn of_code(code: u8) -> Option<Self> {
        ALL.into_iter().find(|checksum| checksum.code() == code)
    }

    fn is_in(self, set: u8) -> bool {
        set >> self.code() & 1 == 1
    }
}

impl Greeting {
    /// Makes the greeting of this node, which can compute every checksum with the processor.
    pub(crate) fn new(layout: PieceLayout, wanted: Checksum) -> Self {
        let checksums = ALL.iter().fold(0, |set, checksum| set | 1 << checksum.code());
        Self { versions: VERSIONS, layout, checksums, wanted: wanted.code() }
    }

    /// Returns the checksum that the node asks for, if the node can compute it itself.
    fn wanted_checksum(&self) -> Result<Checksum, ProtocolError> {
        let known = Checksum::of_code(self.wanted).ok_or(ProtocolError::UnknownChecksum(self.wanted))?;
        if known.is_in(self.checksums) { Ok(known) } else { Err(ProtocolError::ForeignChecksum(known)) }
    }
}

/// Terms of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NegotiatedParameters {
    /// The bytes of each layer that both nodes hold.
    pub(crate) cut: SharedHeads,
    /// Checksum that announcements carry for each piece.
    pub(crate) checksum: Checksum,
}

impl NegotiatedParameters {
    /// Computes the terms of two greetings, as seen from the node of the first.
    pub(crate) fn between(ours: &Greeting, theirs: &Greeting) -> Result<Self, ProtocolError> {
        if ours.versions.common(theirs.versions).is_none() {
            return Err(ProtocolError::Version(theirs.versions));
        }
        let cut = SharedHeads::between(&ours.layout, &theirs.layout).ok_or(ProtocolError::Blocks)?;
        let asked = [ours.wanted_checksum()?, theirs.wanted_checksum()?];
        let common = ours.checksums & theirs.checksums;
        let wanted = if asked.contains(&Checksum::Lanes) { Checksum::Lanes } else { Checksum::Xxh3 };
        let checksum = [wanted].into_iter().chain(ALL).find(|checksum| checksum.is_in(common));
        Ok(Self { cut, checksum: checksum.ok_or(ProtocolError::NoChecksum)? })
    }

    /// Whether pieces can move from and to a device's memory without the processor: a device checksums
    /// contiguous bytes only, and only over lanes.
    pub(crate) fn allow_direct(&self) -> bool {
        self.checksum == Checksum::Lanes && self.cut.rows().is_none()
    }
}

/// Reason for which this node ends a connection: a protocol error or an incompatibility of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error("a malformed or unexpected message")]
    NoSense,
    #[error("the peer supports {0} of the messages, and this node {VERSIONS}")]
    Version(Versions),
    #[error("the peer's blocks differ from ours, or it has no head in common with us")]
    Blocks,
    #[error("the peer wants checksum number {0}, which this node does not know")]
    UnknownChecksum(u8),
    #[error("the peer wants the checksum {0:?}, and says that it does not take it")]
    ForeignChecksum(Checksum),
    #[error("the peer takes none of this node's checksums")]
    NoChecksum,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::HeadRange;

    const LAYOUT: PieceLayout = PieceLayout::whole(4, 256, 1);

    fn greeting(wanted: Checksum) -> Greeting {
        Greeting::new(LAYOUT, wanted)
    }

    #[test]
    fn lanes_are_used_as_soon_as_one_side_wants_them() {
        for (ours, theirs, expected) in [
            (Checksum::Xxh3, Checksum::Xxh3, Checksum::Xxh3),
            (Checksum::Xxh3, Checksum::Lanes, Checksum::Lanes),
            (Checksum::Lanes, Checksum::Xxh3, Checksum::Lanes),
            (Checksum::Lanes, Checksum::Lanes, Checksum::Lanes),
        ] {
            let terms = NegotiatedParameters::between(&greeting(ours), &greeting(theirs)).expect("terms");
            assert_eq!(terms.checksum, expected);
            assert_eq!(terms.allow_direct(), expected == Checksum::Lanes);
        }
    }

    #[test]
    fn a_side_that_cannot_have_its_wish_takes_what_there_is() {
        let only = |checksum: Checksum| Greeting { checksums: 1 << checksum.code(), ..greeting(checksum) };
        let agreed = |one: Greeting, other: Greeting| {
            NegotiatedParameters::between(&one, &other).map(|terms| terms.checksum)
        };
        assert_eq!(agreed(greeting(Checksum::Lanes), only(Checksum::Xxh3)), Ok(Checksum::Xxh3));
        assert_eq!(agreed(greeting(Checksum::Xxh3), only(Checksum::Lanes)), Ok(Checksum::Lanes));
        assert_eq!(agreed(only(Checksum::Lanes), only(Checksum::Xxh3)), Err(ProtocolError::NoChecksum));
    }

    #[test]
    fn what_does_not_go_together_has_a_reason() {
        let ours = greeting(Checksum::Lanes);
        let reason = |change: fn(&mut Greeting)| {
            let mut theirs = greeting(Checksum::Xxh3);
            change(&mut theirs);
            NegotiatedParameters::between(&ours, &theirs).expect_err("no terms").to_string()
        };
        for (expected, found) in [
            (
                "supports versions 3 to 5 of the messages, and this node version 7",
                reason(|theirs| theirs.versions = Versions { oldest: 3, newest: 5 }),
            ),
            ("blocks differ", reason(|theirs| theirs.layout.fingerprint += 1)),
            ("checksum number 2, which this node does not know", reason(|theirs| theirs.wanted = 2)),
            ("checksum number 255", reason(|theirs| theirs.wanted = 255)),
            ("Xxh3, and says that it does not", reason(|theirs| theirs.checksums = 0b1111_1110)),
        ] {
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn nodes_of_two_releases_agree_while_their_versions_overlap() {
        let ours = greeting(Checksum::Xxh3);
        for (oldest, newest, is_common) in
            [(7, 7, true), (6, 9, true), (7, 8, true), (8, 9, false), (3, 6, false)]
        {
            let theirs = Greeting { versions: Versions { oldest, newest }, ..ours };
            assert_eq!(
                NegotiatedParameters::between(&ours, &theirs).is_ok(),
                is_common,
                "{oldest} to {newest}"
            );
        }
    }

    #[test]
    fn rows_with_gaps_are_never_direct() {
        let wide = PieceLayout { heads: HeadRange { first: 0, count: 2 }, ..LAYOUT };
        let theirs = Greeting::new(wide, Checksum::Lanes);
        let terms = NegotiatedParameters::between(&greeting(Checksum::Lanes), &theirs).expect("terms");
        assert_eq!((terms.checksum, terms.allow_direct()), (Checksum::Lanes, false));
    }
}
