//! The blocks that are stored and the order in which they are requested: equal on all sides, from a seed.

use bytes::Bytes;

/// Random bytes of which every block is a part; more than caches hold.
const SOURCE_BYTES: usize = 64 << 20;
/// Distance in bytes between the samples of a block that is not compared as a whole.
const SAMPLE_STRIDE: usize = 4096 + 64;
const SAMPLE_BYTES: usize = 16;

/// xorshift64*, from a seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number from 0 up to 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for at in (1..values.len()).rev() {
            values.swap(at, (self.next() % (at as u64 + 1)) as usize);
        }
    }
}

/// SplitMix64's finaliser.
pub fn mix(value: u64) -> u64 {
    let mut value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// The bytes of each block.
#[derive(Clone)]
pub struct Contents {
    source: Bytes,
    block_bytes: usize,
}

impl Contents {
    pub fn new(block_bytes: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut source = Vec::with_capacity(SOURCE_BYTES + block_bytes);
        while source.len() < SOURCE_BYTES + block_bytes {
            source.extend(random.next().to_le_bytes());
        }
        Self { source: source.into(), block_bytes }
    }

    /// Returns the block of a key. No two keys below a million have the same bytes.
    pub fn block(&self, key: u64) -> Bytes {
        let at = key as usize * 64 % SOURCE_BYTES;
        self.source.slice(at..at + self.block_bytes)
    }

    /// Whether the bytes read are the block's: a sample, or `all` of them.
    pub fn is_right(&self, key: u64, all: bool, mut read: impl FnMut(usize, &mut [u8])) -> bool {
        let block = self.block(key);
        if all {
            let mut bytes = vec![0; self.block_bytes];
            read(0, &mut bytes);
            return bytes == block;
        }
        let mut sample = [0; SAMPLE_BYTES];
        let last = self.block_bytes - SAMPLE_BYTES;
        (0..last).step_by(SAMPLE_STRIDE).chain([last]).all(|at| {
            read(at, &mut sample);
            sample == block[at..at + SAMPLE_BYTES]
        })
    }
}

/// Draws keys in a shuffled order, the most frequent `n^exponent` times as often as the `n`-th.
pub fn zipf(keys: u64, count: usize, exponent: f64, seed: u64) -> Vec<u64> {
    let mut random = Random::new(seed);
    let mut by_rank: Vec<u64> = (0..keys).collect();
    random.shuffle(&mut by_rank);
    let mut sum = 0.0;
    let cumulative: Vec<f64> = (1..=keys)
        .map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        })
        .collect();
    (0..count)
        .map(|_| {
            let wanted = random.unit() * sum;
            let rank = cumulative.partition_point(|&up_to| up_to < wanted);
            by_rank[rank.min(by_rank.len() - 1)]
        })
        .collect()
}
