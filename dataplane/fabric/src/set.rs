//! Several transports as one: each address starts with the name of the transport that shall carry it
//! (`shm:/run/kvasir/w1.sock`, `tcp:10.0.0.7:7400`). The rail's index travels in the top byte of the peer id.

use std::os::fd::BorrowedFd;

use crate::{ConnectError, Event, Fabric, Full, PeerId, WorkRequest};

const RAIL_SHIFT: u32 = 56;
const PEER_MASK: u64 = (1 << RAIL_SHIFT) - 1;

/// The transports of one node.
#[derive(Default)]
pub struct FabricSet {
    rails: Vec<Box<dyn Fabric + Send>>,
}

impl FabricSet {
    /// A set of the given transports, at most 255.
    #[must_use]
    pub fn new(rails: Vec<Box<dyn Fabric + Send>>) -> Self {
        assert!(rails.len() < 256, "the rail index is one byte");
        Self { rails }
    }

    fn rail(&mut self, peer: PeerId) -> Option<(&mut Box<dyn Fabric + Send>, PeerId)> {
        let rail = self.rails.get_mut((peer.0 >> RAIL_SHIFT) as usize)?;
        Some((rail, PeerId(peer.0 & PEER_MASK)))
    }
}

fn on_rail(rail: usize, peer: PeerId) -> PeerId {
    PeerId((rail as u64) << RAIL_SHIFT | peer.0)
}

impl Fabric for FabricSet {
    fn name(&self) -> &'static str {
        "set"
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        let unknown = |reason: &str| ConnectError::Address {
            fabric: "set",
            address: address.to_owned(),
            reason: reason.to_owned(),
        };
        let (name, rest) = address.split_once(':').ok_or_else(|| unknown("no transport before ':'"))?;
        let (rail, fabric) = self
            .rails
            .iter_mut()
            .enumerate()
            .find(|(_, fabric)| fabric.name() == name)
            .ok_or_else(|| unknown("this node has no such transport"))?;
        fabric.connect(rest).map(|peer| on_rail(rail, peer))
    }

    fn post(&mut self, mut request: WorkRequest) -> Result<(), Full> {
        let outside = request.peer;
        let Some((rail, inside)) = self.rail(outside) else { return Err(Full(request)) };
        request.peer = inside;
        rail.post(request).map_err(|Full(mut request)| {
            request.peer = outside;
            Full(request)
        })
    }

    fn flush(&mut self) {
        self.rails.iter_mut().for_each(|rail| rail.flush());
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        let before = events.len();
        for (index, rail) in self.rails.iter_mut().enumerate() {
            let first = events.len();
            rail.poll(budget, events);
            for event in &mut events[first..] {
                match event {
                    Event::Connected { peer }
                    | Event::Accepted { peer }
                    | Event::Immediate { peer, .. }
                    | Event::Message { peer, .. }
                    | Event::PeerDown { peer, .. } => *peer = on_rail(index, *peer),
                    Event::Completed { .. } => {}
                }
            }
        }
        events.len() - before
    }

    fn disconnect(&mut self, peer: PeerId) {
        if let Some((rail, peer)) = self.rail(peer) {
            rail.disconnect(peer);
        }
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        self.rails.iter().for_each(|rail| rail.wait_descriptors(descriptors));
    }

    fn prepare_wait(&mut self) -> bool {
        // Every rail must be prepared, also after one that has work.
        let busy = self.rails.iter_mut().filter_map(|rail| (!rail.prepare_wait()).then_some(())).count();
        busy == 0
    }
}
