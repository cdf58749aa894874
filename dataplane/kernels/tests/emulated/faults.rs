//! Inputs that the kernels refuse, and faults that the emulator must detect.

use dataplane_kernels::{CopyPlan, Direction, HeadRange, SlotLayout, status};

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

/// A plane that the engine lacks is neither read nor written; the other planes are.
#[test]
fn a_plane_without_an_address_is_reported_and_not_touched() {
    let Some(mut emulator) = Emulator::start() else { return };
    let mut random = Random(seed(404));
    let engine = random_engine(&mut random, 2, 64, 0);
    let planes = engine.layers * engine.parts;
    let slot = SlotLayout::new(planes, engine.paged.tokens, 2, 64);
    let mut memory = Memory::default();
    let contents = (vec![0; engine.bytes], slot.bytes() as usize);
    let laid = lay(&mut memory, &mut random, &engine, contents, (0, 0));
    let copy = CopyPlan::new(engine.paged, slot, HeadRange::all(2), laid.alignment).expect("a plan");
    let missing = random.below(u64::from(planes)) as usize;
    memory.at_mut(laid.batch.planes)[missing * 8..][..8].fill(0);
    for direction in [Direction::Gather, Direction::Scatter] {
        let launch = copy.launch(direction, &laid.batch, DEVICE);
        *memory.at_mut(laid.batch.status) = vec![0; laid.slots.len() * 4];
        emulator.run(&launch.expect("a launch"), &mut memory, random.bits());
        let all = vec![status::MISALIGNED; laid.slots.len()];
        assert_eq!(status_of(&memory, laid.batch.status), all);
    }
}

/// Control: a slot that is one byte too small must stop the sanitizer.
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
