//! What a decision sees.

/// The request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Request {
    /// Prompt tokens.
    pub tokens: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Identifies a conversation, for affinity.
    pub session: Option<u64>,
}

impl Request {
    /// Blocks of the prompt, the last of which may not be whole.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.tokens.div_ceil(self.block_tokens.max(1))
    }
}

/// Tiers that a prefix can lie in: device, host, disk, remote.
pub const TIERS: usize = 4;

/// A worker as the decision sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Candidate {
    /// Identifies the worker over time, for affinity.
    pub identity: u64,
    /// Leading blocks of the request that it holds in a tier or a faster one.
    pub leading: [u32; TIERS],
    /// Tokens of prompts that it has still to compute, those routed a moment ago included.
    pub queued_tokens: u32,
    /// Blocks of the requests that it is decoding.
    pub decoding_blocks: u32,
    /// Requests that it has.
    pub requests: u32,
    /// Seconds to move the prompt's blocks from here to where it is decoded, if that is elsewhere.
    pub transfer_seconds: f64,
    /// It has not been there long: its cache and its learned speed say little.
    pub is_cold: bool,
    /// How fast it is.
    pub speed: crate::Speed,
}

impl Candidate {
    /// Leading blocks that a request really saves here, by tier: what lies in that tier and in no faster one.
    /// An engine computes the last token of a prompt in any case, and with it the whole block.
    #[must_use]
    #[inline]
    pub fn saved_blocks(&self, request: &Request) -> [u32; TIERS] {
        let most = request.tokens.saturating_sub(1) / request.block_tokens.max(1);
        if self.leading[0] == self.leading[TIERS - 1] {
            return [self.leading[0].min(most), 0, 0, 0];
        }
        let mut before = 0;
        self.leading.map(|leading| {
            let leading = leading.min(most).max(before);
            let here = leading - before;
            before = leading;
            here
        })
    }

    /// Tokens that it would have to compute.
    #[must_use]
    #[inline]
    pub fn uncached_tokens(&self, request: &Request) -> u32 {
        let saved: u32 = self.saved_blocks(request).iter().sum();
        request.tokens - saved * request.block_tokens
    }
}
