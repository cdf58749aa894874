//! Selection of a row of a port's GID table.
//!
//! On Ethernet the row decides the protocol: RoCE v2 travels in UDP and can be routed, v1 is bare Ethernet. Of
//! the v2 rows the IPv4-mapped one is preferred, as that is the address that switches and operators configure;
//! then a global IPv6 address; a link-local one reaches the same wire only. On InfiniBand row 0 always exists.

use std::net::{IpAddr, Ipv6Addr};

use crate::device::LinkLayer;
use crate::library::GidType;

/// A non-empty row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GidEntry {
    /// Index of the row.
    pub index: u32,
    /// GID of the row, in network order.
    pub gid: [u8; 16],
    /// Address type of the row.
    pub kind: GidType,
}

impl GidEntry {
    /// The IP address that a RoCE row represents; `None` for a link-local one.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        if self.kind != GidType::RoceV2 || self.is_link_local() {
            return None;
        }
        Some(Ipv6Addr::from(self.gid).to_canonical())
    }

    fn is_ipv4(&self) -> bool {
        self.gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF]
    }

    fn is_link_local(&self) -> bool {
        self.gid[0] == 0xFE && self.gid[1] & 0xC0 == 0x80
    }

    /// Ranks a row; a larger value is preferred.
    fn rank(&self) -> (bool, bool, bool) {
        let routable_ipv4 = self.is_ipv4() && self.gid[12] != 127 && self.gid[12..14] != [169, 254];
        (self.kind == GidType::RoceV2, routable_ipv4, !self.is_link_local())
    }
}

/// Returns the best row for a port, the first one of equals.
pub(crate) fn choose_gid(link_layer: LinkLayer, gids: &[GidEntry]) -> Option<GidEntry> {
    if link_layer == LinkLayer::Infiniband {
        return gids.iter().find(|entry| entry.index == 0).or(gids.first()).copied();
    }
    gids.iter().max_by_key(|entry| (entry.rank(), std::cmp::Reverse(entry.index))).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ipv4(index: u32, last: u8, kind: GidType) -> GidEntry {
        GidEntry { index, gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 0, 0, last], kind }
    }

    fn ipv6(index: u32, first: [u8; 2], kind: GidType) -> GidEntry {
        let mut gid = [7; 16];
        gid[..2].copy_from_slice(&first);
        GidEntry { index, gid, kind }
    }

    #[test]
    fn routable_ipv4_over_global_ipv6_over_link_local_over_version_one() {
        let (v1, v2) = (GidType::InfinibandOrRoceV1, GidType::RoceV2);
        let mut table = vec![
            ipv4(0, 1, v1),
            ipv6(1, [0xFE, 0x80], v2),
            ipv6(2, [0x20, 0x01], v2),
            ipv4(3, 1, v2),
            ipv4(4, 2, v2),
        ];
        for expected in [3, 4, 2, 1, 0] {
            let chosen = choose_gid(LinkLayer::Ethernet, &table).expect("a row");
            assert_eq!(chosen.index, expected);
            table.retain(|entry| entry.index != expected);
        }
        assert_eq!(choose_gid(LinkLayer::Ethernet, &table), None);
    }

    #[test]
    fn infiniband_uses_row_zero() {
        let table = [ipv4(3, 1, GidType::RoceV2), ipv6(0, [0xFE, 0x80], GidType::InfinibandOrRoceV1)];
        assert_eq!(choose_gid(LinkLayer::Infiniband, &table).map(|entry| entry.index), Some(0));
    }
}
