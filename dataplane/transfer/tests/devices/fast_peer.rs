//! A peer that answers at once: all of a transfer happens within one poll of the receiver's fabric.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_fabric::{ConnectError, Event, Fabric, Full, PeerId, WorkRequest};
use dataplane_memory::testing::CopyFaults;
use dataplane_memory::{Slab, SlabKind, SlotRef};
use dataplane_transfer::{Command, Notice, Outcome};

use crate::rig::{LAYOUT, Reach, Shape, Side, content, content_of, simulated_side};

/// A fabric that runs the rest of the world before each poll.
struct WorldFirst {
    fabric: SimFabric,
    world: Rc<RefCell<dyn FnMut()>>,
}

impl Fabric for WorldFirst {
    fn name(&self) -> &'static str {
        self.fabric.name()
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        self.fabric.shown_slab(kind)
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        self.fabric.carries(slab)
    }

    fn peer_shows(&self, peer: PeerId, kind: SlabKind) -> bool {
        self.fabric.peer_shows(peer, kind)
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        self.fabric.connect(address)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        self.fabric.post(request)
    }

    fn flush(&mut self) {
        self.fabric.flush();
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        (self.world.borrow_mut())();
        self.fabric.poll(budget, events)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.fabric.disconnect(peer);
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        self.fabric.wait_descriptors(descriptors);
    }
}

/// The receiver reserves the blocks, and receives all of them, in one round.
#[test]
fn a_transfer_that_begins_and_ends_in_one_round_is_copied_on() {
    let shape = Shape::new(11, CopyFaults::default());
    let network = SimNetwork::new(shape.seed, Faults::default());
    let now = Instant::now();
    let sender = Rc::new(RefCell::new(simulated_side(&shape, Reach::Host, &network)));
    let (other, clock) = (Rc::clone(&sender), network.clone());
    let world: Rc<RefCell<dyn FnMut()>> = Rc::new(RefCell::new(move || {
        let Side { staging, node, notices, .. } = &mut *other.borrow_mut();
        for _ in 0..20 {
            clock.advance(1);
            staging.poll(node, now, notices);
        }
        clock.advance(1);
    }));
    let mut receiver = Side::new(&shape, |_, host| WorldFirst {
        fabric: network.add_node(Arc::clone(host.slab())),
        world: Rc::clone(&world),
    });
    for transfer in 1..=3 {
        let sources: Vec<SlotRef> = sender.borrow().slots(3);
        for (block, slot) in sources.iter().enumerate() {
            sender.borrow().fill(slot, &content(transfer, block));
        }
        let (content_id, layers) = (content_of(transfer), 0..LAYOUT.layers);
        let push = Command::Push { transfer, content: content_id, first_block: 0, slots: sources, layers };
        sender.borrow_mut().handle(push, now);
        sender.borrow_mut().handle(Command::PushEnd { transfer }, now);
        let slots = receiver.slots(3);
        let (address, deadline) = ("0".to_owned(), now + shape.lease);
        let expect =
            Command::Expect { transfer, address, content: content_id, first_block: 0, slots, deadline };
        receiver.handle(expect, now);
        let mut rounds = 0;
        let (slots, outcome) = loop {
            let Side { staging, node, notices, .. } = &mut receiver;
            staging.poll(node, now, notices);
            rounds += 1;
            // The first one begins with greetings.
            assert!(transfer == 1 || node.is_idle(), "transfer {transfer} takes more than one round");
            assert!(rounds < 50, "transfer {transfer} never ends");
            if let Some(Notice::Arrived { slots, outcome, .. }) = notices.pop() {
                break (slots, outcome);
            }
        };
        assert_eq!((slots.len(), outcome), (3, Outcome::Complete), "transfer {transfer}");
        for (block, slot) in slots.iter().enumerate() {
            assert!(
                receiver.bytes_of(slot) == content(transfer, block),
                "transfer {transfer}, block {block}"
            );
        }
    }
}
