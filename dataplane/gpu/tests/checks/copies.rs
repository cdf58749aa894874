//! Tensors → gather → host → another device's slots → verify → scatter, against the reference.

use dataplane_cuda::DeviceMemory;
use dataplane_gpu::{BlockCopy, CopyRoute, SlotRoute, SubmitError, Sums};
use dataplane_kernels::{HeadRange, PlanError, SlotLayout, checksum, reference, status};

use super::{Engine, Rig, Shape, Side, host_slots, random_pairs};
use crate::harness::Random;

fn random_shape(random: &mut Random) -> Shape {
    let unit = random.one_of(&[1, 2, 4, 8, 16, 16]);
    Shape {
        layers: 1 + random.below(3) as u32,
        is_latent: random.below(4) == 0,
        tokens: random.one_of(&[1, 5, 16, 16]),
        heads: 1 + random.below(4) as u32,
        head_bytes: unit * random.one_of(&[1, 2, 3, 8, 16]),
        unit,
    }
}

/// Heads of the slot, and the range that an engine shares with it.
fn random_heads(random: &mut Random, heads: u32) -> (u32, HeadRange) {
    if random.below(2) == 0 {
        return (heads, HeadRange::all(heads));
    }
    let first = random.below(heads.into()) as u32;
    let range = dataplane_gpu::heads_shared(0..heads, first..heads + 2).expect("the last one at least");
    (heads + 2 - first, range)
}

/// Gathers, with the checksums on the way where that is possible; whether they were.
fn gather(side: &mut Side, route: &CopyRoute, pairs: &[BlockCopy]) -> (Vec<u64>, bool) {
    let with_sums = match side.queue.gather(route, pairs, Sums::Take, 7) {
        Ok(()) => true,
        Err(SubmitError::Plan(PlanError::Checksum(_))) => {
            side.queue.gather(route, pairs, Sums::None, 7).expect("accepted");
            false
        }
        Err(refusal) => panic!("{refusal}"),
    };
    let words = side.finish(7);
    assert!(words.statuses == vec![0; pairs.len()], "{words:?}");
    assert_eq!(words.checksums.len(), if with_sums { pairs.len() } else { 0 });
    (words.checksums, with_sums)
}

/// One random geometry. Returns whether checksums were taken with the copy.
fn round(rig: &mut Rig, random: &mut Random) -> bool {
    let shape = random_shape(random);
    let [first, second] = &mut rig.sides;
    let bytes = |random: &mut Random, count| random.bytes(count);
    let source = Engine::new(first, random, &shape, &bytes);
    let (slot_heads, heads) = random_heads(random, shape.heads);
    let layout = SlotLayout::new(shape.layers * shape.parts(), shape.tokens, slot_heads, shape.head_bytes);
    let slot_bytes = layout.bytes() as usize;
    let pairs = random_pairs(random, source.blocks(), 2);
    let what = format!("{shape:?} {layout:?} {heads:?} {pairs:?}");

    let slots = first.slots(random, slot_bytes, 8);
    let host = host_slots(slot_bytes, pairs.len() as u32);
    first.copy(&slots, &host, true);
    let mut wanted: Vec<Vec<u8>> = vec![vec![0; slot_bytes]; pairs.len()];
    for (wanted, pair) in wanted.iter_mut().zip(&pairs) {
        host.read(pair.slot, 0, wanted);
        let layouts = (source.tensors.layout(), &layout, heads);
        reference::gather(layouts, &source.bytes, (&source.planes, pair.block), wanted);
    }
    let route = CopyRoute::new(source.tensors.clone(), slots.clone(), layout, heads).expect(&what);
    let (sums, with_sums) = gather(first, &route, &pairs);
    let checksums: Vec<u64> = wanted.iter().map(|bytes| checksum(bytes)).collect();
    assert!(!with_sums || sums == checksums, "{what}");
    assert!(source.read() == source.bytes, "the engine is as before: {what}");

    first.copy(&slots, &host, true);
    let mut found = vec![0; slot_bytes];
    for (pair, wanted) in pairs.iter().zip(&wanted) {
        host.read(pair.slot, 0, &mut found);
        assert!(found == *wanted, "{what}");
    }

    let there = second.slots(random, slot_bytes, 8);
    second.copy(&there, &host, false);
    let numbers: Vec<u32> = pairs.iter().map(|pair| pair.slot).collect();
    let slot_route = SlotRoute::new(there.clone(), slot_bytes as u64).expect("route");
    verify(second, &slot_route, &numbers, &checksums);
    // One bit of the last slot, there and back.
    let at = (pairs.len() - 1) * there.layout().stride() + random.below(slot_bytes as u64) as usize;
    let mut byte = [0];
    for wanted in [status::CHECKSUM, 0] {
        there.read(at, &mut byte).expect("read");
        there.write(at, &[byte[0] ^ 1]).expect("write");
        second.queue.verify(&slot_route, &numbers, &checksums, 5).expect("accepted");
        let statuses = second.finish(5).statuses;
        assert_eq!(statuses.last(), Some(&wanted), "{what}");
        assert!(statuses[..pairs.len() - 1].iter().all(|word| *word == 0));
    }
    let mut target = Engine::new(second, random, &shape, &bytes);
    let blocks = random_pairs(random, target.blocks(), pairs.len() as u64);
    let route = CopyRoute::new(target.tensors.clone(), there, layout, heads).expect(&what);
    // The other engine may lie on other multiples, so that it is asked anew.
    let sums = Sums::Expect(&checksums[..blocks.len()]);
    match second.queue.scatter(&route, &blocks, sums, 9) {
        Err(SubmitError::Plan(PlanError::Checksum(_))) => {
            second.queue.scatter(&route, &blocks, Sums::None, 9).expect("accepted");
        }
        accepted => accepted.expect("accepted"),
    }
    let words = second.finish(9);
    assert!(words.statuses == vec![0; blocks.len()], "{what}: {words:?}");
    for (pair, bytes) in blocks.iter().zip(&wanted) {
        let layouts = (target.tensors.layout(), &layout, heads);
        reference::scatter(layouts, bytes, (&target.planes, pair.block), &mut target.bytes);
    }
    assert!(target.read() == target.bytes, "{what}");
    with_sums
}

/// The sums are those of the processor, and a wrong one is found in its item alone.
fn verify(side: &mut Side, route: &SlotRoute, slots: &[u32], checksums: &[u64]) {
    side.queue.checksum(route, slots, 1).expect("accepted");
    assert_eq!(side.finish(1).checksums, checksums);
    let mut wrong = checksums.to_vec();
    wrong[0] ^= 1 << 40;
    side.queue.verify(route, slots, &wrong, 2).expect("accepted");
    let statuses = side.finish(2).statuses;
    assert_eq!(statuses[0], status::CHECKSUM);
    assert!(statuses[1..].iter().all(|word| *word == 0));
}

pub(crate) fn copies_arrive_on_another_device(rig: &mut Rig, random: &mut Random, rounds: usize) {
    let with_sums = (0..rounds).filter(|_| round(rig, random)).count();
    println!("{with_sums} of {rounds} geometries with checksums on the way");
    assert!(with_sums > 0);
}
