//! Quantising gather and dequantising scatter of random geometries against the definition in double
//! precision.

use dataplane_kernels::{
    Direction, Element, Format, Grouping, HeadRange, PlanError, QuantisePlan, QuantisedSlot, ScaleType,
    checksum, reference,
};

use crate::engine::{DEVICE, Engine, lay, random_engine, with_sums};
use crate::harness::{Emulator, Memory, Random, seed};

const ELEMENTS: [Element; 3] = [Element::Bf16, Element::F16, Element::F32];

/// Finite numbers of very different sizes, exact zeros and denormals.
fn contents(random: &mut Random, element: Element, bytes: usize) -> Vec<u8> {
    let size = element.bytes() as usize;
    let mut contents = vec![0; bytes];
    let exponent = random.one_of(&[-140, -126, -24, -14, 0, 0, 0, 10, 100]);
    for place in contents.chunks_exact_mut(size) {
        let uniform = (random.bits() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0;
        let value = match random.below(16) {
            0 => 0.0,
            1 => uniform * 2_f64.powi(exponent + 20),
            _ => uniform * 2_f64.powi(exponent),
        };
        reference::element_to(element, value, place);
    }
    contents
}

fn random_slot(random: &mut Random, engine: &Engine, head_dim: u32, element: Element) -> QuantisedSlot {
    let groups: Vec<u32> = (1..=head_dim).filter(|group| head_dim.is_multiple_of(*group)).collect();
    let mut grouping = || match random.below(5) {
        0 | 1 => Grouping::Channel,
        2 | 3 => Grouping::Token(head_dim),
        _ => Grouping::Token(random.one_of(&groups)),
    };
    let (keys, values) = (grouping(), grouping());
    QuantisedSlot {
        header: std::array::from_fn(|at| (at as u8).wrapping_mul(37) ^ 0x4b),
        layers: engine.layers,
        parts: engine.parts,
        tokens: engine.paged.tokens,
        heads: engine.paged.heads,
        head_dim,
        element,
        format: random.one_of(&[Format::Fp8E4m3, Format::Int8]),
        scale: random.one_of(&[ScaleType::F32, ScaleType::Bf16]),
        keys,
        values,
    }
}

struct Case {
    engine: Engine,
    slot: QuantisedSlot,
    range: HeadRange,
    memory: Memory,
    laid: crate::engine::Laid,
    plan: QuantisePlan,
}

fn case(random: &mut Random, element: Element, odd: bool) -> Case {
    let head_dim = if odd { random.one_of(&[3, 33, 20]) } else { random.one_of(&[8, 24, 64, 128, 576]) };
    let heads = if head_dim == 576 { 1 } else { 1 + random.below(5) as u32 };
    let engine = random_engine(random, heads, head_dim * element.bytes(), if odd { 4 } else { 64 });
    let mut slot = random_slot(random, &engine, head_dim, element);
    let mut range = HeadRange::all(heads);
    if random.below(4) == 0 {
        slot.heads = heads + 1 + random.below(3) as u32;
        range.count = 1 + random.below(heads.into()) as u32;
        range.paged_first = random.below(u64::from(heads - range.count) + 1) as u32;
        range.slot_first = random.below(u64::from(slot.heads - range.count) + 1) as u32;
    }
    let mut memory = Memory::default();
    let engine_bytes = contents(random, element, engine.bytes);
    let remainders = if odd { (random.one_of(&[0, 4]), random.one_of(&[0, 16, 1, 7])) } else { (0, 16) };
    let laid = lay(&mut memory, random, &engine, (engine_bytes, slot.bytes() as usize), remainders);
    // Slots may lie anywhere for single elements, but planes on whole elements.
    let alignment = if odd { 4 } else { laid.alignment };
    let plan = QuantisePlan::new(engine.paged, slot, range, alignment).expect("a plan");
    Case { engine, slot, range, memory, laid, plan }
}

/// Quantises a random batch, then restores it over other numbers. Returns the width and whether checksums
/// were taken.
fn round(emulator: &mut Emulator, random: &mut Random, element: Element, odd: bool) -> (u32, bool) {
    let Case { engine, slot, range, mut memory, mut laid, plan } = case(random, element, odd);
    let layouts = (&engine.paged, &slot, range);
    let summed = with_sums(&mut memory, laid.batch);
    let with_checksums = match plan.launch(Direction::Gather, &summed, DEVICE) {
        Ok(_) => {
            laid.batch = summed;
            true
        }
        Err(PlanError::Checksum(_)) => false,
        Err(error) => panic!("{error}"),
    };
    let launch = plan.launch(Direction::Gather, &laid.batch, DEVICE).expect("a launch");
    let what = format!("{} {slot:?} {:?} {range:?}", launch.function, engine.paged);
    let engine_before = memory.at(laid.engine).to_vec();
    let mut wanted: Vec<Vec<u8>> = laid.slots.iter().map(|slot| memory.at(*slot).to_vec()).collect();
    for (slot, block) in wanted.iter_mut().zip(&laid.blocks) {
        assert_eq!(reference::quantise(layouts, &engine_before, (&engine.planes, *block), slot), 0, "{what}");
    }
    emulator.run(&launch, &mut memory, random.bits());
    assert!(memory.at(laid.batch.status).iter().all(|byte| *byte == 0), "{what}");
    assert!(memory.at(laid.engine) == engine_before, "{what}");
    for (place, wanted) in laid.slots.iter().zip(&wanted) {
        let found = memory.at(*place);
        let differing = found.iter().zip(wanted).position(|(one, other)| one != other);
        assert_eq!(differing, None, "first differing byte: {what}");
    }
    if let Some(sums) = laid.batch.sums {
        let checksums: Vec<u64> = wanted.iter().map(|slot| checksum(slot)).collect();
        assert_eq!(memory.words(sums.checksums), checksums, "{what}");
    }

    laid.batch.sums = None;
    let poison = random.bytes(engine.bytes);
    memory.at_mut(laid.engine).clone_from(&poison);
    // Codes and scales of other making: every code, NaN too.
    for (place, wanted) in laid.slots.iter().zip(&mut wanted) {
        let codes = (slot.plane_offset(0, 0) + slot.scale_bytes(0)) as usize;
        for byte in &mut wanted[codes..][..slot.plane_elements() as usize] {
            *byte = random.bits() as u8;
        }
        memory.at_mut(*place).clone_from(wanted);
    }
    let mut engine_wanted = poison;
    for (slot, block) in wanted.iter().zip(&laid.blocks) {
        let result = reference::dequantise(layouts, slot, (&engine.planes, *block), &mut engine_wanted);
        if range.count == layouts.1.heads {
            assert_eq!(result, 0, "{what}");
        } else if result != 0 {
            // Other heads' scales were never written.
            return (plan.width(), with_checksums);
        }
    }
    let launch = plan.launch(Direction::Scatter, &laid.batch, DEVICE).expect("a launch");
    emulator.run(&launch, &mut memory, random.bits());
    assert!(memory.at(laid.batch.status).iter().all(|byte| *byte == 0), "{what}");
    let differing = memory.at(laid.engine).iter().zip(&engine_wanted).position(|(one, other)| one != other);
    assert_eq!(differing, None, "first differing byte of the engine: {what}");
    (plan.width(), with_checksums)
}

#[test]
fn random_blocks_are_quantised_and_restored_to_the_bit() {
    let Some(mut emulator) = Emulator::start() else { return };
    let mut random = Random(seed(301));
    let (mut wide, mut narrow, mut summed) = ([0; 3], [0; 3], 0);
    for number in 0..90 {
        let (width, with_checksums) =
            round(&mut emulator, &mut random, ELEMENTS[number % 3], number % 5 == 0);
        if width == 8 {
            wide[number % 3] += 1
        } else {
            narrow[number % 3] += 1
        }
        summed += u32::from(with_checksums);
    }
    println!(
        "eight elements an access: {wide:?}, one: {narrow:?} (bf16, fp16, fp32); with checksums: {summed}"
    );
    assert!(wide.iter().all(|count| *count >= 5) && narrow.iter().all(|count| *count >= 3) && summed > 10);
}

/// Groups whose scale is exactly 1, so that each code is the code of a number as it is: every fp16 up to the
/// greatest, and with them every tie.
#[test]
fn every_half_has_the_code_of_the_definition() {
    let Some(mut emulator) = Emulator::start() else { return };
    for (format, most) in [(Format::Fp8E4m3, 448.0), (Format::Int8, 127.0)] {
        let is_small = |bits: &u16| reference::element_from(Element::F16, &bits.to_le_bytes()).abs() <= most;
        let values: Vec<u16> = (0..=u16::MAX).filter(is_small).collect();
        let mut greatest = [0; 2];
        reference::element_to(Element::F16, most, &mut greatest);
        let mut bytes: Vec<u8> = Vec::new();
        for values in values.chunks(63) {
            bytes.extend(greatest);
            bytes.extend(
                values.iter().chain(std::iter::repeat(&0)).take(63).flat_map(|bits| bits.to_le_bytes()),
            );
        }
        let tokens = (bytes.len() / 128) as u32;
        let paged = dataplane_kernels::PagedLayout {
            blocks: 1,
            tokens,
            heads: 1,
            head_bytes: 128,
            block_stride: bytes.len() as u64,
            token_stride: 128,
            head_stride: 128,
        };
        let engine = Engine { paged, layers: 1, parts: 1, bytes: bytes.len(), planes: vec![0] };
        let slot = QuantisedSlot {
            header: [0; 64],
            layers: 1,
            parts: 1,
            tokens,
            heads: 1,
            head_dim: 64,
            element: Element::F16,
            format,
            scale: ScaleType::F32,
            keys: Grouping::Token(64),
            values: Grouping::Token(64),
        };
        let mut memory = Memory::default();
        let contents = (bytes.clone(), slot.bytes() as usize);
        let laid = lay(&mut memory, &mut Random(1), &engine, contents, (0, 0));
        let plan = QuantisePlan::new(paged, slot, HeadRange::all(1), laid.alignment).expect("a plan");
        let launch = plan.launch(Direction::Gather, &laid.batch, DEVICE).expect("a launch");
        let mut wanted = vec![0; slot.bytes() as usize];
        let layouts = (&paged, &slot, HeadRange::all(1));
        assert_eq!(reference::quantise(layouts, &bytes, (&engine.planes, 0), &mut wanted), 0);
        assert_eq!(wanted[64..68], 1.0_f32.to_le_bytes());
        emulator.run(&launch, &mut memory, 1);
        assert!(memory.at(laid.slots[0]) == wanted, "{format:?}: {} numbers", values.len());
    }
}
