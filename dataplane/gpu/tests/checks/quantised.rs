//! Tensors → codes → host → another device's slots → numbers, against the definition in double precision.

use dataplane_gpu::{QuantiseRoute, Refusal, Sums};
use dataplane_kernels::{
    Element, Format, Grouping, HeadRange, PlanError, QuantisedSlot, ScaleType, checksum, reference, status,
};

use super::{Engine, Rig, Shape, host_slots, random_pairs};
use crate::harness::Random;

/// Finite numbers, and zeros.
fn numbers(element: Element) -> impl Fn(&mut Random, usize) -> Vec<u8> {
    move |random, bytes| {
        let mut contents = vec![0; bytes];
        for place in contents.chunks_exact_mut(element.bytes() as usize) {
            let uniform = (random.bits() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0;
            let value = if random.below(16) == 0 { 0.0 } else { uniform * 10.0 };
            reference::element_to(element, value, place);
        }
        contents
    }
}

fn random_case(random: &mut Random, format: Format) -> (Shape, QuantisedSlot) {
    let element = random.one_of(&[Element::Bf16, Element::F16, Element::F32]);
    let head_dim = random.one_of(&[8, 20, 64, 128]);
    let shape = Shape {
        layers: 1 + random.below(2) as u32,
        is_latent: random.below(4) == 0,
        tokens: random.one_of(&[1, 5, 16]),
        heads: 1 + random.below(2) as u32,
        head_bytes: head_dim * element.bytes(),
        unit: 16,
    };
    let slot = QuantisedSlot {
        header: std::array::from_fn(|at| (at as u8).wrapping_mul(37) ^ 0x4b),
        layers: shape.layers,
        parts: shape.parts(),
        tokens: shape.tokens,
        heads: shape.heads,
        head_dim,
        element,
        format,
        scale: random.one_of(&[ScaleType::F32, ScaleType::Bf16]),
        keys: random.one_of(&[Grouping::Channel, Grouping::Token(head_dim)]),
        values: random.one_of(&[Grouping::Channel, Grouping::Token(head_dim)]),
    };
    (shape, slot)
}

fn round(rig: &mut Rig, random: &mut Random, format: Format) -> bool {
    let (shape, slot) = random_case(random, format);
    let [first, second] = &mut rig.sides;
    let contents = numbers(slot.element);
    let source = Engine::new(first, random, &shape, &contents);
    let heads = HeadRange::all(shape.heads);
    let slot_bytes = slot.bytes() as usize;
    let pairs = random_pairs(random, source.blocks(), 2);
    let slots = first.slots(random, slot_bytes, 4);
    let route = QuantiseRoute::new(source.tensors.clone(), slots.clone(), slot, heads).expect("route");
    let with_sums = match first.queue.quantise(&route, &pairs, Sums::Take, 3) {
        Ok(()) => true,
        Err(Refusal::Plan(PlanError::Checksum(_))) => {
            first.queue.quantise(&route, &pairs, Sums::None, 3).expect("accepted");
            false
        }
        Err(refusal) => panic!("{refusal}"),
    };
    let words = first.finish(3);
    let what = format!("{shape:?} {slot:?} {pairs:?}");
    assert!(words.statuses == vec![0; pairs.len()], "{what}: {words:?}");

    let host = host_slots(slot_bytes, pairs.len() as u32);
    first.copy(&slots, &host, true);
    let mut codes = vec![vec![0; slot_bytes]; pairs.len()];
    for (number, (pair, codes)) in pairs.iter().zip(&mut codes).enumerate() {
        let mut found = vec![0; slot_bytes];
        host.read(pair.slot, 0, &mut found);
        let layouts = (source.tensors.layout(), &slot, heads);
        assert_eq!(reference::quantise(layouts, &source.bytes, (&source.planes, pair.block), codes), 0);
        assert!(found == *codes, "{what}");
        assert!(!with_sums || words.checksums[number] == checksum(codes), "{what}");
    }

    let there = second.slots(random, slot_bytes, 4);
    second.copy(&there, &host, false);
    let mut target = Engine::new(second, random, &shape, &contents);
    let blocks = random_pairs(random, target.blocks(), pairs.len() as u64);
    let route = QuantiseRoute::new(target.tensors.clone(), there.clone(), slot, heads).expect("route");
    second.queue.dequantise(&route, &blocks, 4).expect("accepted");
    assert_eq!(second.finish(4).statuses, vec![0; blocks.len()], "{what}");
    for (pair, codes) in blocks.iter().zip(&codes) {
        let layouts = (target.tensors.layout(), &slot, heads);
        let restored = reference::dequantise(layouts, codes, (&target.planes, pair.block), &mut target.bytes);
        assert_eq!(restored, 0);
    }
    assert!(target.read() == target.bytes, "{what}");
    there.fill(0).expect("fill");
    second.queue.dequantise(&route, &blocks, 5).expect("accepted");
    assert_eq!(second.finish(5).statuses, vec![status::HEADER; blocks.len()], "slots without a header");
    assert!(target.read() == target.bytes, "{what}");
    with_sums
}

pub(crate) fn codes_arrive_on_another_device(rig: &mut Rig, random: &mut Random, rounds: usize) {
    let formats = [Format::Fp8E4m3, Format::Int8];
    let with_sums = (0..rounds).filter(|number| round(rig, random, formats[number % 2])).count();
    println!("{with_sums} of {rounds} geometries with checksums on the way");
    assert!(with_sums > 0);
}
