//! Errors against their stated bound, special values, equal bits on every path, and damaged payloads.

use kvstore_block::{BlockLayout, ElementType};
use kvstore_quantise::testing::{Random, block, elements, push};
use kvstore_quantise::{
    Format, Grouping, HEADER_BYTES, Isa, QuantiseError, QuantisedLayout, ScaleType, Scheme,
};

const SMALL: BlockLayout =
    BlockLayout { layers: 2, parts: 2, tokens: 16, kv_heads: 3, head_dim: 24, element: ElementType::Bf16 };

fn schemes(head_dim: u32) -> Vec<Scheme> {
    let mut schemes = Vec::new();
    for format in [Format::Fp8E4m3, Format::Int8] {
        for scale in [ScaleType::F32, ScaleType::Bf16] {
            for keys in [Grouping::Channel, Grouping::Token(head_dim), Grouping::Token(head_dim / 3)] {
                for values in [Grouping::Channel, Grouping::Token(head_dim)] {
                    schemes.push(Scheme { format, scale, keys, values });
                }
            }
        }
    }
    schemes
}

fn layouts() -> Vec<BlockLayout> {
    let odd = BlockLayout { tokens: 5, kv_heads: 1, head_dim: 33, ..SMALL };
    let latent = BlockLayout { parts: 1, kv_heads: 1, head_dim: 96, ..SMALL };
    let wide = BlockLayout { layers: 1, kv_heads: 4, head_dim: 96, ..SMALL };
    [SMALL, odd, latent, wide]
        .into_iter()
        .flat_map(|layout| [layout, BlockLayout { element: ElementType::F32, ..layout }])
        .collect()
}

fn round_trip(quantised: &QuantisedLayout, source: &[u8]) -> Vec<u8> {
    let mut payload = vec![0xa5; quantised.bytes()];
    quantised.quantise(source, &mut payload).expect("finite");
    let mut restored = vec![0x5a; source.len()];
    quantised.dequantise(&payload, &mut restored).expect("own payload");
    restored
}

/// The greatest magnitude of the group that an element of a plane belongs to.
fn group_magnitudes(quantised: &QuantisedLayout, part: usize, plane: &[f64]) -> Vec<f64> {
    let channels = quantised.layout().token_elements();
    let group_of = |at: usize| match quantised.grouping(part) {
        Grouping::Channel => at % channels,
        Grouping::Token(group) => at / group as usize,
    };
    let mut greatest = vec![0.0_f64; plane.len()];
    for (at, value) in plane.iter().enumerate() {
        greatest[group_of(at)] = greatest[group_of(at)].max(value.abs());
    }
    (0..plane.len()).map(|at| greatest[group_of(at)]).collect()
}

/// The largest part of the bound that is used by any element.
fn used_bound(quantised: &QuantisedLayout, source: &[u8], restored: &[u8]) -> f64 {
    let layout = quantised.layout();
    let plane_bytes = layout.part_bytes();
    let planes = source.chunks_exact(plane_bytes).zip(restored.chunks_exact(plane_bytes));
    let mut used = 0.0_f64;
    for (number, (source, restored)) in planes.enumerate() {
        let source = elements(layout.element, source);
        let magnitudes = group_magnitudes(quantised, number % usize::from(layout.parts), &source);
        for ((value, magnitude), found) in
            source.iter().zip(magnitudes).zip(elements(layout.element, restored))
        {
            assert!(found.is_finite(), "{value} became {found}");
            used = used.max((found - value).abs() / quantised.error_bound(magnitude, *value));
        }
    }
    used
}

#[test]
fn every_error_is_within_the_bound_and_the_bound_is_tight() {
    let seed = 71;
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let mut most = 0.0_f64;
    for layout in layouts() {
        for scheme in schemes(layout.head_dim) {
            let quantised = QuantisedLayout::new(layout, scheme).expect("valid");
            for _ in 0..3 {
                let source = block(&layout, 30.0, &mut random);
                let used = used_bound(&quantised, &source, &round_trip(&quantised, &source));
                assert!(used <= 1.0, "{layout:?} {scheme:?}: {used}");
                most = most.max(used);
            }
        }
    }
    println!("largest error: {most:.4} of its bound");
    assert!(most > 0.9, "the bound says too little: {most}");
}

#[test]
fn magnitudes_from_denormal_to_the_greatest_keep_the_bound() {
    let seed = 72;
    println!("seed {seed}");
    let mut random = Random::new(seed);
    for layout in layouts() {
        let count = layout.block_bytes() / layout.element.bytes();
        for exponent in [-149, -140, -133, -127, -126, -120, -20, 0, 60, 120, 126, 127] {
            let mut source = Vec::new();
            for _ in 0..count {
                let value = (2.0 * random.uniform() - 1.0) * 2_f64.powi(exponent);
                push(layout.element, value as f32, &mut source);
            }
            for scheme in schemes(layout.head_dim) {
                let quantised = QuantisedLayout::new(layout, scheme).expect("valid");
                let used = used_bound(&quantised, &source, &round_trip(&quantised, &source));
                assert!(used <= 1.0, "2^{exponent} {layout:?} {scheme:?}: {used}");
            }
        }
        for greatest in [f32::MAX, f32::from_bits(0x7f7f_0000)] {
            let mut source = Vec::new();
            for at in 0..count {
                let value =
                    if layout.element == ElementType::Bf16 { f32::from_bits(0x7f7f_0000) } else { greatest };
                push(layout.element, if at % 3 == 0 { -value } else { value }, &mut source);
            }
            for scheme in schemes(layout.head_dim) {
                let quantised = QuantisedLayout::new(layout, scheme).expect("valid");
                let used = used_bound(&quantised, &source, &round_trip(&quantised, &source));
                assert!(used <= 1.0, "{greatest} {scheme:?}: {used}");
            }
        }
    }
}

#[test]
fn zeros_stay_zero_and_what_is_not_finite_is_refused() {
    for layout in layouts() {
        for scheme in schemes(layout.head_dim) {
            let quantised = QuantisedLayout::new(layout, scheme).expect("valid");
            let zeros = vec![0; layout.block_bytes()];
            assert_eq!(round_trip(&quantised, &zeros), zeros);
            let count = layout.block_bytes() / layout.element.bytes();
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
                for place in [0, count / 3, count - 1] {
                    let mut source = Vec::new();
                    for at in 0..count {
                        push(layout.element, if at == place { bad } else { 1.0 }, &mut source);
                    }
                    let mut payload = vec![0; quantised.bytes()];
                    let refused = quantised.quantise(&source, &mut payload);
                    assert!(matches!(refused, Err(QuantiseError::NotFinite { .. })), "{bad} at {place}");
                }
            }
        }
    }
}

#[test]
fn every_machine_gives_the_same_bits() {
    let seed = 73;
    println!("seed {seed}; this machine: {:?}", Isa::detect());
    if Isa::detect() == Isa::PORTABLE {
        println!("skipped: this machine has no AVX2");
        return;
    }
    let mut random = Random::new(seed);
    for layout in layouts() {
        for scheme in schemes(layout.head_dim) {
            let quantised = QuantisedLayout::new(layout, scheme).expect("valid");
            let mut source = block(&layout, 30.0, &mut random);
            // Any finite bit pattern, not only well-behaved numbers.
            for byte in source.iter_mut().step_by(layout.element.bytes()) {
                *byte = random.bits() as u8;
            }
            for part in 0..usize::from(layout.parts) {
                let plane = &source[layout.offset(0, part, 0)..][..layout.part_bytes()];
                let codes = |isa| {
                    let mut codes = vec![0; quantised.plane_bytes(part)];
                    quantised.quantise_plane(isa, part, plane, &mut codes).expect("finite");
                    codes
                };
                let portable = codes(Isa::PORTABLE);
                assert!(portable == codes(Isa::detect()), "{layout:?} {scheme:?}");
                let restored = |isa| {
                    let mut restored = vec![0; plane.len()];
                    quantised.dequantise_plane(isa, part, &portable, &mut restored).expect("own plane");
                    restored
                };
                assert!(restored(Isa::PORTABLE) == restored(Isa::detect()), "{layout:?} {scheme:?}");
            }
        }
    }
}

#[test]
fn planes_one_by_one_equal_the_whole_block() {
    let mut random = Random::new(74);
    let quantised = QuantisedLayout::new(SMALL, Scheme::recommended(Format::Int8, &SMALL)).expect("valid");
    let source = block(&SMALL, 30.0, &mut random);
    let mut whole = vec![0; quantised.bytes()];
    quantised.quantise(&source, &mut whole).expect("finite");
    let mut pieces = quantised.header().to_vec();
    for layer in 0..usize::from(SMALL.layers) {
        for part in 0..2 {
            assert_eq!(pieces.len(), quantised.plane_offset(layer, part));
            let start = pieces.len();
            pieces.resize(start + quantised.plane_bytes(part), 0);
            let plane = &source[SMALL.offset(layer, part, 0)..][..SMALL.part_bytes()];
            quantised.quantise_plane(Isa::detect(), part, plane, &mut pieces[start..]).expect("finite");
        }
    }
    assert!(whole == pieces);
    // 16 tokens × 72 channels; bf16 scales: 72 for keys, 48 for values; a block half as large and a little more.
    assert_eq!(quantised.bytes(), HEADER_BYTES + 2 * (2 * 1152 + 2 * 72 + 2 * 48));
}

#[test]
fn damaged_payloads_are_refused_or_restored_to_something_never_a_panic() {
    let seed = 75;
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let quantised = QuantisedLayout::new(SMALL, Scheme::recommended(Format::Fp8E4m3, &SMALL)).expect("valid");
    let source = block(&SMALL, 30.0, &mut random);
    let mut payload = vec![0; quantised.bytes()];
    quantised.quantise(&source, &mut payload).expect("finite");
    let mut restored = vec![0; source.len()];
    for bit in 0..HEADER_BYTES * 8 {
        let mut damaged = payload.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let refused = quantised.dequantise(&damaged, &mut restored);
        assert!(matches!(refused, Err(QuantiseError::Header { .. })), "bit {bit}: {refused:?}");
    }
    let mut refused = 0;
    for _ in 0..2000 {
        let mut damaged = payload.clone();
        for _ in 0..20 {
            let at = HEADER_BYTES + random.bits() as usize % (damaged.len() - HEADER_BYTES);
            damaged[at] = random.bits() as u8;
        }
        refused += usize::from(quantised.dequantise(&damaged, &mut restored).is_err());
    }
    assert!(refused > 0, "negative scales must be noticed");
    for length in [0, 1, HEADER_BYTES, payload.len() - 1] {
        let short = quantised.dequantise(&payload[..length], &mut restored);
        assert!(matches!(short, Err(QuantiseError::Length { .. })));
        assert!(quantised.check_header(&payload[..length]).is_ok() == (length >= HEADER_BYTES));
    }
    let other = Scheme { scale: ScaleType::F32, ..*quantised.scheme() };
    let other = QuantisedLayout::new(SMALL, other).expect("valid");
    assert!(other.check_header(&payload).is_err());
    let odd = Scheme { values: Grouping::Token(7), ..*quantised.scheme() };
    assert_eq!(QuantisedLayout::new(SMALL, odd), Err(QuantiseError::Group { group: 7, head_dim: 24 }));
}

#[test]
fn keys_by_channel_and_values_by_token_are_the_more_exact_choice() {
    let seed = 76;
    let layout = BlockLayout { layers: 4, parts: 2, tokens: 16, kv_heads: 8, head_dim: 128, ..SMALL };
    let source = block(&layout, 40.0, &mut Random::new(seed));
    let values = elements(layout.element, &source);
    println!("seed {seed}; root mean square error, outlier channels of keys left out");
    for format in [Format::Fp8E4m3, Format::Int8] {
        let errors = |keys, values_by| {
            let scheme = Scheme { format, scale: ScaleType::F32, keys, values: values_by };
            let quantised = QuantisedLayout::new(layout, scheme).expect("valid");
            let restored = elements(layout.element, &round_trip(&quantised, &source));
            let (mut sums, mut counts) = ([0.0; 2], [0_u32; 2]);
            for (at, (value, found)) in values.iter().zip(&restored).enumerate() {
                if value.abs() < 6.0 {
                    let part = at / (layout.part_bytes() / 2) % 2;
                    sums[part] += (value - found).powi(2);
                    counts[part] += 1;
                }
            }
            [(sums[0] / f64::from(counts[0])).sqrt(), (sums[1] / f64::from(counts[1])).sqrt()]
        };
        let chosen = errors(Grouping::Channel, Grouping::Token(128));
        let by_token = errors(Grouping::Token(128), Grouping::Token(128));
        println!(
            "{format:?}: keys by channel {:.5}, by token {:.5}; values by token {:.5}",
            chosen[0], by_token[0], chosen[1]
        );
        assert!(chosen[0] <= by_token[0], "{format:?}");
        if format == Format::Int8 {
            assert!(chosen[0] * 10.0 < by_token[0], "an outlier takes the resolution from its neighbours");
        }
    }
}
