//! The tree itself: finding positions, adding, splitting.

use super::*;

impl Writer {
    /// Current node and slot of a position: splits may have moved it. `None` when the block is gone.
    pub(super) fn resolved(&self, position: NodeSlot) -> Option<(NodeId, usize)> {
        let (mut node, slot) = (position.node(), position.slot());
        loop {
            let at = self.shared.arena.get(node)?;
            let shape = at.shape();
            if slot < shape.end() {
                return (slot >= shape.base()).then_some((node, slot));
            }
            node = at.next_part.load(Ordering::Relaxed);
            if node == ROOT {
                return None;
            }
        }
    }

    /// Position of the block with this name.
    pub(super) fn position_of(&self, state: &MemberState, key: EngineHash) -> Option<(NodeId, usize)> {
        self.resolved(state.keys.find(&self.pool, key)?)
    }

    /// Finds or makes the slots for the first of `blocks`, after slot `next - 1` of `node`, and for as many of the following as fit
    /// the same node: (node, first slot, count, whether they were made). `None` when there are no more nodes.
    pub(super) fn advance(
        &mut self,
        id: u16,
        tier: Tier,
        node: NodeId,
        next: usize,
        blocks: &[u64],
    ) -> Option<(NodeId, usize, usize, bool)> {
        let shape = self.node(node).shape();
        if next < shape.end() {
            let agreeing = self.node(node).agreement_from(next, shape.end(), blocks);
            if agreeing > 0 {
                return Some((node, next, agreeing, false));
            }
            self.split(node, next)?;
        }
        match self.child(node, blocks[0]) {
            Some(child) => {
                let shape = self.node(child).shape();
                let agreeing = self.node(child).agreement(shape, blocks);
                Some((child, shape.base(), agreeing, false))
            }
            None => match self.append(node, id, tier, blocks) {
                Some((from, count)) => Some((node, from, count, true)),
                None => {
                    let (child, count) = self.add_child(node, id, tier, blocks)?;
                    Some((child, 0, count, true))
                }
            },
        }
    }

    /// The child of a node that begins with this block.
    pub(super) fn child(&self, node: NodeId, hash: u64) -> Option<NodeId> {
        match self.node(node).shape().children() {
            Children::None => None,
            Children::One(child) => {
                let first = self.node(child);
                (first.hash(first.shape().base()) == hash).then_some(child)
            }
            Children::Many(fork) => self.shared.children.find(&self.shared.arena, fork, hash),
        }
    }

    /// Adds blocks to a node that this member alone holds and that has no children: (first slot, count).
    pub(super) fn append(
        &mut self,
        id: NodeId,
        member: u16,
        tier: Tier,
        blocks: &[u64],
    ) -> Option<(usize, usize)> {
        let node = self.node(id);
        let shape = node.shape();
        let is_alone = node.holder_sets.load(Ordering::Relaxed).is_null()
            && List(node.list.load(Ordering::Relaxed)) == List::of([member].into_iter());
        let free = NODE_BLOCKS - shape.end();
        if tier != Tier::Device || !is_alone || shape.children() != Children::None || free == 0 {
            return None;
        }
        let count = free.min(blocks.len());
        // The slots may have been in use before a truncation: a reader that still sees the old shape must not see the new hashes.
        // Pairs with the fence in `Walk::look`.
        fence(Ordering::Release);
        for (slot, &hash) in (shape.end()..).zip(&blocks[..count]) {
            node.set_hash(slot, hash);
        }
        // From here on the member holds the new blocks: it is on the list of holders of the whole node.
        node.publish(shape.with_len(shape.len() + count));
        self.blocks_held[usize::from(member)][tier as usize] += count as u32;
        Some((shape.end(), count))
    }

    /// A new child with as many blocks as fit, held by one member.
    pub(super) fn add_child(
        &mut self,
        parent: NodeId,
        id: u16,
        tier: Tier,
        blocks: &[u64],
    ) -> Option<(NodeId, usize)> {
        let child = self.nodes.allocate(&self.shared.arena)?;
        let count = blocks.len().min(NODE_BLOCKS);
        let node = self.node(child);
        for (slot, &hash) in blocks[..count].iter().enumerate() {
            node.set_hash(slot, hash);
        }
        node.next_part.store(0, Ordering::Relaxed);
        node.holder_sets.store(std::ptr::null_mut(), Ordering::Relaxed);
        node.list.store(0, Ordering::Relaxed);
        let shape = Shape(node.shape().0).with(0, count, Children::None);
        node.publish(shape);
        if tier == Tier::Device {
            node.list.store(List::of([id].into_iter()).0, Ordering::Relaxed);
            self.blocks_held[usize::from(id)][tier as usize] += count as u32;
        } else {
            self.set_bits(child, id, tier, shape.mask());
        }
        self.link(parent, child, blocks[0]);
        Some((child, count))
    }

    /// Links a complete node below its parent.
    pub(super) fn link(&mut self, parent: NodeId, child: NodeId, first: u64) {
        let shape = self.node(parent).shape();
        match shape.children() {
            Children::None => {
                self.node(child).parent.store(parent, Ordering::Relaxed);
                self.node(parent).publish(shape.with_children(Children::One(child)));
            }
            Children::One(sibling) => {
                let fork = self.new_fork(parent);
                let sibling_node = self.node(sibling);
                let sibling_first = sibling_node.hash(sibling_node.shape().base());
                sibling_node.parent.store(fork | FORK, Ordering::Relaxed);
                self.add_to_table(fork, sibling_first, sibling);
                self.node(child).parent.store(fork | FORK, Ordering::Relaxed);
                self.add_to_table(fork, first, child);
                self.node(parent).publish(shape.with_children(Children::Many(fork)));
            }
            Children::Many(fork) => {
                self.node(child).parent.store(fork | FORK, Ordering::Relaxed);
                self.add_to_table(fork, first, child);
            }
        }
    }

    pub(super) fn new_fork(&mut self, owner: NodeId) -> ForkId {
        let fork = Fork { owner, children: 0 };
        match self.free_forks.pop() {
            Some(id) => {
                self.forks[id as usize] = fork;
                id
            }
            None => {
                self.forks.push(fork);
                (self.forks.len() - 1) as ForkId
            }
        }
    }

    pub(super) fn add_to_table(&mut self, fork: ForkId, first: u64, child: NodeId) {
        let shared = Arc::clone(&self.shared);
        shared.children.insert(&shared.arena, fork, first, child, &mut self.replaced);
        self.forks[fork as usize].children += 1;
        self.table_live += 1;
        self.shrink_below = self.shrink_below.max(self.table_live);
        self.take_replaced();
    }

    pub(super) fn take_replaced(&mut self) {
        if self.replaced.is_empty() {
            return;
        }
        self.table_pieces = self.shared.children.pages();
        let stamp = self.shared.grace.stamp();
        self.garbage.extend(self.replaced.drain(..).map(|replaced| (stamp, Garbage::Replaced(replaced))));
    }

    /// Splits a node before slot `at`: the rest moves to a new node, which becomes its only child.
    pub(super) fn split(&mut self, id: NodeId, at: usize) -> Option<()> {
        let lower_id = self.nodes.allocate(&self.shared.arena)?;
        let (upper, lower) = (self.shared.arena.node(id), self.shared.arena.node(lower_id));
        let shape = upper.shape();
        let rest = Shape(lower.shape().0).with(at, shape.end() - at, shape.children());
        #[cfg(loom)]
        if crate::broken(crate::PlantedFault::EarlySplit) {
            lower.list.store(0, Ordering::Relaxed);
            upper.publish(shape.with(shape.base(), at - shape.base(), Children::One(lower_id)));
        }
        for slot in at..shape.end() {
            lower.set_hash(slot, upper.hash(slot));
        }
        let holder_sets = upper.holder_sets.load(Ordering::Relaxed);
        // SAFETY: linked, so not freed; only the writer frees.
        let copy = unsafe { holder_sets.as_ref() }.map(|holder_sets| holder_sets.copied_for(rest.mask()));
        lower.list.store(upper.list.load(Ordering::Relaxed), Ordering::Relaxed);
        lower.next_part.store(upper.next_part.load(Ordering::Relaxed), Ordering::Relaxed);
        lower.parent.store(id, Ordering::Relaxed);
        let copy = copy.map_or(std::ptr::null_mut(), |copy| {
            self.ext_bytes += copy.bytes();
            Box::into_raw(copy)
        });
        lower.holder_sets.store(copy, Ordering::Relaxed);
        lower.publish(rest);
        match shape.children() {
            Children::None => {}
            Children::One(child) => self.shared.arena.node(child).parent.store(lower_id, Ordering::Relaxed),
            Children::Many(fork) => self.forks[fork as usize].owner = lower_id,
        }
        let kept = shape.with(shape.base(), at - shape.base(), Children::One(lower_id));
        // From here on the rest belongs to the new node, for readers and for positions.
        upper.publish(kept);
        upper.next_part.store(lower_id, Ordering::Relaxed);
        self.splits += 1;
        // SAFETY: as above.
        if let Some(holder_sets) = unsafe { holder_sets.as_ref() } {
            // A holder of only the beginning now holds all of it. The old copy refers to the old slots.
            let copy = holder_sets.copied_for(kept.mask());
            self.set_holder_sets(id, Some(copy));
            self.tidy(id);
            self.tidy(lower_id);
        }
        Some(())
    }
}
