//! What the kernels refuse, and that the rig sees what it should see.

use dataplane_kernels::{
    CopyPlan, Direction, Element, Format, Grouping, HeadRange, QuantisePlan, QuantisedSlot, ScaleType,
    SlotLayout, status,
};

use crate::engine::{DEVICE, lay, random_engine};
use crate::harness::{Emulator, Memory, Random, seed};

fn status_of(memory: &Memory, address: u64) -> Vec<u32> {
    memory.at(address).as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

#[test]
fn a_block_that_does_not_exist_and_a_crooked_address_are_refused() {
    let Some(mut emulator) = Emulator::start() else { return };
    let mut random = Random(seed(401));
    let engine = random_engine(&mut random, 2, 64, 0);
    let slot = SlotLayout::new(engine.layers * engine.parts, engine.paged.tokens, 2, 64);
    let mut memory = Memory::default();
    let bytes = random.bytes(engine.bytes);
    let laid = lay(&mut memory, &mut random, &engine, (bytes, slot.bytes() as usize + 16), (0, 0));
    let plan = CopyPlan::new(engine.paged, slot, HeadRange::all(2), laid.alignment).expect("a plan");
    let words = [laid.slots[0], engine.paged.blocks, laid.slots[0] + 4, 0];
    *memory.at_mut(laid.batch.items) = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    *memory.at_mut(laid.batch.status) = vec![0; 8];
    let batch = dataplane_kernels::Batch { count: 2, ..laid.batch };
    let before = (memory.at(laid.engine).to_vec(), memory.at(laid.slots[0]).to_vec());
    for direction in [Direction::Gather, Direction::Scatter] {
        let launch = plan.launch(direction, &batch, DEVICE).expect("a launch");
        emulator.run(&launch, &mut memory, random.bits());
        assert_eq!(status_of(&memory, batch.status), [status::BLOCK, status::MISALIGNED]);
        assert!((memory.at(laid.engine), memory.at(laid.slots[0])) == (&before.0[..], &before.1[..]));
    }
}

/// A tensor that the engine does not have: its plane is neither read nor written, and the others are.
#[test]
fn a_plane_without_an_address_is_reported_and_not_touched() {
    let Some(mut emulator) = Emulator::start() else { return };
    let mut random = Random(seed(404));
    let engine = random_engine(&mut random, 2, 64, 0);
    let planes = engine.layers * engine.parts;
    let slot = SlotLayout::new(planes, engine.paged.tokens, 2, 64);
    let quantised = QuantisedSlot {
        header: [7; 64],
        layers: engine.layers,
        parts: engine.parts,
        tokens: engine.paged.tokens,
        heads: 2,
        head_dim: 32,
        element: Element::Bf16,
        format: Format::Int8,
        scale: ScaleType::F32,
        keys: Grouping::Channel,
        values: Grouping::Token(16),
    };
    let mut memory = Memory::default();
    let slot_bytes = slot.bytes().max(quantised.bytes()) as usize;
    let laid = lay(&mut memory, &mut random, &engine, (vec![0; engine.bytes], slot_bytes), (0, 0));
    let copy = CopyPlan::new(engine.paged, slot, HeadRange::all(2), laid.alignment).expect("a plan");
    let quantise =
        QuantisePlan::new(engine.paged, quantised, HeadRange::all(2), laid.alignment).expect("a plan");
    let missing = random.below(u64::from(planes)) as usize;
    memory.at_mut(laid.batch.planes)[missing * 8..][..8].fill(0);
    let launches = [Direction::Gather, Direction::Scatter].map(|direction| {
        [copy.launch(direction, &laid.batch, DEVICE), quantise.launch(direction, &laid.batch, DEVICE)]
    });
    for launch in launches.into_iter().flatten() {
        *memory.at_mut(laid.batch.status) = vec![0; laid.slots.len() * 4];
        emulator.run(&launch.expect("a launch"), &mut memory, random.bits());
        let all = vec![status::MISALIGNED; laid.slots.len()];
        assert_eq!(status_of(&memory, laid.batch.status), all);
    }
}

#[test]
fn numbers_that_are_not_finite_other_headers_and_bad_scales_are_reported() {
    let Some(mut emulator) = Emulator::start() else { return };
    let mut random = Random(seed(402));
    for element in [Element::Bf16, Element::F16, Element::F32] {
        let engine = random_engine(&mut random, 2, 16 * element.bytes(), 0);
        let slot = QuantisedSlot {
            header: [7; 64],
            layers: engine.layers,
            parts: engine.parts,
            tokens: engine.paged.tokens,
            heads: 2,
            head_dim: 16,
            element,
            format: Format::Fp8E4m3,
            scale: ScaleType::F32,
            keys: Grouping::Channel,
            values: Grouping::Token(16),
        };
        let mut memory = Memory::default();
        let laid =
            lay(&mut memory, &mut random, &engine, (vec![0; engine.bytes], slot.bytes() as usize), (0, 0));
        let plan = QuantisePlan::new(engine.paged, slot, HeadRange::all(2), laid.alignment).expect("a plan");
        let run = |emulator: &mut Emulator, memory: &mut Memory, direction, order| {
            *memory.at_mut(laid.batch.status) = vec![0; laid.slots.len() * 4];
            emulator.run(&plan.launch(direction, &laid.batch, DEVICE).expect("a launch"), memory, order);
            status_of(memory, laid.batch.status)[0]
        };
        assert_eq!(run(&mut emulator, &mut memory, Direction::Gather, 1), 0);
        assert_eq!(run(&mut emulator, &mut memory, Direction::Scatter, 2), 0);
        memory.at_mut(laid.slots[0])[70] = 0xff;
        memory.at_mut(laid.slots[0])[71] = 0xff;
        assert_eq!(run(&mut emulator, &mut memory, Direction::Scatter, 3), status::SCALE);
        memory.at_mut(laid.slots[0])[63] ^= 1;
        assert_eq!(run(&mut emulator, &mut memory, Direction::Scatter, 4), status::HEADER);
        // An infinity in the first item's block.
        let infinity: &[u8] = match element {
            Element::Bf16 => &[0x80, 0x7f],
            Element::F16 => &[0, 0x7c],
            Element::F32 => &[0, 0, 0x80, 0xff],
        };
        let at = (engine.planes[0] + laid.blocks[0] * engine.paged.block_stride) as usize;
        memory.at_mut(laid.engine)[at..at + infinity.len()].copy_from_slice(infinity);
        assert_eq!(run(&mut emulator, &mut memory, Direction::Gather, 5), status::NOT_FINITE);
    }
}

/// The canary: a slot that is a byte too small must stop the sanitizer.
#[test]
#[should_panic(expected = "no sanitizer stopped the emulator")]
fn a_write_behind_a_slot_is_seen() {
    let Some(mut emulator) = Emulator::start() else { panic!("no sanitizer stopped the emulator: skipped") };
    let mut random = Random(seed(403));
    let engine = random_engine(&mut random, 2, 64, 0);
    let slot = SlotLayout::new(engine.layers * engine.parts, engine.paged.tokens, 2, 64);
    let mut memory = Memory::default();
    let bytes = random.bytes(engine.bytes);
    let laid = lay(&mut memory, &mut random, &engine, (bytes, slot.bytes() as usize - 1), (0, 0));
    let plan = CopyPlan::new(engine.paged, slot, HeadRange::all(2), laid.alignment).expect("a plan");
    let launch = plan.launch(Direction::Gather, &laid.batch, DEVICE).expect("a launch");
    emulator.run(&launch, &mut memory, 1);
}
