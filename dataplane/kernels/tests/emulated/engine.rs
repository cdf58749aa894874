//! A random engine, slots and a batch in device memory.

use dataplane_kernels::{
    Batch, ChecksumArrays, Device, EngineTensors, InnerOrder, Item, KeyValueLayout, PagedLayout, Scratch,
    alignment_of,
};

use crate::harness::{Memory, Random};

/// Few multiprocessors, so that thread blocks have many tiles.
pub(crate) const DEVICE: Device = Device { multiprocessors: 1 };

pub(crate) struct Engine {
    pub(crate) paged: PagedLayout,
    pub(crate) layers: u32,
    pub(crate) parts: u32,
    pub(crate) bytes: usize,
    /// Offset of each plane's first block.
    pub(crate) planes: Vec<u64>,
}

/// Tensors one after the other with gaps, so that nothing is where it would be by luck.
pub(crate) fn random_engine(random: &mut Random, heads: u32, head_bytes: u32, gap: u64) -> Engine {
    let parts = random.one_of(&[
        KeyValueLayout::Separate,
        KeyValueLayout::BeforeBlocks,
        KeyValueLayout::WithinBlock,
        KeyValueLayout::Latent,
    ]);
    let tensors = EngineTensors {
        order: random.one_of(&[InnerOrder::Nhd, InnerOrder::Hnd]),
        parts,
        blocks: 1 + random.below(6),
        tokens: random.one_of(&[1, 2, 5, 16, 16, 16, 21, 32]),
        heads,
        head_bytes,
    };
    let layers = 1 + random.below(3) as u32;
    let part_count = if parts == KeyValueLayout::Latent { 1 } else { 2 };
    let (per_layer, in_tensor) = match parts {
        KeyValueLayout::Separate => (2, 1),
        KeyValueLayout::Latent => (1, 1),
        _ => (1, 2),
    };
    let tensor_bytes = tensors.layout().piece_bytes() * tensors.blocks * in_tensor + gap;
    let starts: Vec<u64> = (0..u64::from(layers) * per_layer).map(|tensor| tensor * tensor_bytes).collect();
    let planes = tensors.planes(&starts);
    let bytes = (starts.len() as u64 * tensor_bytes - gap) as usize;
    Engine { paged: tensors.layout(), layers, parts: part_count, bytes, planes }
}

/// A batch in device memory: the engine, its planes, slots, items, status words, sums.
pub(crate) struct Laid {
    pub(crate) engine: u64,
    pub(crate) slots: Vec<u64>,
    pub(crate) blocks: Vec<u64>,
    pub(crate) batch: Batch,
    pub(crate) alignment: u64,
}

/// Distinct blocks in any order, a slot for each.
pub(crate) fn lay(
    memory: &mut Memory,
    random: &mut Random,
    engine: &Engine,
    contents: (Vec<u8>, usize),
    remainders: (u64, u64),
) -> Laid {
    let (engine_bytes, slot_bytes) = contents;
    let mut blocks: Vec<u64> = (0..engine.paged.blocks).collect();
    for left in (1..blocks.len()).rev() {
        blocks.swap(left, random.below(left as u64 + 1) as usize);
    }
    blocks.truncate(1 + random.below(engine.paged.blocks) as usize);
    let at = memory.put(engine_bytes, remainders.0);
    let planes: Vec<u64> = engine.planes.iter().map(|plane| at + plane).collect();
    let slots: Vec<u64> = blocks.iter().map(|_| memory.put(random.bytes(slot_bytes), remainders.1)).collect();
    let items: Vec<Item> =
        slots.iter().zip(&blocks).map(|(slot, block)| Item { slot: *slot, block: *block }).collect();
    let words: Vec<u64> = items.iter().flat_map(|item| [item.slot, item.block]).collect();
    let batch = Batch {
        items: memory.put_words(&words),
        count: items.len() as u32,
        planes: memory.put_words(&planes),
        status: memory.put(vec![0; items.len() * 4], 0),
        sums: None,
    };
    let alignment = alignment_of(planes.into_iter().chain(slots.iter().copied()));
    Laid { engine: at, slots, blocks, batch, alignment }
}

/// Adds places for checksums, poisoned, and scratch, clear.
pub(crate) fn with_sums(memory: &mut Memory, batch: Batch) -> Batch {
    let count = batch.count as usize;
    let checksums = memory.put(vec![0xee; count * 8], 0);
    let scratch = memory.put(vec![0; count * size_of::<Scratch>()], 0);
    Batch { sums: Some(ChecksumArrays { checksums, scratch, expected: 0 }), ..batch }
}
