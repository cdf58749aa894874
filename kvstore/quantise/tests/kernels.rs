//! What the GPU's kernels write is what this crate reads, and the other way round, to the byte. The kernels
//! are proved equal to their reference where they live (`dataplane/kernels/tests/emulated`); here the
//! reference is proved equal to this crate.

use dataplane_kernels::{self as kernels, EngineTensors, HeadRange, InnerOrder, PartPlace, reference};
use kvstore_block::{BlockLayout, ElementType};
use kvstore_quantise::testing::{Random, block, push};
use kvstore_quantise::{Format, Grouping, QuantisedLayout, ScaleType, Scheme};

fn grouping(grouping: Grouping) -> kernels::Grouping {
    match grouping {
        Grouping::Channel => kernels::Grouping::Channel,
        Grouping::Token(group) => kernels::Grouping::Token(group),
    }
}

fn slot_of(quantised: &QuantisedLayout) -> kernels::QuantisedSlot {
    let (layout, scheme) = (quantised.layout(), quantised.scheme());
    kernels::QuantisedSlot {
        header: quantised.header(),
        layers: layout.layers.into(),
        parts: layout.parts.into(),
        tokens: layout.tokens,
        heads: layout.kv_heads,
        head_dim: layout.head_dim,
        element: match layout.element {
            ElementType::Bf16 => kernels::Element::Bf16,
            ElementType::F32 => kernels::Element::F32,
        },
        format: match scheme.format {
            Format::Fp8E4m3 => kernels::Format::Fp8E4m3,
            Format::Int8 => kernels::Format::Int8,
        },
        scale: match scheme.scale {
            ScaleType::F32 => kernels::ScaleType::F32,
            ScaleType::Bf16 => kernels::ScaleType::Bf16,
        },
        keys: grouping(scheme.keys),
        values: grouping(scheme.values),
    }
}

/// A block in the slot's own order is an engine with one block and a tensor for each part.
fn engine_of(layout: &BlockLayout) -> (kernels::PagedLayout, Vec<u64>) {
    let tensors = EngineTensors {
        order: InnerOrder::Nhd,
        parts: PartPlace::Separate,
        blocks: 1,
        tokens: layout.tokens,
        heads: layout.kv_heads,
        head_bytes: layout.head_dim * layout.element.bytes() as u32,
    };
    let planes = u64::from(layout.layers) * u64::from(layout.parts);
    (tensors.layout(), (0..planes).map(|plane| plane * layout.part_bytes() as u64).collect())
}

fn check(layout: BlockLayout, scheme: Scheme, source: &[u8]) {
    let quantised = QuantisedLayout::new(layout, scheme).expect("valid");
    let (slot, (paged, planes)) = (slot_of(&quantised), engine_of(&layout));
    let layouts = (&paged, &slot, HeadRange::all(layout.kv_heads));
    let mut ours = vec![0xa5; quantised.bytes()];
    quantised.quantise(source, &mut ours).expect("finite");
    let mut theirs = vec![0x5a; usize::try_from(slot.bytes()).expect("small")];
    assert_eq!(reference::quantise(layouts, source, (&planes, 0), &mut theirs), 0);
    assert!(ours == theirs, "quantised: {layout:?} {scheme:?}");

    // Any codes, not only those that come from numbers.
    let codes = quantised.plane_offset(0, 0) + quantised.scale_bytes(0);
    for (at, code) in ours[codes..][..quantised.plane_elements()].iter_mut().enumerate() {
        *code = at as u8;
    }
    let mut ours_restored = vec![0xa5; source.len()];
    quantised.dequantise(&ours, &mut ours_restored).expect("own payload");
    let mut theirs_restored = vec![0x5a; source.len()];
    assert_eq!(reference::dequantise(layouts, &ours, (&planes, 0), &mut theirs_restored), 0);
    assert!(ours_restored == theirs_restored, "restored: {layout:?} {scheme:?}");
}

#[test]
fn the_kernels_reference_writes_and_reads_the_same_bytes() {
    let seed = 91;
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let small = BlockLayout {
        layers: 2,
        parts: 2,
        tokens: 16,
        kv_heads: 2,
        head_dim: 24,
        element: ElementType::Bf16,
    };
    let odd = BlockLayout { tokens: 5, kv_heads: 1, head_dim: 33, ..small };
    let latent = BlockLayout { parts: 1, kv_heads: 1, head_dim: 96, ..small };
    for layout in [small, odd, latent] {
        for layout in [layout, BlockLayout { element: ElementType::F32, ..layout }] {
            for format in [Format::Fp8E4m3, Format::Int8] {
                for scale in [ScaleType::F32, ScaleType::Bf16] {
                    for keys in [Grouping::Channel, Grouping::Token(layout.head_dim / 3)] {
                        for values in [Grouping::Channel, Grouping::Token(layout.head_dim)] {
                            let scheme = Scheme { format, scale, keys, values };
                            check(layout, scheme, &block(&layout, 30.0, &mut random));
                            for exponent in [-149, -133, -126, -20, 127] {
                                let mut source = Vec::new();
                                for _ in 0..layout.block_bytes() / layout.element.bytes() {
                                    let value = (2.0 * random.uniform() - 1.0) * 2_f64.powi(exponent);
                                    push(layout.element, value as f32, &mut source);
                                }
                                check(layout, scheme, &source);
                            }
                        }
                    }
                }
            }
        }
    }
}
