//! Slots in an accelerator's memory, which the card reaches directly: over software devices and a double of
//! the memory, whose address faults on any access by the CPU.

mod support;

use std::sync::Arc;

use dataplane_fabric::{
    Completion, Fabric, INLINE_BYTES_MAX, Operation, PeerAccess, Priority, Rows, SlotRange, Source, Target,
    WorkRequest,
};
use dataplane_memory::testing::{Abilities, DeviceDouble};
use dataplane_memory::{DeviceMemory, PageSize, Slab, SlabKind, SlabLayout, SlotPool, SlotRef};
use dataplane_verbs::raw::{Access, MemoryRegion, ProtectionDomain};
use dataplane_verbs::testing::{Reach, SoftwareDevice};
use dataplane_verbs::{Registration, VerbsConfig, VerbsError, VerbsFabric};
use support::{Two, loopback, small, write};

const LAYOUT: SlabLayout = SlabLayout { slot_bytes: 8192, slot_count: 4 };
const EVERY_WAY: Abilities = Abilities { dma_buf: true, peer_memory: true };

/// Makes slots in a double's memory, which `card` reaches as `reach` says.
fn device_pool(
    card: &SoftwareDevice,
    abilities: Abilities,
    reach: Reach,
) -> (Arc<SlotPool>, Arc<DeviceDouble>) {
    let memory = DeviceDouble::new(LAYOUT.slots_bytes(), abilities);
    card.put_beside(Arc::clone(&memory) as Arc<dyn DeviceMemory>, reach);
    let slab = Slab::on_device("device", LAYOUT, Arc::clone(&memory) as Arc<dyn DeviceMemory>).expect("slab");
    (SlotPool::new(Arc::new(slab)), memory)
}

fn at(slot: &SlotRef, offset: usize) -> usize {
    slot.slot() as usize * LAYOUT.stride() + offset
}

fn bytes_of(memory: &DeviceDouble, slot: &SlotRef) -> Vec<u8> {
    let mut bytes = vec![0; LAYOUT.slot_bytes];
    memory.read(at(slot, 0), &mut bytes).expect("inside");
    bytes
}

fn pattern(seed: usize) -> Vec<u8> {
    (0..LAYOUT.slot_bytes).map(|at| (at * 13 + at / 255 + seed) as u8).collect()
}

/// Writes in one piece, in rows and inline, and a read, from accelerator to accelerator.
fn every_kind(reach: Reach, expected: Registration) {
    let (card_a, card_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let (pool_a, memory_a) = device_pool(&card_a, EVERY_WAY, reach);
    let (pool_b, memory_b) = device_pool(&card_b, EVERY_WAY, reach);
    let config = VerbsConfig { inline_bytes: 64, ..small() };
    let pools = [Arc::clone(&pool_a), Arc::clone(&pool_b)];
    let mut two =
        Two::over(card_a.open().expect("open"), card_b.open().expect("open"), config.clone(), config, pools);
    let shown = two.a.shown_slab(SlabKind::Device).expect("shown");
    assert!(Arc::ptr_eq(&shown, pool_a.slab()) && two.a.shown_slab(SlabKind::Host).is_none());
    assert!(two.a.carries(pool_a.slab()) && !two.a.carries(pool_b.slab()));
    assert_eq!(two.a.registration(pool_a.slab()), Some(expected));
    assert_eq!(two.a.registration(pool_b.slab()), None);
    assert_eq!(two.a.registrations().map(|(_, way)| way).collect::<Vec<_>>(), [expected]);
    memory_a.write(at(&two.source, 0), &pattern(1)).expect("inside");
    let here = pool_a.acquire().expect("slot");
    let target = |offset| Target::of(&two.target, offset);
    let slot = |offset, len| Source::Slot { slot: two.source.clone(), offset, len };
    let rows = Some(Rows { bytes: 64, local_stride: 128, remote_stride: 64 });
    let inline = Source::Inline { bytes: [7; INLINE_BYTES_MAX], len: 16 };
    let into = SlotRange { slot: here.clone(), offset: 100, len: 3000 };
    let operations = [
        Operation::Write { source: slot(5, 3000), target: target(1), rows: None, immediate: None },
        Operation::Write { source: slot(0, 640), target: target(4096), rows, immediate: Some(9) },
        Operation::Write { source: inline, target: target(8176), rows: None, immediate: None },
        Operation::Read { into, from: target(1), rows: None },
    ];
    for (id, operation) in (1..).zip(operations) {
        let request = WorkRequest { id, peer: two.to_b, priority: Priority::Urgent, operation };
        two.post(request);
        two.until("done", |two| two.completion_at_a(id) == Some(Completion::Done));
    }
    let (sent, found) = (pattern(1), bytes_of(&memory_b, &two.target));
    assert!(found[1..3001] == sent[5..3005], "in one piece");
    for row in 0..10 {
        assert!(found[4096 + row * 64..][..64] == sent[row * 128..][..64], "row {row}");
    }
    assert_eq!(found[8176..], [7; 16], "inline");
    assert!(bytes_of(&memory_a, &here)[100..3100] == sent[5..3005], "read back");
    drop((two, here));
    assert_eq!((pool_a.used_count(), card_a.usage().regions), (0, 0), "nothing is left");
}

/// Slots of the same number in the host's slab and in the accelerator's are distinguished by the kind of
/// their slab, on both sides.
#[test]
fn a_card_shows_slots_of_both_kinds_side_by_side() {
    let every_way = Reach { dma_buf: true, peer_memory: true };
    let cards = [(); 2].map(|()| SoftwareDevice::new());
    let device = [&cards[0], &cards[1]].map(|card| device_pool(card, EVERY_WAY, every_way));
    let host = ["host a", "host b"].map(|name| {
        SlotPool::new(Arc::new(Slab::create(name, LAYOUT, PageSize::Standard).expect("a small slab")))
    });
    let fabric = |at: usize, is_shown: bool| {
        let card = cards[at].open().expect("open");
        let mut fabric =
            VerbsFabric::new(card, host[at].slab(), Some(loopback()), small()).expect("a fabric");
        match is_shown {
            true => fabric.show(device[at].0.slab()).expect("shown"),
            false => fabric.register(device[at].0.slab()).expect("registered"),
        }
        fabric
    };
    let mut two = Two::connected(fabric(0, false), fabric(1, true), host.clone());
    let sources = [host[0].acquire(), device[0].0.acquire()].map(|slot| slot.expect("a slot"));
    let of_number = |pool: &Arc<SlotPool>, number: u32| {
        let slots: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
        slots.into_iter().find(|slot| slot.slot() == number).expect("a slot")
    };
    let targets = [of_number(&host[1], 3), of_number(&device[1].0, 3)];
    for (kind, reaches_there, reaches_here) in [(SlabKind::Host, true, true), (SlabKind::Device, true, false)]
    {
        for source in &sources {
            assert_eq!(two.a.reaches(two.to_b, Some(source.slab()), kind), reaches_there);
        }
        assert_eq!(two.b.reaches(two.to_a, None, kind), reaches_here, "a has registered it for itself alone");
        assert!(two.b.is_shown_to(two.to_a, kind));
    }
    for (from, source) in sources.iter().enumerate() {
        for (to, target) in targets.iter().enumerate() {
            let (fill, id) = ((from * 2 + to + 1) as u8, (from * 2 + to + 1) as u64);
            match source.slab().device() {
                None => source.slab().write(source.slot(), 0, &[fill; 4096]),
                Some(_) => device[0].1.write(at(source, 0), &[fill; 4096]).expect("inside"),
            }
            let bytes_at_target = |which: usize| match which {
                0 => {
                    let mut bytes = vec![0; LAYOUT.slot_bytes];
                    targets[0].slab().read(3, 0, &mut bytes);
                    bytes
                }
                _ => bytes_of(&device[1].1, &targets[1]),
            };
            let before = bytes_at_target(1 - to);
            let source = Source::Slot { slot: source.clone(), offset: 0, len: 4096 };
            two.post(write(two.to_b, id, source, Target::of(target, 0)));
            two.until("written", |two| two.completion_at_a(id) == Some(Completion::Done));
            assert!(
                bytes_at_target(to)[..4096] == [fill; 4096] && bytes_at_target(1 - to) == before,
                "{from} to {to}"
            );
        }
    }
}

#[test]
fn bytes_go_from_accelerator_to_accelerator_as_dma_bufs() {
    every_kind(Reach { dma_buf: true, peer_memory: false }, Registration::DmaBuf);
    every_kind(Reach { dma_buf: true, peer_memory: true }, Registration::DmaBuf);
}

#[test]
fn where_dma_bufs_are_refused_the_bare_address_is_registered() {
    every_kind(Reach { dma_buf: false, peer_memory: true }, Registration::PeerMemory);
}

/// A driver that does not support the window on the bus, and one whose buffers are all refused.
#[test]
fn without_the_window_the_driver_chooses_the_mapping() {
    for (reach, expected) in [
        (Reach { dma_buf: true, peer_memory: true }, Registration::DmaBuf),
        (Reach { dma_buf: false, peer_memory: true }, Registration::PeerMemory),
    ] {
        let card = SoftwareDevice::new();
        let (pool, memory) = device_pool(&card, EVERY_WAY, reach);
        memory.refuse_bar();
        let domain = ProtectionDomain::new(&card.open().expect("open")).expect("domain");
        let access = Access { remote: PeerAccess::ReadWrite, relaxed_ordering: true };
        let region = MemoryRegion::of_slab(&domain, pool.slab(), access).expect("region");
        assert_eq!(region.registration(), expected);
    }
    let card = SoftwareDevice::new();
    let abilities = Abilities { dma_buf: true, ..Abilities::default() };
    let (pool, memory) = device_pool(&card, abilities, Reach::default());
    memory.refuse_bar();
    let refused = VerbsFabric::new(card.open().expect("open"), pool.slab(), None, small());
    let text = refused.expect_err("out of reach").to_string();
    let reasons = [
        "through its bus window: export of the double's memory: this double does not map its window",
        "as a dma-buf: ibv_reg_dmabuf_mr: EOPNOTSUPP",
        "as peer memory: no peer-memory module",
    ];
    assert!(reasons.iter().all(|reason| text.contains(reason)), "{text}");
}

/// The errors name every way that failed and its errno.
#[test]
fn what_cannot_be_reached_is_refused_with_every_reason() {
    let (bare, peer) = (Abilities::default(), Abilities { peer_memory: true, ..Abilities::default() });
    let dma_buf = Abilities { dma_buf: true, ..Abilities::default() };
    let (exported, taken) = ("export of the double's memory: this double has no dma-buf", "EOPNOTSUPP");
    let (absent, unmapped) = ("no peer-memory module", "ibv_reg_mr: EFAULT");
    for (abilities, reasons) in [
        (bare, [exported, absent]),
        (peer, [exported, unmapped]),
        (dma_buf, [taken, absent]),
        (EVERY_WAY, [taken, unmapped]),
    ] {
        let card = SoftwareDevice::new();
        let (pool, _) = device_pool(&card, abilities, Reach::default());
        let device = card.open().expect("open");
        let refused = VerbsFabric::new(device, pool.slab(), None, small()).expect_err("out of reach");
        assert!(matches!(refused, VerbsError::DeviceMemory { length: 32_768, .. }), "{refused:?}");
        let text = refused.to_string();
        assert!(reasons.iter().all(|reason| text.contains(reason)), "{abilities:?}: {text}");
        assert_eq!(card.usage(), Default::default(), "nothing is left on the card");
    }
}

/// Registering returns the reasons; a request that uses the slab nevertheless ends its connection.
#[test]
fn a_source_out_of_reach_cannot_be_used() {
    let (card_a, card_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let mut two = Two::new(card_a.open().expect("open"), card_b.open().expect("open"), small(), small());
    let (pool, _) = device_pool(&card_a, Abilities::default(), Reach::default());
    let error = two.a.register(pool.slab()).expect_err("out of reach").to_string();
    assert!(error.contains("as peer memory: no peer-memory module"), "{error}");
    let source = Source::Slot { slot: pool.acquire().expect("slot"), offset: 0, len: 64 };
    let target = Target::of(&two.target, 0);
    two.a.post(write(two.to_b, 1, source, target)).expect("accepted and answered");
    two.until("the end", |two| two.is_down());
    assert!(two.reason_at_a().contains("that were not registered"), "{}", two.reason_at_a());
    assert_eq!((two.completion_at_a(1), pool.used_count()), (Some(Completion::PeerDown), 0));
}

/// From host memory into an accelerator, over a slab that is registered beside the fabric's own.
#[test]
fn host_and_accelerator_mix() {
    let (card_a, card_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let (pool_b, memory_b) = device_pool(&card_b, EVERY_WAY, Reach { dma_buf: true, peer_memory: false });
    let pools = [dataplane_fabric::testing::pool("a"), pool_b];
    let mut two =
        Two::over(card_a.open().expect("open"), card_b.open().expect("open"), small(), small(), pools);
    let (host, device) = (two.a.registration(two.pool_a.slab()), two.b.registration(two.pool_b.slab()));
    assert_eq!((host, device), (Some(Registration::Host), Some(Registration::DmaBuf)));
    two.write_and_wait(1, 4096);
    assert!(bytes_of(&memory_b, &two.target)[..4096].iter().all(|&byte| byte == 1));
}

#[test]
fn a_region_begins_at_the_accelerators_own_address() {
    let card = SoftwareDevice::new();
    let domain = ProtectionDomain::new(&card.open().expect("open")).expect("domain");
    let (pool, memory) = device_pool(&card, EVERY_WAY, Reach { dma_buf: true, peer_memory: false });
    let access = Access { remote: PeerAccess::ReadWrite, relaxed_ordering: true };
    let region = MemoryRegion::of_slab(&domain, pool.slab(), access).expect("region");
    assert_eq!((region.address(), region.length()), (memory.address(), LAYOUT.slots_bytes() as u64));
    assert_eq!((region.registration(), region.registration().name()), (Registration::DmaBuf, "dma-buf"));
}
