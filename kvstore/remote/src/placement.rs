//! Placement of groups of blocks on nodes: rendezvous hashing (highest random weight, Thaler and Ravishankar
//! 1998).
//!
//! Each node has a weight for each group, a hash of both names; the highest wins. No table is kept, all clients
//! agree, and adding or removing a node moves only that node's share. A ring with virtual nodes lost: it needs
//! hundreds of points a node for the same balance, and with the few dozen nodes of a pool the linear scan costs
//! less than its lookup.
//!
//! The unit of placement is a *group*: `group_blocks` consecutive positions of a chain, named by the identity
//! of the group's first block. One request then serves a whole group, and chains that share a prefix share its
//! groups.

use kvstore_block::BlockIdentity;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Id of a node of one [`crate::RemotePool`]. Ids are not reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// Returns the name of the group that position `position` of `chain` belongs to.
#[must_use]
pub fn group_of(chain: &[BlockIdentity], position: usize, group_blocks: usize) -> Option<BlockIdentity> {
    chain.get(position - position % group_blocks.max(1)).copied()
}

/// The nodes, with the hash of their name.
#[derive(Debug, Clone, Default)]
pub struct Placement {
    nodes: Vec<(NodeId, u64)>,
}

impl Placement {
    /// Adds a node. Only its name determines its share, which is the same on all clients.
    pub fn add(&mut self, id: NodeId, name: &str) {
        self.nodes.push((id, xxh3_64(name.as_bytes())));
    }

    /// Removes a node.
    pub fn remove(&mut self, id: NodeId) {
        self.nodes.retain(|(other, _)| *other != id);
    }

    /// Returns the first and second node of the ranking among those for which `usable` returns true.
    #[must_use]
    pub fn best_two(
        &self,
        group: &BlockIdentity,
        mut usable: impl FnMut(NodeId) -> bool,
    ) -> [Option<NodeId>; 2] {
        let mut best: [Option<(u64, NodeId)>; 2] = [None, None];
        for &(id, hash) in self.nodes.iter() {
            let candidate = Some((xxh3_64_with_seed(&group.0, hash), id));
            if candidate <= best[1] || !usable(id) {
                continue;
            }
            best[1] = candidate;
            if best[1] > best[0] {
                best.swap(0, 1);
            }
        }
        best.map(|node| node.map(|(_, id)| id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: u64 = 20_000;

    fn group(number: u64) -> BlockIdentity {
        BlockIdentity(xxhash_rust::xxh3::xxh3_128(&number.to_le_bytes()).to_le_bytes())
    }

    fn placement(nodes: u32) -> Placement {
        let mut placement = Placement::default();
        (0..nodes).for_each(|id| placement.add(NodeId(id), &format!("store-{id}")));
        placement
    }

    fn first(placement: &Placement, number: u64) -> NodeId {
        placement.best_two(&group(number), |_| true)[0].expect("there are nodes")
    }

    #[test]
    fn shares_are_even() {
        for nodes in [2, 5, 16] {
            let placement = placement(nodes);
            let mut counts = vec![0_u64; nodes as usize];
            (0..GROUPS).for_each(|number| counts[first(&placement, number).0 as usize] += 1);
            let even = GROUPS / u64::from(nodes);
            // Six standard deviations of the binomial distribution of an even draw.
            let bound = 6 * (even as f64).sqrt() as u64;
            assert!(counts.iter().all(|count| count.abs_diff(even) < bound), "{counts:?} around {even}");
        }
    }

    #[test]
    fn a_node_takes_only_its_share_with_it() {
        let before = placement(8);
        let mut after = before.clone();
        after.remove(NodeId(3));
        let mut grown = before.clone();
        grown.add(NodeId(8), "store-8");
        let (mut left, mut came) = (0_u64, 0_u64);
        for number in 0..GROUPS {
            let (was, then) = (first(&before, number), first(&after, number));
            let second = before.best_two(&group(number), |_| true)[1];
            if was == NodeId(3) {
                left += 1;
                assert_eq!(Some(then), second, "its groups go to the second of the ranking");
            } else {
                assert_eq!(was, then, "group {number} moved for nothing");
            }
            let now = first(&grown, number);
            assert!(now == was || now == NodeId(8), "group {number} moved between old nodes");
            came += u64::from(now == NodeId(8));
        }
        assert!(left.abs_diff(GROUPS / 8) < 300, "{left} of {GROUPS} left");
        assert!(came.abs_diff(GROUPS / 9) < 300, "{came} of {GROUPS} came");
    }

    #[test]
    fn unusable_nodes_are_passed_over() {
        let placement = placement(4);
        for number in 0..1000 {
            let [one, two] = placement.best_two(&group(number), |_| true);
            assert_ne!(one, two);
            assert_eq!(placement.best_two(&group(number), |id| Some(id) != one)[0], two);
        }
        assert_eq!(placement.best_two(&group(1), |_| false), [None, None]);
    }
}
