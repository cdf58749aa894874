//! The identity of stored KV: a 128-bit chain of keyed BLAKE3.
//!
//! The key is derived from everything that decides what the bytes mean (model and layout fingerprint) and
//! from the tenant's salt, so chains of different models or tenants never meet. Each step hashes (parent
//! identity, tokens). Truncation to 128 bits keeps the chance of a collision among 10^12 blocks near 10^-15.

use crate::TokenId;

/// Identifies the content of one block, prefix included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockIdentity(pub [u8; 16]);

impl BlockIdentity {
    /// The low 64 bits, little-endian: a short name for logs and for engines' event streams.
    #[must_use]
    pub fn short(&self) -> u64 {
        let mut low = [0; 8];
        low.copy_from_slice(&self.0[..8]);
        u64::from_le_bytes(low)
    }
}

const KEY_CONTEXT: &str = "kvasir 2026-11 stored KV block identity v1";

/// Chains blocks into identities.
#[derive(Debug, Clone)]
pub struct IdentityChain {
    key: [u8; 32],
    parent: BlockIdentity,
}

impl IdentityChain {
    /// Starts a chain. `fingerprint` covers model, weights and layout; `extras` the tenant's salt, the
    /// LoRA name and multimodal hashes, in a fixed order.
    #[must_use]
    pub fn new(fingerprint: u64, extras: &[&str]) -> Self {
        let mut material = Vec::with_capacity(64);
        material.extend(fingerprint.to_le_bytes());
        for extra in extras {
            material.extend((extra.len() as u64).to_le_bytes());
            material.extend(extra.as_bytes());
        }
        Self { key: blake3::derive_key(KEY_CONTEXT, &material), parent: BlockIdentity([0; 16]) }
    }

    /// Returns the identity of the next block.
    pub fn next(&mut self, tokens: &[TokenId]) -> BlockIdentity {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&self.parent.0);
        let mut bytes = [0; 256];
        for chunk in tokens.chunks(64) {
            for (token, out) in chunk.iter().zip(bytes.chunks_exact_mut(4)) {
                out.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..chunk.len() * 4]);
        }
        let mut identity = [0; 16];
        identity.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        self.parent = BlockIdentity(identity);
        self.parent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_tenant_prefix_and_tokens_all_count() {
        let first = |fingerprint, extras: &[&str], tokens: &[u32]| {
            IdentityChain::new(fingerprint, extras).next(tokens)
        };
        let base = first(1, &[], &[1, 2, 3]);
        assert_eq!(base, first(1, &[], &[1, 2, 3]));
        assert_ne!(base, first(2, &[], &[1, 2, 3]));
        assert_ne!(base, first(1, &["tenant"], &[1, 2, 3]));
        assert_ne!(base, first(1, &[], &[1, 2, 4]));
        assert_ne!(first(1, &["ab"], &[1]), first(1, &["a", "b"], &[1]));
        let mut chain = IdentityChain::new(1, &[]);
        chain.next(&[9]);
        assert_ne!(chain.next(&[1, 2, 3]), base, "the prefix counts");
    }

    #[test]
    fn a_short_name_is_the_beginning() {
        let identity = BlockIdentity([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9, 9, 9, 9]);
        assert_eq!(identity.short(), 0x0807_0605_0403_0201);
    }
}
