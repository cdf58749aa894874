//! Blocks that their nodes are asked to keep for a time.

use std::time::Duration;

use dataplane_fabric::Fabric;
use kvstore_block::BlockIdentity;

use super::RemotePool;
use crate::wire::{BLOCKS_PER_MESSAGE_MAX, Message};

impl<F: Fabric> RemotePool<F> {
    /// Asks the nodes of a chain, which starts at the root, to keep its blocks for so long, in whole seconds. Each is told once and not surely, and
    /// there is no answer; a second home that a group has got is told as well.
    pub fn retain(&mut self, chain: &[BlockIdentity], how_long: Duration) {
        let seconds = u32::try_from(how_long.as_secs().max(1)).unwrap_or(u32::MAX);
        let group_blocks = self.config.group_blocks.max(1);
        for group in chain.chunks(group_blocks) {
            let name = group[0];
            let [first, second] =
                self.placement.best_two(&name, |id| self.nodes.get(&id).is_some_and(|node| node.is_usable()));
            let second = second.filter(|_| self.replication.done.contains(&name));
            for node in [first, second].into_iter().flatten() {
                for blocks in group.chunks(BLOCKS_PER_MESSAGE_MAX) {
                    self.send(node, &Message::Retain { seconds, chain: blocks.to_vec() });
                }
            }
        }
    }
}
