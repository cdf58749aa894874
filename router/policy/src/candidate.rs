//! Inputs of a decision.

/// The request to be placed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Request {
    /// Prompt tokens.
    pub tokens: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Hash of the conversation, for affinity.
    pub session: Option<u64>,
}

impl Request {
    /// Number of blocks of the prompt; the last one may be partial.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.tokens.div_ceil(self.block_tokens.max(1))
    }
}

/// Number of tiers that a prefix can lie in: device, host, disk, remote.
pub const TIERS: usize = 4;

/// A worker and its state, as inputs of the decision.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Candidate {
    /// Hash that identifies the worker over time, for affinity.
    pub identity: u64,
    /// Leading blocks of the request that the worker holds in each tier or a faster one.
    pub leading: [u32; TIERS],
    /// Prompt tokens that the worker has still to compute, those of requests routed a moment ago included.
    pub queued_tokens: u32,
    /// Blocks of the requests that the worker is decoding.
    pub decoding_blocks: u32,
    /// Requests at the worker.
    pub requests: u32,
    /// Seconds to move the prompt's blocks from here to the decode worker, if that is another one.
    pub transfer_seconds: f64,
    /// Whether the worker is new: its cache and its learned times are not significant yet.
    pub is_cold: bool,
    /// Learned coefficients of its time to the first token.
    pub coefficients: crate::TimeCoefficients,
}

impl Candidate {
    /// Leading blocks that need not be computed, by tier: those in that tier and in no faster one. An engine computes the last
    /// token of a prompt in any case, and with it the whole block.
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

    /// Tokens that the worker would have to compute.
    #[must_use]
    #[inline]
    pub fn uncached_tokens(&self, request: &Request) -> u32 {
        let saved: u32 = self.saved_blocks(request).iter().sum();
        request.tokens - saved * request.block_tokens
    }
}
