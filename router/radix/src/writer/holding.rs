//! Holders of blocks, and removal of nodes without holders.

use super::*;

impl Writer {
    /// Slots of a node that an internal number holds in a tier.
    pub(super) fn mask(&self, id: NodeId, member: u16, tier: Tier) -> u32 {
        let node = self.node(id);
        let all = node.shape().mask();
        // SAFETY: linked, so not freed; only the writer frees.
        match unsafe { node.holder_sets.load(Ordering::Relaxed).as_ref() } {
            Some(holder_sets) => holder_sets.mask(member, tier, all),
            None if tier == Tier::Device && List(node.list.load(Ordering::Relaxed)).contains(member) => all,
            None => 0,
        }
    }

    /// Publishes a node's holders; the previous ones are freed after their grace period.
    pub(super) fn set_holder_sets(&mut self, id: NodeId, holder_sets: Option<Box<HolderSets>>) {
        let new = holder_sets.map_or(std::ptr::null_mut(), |holder_sets| {
            self.ext_bytes += holder_sets.bytes();
            Box::into_raw(holder_sets)
        });
        // Release: pairs with the acquire in `Walk::look`.
        let old = self.node(id).holder_sets.swap(new, Ordering::AcqRel);
        if !old.is_null() {
            self.garbage.push_back((self.shared.grace.stamp(), Garbage::HolderSets(old)));
        }
    }

    /// Returns the node's holders as a [`HolderSets`], made from its list if necessary.
    pub(super) fn ext_of(&mut self, id: NodeId, member: u16, tier: Tier) -> &HolderSets {
        let node = self.node(id);
        if node.holder_sets.load(Ordering::Relaxed).is_null() {
            let all = node.shape().mask();
            let list = List(node.list.load(Ordering::Relaxed));
            let highest = list.ids().chain([member]).max().map_or(0, usize::from);
            let mut holder_sets = Box::new(HolderSets::new(highest / 64 + 1, tiers_for(tier), 2));
            for held in list.ids() {
                if let Some(larger) = holder_sets.stored(held, Tier::Device, all, all) {
                    holder_sets = larger;
                }
            }
            self.set_holder_sets(id, Some(holder_sets));
        }
        // SAFETY: not null: it was there or has just been put there; only the writer frees.
        unsafe { &*self.node(id).holder_sets.load(Ordering::Relaxed) }
    }

    /// Adds slots to those that an internal number holds.
    pub(super) fn set_bits(&mut self, id: NodeId, member: u16, tier: Tier, new: u32) {
        let held = self.mask(id, member, tier);
        if held & new == new {
            return;
        }
        self.blocks_held[usize::from(member)][tier as usize] += (new & !held).count_ones();
        let node = self.node(id);
        let all = node.shape().mask();
        let list = List(node.list.load(Ordering::Relaxed));
        let is_list = node.holder_sets.load(Ordering::Relaxed).is_null();
        if is_list && tier == Tier::Device && new == all && list.len() < LIST_MAX {
            // Release: pairs with the acquire in `Walk::look`.
            node.list.store(list.with(member).0, Ordering::Release);
            return;
        }
        self.set_mask(id, member, tier, held | new);
        if new & all != all || held != 0 {
            self.split_if_ragged(id);
        }
        self.tidy(id);
    }

    pub(super) fn set_mask(&mut self, id: NodeId, member: u16, tier: Tier, mask: u32) {
        let all = self.node(id).shape().mask();
        if let Some(larger) = self.ext_of(id, member, tier).stored(member, tier, mask, all) {
            self.set_holder_sets(id, Some(larger));
        }
    }

    /// If many members hold only the beginning of a node, splits it where most of them end: afterwards each of them is one bit.
    pub(super) fn split_if_ragged(&mut self, id: NodeId) {
        let shape = self.node(id).shape();
        // SAFETY: linked, so not freed; only the writer frees.
        let Some(holder_sets) = (unsafe { self.node(id).holder_sets.load(Ordering::Relaxed).as_ref() })
        else {
            return;
        };
        if holder_sets.partial_count(shape.mask()) <= PARTIAL_MAX {
            return;
        }
        let mut ends = [0_u32; NODE_BLOCKS + 1];
        for (_, _, mask) in holder_sets.held(shape.mask()) {
            let end = shape.base() + (mask >> shape.base()).trailing_ones() as usize;
            if end > shape.base() && end < shape.end() {
                ends[end] += 1;
            }
        }
        let most = (0..ends.len()).max_by_key(|&end| ends[end]).filter(|&end| ends[end] > 1);
        if let Some(at) = most {
            // Without a free node it stays ragged: slower, but correct.
            let _split = self.split(id, at);
        }
    }

    /// Removes slots from those that an internal number holds.
    pub(super) fn clear_bits(&mut self, id: NodeId, member: u16, tier: Tier, gone: u32) {
        let held = self.mask(id, member, tier);
        self.blocks_held[usize::from(member)][tier as usize] -= (held & gone).count_ones();
        let left = held & !gone;
        let node = self.node(id);
        let shape = node.shape();
        let list = List(node.list.load(Ordering::Relaxed));
        if node.holder_sets.load(Ordering::Relaxed).is_null() {
            let is_beginning = left == bits(shape.base(), shape.base() + left.count_ones() as usize);
            if left == 0 {
                node.list.store(list.without(member).0, Ordering::Release);
                self.free_if_unused(id);
                return;
            }
            if list.len() == 1 && is_beginning && shape.children() == Children::None {
                // The last blocks have no holder any more.
                node.publish(shape.with_len(left.count_ones() as usize));
                return;
            }
        }
        self.set_mask(id, member, tier, left);
        self.tidy(id);
    }

    /// Converts a node's holders to a list if that can represent them, and frees a node without holders.
    pub(super) fn tidy(&mut self, id: NodeId) {
        let node = self.node(id);
        let shape = node.shape();
        // SAFETY: linked, so not freed; only the writer frees.
        let Some(holder_sets) = (unsafe { node.holder_sets.load(Ordering::Relaxed).as_ref() }) else {
            return;
        };
        let count = holder_sets.count.load(Ordering::Relaxed) as usize;
        if count > LIST_MAX {
            return;
        }
        let mut held = [(0, Tier::Device, 0); LIST_MAX];
        let mut len = 0;
        for (slot, pair) in held.iter_mut().zip(holder_sets.held(shape.mask())) {
            *slot = pair;
            len += 1;
        }
        let held = &held[..len];
        if held.iter().all(|&(_, tier, mask)| tier == Tier::Device && mask == shape.mask()) {
            // Stores the list before removing the extension: readers load the extension first.
            node.list.store(List::of(held.iter().map(|pair| pair.0)).0, Ordering::Release);
            self.set_holder_sets(id, None);
            self.free_if_unused(id);
        } else if let &[(member, Tier::Device, mask)] = held
            && shape.children() == Children::None
            && mask == bits(shape.base(), shape.base() + mask.count_ones() as usize)
        {
            // One member is left, with the beginning: the rest of the node is removed. The shape comes first, so that no reader takes the
            // member for a holder of the old length.
            node.publish(shape.with_len(mask.count_ones() as usize));
            node.list.store(List::of([member].into_iter()).0, Ordering::Release);
            self.set_holder_sets(id, None);
        }
    }

    /// Unlinks a node without holders and children, and then perhaps the one before it.
    pub(super) fn free_if_unused(&mut self, mut id: NodeId) {
        while id != ROOT {
            let node = self.node(id);
            let shape = node.shape();
            let is_held =
                node.list.load(Ordering::Relaxed) != 0 || !node.holder_sets.load(Ordering::Relaxed).is_null();
            if is_held || shape.children() != Children::None || shape.len() == 0 {
                return;
            }
            let parent = node.parent.load(Ordering::Relaxed);
            let first = node.hash(shape.base());
            let owner = if parent & FORK == 0 {
                let shape = self.node(parent).shape();
                self.node(parent).publish(shape.with_children(Children::None));
                parent
            } else {
                self.unlink_from_fork(parent & !FORK, first, id)
            };
            let before = self.node(owner);
            if before.next_part.load(Ordering::Relaxed) == id {
                before.next_part.store(0, Ordering::Relaxed);
            }
            // Length 0: a stale reference to the number finds the node empty.
            let gone = self.node(id);
            gone.publish(gone.shape().with_len(0));
            gone.next_part.store(ROOT, Ordering::Relaxed);
            self.garbage.push_back((self.shared.grace.stamp(), Garbage::Node(id)));
            id = owner;
        }
    }

    pub(super) fn unlink_from_fork(&mut self, fork: ForkId, first: u64, child: NodeId) -> NodeId {
        self.shared.children.remove(fork, first, child);
        self.table_live -= 1;
        let state = &mut self.forks[fork as usize];
        state.children -= 1;
        let owner = state.owner;
        if state.children == 0 && owner != ROOT {
            let shape = self.node(owner).shape();
            self.node(owner).publish(shape.with_children(Children::None));
            self.garbage.push_back((self.shared.grace.stamp(), Garbage::Fork(fork)));
        }
        owner
    }
}
