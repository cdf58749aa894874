//! Everything over the double of the driver, whose kernels run in the emulator. Without compilers each test says why it
//! is skipped.

mod checks;
#[path = "../../cuda/tests/double/mod.rs"]
mod double;
#[allow(dead_code, reason = "of the emulator only the library is used")]
#[path = "../../kernels/tests/emulator/harness.rs"]
mod harness;

use std::sync::Arc;

use checks::Rig;
use checks::sums::Summed;
use dataplane_cuda::{Cuda, Device};
use dataplane_gpu::{
    BlockCopy, CopyRoute, LayoutKernels, PagedTensors, Plane, RouteError, SlotRoute, SubmitError, Sums,
    heads_shared,
};
use dataplane_kernels::{HeadRange, PagedLayout, PlanError, SlotLayout};
use dataplane_memory::{Checksummer, SlotRef, SlotSum, SumRefused};
use double::Double;
use harness::{Random, seed};

/// The double, and kernels that the emulator runs.
fn rig() -> Option<(Double, Rig)> {
    let double = Double::load()?;
    let options = ["-O2", "-shared", "-fPIC"];
    let library = harness::build("libkvasir_emulator.so", &["emulator.cpp"], &options)?;
    let image = format!("emulator:{}\n", library.display());
    let cuda = Cuda::open().expect("the double starts");
    let kernels = |device: &Device| {
        // SAFETY: the emulator is compiled from the kernels' own text.
        let loaded = unsafe { LayoutKernels::load(device, image.as_bytes()) };
        Arc::new(loaded.expect("kernels"))
    };
    let devices = [0, 1].map(|ordinal| cuda.device(ordinal).expect("device"));
    Some((double, Rig::new(devices, kernels)))
}

#[test]
fn random_tensors_arrive_on_another_device_to_the_byte() {
    let Some((_double, mut rig)) = rig() else { return };
    checks::copies_arrive_on_another_device(&mut rig, &mut Random(seed(301)), 60);
}

const LAYOUT: PagedLayout = PagedLayout {
    blocks: 6,
    tokens: 2,
    heads: 1,
    head_bytes: 16,
    block_stride: 32,
    token_stride: 16,
    head_stride: 16,
};
const SLOT_BYTES: usize = 64;

/// Two planes of six blocks, and four slots, on the first device.
fn small(rig: &Rig) -> (Arc<PagedTensors>, CopyRoute, SlotRoute) {
    let side = &rig.sides[0];
    let memory = side.slots(&mut Random(1), 2 * 6 * 32, 1);
    let planes = [0, 192].map(|offset| Plane { memory: memory.clone(), offset });
    let tensors = Arc::new(PagedTensors::new(LAYOUT, &planes).expect("tensors"));
    let slots = side.slots(&mut Random(2), SLOT_BYTES, 4);
    let route =
        CopyRoute::new(tensors.clone(), slots.clone(), SlotLayout::new(2, 2, 1, 16), HeadRange::all(1));
    (tensors, route.expect("route"), SlotRoute::new(slots, SLOT_BYTES as u64).expect("route"))
}

#[test]
fn what_is_not_there_is_refused_before_a_launch() {
    let Some((_double, mut rig)) = rig() else { return };
    let (_tensors, route, slots) = small(&rig);
    let [side, other] = &mut rig.sides;
    let queue = &mut side.queue;
    let pair = |block, slot| BlockCopy { block, slot };
    let refused = |result: Result<(), SubmitError>| result.expect_err("refused");
    for pairs in [[pair(0, 0), pair(6, 1)], [pair(0, 0), pair(u64::MAX, 1)]] {
        let block = pairs[1].block;
        let wanted = SubmitError::Block { index: 1, block, blocks: 6 };
        assert_eq!(refused(queue.gather(&route, &pairs, Sums::None, 0)), wanted);
        assert_eq!(refused(queue.scatter(&route, &pairs, Sums::None, 0)), wanted);
    }
    let wanted = SubmitError::Slot { index: 0, slot: 4, slots: 4 };
    assert_eq!(refused(queue.gather(&route, &[pair(0, 4)], Sums::None, 0)), wanted);
    assert_eq!(refused(queue.checksum(&slots, &[4], 0)), wanted);
    let empty = SubmitError::Plan(PlanError::Zero("the count of items"));
    assert_eq!(refused(queue.gather(&route, &[], Sums::None, 0)), empty);
    assert_eq!(
        refused(queue.verify(&slots, &[0, 1], &[5], 0)),
        SubmitError::Expected { expected: 1, items: 2 }
    );
    let many = vec![0; 65];
    assert_eq!(refused(queue.checksum(&slots, &many, 0)), SubmitError::TooMany { items: 65, items_max: 64 });
    let elsewhere = SubmitError::Device { route: 0, queue: 1 };
    assert_eq!(refused(other.queue.checksum(&slots, &[0], 0)), elsewhere);
    assert_eq!(queue.in_flight(), 0);
    for token in 0..4 {
        queue.checksum(&slots, &[0], token).expect("room");
    }
    assert_eq!(refused(queue.checksum(&slots, &[0], 4)), SubmitError::Full);
    let mut tokens = Vec::new();
    while queue.in_flight() > 2 {
        assert!(queue.poll(1, |end| tokens.push(end.token)) <= 1, "a poll keeps to its budget");
    }
    queue.checksum(&slots, &[0], 4).expect("room again");
    queue.drain(|end| tokens.push(end.token));
    assert_eq!(tokens, [0, 1, 2, 3, 4]);
}

#[test]
fn routes_beyond_their_memory_are_refused() {
    let Some((_double, rig)) = rig() else { return };
    let [side, other] = &rig.sides;
    let memory = side.slots(&mut Random(1), 2 * 6 * 32, 1);
    let plane = |offset| Plane { memory: memory.clone(), offset };
    for (layout, offset) in [
        (LAYOUT, 193),
        (LAYOUT, usize::MAX),
        (PagedLayout { blocks: 13, ..LAYOUT }, 0),
        (PagedLayout { blocks: u64::MAX, ..LAYOUT }, 0),
        (PagedLayout { token_stride: 209, ..LAYOUT }, 0),
    ] {
        let made = PagedTensors::new(layout, &[plane(0), plane(offset)]);
        assert!(matches!(made, Err(RouteError::Plane { .. })), "{layout:?} {offset}");
    }
    assert!(matches!(PagedTensors::new(LAYOUT, &[]), Err(RouteError::Planes { .. })));
    let none = PagedLayout { blocks: 0, ..LAYOUT };
    assert!(matches!(PagedTensors::new(none, &[plane(0)]), Err(RouteError::Plan(PlanError::Zero(_)))));
    let tensors = Arc::new(PagedTensors::new(LAYOUT, &[plane(0), plane(192)]).expect("tensors"));
    let slots = side.slots(&mut Random(2), SLOT_BYTES, 4);
    let elsewhere = other.slots(&mut Random(2), SLOT_BYTES, 4);
    let fits = SlotLayout::new(2, 2, 1, 16);
    let route = |slots: &Arc<_>, layout| {
        CopyRoute::new(tensors.clone(), Arc::clone(slots), layout, HeadRange::all(1))
    };
    assert!(route(&slots, fits).is_ok());
    assert!(matches!(route(&elsewhere, fits), Err(RouteError::Devices { one: 0, other: 1 })));
    for layout in [SlotLayout { first_byte: 1, ..fits }, SlotLayout { plane_stride: u64::MAX, ..fits }] {
        assert!(matches!(route(&slots, layout), Err(RouteError::Slot { .. })), "{layout:?}");
    }
    assert!(matches!(route(&slots, SlotLayout::new(1, 2, 1, 16)), Err(RouteError::Planes { .. })));
    assert!(matches!(SlotRoute::new(slots, SLOT_BYTES as u64 + 1), Err(RouteError::Slot { .. })));
}

#[test]
fn refused_copies_and_failed_devices_end_their_batches_with_an_error() {
    let Some((double, mut rig)) = rig() else { return };
    let (_tensors, route, slots) = small(&rig);
    let queue = &mut rig.sides[0].queue;
    double.set("refuse_copy", 1);
    // More than a kernel reads in host memory.
    let many = [BlockCopy { block: 0, slot: 0 }; 9];
    let launches = double.growth("launches", || {
        queue.gather(&route, &many, Sums::Take, 1).expect("accepted");
        queue.stream().synchronise().expect("over");
    });
    assert_eq!(launches, 0, "without its items in place no kernel runs");
    double.set("refuse_copy", 0);
    queue.checksum(&slots, &[0, 1], 2).expect("accepted");
    let mut ends = Vec::new();
    queue.drain(|end| ends.push((end.token, end.result.is_ok(), end.statuses.len())));
    assert_eq!(ends, [(1, false, 0), (2, true, 2)]);
    double.set("fault_launch", 1);
    for token in 3..6 {
        queue.checksum(&slots, &[0, 1], token).expect("accepted");
    }
    ends.clear();
    queue.drain(|end| ends.push((end.token, end.result.is_ok(), end.statuses.len())));
    assert_eq!(ends, [(3, false, 0), (4, false, 0), (5, false, 0)], "the device is lost");
}

#[test]
fn what_a_batch_names_is_kept_until_it_is_over() {
    let Some((double, mut rig)) = rig() else { return };
    let before = double.get("allocations");
    let named = small(&rig);
    let queue = &mut rig.sides[0].queue;
    double.set("delay_us", 3_000);
    queue.gather(&named.1, &[BlockCopy { block: 5, slot: 3 }], Sums::Take, 1).expect("accepted");
    drop(named);
    assert!(double.get("allocations") > before, "the batch has its memory");
    queue.drain(|end| assert_eq!((end.result, end.statuses), (Ok(()), &[0][..])));
    assert_eq!(double.get("allocations"), before);
    let named = small(&rig);
    let queue = &mut rig.sides[0].queue;
    queue.scatter(&named.1, &[BlockCopy { block: 5, slot: 3 }], Sums::None, 2).expect("accepted");
    // A queue that is dropped waits; the double would refuse a kernel the memory that was freed before it.
    drop(named);
    drop(rig);
}

#[test]
fn heads_of_ranks_are_cut_at_both_ends() {
    let range = |paged_first, slot_first, count| Some(HeadRange { paged_first, slot_first, count });
    assert_eq!(heads_shared(4..8, 0..16), range(0, 4, 4));
    assert_eq!(heads_shared(0..16, 4..8), range(4, 0, 4));
    assert_eq!(heads_shared(2..6, 4..9), range(2, 0, 2));
    assert_eq!(heads_shared(0..4, 4..8), None);
}

#[test]
fn random_ranges_of_slots_have_the_sums_that_a_processor_takes() {
    let Some((_double, rig)) = rig() else { return };
    checks::sums_of_ranges_are_those_of_the_processor(rig, &mut Random(seed(303)), 2000);
}

#[test]
fn sums_keep_to_their_bound_and_refuse_what_they_cannot_reach() {
    let Some((_double, rig)) = rig() else { return };
    let other = rig.sides[1].slots(&mut Random(4), 100, 3);
    let mut summed = Summed::new(rig, &mut Random(3), 100, 3, 2);
    let here = summed.pool.acquire().expect("slot");
    let sum = |token, slot: &SlotRef, offset, len| SlotSum { token, slot: slot.clone(), offset, len };
    let elsewhere = Summed::pool_of(&other);
    assert_eq!(summed.summer.add_device(elsewhere.slab(), &other), None, "on the other device");
    assert_eq!(summed.summer.add_device(elsewhere.slab(), &summed.memory), None, "not that memory");
    assert!(summed.summer.reaches(summed.pool.slab()) && !summed.summer.reaches(elsewhere.slab()));
    let there = elsewhere.acquire().expect("slot");
    assert!(matches!(summed.summer.submit(sum(1, &there, 0, 8)), Err(SumRefused::Unreachable(_))));
    for (offset, len) in [(93, 8), (0, 0), (u32::MAX, 2)] {
        let refused = summed.summer.submit(sum(1, &here, offset, len));
        assert!(matches!(refused, Err(SumRefused::Outside(back)) if back.token == 1), "{offset} {len}");
    }
    (0..2).for_each(|token| summed.summer.submit(sum(token, &here, 0, 8)).expect("room"));
    assert!(
        matches!(summed.summer.submit(sum(2, &here, 0, 8)), Err(SumRefused::Full(back)) if back.token == 2)
    );
    assert_eq!(summed.finish().len(), 2);
    summed.summer.submit(sum(2, &here, 0, 8)).expect("room again");
    assert_eq!(summed.finish().len(), 1);
}

#[test]
fn a_lost_device_ends_every_sum_and_its_slots_are_kept_until_then() {
    let Some((double, rig)) = rig() else { return };
    let mut summed = Summed::new(rig, &mut Random(5), 100, 20, 64);
    double.set("fault_launch", 1);
    // More kinds than there are batches: some of them wait here.
    for len in 1..=20 {
        let slot = summed.pool.acquire().expect("slot");
        summed.summer.submit(SlotSum { token: len.into(), slot, offset: 0, len }).expect("room");
    }
    assert_eq!(summed.pool.free_count(), 0, "held, though nobody else has them");
    let done = summed.finish();
    assert!(done.len() == 20 && done.iter().all(|done| done.result.is_err()), "{done:?}");
    assert_eq!((summed.summer.in_flight(), summed.pool.free_count()), (0, 20));
    let slot = summed.pool.acquire().expect("slot");
    summed
        .summer
        .submit(SlotSum { token: 21, slot, offset: 0, len: 8 })
        .expect("taken, to end with an error");
    assert!(summed.finish().iter().all(|done| done.token == 21 && done.result.is_err()));
}
