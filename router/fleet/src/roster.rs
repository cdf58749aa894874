//! The ranks of a pool as decisions see them: a list that is replaced as a whole, and the order of their loads.

use std::ops::Deref;
use std::sync::Arc;

use router_engines::dialect::Role;
use router_radix::{MEMBERS_MAX, Member};

use crate::order::LoadOrder;
use crate::worker::RankRef;

/// The part of a request that a rank is chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Generating, and computing prompts that no prefill worker computes.
    Decode,
    /// Computing prompts for decode workers.
    Prefill,
}

/// The ranks of a pool that have described themselves.
#[derive(Debug, Default)]
pub struct Roster {
    ranks: Vec<RankRef>,
    /// The place of each member of the index in `ranks`; `u32::MAX` for members of other pools.
    places: Vec<u32>,
    orders: Option<Arc<Orders>>,
}

/// The order of the ranks for each phase.
#[derive(Debug)]
struct Orders {
    decode: LoadOrder,
    prefill: LoadOrder,
}

/// Position of a rank in the orders of its pool's roster.
#[derive(Debug)]
pub(crate) struct LoadOrderPosition {
    orders: Arc<Orders>,
    place: usize,
}

impl Deref for Roster {
    type Target = [RankRef];

    fn deref(&self) -> &[RankRef] {
        &self.ranks
    }
}

impl Roster {
    /// Builds a roster of these ranks and gives each its position in the order by load.
    pub(crate) fn new(ranks: Vec<RankRef>) -> Self {
        let orders = Orders { decode: LoadOrder::new(ranks.len()), prefill: LoadOrder::new(ranks.len()) };
        let orders = Arc::new(orders);
        let mut places = vec![u32::MAX; if ranks.is_empty() { 0 } else { MEMBERS_MAX }];
        for (place, rank) in ranks.iter().enumerate() {
            places[rank.run.member.index()] = place as u32;
            rank.run.set_load_position(LoadOrderPosition { orders: Arc::clone(&orders), place });
        }
        Self { ranks, places, orders: Some(orders) }
    }

    /// The place of a member of the index, if it is one of these ranks.
    pub(crate) fn place_of(&self, member: Member) -> Option<usize> {
        let place = *self.places.get(member.index())?;
        (place != u32::MAX).then_some(place as usize)
    }

    /// Passes places to `take`, the least loaded first, until `take` returns false.
    pub(crate) fn least_loaded(&self, phase: Phase, turn: usize, take: impl FnMut(usize) -> bool) {
        let Some(orders) = &self.orders else { return };
        match phase {
            Phase::Decode => orders.decode.least(turn, take),
            Phase::Prefill => orders.prefill.least(turn, take),
        }
    }

    /// Returns a rank that takes requests.
    pub(crate) fn any_ready(&self) -> Option<&RankRef> {
        // Fast path: most of the time all ranks are ready.
        if let Some(first) = self.ranks.first().filter(|rank| rank.is_ready()) {
            return Some(first);
        }
        let mut found = None;
        for phase in [Phase::Decode, Phase::Prefill] {
            self.least_loaded(phase, 0, |place| {
                found = found.or(Some(place));
                false
            });
        }
        match found {
            Some(place) => self.ranks.get(place),
            None => self.ranks.iter().find(|rank| rank.is_ready()),
        }
    }

    /// Repairs the orders: see `order`.
    pub(crate) fn refresh(&self) {
        if let Some(orders) = &self.orders {
            orders.decode.refresh();
            orders.prefill.refresh();
        }
    }
}

impl LoadOrderPosition {
    /// Sets the load of a rank with this role; `None` when it takes no requests.
    pub(crate) fn put(&self, role: Role, load: Option<u32>) {
        let order = if role == Role::Prefill { &self.orders.prefill } else { &self.orders.decode };
        order.put(self.place, load);
    }
}
