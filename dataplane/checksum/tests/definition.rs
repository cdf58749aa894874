//! Sensitivity of the checksum to flips, swaps, zero runs and lengths, and collision rates of structured
//! inputs.

use dataplane_checksum::{Sum, checksum};

fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

fn random_bytes(state: &mut u64, count: usize) -> Vec<u8> {
    (0..count.div_ceil(8)).flat_map(|_| next(state).to_le_bytes()).take(count).collect()
}

/// The sum as defined in the documentation.
fn defined_sum(bytes: &[u8]) -> u64 {
    let mut sum = 0_u64;
    for (lane, piece) in bytes.chunks(8).enumerate() {
        let mut value = [0; 8];
        value[..piece.len()].copy_from_slice(piece);
        let position = (lane as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let a = u64::from_le_bytes(value).wrapping_add(position);
        let b = (a ^ a >> 32).wrapping_mul(0x9e37_79b1);
        let c = (b ^ b >> 32).wrapping_mul(0x85eb_ca77);
        sum = sum.wrapping_add(c ^ c >> 32);
    }
    sum
}

/// The checksum as defined in the documentation.
fn defined(bytes: &[u8]) -> u64 {
    let d = defined_sum(bytes).wrapping_add((bytes.len() as u64 + 1).wrapping_mul(0xc2b2_ae3d_27d4_eb4f));
    let e = (d ^ d >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let f = (e ^ e >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    f ^ f >> 31
}

#[test]
fn every_path_gives_the_defined_value_and_parts_add_up() {
    let seed = 11;
    println!("seed {seed}");
    let mut state = seed;
    let bytes = random_bytes(&mut state, 3000);
    for len in (0..600).chain([1024, 2047, 2999, 3000]) {
        assert_eq!(checksum(&bytes[..len]), defined(&bytes[..len]), "{len} bytes");
    }
    for _ in 0..200 {
        let cut = (next(&mut state) % 375) as usize;
        let (mut first, mut second) = (Sum::default(), Sum::default());
        second.add(cut as u64, &bytes[cut * 8..]);
        first.add(0, &bytes[..cut * 8]);
        second.join(first);
        assert_eq!(second.seal(3000), defined(&bytes));
    }
    // Fixed values: stored checksums outlive this code.
    assert_eq!(checksum(b""), defined(b""));
    assert_eq!(checksum(b"kvasir"), 0x275f_2d92_0afc_9e36);
}

#[test]
fn bytes_are_counted() {
    let before = dataplane_checksum::checksummed_bytes();
    let _sum = dataplane_checksum::checksum(&[7; 5000]);
    // Other tests increase the counter as well.
    assert!(dataplane_checksum::checksummed_bytes() >= before + 5000);
}

#[test]
fn every_single_bit_flip_changes_about_half_of_the_bits() {
    let seed = 12;
    println!("seed {seed}");
    let mut state = seed;
    let mut counts = [0_u32; 64];
    let mut flips = 0;
    for contents in [vec![0; 4096], vec![0xff; 4096], random_bytes(&mut state, 4096)] {
        let before = checksum(&contents);
        let mut changed = contents;
        for bit in 0..4096 * 8 {
            changed[bit / 8] ^= 1 << (bit % 8);
            let difference = checksum(&changed) ^ before;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(difference, 0, "bit {bit}");
            let found = difference.count_ones();
            assert!((8..=56).contains(&found), "bit {bit} changes {found} bits");
            for (at, count) in counts.iter_mut().enumerate() {
                *count += (difference >> at & 1) as u32;
            }
            flips += 1;
        }
    }
    let shares = counts.map(|count| f64::from(count) / f64::from(flips));
    let (least, most) =
        shares.iter().fold((1.0_f64, 0.0_f64), |(low, high), share| (low.min(*share), high.max(*share)));
    println!("each bit of the checksum changes in {least:.4} to {most:.4} of {flips} flips");
    assert!(least > 0.49 && most < 0.51);
}

#[test]
fn exchanged_words_zero_runs_and_lengths_are_told_apart() {
    let seed = 13;
    println!("seed {seed}");
    let mut state = seed;
    // Few different words, as in a block with equal tokens.
    let mut bytes = random_bytes(&mut state, 2048);
    for (at, byte) in bytes.iter_mut().enumerate() {
        if at / 16 % 3 != 0 {
            *byte = (at / 16 % 3) as u8;
        }
    }
    let before = checksum(&bytes);
    let mut exchanges = 0;
    for width in [8, 16, 64] {
        for one in 0..2048 / width {
            for other in 0..one {
                let (low, high) = (other * width, one * width);
                if bytes[low..low + width] == bytes[high..high + width] {
                    continue;
                }
                let mut changed = bytes.clone();
                changed[low..low + width].copy_from_slice(&bytes[high..high + width]);
                changed[high..high + width].copy_from_slice(&bytes[low..low + width]);
                assert_ne!(checksum(&changed), before, "words of {width} at {low} and {high}");
                exchanges += 1;
            }
        }
    }
    println!("{exchanges} exchanges");
    let mut seen: Vec<u64> = (0..10_000).map(|len| checksum(&vec![0; len])).collect();
    seen.extend((1..4000).map(|len| checksum(&vec![0xff; len])));
    let count = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), count, "runs of equal bytes of every length");
    for from in (0..2048).step_by(16) {
        for len in [16, 64, 256] {
            let mut changed = bytes.clone();
            let end = (from + len).min(2048);
            changed[from..end].fill(0);
            assert!(changed == bytes || checksum(&changed) != before, "zeros from {from} to {end}");
        }
    }
}

/// Returns the number of pairs with equal keys.
fn collisions(mut keys: Vec<u32>) -> u64 {
    keys.sort_unstable();
    keys.chunk_by(|one, other| one == other).map(|run| run.len() as u64 * (run.len() as u64 - 1) / 2).sum()
}

/// Returns the multiples 0 to 9 of `factor` in the permutation of this number.
fn ordered(mut number: u64, factor: u64) -> impl Iterator<Item = u64> {
    let mut left: Vec<u64> = (0..10).map(|at| at * factor).collect();
    (1..=10).rev().map(move |count| {
        let at = number % count;
        number /= count;
        left.remove(at as usize)
    })
}

/// Returns the number of colliding pairs in the low, high and middle 32 bits.
fn collisions_of(found: &[u64]) -> [u64; 3] {
    [0, 32, 16].map(|shift| collisions(found.iter().map(|value| (value >> shift) as u32).collect()))
}

/// The sum itself, before `seal` hides it: different orders of lanes differ in all of its bits, or nearly
/// (orders share differences, so their pairs are not independent; the greatest count seen here is 810).
#[test]
fn sums_of_lanes_in_other_orders_collide_about_as_random_numbers_do() {
    for factor in [1, 5, 0x3f80_3f80, 1 << 28, 0x0001_0000_0001, 1 << 46, 1 << 53, 1 << 60] {
        let found: Vec<u64> = (0..1 << 21)
            .map(|number| {
                defined_sum(&ordered(number, factor).flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
            })
            .collect();
        let pairs = collisions_of(&found);
        println!("orders of ten multiples of {factor:#x}: {pairs:?} pairs (low, high, middle; 512 ± 23)");
        assert!(
            pairs.iter().all(|pairs| (400..=2048).contains(pairs)),
            "a part of the sum has lost two bits"
        );
    }
}

/// 2²¹ inputs of one kind, cut to 32 bits, collide as random numbers do: 512 pairs expected, standard
/// deviation 22.6.
#[test]
fn truncated_checksums_collide_as_random_numbers_do() {
    const COUNT: u64 = 1 << 21;
    let seed = 14;
    println!("seed {seed}");
    let mut state = seed;
    let base = random_bytes(&mut state, 256);
    type Make = fn(u64, &[u8], &mut u64) -> Vec<u8>;
    let kinds: [(&str, Make); 9] = [
        ("random", |_, _, state| random_bytes(state, 64)),
        ("counter in the first lane", |number, _, _| [number.to_le_bytes(), [0; 8]].concat()),
        ("counter in the high bits", |number, _, _| [0, number << 43, 0].map(u64::to_le_bytes).concat()),
        ("two counters", |number, _, _| [number & 0x7ff, 0, number >> 11].map(u64::to_le_bytes).concat()),
        ("two equal and opposite counters", |number, _, _| {
            let (one, other) = (number & 0x7ff, number >> 11);
            [one, one.wrapping_neg(), other << 32, other.wrapping_neg() << 32].map(u64::to_le_bytes).concat()
        }),
        ("two bits of 2,048 and one word", |number, base, _| {
            let mut bytes = base.to_vec();
            for bit in [number % 2048, number / 2048 % 1024] {
                bytes[bit as usize / 8] ^= 1 << (bit % 8);
            }
            bytes[255] = bytes[255].wrapping_add(bytes[0]);
            [&bytes[..], &number.to_le_bytes()[..]].concat()
        }),
        ("orders of ten small words", |number, _, _| ordered(number, 1).flat_map(u64::to_le_bytes).collect()),
        ("orders of ten words of 16 bytes", |number, _, _| {
            ordered(number, 0x3f80_3f80).flat_map(|word| [word, 0].map(u64::to_le_bytes)).flatten().collect()
        }),
        ("bf16 steps", |number, _, _| {
            (0..16_u32).flat_map(|at| (0x3f80 + (number >> (at % 7 * 3) & 7) as u16).to_le_bytes()).collect()
        }),
    ];
    for (name, make) in kinds {
        let found: Vec<u64> = (0..COUNT).map(|number| checksum(&make(number, &base, &mut state))).collect();
        let [low, high, middle] = collisions_of(&found);
        println!(
            "{name}: {low} pairs in the low 32 bits, {high} in the high, {middle} in the middle (512 ± 23)"
        );
        for pairs in [low, high, middle] {
            assert!((400..=624).contains(&pairs), "{name}: {pairs} pairs, five deviations from 512");
        }
    }
}
