//! 64-bit xxh3 hashes of token blocks and of the prefixes that they end.
//!
//! The *block hash* covers the tokens of one block as little-endian u32, with seed 1337. The *sequence hash* is
//! chained: the first block's is its block hash, each later one hashes (parent's sequence hash, block hash),
//! both little-endian. Equal sequence hash means equal prefix, up to collisions. Other routers compute the same
//! hashes, so tables can be compared.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::TokenId;

/// Seed of every routing hash.
pub const HASH_SEED: u64 = 1337;

/// Hash of the tokens of one block.
#[must_use]
#[inline]
pub fn block_hash(tokens: &[TokenId]) -> u64 {
    #[cfg(target_endian = "little")]
    {
        xxh3_64_with_seed(bytemuck::must_cast_slice(tokens), HASH_SEED)
    }
    #[cfg(target_endian = "big")]
    {
        let mut hasher = Xxh3::with_seed(HASH_SEED);
        tokens.iter().for_each(|token| hasher.update(&token.to_le_bytes()));
        hasher.digest()
    }
}

/// Hash of one block's tokens and extras: the LoRA adapter and the cache salt at the start of a chain, images
/// and the like in the blocks that they reach into. Blocks with different extras differ.
#[must_use]
pub fn block_hash_with_extras<Extra: AsRef<[u8]>>(tokens: &[TokenId], extras: &[Extra]) -> u64 {
    if extras.is_empty() {
        return block_hash(tokens);
    }
    let mut hasher = Xxh3::with_seed(HASH_SEED);
    hasher.update(&block_hash(tokens).to_le_bytes());
    for extra in extras.iter().map(AsRef::as_ref) {
        // The length is hashed too: ["ab", "c"] is not ["a", "bc"].
        hasher.update(&(extra.len() as u64).to_le_bytes());
        hasher.update(extra);
    }
    hasher.digest()
}

/// Properties of a prompt besides its tokens that its blocks depend on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptExtras<'a> {
    /// Name of the LoRA adapter.
    pub lora: Option<&'a str>,
    /// Salt that keeps a tenant's blocks apart.
    pub cache_salt: Option<&'a str>,
    /// Images and the like, in order of the tokens.
    pub multimodal: &'a [Multimodal<'a>],
}

/// An image or the like in a prompt; hashed into each block that it reaches into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Multimodal<'a> {
    /// Index of the first token that stands for the item.
    pub start: usize,
    /// Number of tokens that stand for the item.
    pub tokens: usize,
    /// Identity of the item: engines use a hash of its contents.
    pub identity: &'a str,
}

/// Appends the block hashes of every whole block of a prompt to `hashes`. Routing looks these up; computed
/// once for a request. Allocates nothing beyond `hashes` unless there are extras.
pub fn block_hashes(
    tokens: &[TokenId],
    block_tokens: usize,
    extras: &PromptExtras<'_>,
    hashes: &mut Vec<u64>,
) {
    let blocks = tokens.chunks_exact(block_tokens);
    if *extras == PromptExtras::default() {
        hashes.extend(blocks.map(block_hash));
        return;
    }
    for (number, block) in blocks.enumerate() {
        // Only the first block includes adapter and salt: the later blocks are chained to it.
        let first = if number == 0 { [extras.lora, extras.cache_salt] } else { [None; 2] };
        let (start, end) = (number * block_tokens, (number + 1) * block_tokens);
        let reaches = |item: &&Multimodal<'_>| item.start < end && item.start + item.tokens > start;
        let here = extras.multimodal.iter().filter(reaches).map(|item| item.identity);
        // Engines mix adapter, images and salt in this order.
        let all: Vec<&str> = first[0].into_iter().chain(here).chain(first[1]).collect();
        hashes.push(block_hash_with_extras(block, &all));
    }
}

/// Returns the sequence hash of a prefix from the one before its last block, and that block's hash.
#[must_use]
#[inline]
pub fn chained_hash(parent: Option<u64>, block_hash: u64) -> u64 {
    let Some(parent) = parent else { return block_hash };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&parent.to_le_bytes());
    bytes[8..].copy_from_slice(&block_hash.to_le_bytes());
    xxh3_64_with_seed(&bytes, HASH_SEED)
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
    fn extras_keep_prompts_apart() {
        let tokens: Vec<u32> = (0..64).collect();
        let hashes = |extras: PromptExtras<'_>| {
            let mut out = Vec::new();
            block_hashes(&tokens, 16, &extras, &mut out);
            out
        };
        let plain = hashes(PromptExtras::default());
        assert_eq!(plain, tokens.chunks(16).map(block_hash).collect::<Vec<_>>());
        let lora = hashes(PromptExtras { lora: Some("a"), ..PromptExtras::default() });
        let salt = hashes(PromptExtras { cache_salt: Some("a"), ..PromptExtras::default() });
        assert_ne!(lora[0], plain[0]);
        assert_eq!(lora[1..], plain[1..], "the rest hangs below the first block");
        assert_eq!(salt[0], lora[0], "engines publish both without saying which");
        let cat = Multimodal { start: 17, tokens: 16, identity: "cat" };
        let image = hashes(PromptExtras { multimodal: &[cat], ..PromptExtras::default() });
        let differs: Vec<bool> = image.iter().zip(&plain).map(|(image, plain)| image != plain).collect();
        assert_eq!(differs, [false, true, true, false], "tokens 17 to 32");
        for (start, tokens) in [(16, 16), (16, 1), (31, 1)] {
            let cat = Multimodal { start, tokens, identity: "cat" };
            let image = hashes(PromptExtras { multimodal: &[cat], ..PromptExtras::default() });
            let differs: Vec<bool> = image.iter().zip(&plain).map(|(image, plain)| image != plain).collect();
            assert_eq!(differs, [false, true, false, false], "{tokens} tokens from {start} on");
        }
        assert_ne!(
            block_hash_with_extras(&tokens, &["ab", "c"]),
            block_hash_with_extras(&tokens, &["a", "bc"])
        );
        assert_eq!(block_hash_with_extras::<&str>(&tokens, &[]), block_hash(&tokens));
    }

    #[test]
    fn equal_prefixes_and_only_they_share_chained_hashes() {
        let chain = |tokens: &[u32]| -> Vec<u64> {
            let mut parent = None;
            let blocks = tokens.chunks_exact(4).map(|block| {
                parent = Some(chained_hash(parent, block_hash(block)));
                parent.unwrap_or_default()
            });
            blocks.collect()
        };
        let a = chain(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let b = chain(&[1, 2, 3, 4, 5, 6, 7, 9]);
        let c = chain(&[5, 6, 7, 8]);
        assert_eq!(a.len(), 2, "a block that is not whole has no hash");
        assert_eq!(a[0], b[0]);
        assert_ne!(a[1], b[1]);
        assert_ne!(a[1], c[0], "the same block after another prefix is another sequence");
        assert_eq!(chained_hash(Some(a[0]), block_hash(&[5, 6, 7, 8])), a[1]);
    }
}
