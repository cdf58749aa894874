//! 64-bit xxh3 hashes of token blocks and of the prefixes that they end.
//!
//! The *block hash* covers the tokens of one block as little-endian u32, with seed 1337. The *sequence hash*
//! is chained: the first block's is its block hash, each later one hashes (parent's sequence hash, block
//! hash), both little-endian. Equal sequence hash means equal prefix, up to collisions. This is what other
//! routers of this field compute, so tables can be compared.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::TokenId;

/// Seed of every routing hash.
pub const HASH_SEED: u64 = 1337;

/// Tokens hashed per step: their bytes are gathered on the stack, since a token slice has no portable bytes.
const GATHERED_TOKENS: usize = 64;

/// Hash of the tokens of one block.
#[must_use]
pub fn block_hash(tokens: &[TokenId]) -> u64 {
    let mut bytes = [0; GATHERED_TOKENS * 4];
    if tokens.len() <= GATHERED_TOKENS {
        return xxh3_64_with_seed(gather(tokens, &mut bytes), HASH_SEED);
    }
    let mut hasher = Xxh3::with_seed(HASH_SEED);
    tokens.chunks(GATHERED_TOKENS).for_each(|chunk| hasher.update(gather(chunk, &mut bytes)));
    hasher.digest()
}

fn gather<'a>(tokens: &[TokenId], bytes: &'a mut [u8; GATHERED_TOKENS * 4]) -> &'a [u8] {
    for (token, out) in tokens.iter().zip(bytes.chunks_exact_mut(4)) {
        out.copy_from_slice(&token.to_le_bytes());
    }
    &bytes[..tokens.len() * 4]
}

/// Chains block hashes into sequence hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceHasher {
    parent: Option<u64>,
}

impl SequenceHasher {
    /// The chain of plain requests.
    #[must_use]
    pub fn new() -> Self {
        Self { parent: None }
    }

    /// The chain of requests that share nothing with others: `extras` are the LoRA name, the cache salt and
    /// whatever else an engine mixes into its first block.
    #[must_use]
    pub fn with_extras(extras: &[&str]) -> Self {
        if extras.is_empty() {
            return Self::new();
        }
        let mut hasher = Xxh3::with_seed(HASH_SEED);
        for extra in extras {
            hasher.update(&(extra.len() as u64).to_le_bytes());
            hasher.update(extra.as_bytes());
        }
        Self { parent: Some(hasher.digest()) }
    }

    /// Goes on after a known prefix.
    #[must_use]
    pub fn after(sequence_hash: u64) -> Self {
        Self { parent: Some(sequence_hash) }
    }

    /// The sequence hash of the prefix that ends with this block.
    pub fn next(&mut self, block: &[TokenId]) -> u64 {
        let own = block_hash(block);
        let chained = match self.parent {
            None => own,
            Some(parent) => {
                let mut bytes = [0; 16];
                bytes[..8].copy_from_slice(&parent.to_le_bytes());
                bytes[8..].copy_from_slice(&own.to_le_bytes());
                xxh3_64_with_seed(&bytes, HASH_SEED)
            }
        };
        self.parent = Some(chained);
        chained
    }
}

impl Default for SequenceHasher {
    fn default() -> Self {
        Self::new()
    }
}

/// Sequence hashes of every whole block of `tokens`, appended to `hashes`.
pub fn sequence_hashes(
    mut hasher: SequenceHasher,
    tokens: &[TokenId],
    block_tokens: usize,
    hashes: &mut Vec<u64>,
) {
    hashes.extend(tokens.chunks_exact(block_tokens).map(|block| hasher.next(block)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interoperable_vector() {
        assert_eq!(block_hash(&[1, 2, 3, 4]), 14_643_705_804_678_351_452);
    }

    #[test]
    fn long_blocks_hash_like_their_bytes() {
        for len in [0, 1, 16, 63, 64, 65, 128, 1000] {
            let tokens: Vec<u32> = (0..len).map(|n| n * 77).collect();
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            assert_eq!(block_hash(&tokens), xxh3_64_with_seed(&bytes, HASH_SEED), "{len} tokens");
        }
    }

    #[test]
    fn equal_prefixes_and_only_they_share_hashes() {
        let hashes = |hasher, tokens: &[u32]| {
            let mut out = Vec::new();
            sequence_hashes(hasher, tokens, 4, &mut out);
            out
        };
        let plain = SequenceHasher::new();
        let a = hashes(plain, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let b = hashes(plain, &[1, 2, 3, 4, 5, 6, 7, 9]);
        let c = hashes(plain, &[5, 6, 7, 8]);
        assert_eq!(a.len(), 2, "a block that is not whole has no hash");
        assert_eq!(a[0], b[0]);
        assert_ne!(a[1], b[1]);
        assert_ne!(a[1], c[0], "the same block after another prefix is another sequence");
        assert_eq!(hashes(SequenceHasher::after(a[0]), &[5, 6, 7, 8])[0], a[1]);
        let salted = hashes(SequenceHasher::with_extras(&["tenant"]), &[1, 2, 3, 4]);
        assert_ne!(salted[0], a[0]);
        assert_eq!(SequenceHasher::with_extras(&[]), plain);
        assert_ne!(SequenceHasher::with_extras(&["ab", "c"]), SequenceHasher::with_extras(&["a", "bc"]));
    }
}
