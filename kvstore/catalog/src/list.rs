//! State of each slot that the tier's lock protects, and the lists that are threaded through it.

/// No slot.
pub(crate) const NONE: u32 = u32::MAX;

/// Links of a slot in one list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link {
    pub(crate) older: u32,
    pub(crate) newer: u32,
}

/// Whether a slot can be picked by the policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Not among the candidates: free, not registered, or with a registered child.
    Away,
    /// A candidate.
    Candidate,
    /// A candidate that was found pinned; its last reader makes it a candidate again.
    Parked,
}

/// State of a slot under the tier's lock: links of lists, tenant, children.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Node {
    /// The free list's or the policy's link, that of the tenant's own list, and that of a list of orphans.
    pub(crate) links: [Link; 3],
    pub(crate) place: Place,
    pub(crate) account: u16,
    /// The policy's own mark: an epoch, a queue, a position.
    pub(crate) mark: u32,
    /// The parent's slot, and the generation that it had there; no slot while the parent is not registered.
    pub(crate) parent: u32,
    pub(crate) parent_generation: u32,
    /// Registered children in this tier.
    pub(crate) children: u32,
    /// Recompute seconds saved per byte.
    pub(crate) density: f32,
    /// The block counts as a root: the parent that its caller named is one of its own descendants.
    pub(crate) is_cut: bool,
}

impl Node {
    pub(crate) const EMPTY: Self = Self {
        links: [Link { older: NONE, newer: NONE }; 3],
        place: Place::Away,
        account: 0,
        mark: 0,
        parent: NONE,
        parent_generation: 0,
        children: 0,
        density: 0.0,
        is_cut: false,
    };
}

/// The policy's lists and the free list.
pub(crate) const ORDER: usize = 0;
/// The tenants' lists.
pub(crate) const OWN: usize = 1;
/// The lists of orphans.
pub(crate) const ORPHANS: usize = 2;

/// A doubly linked list over the nodes' link `LINK`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct List<const LINK: usize> {
    pub(crate) oldest: u32,
    pub(crate) newest: u32,
    pub(crate) len: u32,
}

impl<const LINK: usize> List<LINK> {
    pub(crate) const EMPTY: Self = Self { oldest: NONE, newest: NONE, len: 0 };

    pub(crate) fn push_newest(&mut self, nodes: &mut [Node], slot: u32) {
        nodes[slot as usize].links[LINK] = Link { older: self.newest, newer: NONE };
        match self.newest {
            NONE => self.oldest = slot,
            newest => nodes[newest as usize].links[LINK].newer = slot,
        }
        self.newest = slot;
        self.len += 1;
    }

    pub(crate) fn push_oldest(&mut self, nodes: &mut [Node], slot: u32) {
        nodes[slot as usize].links[LINK] = Link { older: NONE, newer: self.oldest };
        match self.oldest {
            NONE => self.newest = slot,
            oldest => nodes[oldest as usize].links[LINK].older = slot,
        }
        self.oldest = slot;
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, nodes: &mut [Node], slot: u32) {
        let Link { older, newer } = nodes[slot as usize].links[LINK];
        match older {
            NONE => self.oldest = newer,
            older => nodes[older as usize].links[LINK].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => nodes[newer as usize].links[LINK].older = older,
        }
        self.len -= 1;
    }

    /// Takes all of `other` in, as the newest.
    pub(crate) fn append(&mut self, nodes: &mut [Node], other: &mut Self) {
        if other.len == 0 {
            return;
        }
        match self.newest {
            NONE => *self = *other,
            newest => {
                nodes[newest as usize].links[LINK].newer = other.oldest;
                nodes[other.oldest as usize].links[LINK].older = newest;
                self.newest = other.newest;
                self.len += other.len;
            }
        }
        *other = Self::EMPTY;
    }

    /// From the oldest to the newest.
    pub(crate) fn iter<'a>(&self, nodes: &'a [Node]) -> impl Iterator<Item = u32> + use<'a, LINK> {
        let first = Some(self.oldest).filter(|&slot| slot != NONE);
        std::iter::successors(first, |&slot| {
            Some(nodes[slot as usize].links[LINK].newer).filter(|&slot| slot != NONE)
        })
    }
}
