//! A peer with its links and lanes, and the fences of links that have ended.

use std::collections::VecDeque;
use std::time::Instant;

use dataplane_fabric::{Event, Fabric, Operation, PeerId, Priority, WorkRequest};
use dataplane_memory::SlabKind;

use super::arrivals::Arrivals;
use super::lane::{Lane, Slice};
use super::link::{Link, State};
use super::wire::LinkName;
use super::{FENCE_WITHIN, GREET_WITHIN, LINK_DOWN_RESEND_AFTER, LINKS_WITHIN, REACH_WITHIN, Rail};

/// Most connections that may fail while they carry one slice. The peer's side may refuse the target of such
/// a slice.
const SLICE_FAILURES_MAX: u8 = 16;
/// Most events of a peer that may arrive before the connection is announced.
const EARLY_MAX: usize = 256;
/// Most control frames that may wait, and most ended connections whose end the peer has not confirmed.
const CONTROL_MAX: usize = 64;

/// A connection that has ended here, until the peer confirms that nothing of it can arrive any more.
#[derive(Debug)]
struct Fence {
    name: LinkName,
    /// Writes of the connection, posted again after the confirmation.
    slices: Vec<(usize, Slice)>,
    since: Instant,
    /// Time at which the peer was last told of the end.
    last_sent_at: Instant,
}

/// A link that is up.
pub(crate) struct UpLink {
    pub(crate) index: usize,
    pub(crate) rail: usize,
    /// Peer id of the connection on its rail.
    pub(crate) inner: PeerId,
}

/// Frames about connections, sent over every link that is up and has room, since any link may have failed
/// at the other end only. Repeats are harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Control {
    LinkDown(LinkName),
    Fenced(LinkName),
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) session: u64,
    /// Name of the accepting node: drawn here if this node accepted, else taken from the peer's first welcome.
    pub(crate) incarnation: Option<u64>,
    pub(crate) links: Vec<Link>,
    pub(crate) lanes: [Lane; Priority::ALL.len()],
    /// By lane: events that have arrived.
    pub(crate) arrivals: [Arrivals<Event>; Priority::ALL.len()],
    /// The link that carries the events of each lane.
    pub(crate) carriers: [Option<usize>; Priority::ALL.len()],
    /// Time at which the peer's first link was up.
    pub(crate) first_link_up_at: Option<Instant>,
    /// By lane: time since which the first waiting slice has had no link that reaches its memory.
    pub(crate) out_of_reach: [Option<Instant>; Priority::ALL.len()],
    /// Whether the user was told of the connection.
    pub(crate) announced: bool,
    pub(crate) early: Vec<Event>,
    /// Reason for the end of the peer, once it is to end.
    pub(crate) ending: Option<String>,
    /// Whether the peer's connections are being closed.
    pub(crate) closing: bool,
    pub(crate) ack_due: bool,
    fences: Vec<Fence>,
    /// Links whose end the peer asks to be told of, to be reported when they have ended here.
    owed: Vec<LinkName>,
    pub(super) control: VecDeque<Control>,
}

impl Peer {
    pub(crate) fn new(session: u64, incarnation: Option<u64>, links: Vec<Link>) -> Self {
        Self {
            session,
            incarnation,
            links,
            lanes: Default::default(),
            arrivals: Default::default(),
            carriers: [None; Priority::ALL.len()],
            first_link_up_at: None,
            out_of_reach: Default::default(),
            announced: false,
            early: Vec::new(),
            ending: None,
            closing: false,
            ack_due: false,
            fences: Vec::new(),
            owed: Vec::new(),
            control: VecDeque::new(),
        }
    }

    /// Whether messages are framed. With one link, requests pass through and messages are the users' own.
    pub(crate) fn is_framed(&self) -> bool {
        self.links.len() > 1
    }

    pub(crate) fn keep_early(&mut self, event: Event) {
        if self.early.len() < EARLY_MAX {
            self.early.push(event);
        } else {
            self.ending.get_or_insert_with(|| "too many events before the welcome".to_owned());
        }
    }

    /// Returns the links that are up.
    pub(crate) fn up_links(&self) -> impl Iterator<Item = UpLink> {
        let up = self.links.iter().enumerate().filter(|(_, link)| link.is_up());
        up.filter_map(|(index, link)| Some(UpLink { index, rail: link.rail, inner: link.inner? }))
    }

    /// Whether the user can be told of the connection: a link is up, and no link that is being made would
    /// show the peer a further kind of slab, or [`LINKS_WITHIN`] has passed. A peer that connects to this
    /// node is reported at once: it asks for memory as its own links reach it.
    pub(crate) fn has_all_links<F: Fabric>(&self, rails: &[Rail<F>], now: Instant) -> bool {
        let Some(since) = self.first_link_up_at else { return false };
        let is_shown = |kind: SlabKind| {
            self.up_links().any(|link| rails[link.rail].fabric.is_shown_to(link.inner, kind))
        };
        let shows_more = |link: &Link| {
            let fabric = &rails[link.rail].fabric;
            SlabKind::ALL.into_iter().any(|kind| fabric.shown_slab(kind).is_some() && !is_shown(kind))
        };
        let mut coming = self.links.iter().filter(|link| link.is_being_made() && link.address.is_some());
        let is_up = self.up_links().next().is_some();
        is_up && (now >= since + LINKS_WITHIN || !coming.any(shows_more))
    }

    /// Whether a first link may still come up. After the first one this is false: the peer has dropped a
    /// session whose last link has ended.
    pub(crate) fn is_waiting(&self) -> bool {
        self.first_link_up_at.is_none() && self.links.iter().any(Link::is_being_made)
    }

    /// Handles the end of a link: the events that it carried, or whose writes it carried, are sent again
    /// over another.
    pub(crate) fn link_ended(&mut self, index: usize) {
        for (carrier, lane) in self.carriers.iter_mut().zip(&mut self.lanes) {
            let was_carrier = *carrier == Some(index);
            if was_carrier {
                *carrier = None;
            }
            lane.link_ended(index, was_carrier);
        }
    }

    pub(crate) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        if self.ending.is_some() {
            // Once its connections are being closed, the rails report the end.
            return (!self.closing).then_some(now);
        }
        let retries = self.links.iter().filter_map(|link| match link.state {
            State::Down { retry_at } => retry_at,
            State::Greeting { since } => Some(since + GREET_WITHIN),
            State::Connecting | State::Up => None,
        });
        let overdue = self.fences.iter().filter(|fence| !fence.slices.is_empty());
        let again = self.fences.iter().map(|fence| fence.last_sent_at + LINK_DOWN_RESEND_AFTER);
        let is_settling = !self.announced && self.up_links().next().is_some();
        let settles = self.first_link_up_at.filter(|_| is_settling).map(|since| since + LINKS_WITHIN);
        let unreached = self.out_of_reach.iter().flatten().map(|&since| since + REACH_WITHIN);
        let fences = overdue.map(|fence| fence.since + FENCE_WITHIN).chain(again);
        retries.chain(fences).chain(settles).chain(unreached).min()
    }

    /// Takes a request of the user, or hands it back when the lane is full.
    pub(crate) fn enqueue(&mut self, request: WorkRequest) -> Result<(), WorkRequest> {
        let lane = &mut self.lanes[request.priority.index()];
        if lane.is_full() {
            return Err(request);
        }
        let WorkRequest { id, operation, .. } = request;
        match operation {
            Operation::Send { message } => lane.add_message(id, message),
            Operation::Write { source, target, rows, immediate } => {
                lane.add_request(id, Operation::Write { source, target, rows, immediate: None });
                if let Some(value) = immediate {
                    lane.add_immediate(value);
                }
            }
            operation @ Operation::Read { .. } => lane.add_request(id, operation),
        }
        Ok(())
    }

    // --- fences ---

    /// Takes the slices of a failed link: reads are posted again at once, writes when the peer has fenced
    /// the link. Returns the number of reads.
    pub(crate) fn fence(&mut self, name: LinkName, failed: Vec<(usize, Slice)>, now: Instant) -> u64 {
        let (mut writes, mut reads) = (Vec::new(), 0);
        for (lane, mut slice) in failed.into_iter().rev() {
            slice.is_last = false;
            slice.failures = slice.failures.saturating_add(1);
            if slice.failures > SLICE_FAILURES_MAX {
                self.ending
                    .get_or_insert_with(|| "one slice failed on too many connections in a row".to_owned());
            }
            match slice.operation {
                Operation::Read { .. } => {
                    reads += 1;
                    self.lanes[lane].waiting.push_front(slice);
                }
                _ => writes.push((lane, slice)),
            }
        }
        // Fences links without writes too: the peer may not have noticed the failure and would keep sending
        // over the link. Whatever it sends again only after noticing would be lost until then.
        if self.fences.len() < CONTROL_MAX {
            self.fences.push(Fence { name, slices: writes, since: now, last_sent_at: now });
        } else {
            self.too_many_failures();
        }
        self.say(Control::LinkDown(name));
        reads
    }

    /// Repeats the acknowledgement and the unconfirmed `LinkDown` frames, which a failed link may have lost.
    pub(crate) fn repeat(&mut self, now: Instant) {
        self.ack_due = true;
        self.resend_link_downs(now, |_| true);
    }

    /// Repeats the end of connections that the peer has not confirmed for a while; returns true when there
    /// are some.
    pub(crate) fn repeat_overdue(&mut self, now: Instant) -> bool {
        self.resend_link_downs(now, |fence| fence.last_sent_at + LINK_DOWN_RESEND_AFTER <= now)
    }

    fn resend_link_downs(&mut self, now: Instant, which: impl Fn(&Fence) -> bool) -> bool {
        let due = self.fences.iter_mut().filter(|fence| which(fence));
        let names: Vec<LinkName> = due
            .map(|fence| {
                fence.last_sent_at = now;
                fence.name
            })
            .collect();
        names.iter().for_each(|&name| self.say(Control::LinkDown(name)));
        !names.is_empty()
    }

    /// Handles the peer's confirmation: the writes are posted again, except those whose events it has
    /// delivered. Returns the ids of requests that have landed with these, and the number of slices posted
    /// again.
    pub(crate) fn fenced(
        &mut self,
        name: LinkName,
        delivered: [u64; Priority::ALL.len()],
    ) -> (Vec<u64>, u64) {
        let (mut landed, mut again) = (Vec::new(), 0);
        let Some(at) = self.fences.iter().position(|fence| fence.name == name) else { return (landed, 0) };
        for (lane, slice) in self.fences.swap_remove(at).slices {
            if self.lanes[lane].was_delivered(slice.request, delivered[lane]) {
                landed.extend(self.lanes[lane].slice_done(slice.request));
            } else {
                again += 1;
                self.lanes[lane].waiting.push_front(slice);
            }
        }
        (landed, again)
    }

    pub(super) fn delivered(&self) -> [u64; Priority::ALL.len()] {
        std::array::from_fn(|lane| self.arrivals[lane].delivered)
    }

    pub(crate) fn is_fence_overdue(&self, now: Instant) -> bool {
        self.fences.iter().any(|fence| !fence.slices.is_empty() && fence.since + FENCE_WITHIN <= now)
    }

    /// Records that the peer asks for the end of a link: reported now if it has ended, else when it ends.
    pub(crate) fn owe_fence(&mut self, name: LinkName, is_open: bool) {
        if is_open {
            // A repeated request is recorded once.
            if !self.owed.contains(&name) {
                self.owed.push(name);
            }
        } else {
            self.say(Control::Fenced(name));
        }
    }

    pub(crate) fn confirm_fence(&mut self, name: LinkName) {
        if let Some(at) = self.owed.iter().position(|owed| *owed == name) {
            self.owed.swap_remove(at);
            self.say(Control::Fenced(name));
        }
    }

    fn say(&mut self, control: Control) {
        if self.control.contains(&control) {
            return;
        }
        if self.control.len() < CONTROL_MAX {
            self.control.push_back(control);
        } else {
            self.too_many_failures();
        }
    }

    fn too_many_failures(&mut self) {
        self.ending
            .get_or_insert_with(|| "its links fail faster than control messages can be queued".to_owned());
    }
}
