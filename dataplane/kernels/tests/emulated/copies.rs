//! Gather and scatter of random geometries.

use dataplane_kernels::{CopyPlan, Direction, HeadRange, PlanError, SlotLayout, checksum, reference};

use crate::engine::{DEVICE, lay, random_engine, with_sums};
use crate::harness::{Emulator, Memory, Random, seed};

/// Bytes of a head, in units.
const HEAD_UNITS: [u32; 8] = [1, 2, 3, 4, 8, 10, 16, 72];

fn random_heads(random: &mut Random, paged: u32) -> (u32, HeadRange) {
    if random.below(2) == 0 {
        return (paged, HeadRange::all(paged));
    }
    let slot = 1 + random.below(8) as u32;
    let count = 1 + random.below(paged.min(slot).into()) as u32;
    let paged_first = random.below(u64::from(paged - count) + 1) as u32;
    let slot_first = random.below(u64::from(slot - count) + 1) as u32;
    (slot, HeadRange { paged_first, slot_first, count })
}

/// Copies one random geometry in one direction. Returns the bytes of an access and whether checksums were
/// taken.
fn round(emulator: &mut Emulator, random: &mut Random, direction: Direction) -> (u64, bool) {
    let heads = 1 + random.below(8) as u32;
    // All sizes and offsets are multiples of this.
    let unit = random.one_of(&[1, 2, 4, 8, 16, 16]);
    let head_bytes = unit * random.one_of(&HEAD_UNITS);
    let unit = u64::from(unit);
    let gap = unit * random.below(4);
    let engine = random_engine(random, heads, head_bytes, gap);
    let (slot_heads, range) = random_heads(random, heads);
    let mut slot = SlotLayout::new(engine.layers * engine.parts, engine.paged.tokens, slot_heads, head_bytes);
    slot.plane_stride += random.one_of(&[0, 0, 0, 16, unit]);
    slot.first_byte = random.one_of(&[0, 0, 0, 16, unit]);
    let slot_bytes = slot.first_byte + (u64::from(slot.planes) - 1) * slot.plane_stride + slot.plane_bytes();

    let mut memory = Memory::default();
    let remainders = (unit * random.below(3), unit * random.below(3));
    let engine_bytes = random.bytes(engine.bytes);
    let mut laid = lay(&mut memory, random, &engine, (engine_bytes, slot_bytes as usize), remainders);
    let plan = CopyPlan::new(engine.paged, slot, range, laid.alignment).expect("a plan");
    let summed = with_sums(&mut memory, laid.batch);
    let with_checksums = match plan.launch(direction, &summed, DEVICE) {
        Ok(_) => {
            laid.batch = summed;
            true
        }
        Err(PlanError::Checksum(_)) => false,
        Err(error) => panic!("{error}"),
    };
    let launch = plan.launch(direction, &laid.batch, DEVICE).expect("a launch");

    let layouts = (&engine.paged, &slot, range);
    let mut engine_after = memory.at(laid.engine).to_vec();
    let mut slots_after: Vec<Vec<u8>> = laid.slots.iter().map(|slot| memory.at(*slot).to_vec()).collect();
    for (slot, block) in slots_after.iter_mut().zip(&laid.blocks) {
        let place = (&engine.planes[..], *block);
        match direction {
            Direction::Gather => reference::gather(layouts, &engine_after, place, slot),
            Direction::Scatter => reference::scatter(layouts, slot, place, &mut engine_after),
        }
    }
    // The scratch is zero again after a launch, so a second launch gives the same result.
    for _ in 0..2 {
        emulator.run(&launch, &mut memory, random.bits());
        let what = format!("{direction:?} {} {:?} {slot:?} {range:?}", launch.function, engine.paged);
        assert!(memory.at(laid.engine) == engine_after, "engine: {what}");
        for (slot, wanted) in laid.slots.iter().zip(&slots_after) {
            assert!(memory.at(*slot) == wanted, "slot: {what}");
        }
        assert!(memory.at(laid.batch.status).iter().all(|byte| *byte == 0), "{what}");
        if let Some(sums) = laid.batch.sums {
            let wanted: Vec<u64> = slots_after.iter().map(|slot| checksum(slot)).collect();
            assert_eq!(memory.words(sums.checksums), wanted, "{what}");
            assert!(memory.at(sums.scratch).iter().all(|byte| *byte == 0), "{what}");
        }
    }
    (plan.unit_bytes(), with_checksums)
}

#[test]
fn random_layouts_are_gathered_and_scattered_to_the_byte() {
    let Some(mut emulator) = Emulator::start() else { return };
    let mut random = Random(seed(101));
    let mut by_unit = [[0; 2]; 5];
    let mut summed = 0;
    for number in 0..120 {
        let direction = [Direction::Gather, Direction::Scatter][number % 2];
        let (unit, with_checksums) = round(&mut emulator, &mut random, direction);
        by_unit[unit.ilog2() as usize][number % 2] += 1;
        summed += u32::from(with_checksums);
    }
    println!("launches by unit of 1 to 16 bytes (gather, scatter): {by_unit:?}, with checksums: {summed}");
    assert!(by_unit.as_flattened().iter().all(|count| *count > 0), "every kernel was run");
    assert!(summed > 10);
}

/// Runs in canonical order whose length is not a multiple of 16: wide accesses and a tail.
#[test]
fn tails_of_runs_are_copied_and_nothing_behind_them() {
    let Some(mut emulator) = Emulator::start() else { return };
    let mut random = Random(seed(103));
    for head_bytes in [17, 31, 33, 100, 4097, 5003] {
        let paged = dataplane_kernels::PagedLayout {
            blocks: 3,
            tokens: 1,
            heads: 1,
            head_bytes,
            block_stride: u64::from(head_bytes).next_multiple_of(16),
            token_stride: head_bytes.into(),
            head_stride: head_bytes.into(),
        };
        let slot = SlotLayout { plane_stride: paged.block_stride, ..SlotLayout::new(2, 1, 1, head_bytes) };
        let bytes = 6 * paged.block_stride as usize;
        let planes = vec![0, 3 * paged.block_stride];
        let engine = crate::engine::Engine { paged, layers: 2, parts: 1, bytes, planes };
        let mut memory = Memory::default();
        let before = random.bytes(bytes);
        let slot_bytes = (slot.plane_stride + slot.plane_bytes()) as usize;
        let laid = lay(&mut memory, &mut random, &engine, (before.clone(), slot_bytes), (0, 0));
        let plan = CopyPlan::new(paged, slot, HeadRange::all(1), laid.alignment).expect("a plan");
        assert_eq!(plan.unit_bytes(), 16);
        let launch = plan.launch(Direction::Gather, &laid.batch, DEVICE).expect("a launch");
        for (slot_at, block) in laid.slots.iter().zip(&laid.blocks) {
            let mut wanted = memory.at(*slot_at).to_vec();
            reference::gather(
                (&paged, &slot, HeadRange::all(1)),
                &before,
                (&engine.planes, *block),
                &mut wanted,
            );
            emulator.run(&launch, &mut memory, random.bits());
            assert!(memory.at(*slot_at) == wanted, "{head_bytes}");
        }
    }
}

/// Heads gathered by one engine with few heads are scattered by another with more heads: tensor parallelism 4
/// to 2.
#[test]
fn heads_of_two_ranks_meet_in_one_slot() {
    let Some(mut emulator) = Emulator::start() else { return };
    let mut random = Random(seed(102));
    let slot = SlotLayout::new(4, 16, 4, 128);
    let mut memory = Memory::default();
    let target = memory.put(vec![0xcd; slot.bytes() as usize], 0);
    let mut expected = vec![0xcd; slot.bytes() as usize];
    for rank in 0..2 {
        let engine = loop {
            let engine = random_engine(&mut random, 2, 128, 32);
            if engine.layers * engine.parts == 4 && engine.paged.tokens == 16 {
                break engine;
            }
        };
        let bytes = random.bytes(engine.bytes);
        let range = HeadRange { paged_first: 0, slot_first: 2 * rank, count: 2 };
        reference::gather((&engine.paged, &slot, range), &bytes, (&engine.planes, 0), &mut expected);
        let laid = lay(&mut memory, &mut random, &engine, (bytes, 16), (0, 0));
        *memory.at_mut(laid.batch.items) = [target, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
        let batch = dataplane_kernels::Batch { count: 1, ..laid.batch };
        let plan = CopyPlan::new(engine.paged, slot, range, 16).expect("a plan");
        assert_eq!(plan.unit_bytes(), 16);
        let launch = plan.launch(Direction::Gather, &batch, DEVICE).expect("a launch");
        emulator.run(&launch, &mut memory, random.bits());
    }
    assert!(memory.at(target) == expected);
    assert!(!expected.chunks(16).any(|piece| piece == [0xcd; 16]), "both ranks together fill the slot");
}

#[test]
fn canonical_pieces_are_one_run_and_others_are_not() {
    let tensors = dataplane_kernels::EngineTensors {
        order: dataplane_kernels::InnerOrder::Nhd,
        parts: dataplane_kernels::KeyValueLayout::BeforeBlocks,
        blocks: 100,
        tokens: 16,
        heads: 8,
        head_bytes: 256,
    };
    let slot = SlotLayout::new(64, 16, 8, 256);
    let plan = CopyPlan::new(tensors.layout(), slot, HeadRange::all(8), 16).expect("a plan");
    assert_eq!((plan.run_bytes(), plan.unit_bytes()), (32 << 10, 16));
    assert_eq!(plan.bytes_moved(3), 3 * (2 << 20));
    let hnd = dataplane_kernels::EngineTensors { order: dataplane_kernels::InnerOrder::Hnd, ..tensors };
    let plan = CopyPlan::new(hnd.layout(), slot, HeadRange::all(8), 16).expect("a plan");
    assert_eq!(plan.run_bytes(), 256);
    let half = HeadRange { paged_first: 4, slot_first: 0, count: 4 };
    let plan = CopyPlan::new(tensors.layout(), SlotLayout::new(64, 16, 4, 256), half, 16).expect("a plan");
    assert_eq!(plan.run_bytes(), 1024);
}
