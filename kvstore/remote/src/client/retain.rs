//! Requests to nodes to retain blocks.

use std::time::Duration;

use dataplane_fabric::Fabric;
use kvstore_block::BlockIdentity;

use super::RemotePool;
use crate::wire::Message;

impl<F: Fabric> RemotePool<F> {
    /// Asks the nodes of a chain, which starts at the root, to retain its blocks for this time, in whole
    /// seconds: the blocks of a number of groups from the block `next` on; returns the block after them. Each
    /// node is asked once, without an answer, and so is the second home of a group. A message that finds no
    /// room in a node's outbox is lost.
    pub fn retain(
        &mut self,
        chain: &[BlockIdentity],
        next: usize,
        groups: usize,
        how_long: Duration,
    ) -> usize {
        let seconds = u32::try_from(how_long.as_secs().max(1)).unwrap_or(u32::MAX);
        let end = (next + groups * self.config.group_blocks).min(chain.len());
        // A group has at most as many blocks as a message can name.
        for group in chain[next..end].chunks(self.config.group_blocks) {
            let name = group[0];
            let [first, second] =
                self.placement.best_two(&name, |id| self.nodes.get(&id).is_some_and(|node| node.is_usable()));
            let second = second.filter(|_| self.replication.done.contains(&name));
            for node in [first, second].into_iter().flatten() {
                self.send(node, &Message::Retain { seconds, chain: group.to_vec() });
            }
        }
        end
    }
}
