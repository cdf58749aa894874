//! State transitions of connections: greeted, attached, open, left, closed.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use dataplane_fabric::{Event, Fabric, Operation, PeerId, Priority, WorkRequest};
use dataplane_memory::DeviceError;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::IpcCounters;
use crate::attach::{Done, PeerSlab};
use crate::fabric::IpcFabric;
use crate::lane::LaneContext;
use crate::peer::{Peer, Stage};
use crate::wire::Message;

const NO_PIDFD: &str = "this kernel does not tell when the peer's process has ended: Linux 6.5 or later, or one PID namespace for \
    both, is needed";

impl IpcFabric {
    pub(crate) fn mark_busy(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id)
            && !std::mem::replace(&mut peer.is_listed, true)
        {
            self.busy.push(id);
        }
    }

    /// Sends a message to the peer; false when its ring is full.
    fn send(&mut self, id: PeerId, priority: Priority, message: Message) -> bool {
        let operation = Operation::Send { message: message.encode() };
        let is_sent = self.shm.post(WorkRequest { id: 0, peer: id, priority, operation }).is_ok();
        self.shm.flush();
        is_sent
    }

    pub(crate) fn handle_shm_event(&mut self, event: Event) {
        match event {
            Event::Connected { peer } => self.send_hello(peer),
            // No event reports the end of a peer that exceeded the limit.
            Event::Accepted { peer } if self.peers.len() >= self.peers_max => self.shm.disconnect(peer),
            Event::Accepted { peer } => {
                self.insert(peer, false);
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.stage = Stage::Greeting;
                }
            }
            Event::Completed { .. } => self.events.push_back(event),
            Event::Immediate { peer, .. } => {
                self.open_if_waiting(peer);
                if self.peers.get(&peer).is_some_and(|peer| peer.stage == Stage::Open) {
                    self.events.push_back(event);
                }
            }
            Event::Message { peer, message } => match Message::decode(message) {
                Ok(message) => self.handle_message(peer, message),
                Err(reason) => self.leave(peer, &format!("protocol error: {reason}")),
            },
            Event::PeerDown { peer, reason } => self.shm_is_down(peer, &reason),
        }
    }

    /// Sends the peer the exported handle of this node's slab.
    fn send_hello(&mut self, id: PeerId) {
        let process = self.shm.peer_pidfd(id);
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.stage.is_end() {
            return;
        }
        peer.stage = Stage::Greeting;
        peer.process = process;
        if peer.process.is_none() {
            return self.refuse(id, NO_PIDFD);
        }
        let hello = self.hello.clone();
        if !self.send(id, Priority::Urgent, Message::Hello(hello)) {
            self.leave(id, "its ring has no room for a hello");
        }
    }

    fn handle_message(&mut self, id: PeerId, message: Message) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match (message, peer.stage) {
            (Message::Goodbye(lane, reason), _) => {
                peer.goodbyes_received[lane.index()] = true;
                if peer.has_said_goodbye() {
                    self.leave(id, &format!("the peer closed the connection: {reason}"));
                    self.close_if_both_left(id);
                }
            }
            // Late messages: the peer does not know yet that the connection is ending.
            (_, stage) if stage.is_end() => {}
            (Message::Hello(hello), Stage::Greeting) => {
                if !peer.is_initiator {
                    self.send_hello(id);
                }
                let Some(peer) = self.peers.get_mut(&id).filter(|peer| !peer.stage.is_end()) else { return };
                if hello.exported.is_empty() {
                    peer.stage = Stage::Waiting;
                    return self.send_ready(id);
                }
                peer.stage = Stage::Attaching;
                peer.has_job = self.attaching.attach(id, hello);
                if !peer.has_job {
                    self.refuse(id, "the thread that attaches memory has ended");
                }
            }
            (Message::Ready, Stage::Waiting) => self.open_if_waiting(id),
            // The peer has attached our slab first.
            (Message::Ready, Stage::Attaching) => peer.is_ready = true,
            (Message::Ready, Stage::Open) => {}
            (Message::User(message), Stage::Waiting | Stage::Open) => {
                self.open_if_waiting(id);
                self.events.push_back(Event::Message { peer: id, message });
            }
            _ => self.leave(id, "protocol error: a message out of its order"),
        }
    }

    fn send_ready(&mut self, id: PeerId) {
        if !self.send(id, Priority::Urgent, Message::Ready) {
            self.leave(id, "its ring has no room");
        }
    }

    /// Opens the connection if the peer has attached our slab, which its `Ready` or any later message shows.
    fn open_if_waiting(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.stage == Stage::Waiting) else { return };
        peer.stage = Stage::Open;
        (peer.was_open, peer.is_announced) = (true, true);
        self.opening -= usize::from(peer.deadline.take().is_some());
        self.events.push_back(match peer.is_initiator {
            true => Event::Connected { peer: id },
            false => Event::Accepted { peer: id },
        });
    }

    /// Ends the connections that are not open in time.
    pub(crate) fn expire(&mut self) {
        let now = Instant::now();
        let late =
            self.peers.iter().filter(|(_, peer)| peer.deadline.is_some_and(|deadline| deadline <= now));
        let late: Vec<(PeerId, Stage)> = late.map(|(&id, peer)| (id, peer.stage)).collect();
        for (id, stage) in late {
            self.leave(
                id,
                match stage {
                    Stage::Connecting => "no connection over shared memory in time",
                    _ => "the peer did not attach memory in time",
                },
            );
        }
    }

    /// Starts to end a connection: no further copy is started. The end of a connection that was never open is
    /// reported at once, because no slot was named to its peer.
    pub(crate) fn leave(&mut self, id: PeerId, reason: &str) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.stage.is_end() {
            return;
        }
        self.opening -= usize::from(peer.deadline.take().is_some());
        reason.clone_into(&mut peer.reason);
        if peer.stage == Stage::Connecting {
            // Shared memory reports the end.
            return self.shm.disconnect(id);
        }
        peer.stage = Stage::Leaving;
        for lane in &mut peer.lanes {
            lane.give_up(&mut self.events);
        }
        if !peer.was_open && std::mem::take(&mut peer.is_announced) {
            self.events.push_back(Event::PeerDown { peer: id, reason: reason.to_owned() });
        }
        self.mark_busy(id);
    }

    fn refuse(&mut self, id: PeerId, reason: &str) {
        IpcCounters::add(&self.counters.refused_peers, 1);
        tracing::info!(reason, "a peer of shared device memory is refused");
        self.leave(id, reason);
    }

    /// Detaches the peer's slab once no copy is in flight, and then says goodbye.
    fn advance_disconnect(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.stage != Stage::Leaving || peer.copies_in_flight() > 0 || peer.has_job {
            return;
        }
        for lane in &mut peer.lanes {
            lane.end(&mut self.events);
        }
        if peer.slab.as_ref().is_some_and(|slab| slab.attached.copier.is_lost()) {
            // Copies of a lost device may continue: no goodbye is sent, and the peer waits for the end of
            // this process.
            peer.stage = Stage::Closing;
            return self.shm.disconnect(id);
        }
        if let Some(slab) = peer.slab.take() {
            // The driver closes the memory before the goodbye allows the peer to free it.
            peer.has_job = self.attaching.detach(id, slab);
            if peer.has_job {
                return;
            }
        }
        let reason = peer.reason.clone();
        for lane in Priority::ALL {
            let is_said = |peer: &Peer| peer.goodbyes_sent[lane.index()];
            if self.peers.get(&id).is_none_or(is_said) {
                continue;
            }
            if !self.send(id, lane, Message::Goodbye(lane, reason.clone())) {
                return;
            }
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.goodbyes_sent[lane.index()] = true;
            }
        }
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.stage = Stage::Left;
        }
        self.close_if_both_left(id);
    }

    fn close_if_both_left(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id)
            && peer.stage == Stage::Left
            && (peer.has_said_goodbye() || !peer.was_open)
        {
            peer.stage = Stage::Closing;
            self.shm.disconnect(id);
        }
    }

    /// Handles the disconnect of shared memory. Without goodbyes, a copy of the peer may run until its
    /// process has ended.
    fn shm_is_down(&mut self, id: PeerId, reason: &str) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        self.opening -= usize::from(peer.deadline.take().is_some());
        if peer.reason.is_empty() {
            reason.clone_into(&mut peer.reason);
        }
        for lane in &mut peer.lanes {
            lane.give_up(&mut self.events);
        }
        peer.stage = Stage::Orphaned;
        if !peer.may_write() || self.hello.exported.is_empty() {
            peer.process = None;
        }
        self.orphans += 1;
        self.end_orphans();
    }

    /// Ends the connections of orphaned peers that have nothing in flight in either direction.
    pub(crate) fn end_orphans(&mut self) {
        let is_over = |peer: &Peer| {
            let is_idle = peer.copies_in_flight() == 0 && !peer.has_job;
            peer.stage == Stage::Orphaned && is_idle && peer.process.as_ref().is_none_or(has_ended)
        };
        let over: Vec<PeerId> =
            self.peers.iter().filter(|(_, peer)| is_over(peer)).map(|(&id, _)| id).collect();
        for id in over {
            let Some(peer) = self.peers.get_mut(&id) else { continue };
            for lane in &mut peer.lanes {
                lane.end(&mut self.events);
            }
            if let Some(slab) = peer.slab.take() {
                peer.has_job = self.attaching.detach(id, slab);
                if peer.has_job {
                    continue;
                }
            }
            self.orphans -= 1;
            if let Some(peer) = self.peers.remove(&id).filter(|peer| peer.is_announced) {
                self.events.push_back(Event::PeerDown { peer: id, reason: peer.reason });
            }
            self.publish_peer_count();
        }
    }

    pub(crate) fn publish_peer_count(&self) {
        self.counters.peers.store(self.peers.len() as u64, Ordering::Relaxed);
    }

    /// Handles the completed jobs of the attaching thread.
    pub(crate) fn take_done(&mut self) {
        loop {
            match self.attaching.next() {
                Ok(Some(Done::Attached(id, result))) => self.attached(id, result),
                Ok(Some(Done::Detached(id))) => self.job_ended(id),
                Ok(None) => return,
                Err(()) => return self.thread_ended(),
            }
        }
    }

    fn job_ended(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.has_job = false;
            self.mark_busy(id);
        }
    }

    fn attached(&mut self, id: PeerId, result: Result<PeerSlab, DeviceError>) {
        self.job_ended(id);
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match result {
            // Also for a connection that has started to end: the slab is detached when it ends.
            Ok(slab) => peer.slab = Some(slab),
            Err(error) => {
                return self.refuse(id, &format!("its device's memory cannot be attached: {error}"));
            }
        }
        if peer.stage == Stage::Attaching {
            peer.stage = Stage::Waiting;
            let is_ready = peer.is_ready;
            self.send_ready(id);
            if is_ready {
                self.open_if_waiting(id);
            }
        }
    }

    /// Handles a panic of the thread: its jobs are lost, and no slab is attached any more.
    fn thread_ended(&mut self) {
        let waiting: Vec<PeerId> =
            self.peers.iter().filter(|(_, peer)| peer.has_job).map(|(&id, _)| id).collect();
        for id in waiting {
            self.job_ended(id);
            if self.peers.get(&id).is_some_and(|peer| peer.stage == Stage::Attaching) {
                self.refuse(id, "the thread that attaches memory has ended");
            }
        }
    }

    /// Advances every peer that has requests or is leaving.
    pub(crate) fn advance(&mut self) {
        let mut busy = std::mem::take(&mut self.busy);
        busy.retain(|&id| {
            self.advance_peer(id);
            let Some(peer) = self.peers.get_mut(&id) else { return false };
            peer.is_listed = peer.has_requests() || (peer.stage == Stage::Leaving && !peer.has_job);
            peer.is_listed
        });
        // Keeps the buffer. Peers that were added meanwhile are not in it yet.
        busy.append(&mut self.busy);
        self.busy = busy;
    }

    fn advance_peer(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.poll_copies(&mut self.done);
        if peer.stage.is_end() {
            self.advance_disconnect(id);
        } else if let Err(reason) = self.advance_lanes(id) {
            IpcCounters::add(&self.counters.failed_copies, 1);
            self.leave(id, &reason);
        }
    }

    fn advance_lanes(&mut self, id: PeerId) -> Result<(), String> {
        let Some(peer) = self.peers.get_mut(&id) else { return Ok(()) };
        for lane in &mut peer.lanes {
            let mut context = LaneContext {
                shm: &mut self.shm,
                events: &mut self.events,
                slots: peer.slab.as_ref().map_or(&[], |slab| &slab.slots),
                counters: &self.counters,
            };
            lane.advance(&mut context)?;
            if let Some(slab) = &mut peer.slab {
                lane.begin(slab)?;
            }
        }
        Ok(())
    }
}

fn has_ended(process: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&process, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
}
