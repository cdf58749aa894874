//! Queue of waiting requests: by priority, fair among tenants of one priority, with a deadline for each
//! waiter.
//!
//! Priorities are strict: a lower number goes first, as in vLLM, and can starve a higher one; deadlines
//! bound that. Within a priority the order is start-time fair queueing (Goyal, Vin, Cheng, 1996, section
//! 2.1): each tenant is a flow with a FIFO; the head of each has a start tag; the smallest tag is served,
//! becomes the virtual time, and its flow's next tag lies cost/weight later. A flow that was idle starts at
//! the virtual time, so it gains and loses nothing by being idle. Over any time in which two tenants both
//! wait, their service differs from their weights by at most one request of each, whatever the requests
//! cost; and no tenant starves, since the tag of a waiting flow stays while the tags of served flows grow.
//! Deficit round robin is as fair over long times only, and needs a quantum that fits all requests.
//!
//! Tags are made when a waiter becomes head, not when it arrives, so a waiter that gives up costs its
//! tenant nothing. A priority without waiters is removed with its tags.
//!
//! Pure: no lock, no clock, no wake-ups. Each operation is O(log n). The caller bounds the number of
//! waiters.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Start tags count in parts of a token, so that a weight divides even a small cost well.
const TOKEN_PARTS: u128 = 1 << 20;
/// Flows without waiters that may be kept for their tags.
const FLOWS_SPARE: usize = 64;

/// Identifies a waiter for as long as it waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ticket {
    priority: i32,
    tenant: Arc<str>,
    serial: u64,
    deadline: u64,
}

#[derive(Debug)]
struct Waiter<T> {
    cost: u64,
    deadline: u64,
    payload: T,
}

/// One tenant's waiters of one priority, by arrival.
#[derive(Debug)]
struct Flow<T> {
    waiting: BTreeMap<u64, Waiter<T>>,
    cost: u64,
    weight: u32,
    /// Start tag of the head.
    start: u128,
}

/// The waiters of one priority.
#[derive(Debug)]
struct Class<T> {
    flows: HashMap<Arc<str>, Flow<T>>,
    /// Flows with waiters, by the tag of their head; ties go by the head's arrival.
    heads: BTreeMap<(u128, u64), Arc<str>>,
    virtual_time: u128,
    waiting: usize,
    cost: u64,
    /// Weights of the flows with waiters.
    weight: u64,
}

/// All waiters.
#[derive(Debug)]
pub(super) struct Queue<T> {
    classes: BTreeMap<i32, Class<T>>,
    deadlines: BTreeSet<(u64, u64)>,
    /// Priority and tenant of each waiter, by serial.
    places: HashMap<u64, (i32, Arc<str>)>,
    serial: u64,
}

/// Attributes of a request before it waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival<'a> {
    pub(super) priority: i32,
    pub(super) tenant: &'a Arc<str>,
    pub(super) weight: u32,
    pub(super) cost: u64,
    pub(super) deadline: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { classes: BTreeMap::new(), deadlines: BTreeSet::new(), places: HashMap::new(), serial: 0 }
    }
}

impl<T> Queue<T> {
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn cost(&self) -> u64 {
        self.classes.values().map(|class| class.cost).sum()
    }

    /// Returns the number of waiters of one tenant and priority.
    pub(super) fn tenant_len(&self, priority: i32, tenant: &str) -> usize {
        let flow = self.classes.get(&priority).and_then(|class| class.flows.get(tenant));
        flow.map_or(0, |flow| flow.waiting.len())
    }

    /// Returns the tokens that are served before such a request: all of better priority; and of its own
    /// priority, either all or what is served before its tenant's share reaches it, whichever is less. So a
    /// tenant that fills the queue only makes its own waits long.
    pub(super) fn cost_ahead(&self, arrival: &Arrival<'_>) -> u64 {
        let better: u64 = self.classes.range(..arrival.priority).map(|(_, class)| class.cost).sum();
        let Some(class) = self.classes.get(&arrival.priority) else { return better };
        let (own_cost, own_weight) = match class.flows.get(arrival.tenant) {
            Some(flow) if !flow.waiting.is_empty() => (flow.cost, u64::from(flow.weight)),
            _ => (0, 0),
        };
        let weight = u64::from(arrival.weight.max(1));
        let others = class.weight - own_weight;
        let own = u128::from(own_cost) + u128::from(arrival.cost);
        let among = own * u128::from(others) / u128::from(weight) + u128::from(own_cost);
        better.saturating_add(class.cost.min(u64::try_from(among).unwrap_or(u64::MAX)))
    }

    pub(super) fn push(&mut self, arrival: &Arrival<'_>, payload: T) -> Ticket {
        let serial = self.serial;
        self.serial += 1;
        let class = self.classes.entry(arrival.priority).or_default();
        class.push(arrival, serial, payload);
        self.deadlines.insert((arrival.deadline, serial));
        self.places.insert(serial, (arrival.priority, Arc::clone(arrival.tenant)));
        Ticket {
            priority: arrival.priority,
            tenant: Arc::clone(arrival.tenant),
            serial,
            deadline: arrival.deadline,
        }
    }

    /// Removes the next waiter to be served.
    pub(super) fn pop(&mut self) -> Option<T> {
        let mut entry = self.classes.first_entry()?;
        let (serial, waiter) = entry.get_mut().pop()?;
        if entry.get().waiting == 0 {
            entry.remove();
        }
        self.deadlines.remove(&(waiter.deadline, serial));
        self.places.remove(&serial);
        Some(waiter.payload)
    }

    /// Removes a waiter that gave up; `None` when it was served or has expired already.
    pub(super) fn remove(&mut self, ticket: &Ticket) -> Option<T> {
        self.places.remove(&ticket.serial)?;
        self.deadlines.remove(&(ticket.deadline, ticket.serial));
        self.take(ticket.priority, &ticket.tenant, ticket.serial)
    }

    /// Removes a waiter whose deadline has passed, the oldest deadline first.
    pub(super) fn pop_expired(&mut self, now: u64) -> Option<T> {
        let &(deadline, serial) = self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.deadlines.pop_first();
        let (priority, tenant) = self.places.remove(&serial)?;
        self.take(priority, &tenant, serial)
    }

    fn take(&mut self, priority: i32, tenant: &Arc<str>, serial: u64) -> Option<T> {
        let class = self.classes.get_mut(&priority)?;
        let waiter = class.remove(tenant, serial)?;
        if class.waiting == 0 {
            self.classes.remove(&priority);
        }
        Some(waiter.payload)
    }
}

impl<T> Default for Class<T> {
    fn default() -> Self {
        Self {
            flows: HashMap::new(),
            heads: BTreeMap::new(),
            virtual_time: 0,
            waiting: 0,
            cost: 0,
            weight: 0,
        }
    }
}

impl<T> Class<T> {
    fn push(&mut self, arrival: &Arrival<'_>, serial: u64, payload: T) {
        let virtual_time = self.virtual_time;
        let flow = self.flows.entry(Arc::clone(arrival.tenant)).or_insert_with(|| Flow {
            waiting: BTreeMap::new(),
            cost: 0,
            weight: 1,
            start: virtual_time,
        });
        if flow.waiting.is_empty() {
            flow.weight = arrival.weight.max(1);
            flow.start = flow.start.max(virtual_time);
            self.weight += u64::from(flow.weight);
            self.heads.insert((flow.start, serial), Arc::clone(arrival.tenant));
        }
        flow.cost += arrival.cost;
        flow.waiting.insert(serial, Waiter { cost: arrival.cost, deadline: arrival.deadline, payload });
        self.cost += arrival.cost;
        self.waiting += 1;
        self.remove_idle_flows();
    }

    fn pop(&mut self) -> Option<(u64, Waiter<T>)> {
        let ((start, serial), tenant) = self.heads.pop_first()?;
        let flow = self.flows.get_mut(&tenant)?;
        let waiter = flow.waiting.remove(&serial)?;
        self.virtual_time = start;
        flow.start += u128::from(waiter.cost) * TOKEN_PARTS / u128::from(flow.weight);
        self.account(&tenant, waiter.cost);
        Some((serial, waiter))
    }

    fn remove(&mut self, tenant: &Arc<str>, serial: u64) -> Option<Waiter<T>> {
        let flow = self.flows.get_mut(tenant)?;
        let waiter = flow.waiting.remove(&serial)?;
        self.heads.remove(&(flow.start, serial));
        self.account(tenant, waiter.cost);
        Some(waiter)
    }

    /// Updates the sums after a waiter of this tenant left.
    fn account(&mut self, tenant: &Arc<str>, cost: u64) {
        self.waiting -= 1;
        self.cost -= cost;
        let Some(flow) = self.flows.get_mut(tenant) else { return };
        flow.cost -= cost;
        match flow.waiting.keys().next() {
            Some(&head) => {
                self.heads.insert((flow.start, head), Arc::clone(tenant));
            }
            None => self.weight -= u64::from(flow.weight),
        }
    }

    /// Removes flows without waiters, which are kept for their tags, once there are many more flows than
    /// waiters. A flow whose tag the virtual time has passed loses nothing; if that is not enough, flows
    /// that were served far ahead of the rest lose what they owe.
    fn remove_idle_flows(&mut self) {
        if self.flows.len() <= 2 * self.waiting + FLOWS_SPARE {
            return;
        }
        let virtual_time = self.virtual_time;
        self.flows.retain(|_, flow| !flow.waiting.is_empty() || flow.start > virtual_time);
        // Well below the bound, so that removal is rare.
        if self.flows.len() > self.waiting + FLOWS_SPARE / 2 {
            self.flows.retain(|_, flow| !flow.waiting.is_empty());
        }
    }
}

#[cfg(test)]
mod tests;
