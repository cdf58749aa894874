//! One request inside the engine.

use std::time::{Duration, Instant};

use dataplane_memory::SlotRef;
use kvstore_block::{BlockIdentity, IdentityChain};
use kvstore_store::TenantId;
use router_openai::{Finish, Sampling};
use router_tokens::{Detokenizer, StopStrings};
use tokio::sync::mpsc;
use tools_grammar::Grammar;
use xxhash_rust::xxh3::xxh3_64;

use crate::engine::Output;

/// Purpose of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Generate tokens.
    Generate,
    /// Compute the prompt's whole blocks and push them to another worker.
    Prefill {
        /// Number of the transfer.
        transfer: u64,
    },
}

/// Prefill worker from which the prompt's blocks can be fetched instead of being computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemotePrefill {
    pub(crate) transfer: u64,
    /// The sender's data plane, in the fabric's notation.
    pub(crate) address: String,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: u64,
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    pub(crate) sampling: Sampling,
    pub(crate) seed: u64,
    pub(crate) extras: Vec<String>,
    pub(crate) goal: Goal,
    /// Time for which the blocks are retained in the store; zero: no longer than any other's.
    pub(crate) retain_for: Duration,
    /// Source of the prompt's blocks; taken when the fetch starts, so that it is tried once.
    pub(crate) remote: Option<RemotePrefill>,
    /// Whether the store was asked for this node's blocks.
    pub(crate) store_fetch_tried: bool,
    /// Whether the store was asked for other nodes' blocks.
    pub(crate) remote_lookup_done: bool,
    chain: IdentityChain,
    pub(crate) identities: Vec<BlockIdentity>,
    /// Identity of the prompt's last reusable block, once known.
    content: Option<[u8; 16]>,
    pub(crate) table: Vec<SlotRef>,
    pub(crate) computed: usize,
    /// Leading blocks that the catalog knows.
    pub(crate) registered: usize,
    /// Leading blocks already passed to the transfer layer.
    pub(crate) pushed: usize,
    /// Prompt tokens found cached at first admission.
    pub(crate) cached_tokens: usize,
    /// Whether the sequence was preempted: cached blocks may then be its own.
    pub(crate) was_preempted: bool,
    pub(crate) detokenizer: Detokenizer,
    pub(crate) stop: StopStrings,
    /// Grammar that masks tokens outside the output's schema. It has accepted every output token so far, resumed ones included.
    pub(crate) grammar: Option<Grammar>,
    pub(crate) output: mpsc::Sender<Output>,
    pub(crate) arrived: Instant,
    pub(crate) last_token: Option<Instant>,
}

pub(crate) struct Start {
    pub(crate) id: u64,
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: Sampling,
    pub(crate) seed: u64,
    pub(crate) extras: Vec<String>,
    pub(crate) goal: Goal,
    pub(crate) retain_for: Duration,
    pub(crate) remote: Option<RemotePrefill>,
    pub(crate) chain: IdentityChain,
    pub(crate) detokenizer: Detokenizer,
    pub(crate) grammar: Option<Grammar>,
    pub(crate) output: mpsc::Sender<Output>,
}

impl Sequence {
    pub(crate) fn new(start: Start) -> Self {
        let stop = StopStrings::new(start.sampling.stop.clone(), start.sampling.include_stop);
        Self {
            id: start.id,
            prompt_len: start.prompt.len(),
            tokens: start.prompt,
            sampling: start.sampling,
            seed: start.seed,
            extras: start.extras,
            goal: start.goal,
            retain_for: start.retain_for,
            remote: start.remote,
            store_fetch_tried: false,
            remote_lookup_done: false,
            chain: start.chain,
            identities: Vec::new(),
            content: None,
            table: Vec::new(),
            computed: 0,
            registered: 0,
            pushed: 0,
            cached_tokens: 0,
            was_preempted: false,
            detokenizer: start.detokenizer,
            stop,
            grammar: start.grammar,
            output: start.output,
            arrived: Instant::now(),
            last_token: None,
        }
    }

    /// Tenant of the request: each cache salt is one.
    pub(crate) fn tenant(&self) -> TenantId {
        self.extras.first().map_or(TenantId(0), |salt| TenantId(xxh3_64(salt.as_bytes()) as u32))
    }

    /// Number of whole blocks before the last token, which is always computed here, since its logits are needed.
    pub(crate) fn reusable_blocks(&self, block_tokens: usize) -> usize {
        (self.tokens.len() - 1) / block_tokens
    }

    /// Position up to which this sequence is computed before the next token can be drawn (or it is done).
    pub(crate) fn target(&self, block_tokens: usize) -> usize {
        match self.goal {
            Goal::Generate => self.tokens.len(),
            Goal::Prefill { .. } => self.reusable_blocks(block_tokens) * block_tokens,
        }
    }

    /// Computes the identities of the first `blocks` blocks, all of whose tokens are known.
    pub(crate) fn identify(&mut self, blocks: usize, block_tokens: usize) {
        while self.identities.len() < blocks {
            let at = self.identities.len() * block_tokens;
            let identity = self.chain.next(&self.tokens[at..at + block_tokens]);
            self.identities.push(identity);
        }
        let wanted = (self.prompt_len - 1) / block_tokens;
        if self.content.is_none() && wanted > 0 && self.identities.len() >= wanted {
            self.content = Some(self.identities[wanted - 1].0);
        }
    }

    /// Identity of the prompt's whole blocks: equal in both legs of a hand-off, and different for every other request's blocks.
    /// Call after `identify` of these blocks.
    pub(crate) fn content(&self) -> [u8; 16] {
        self.content.unwrap_or_default()
    }

    /// Position at which the output starts, that of an interrupted run included.
    pub(crate) fn output_start(&self) -> usize {
        self.prompt_len.saturating_sub(self.sampling.resumed_tokens)
    }

    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Releases all blocks and the computed state; blocks in the catalog stay there.
    pub(crate) fn release_blocks(&mut self) {
        self.table.clear();
        self.computed = 0;
        self.registered = 0;
        self.store_fetch_tried = false;
    }

    /// Sends to the client. An error means that the receiver was dropped, whose cancellation is on its way.
    pub(crate) fn send(&self, output: Output) {
        let _cancelled = self.output.try_send(output);
    }

    pub(crate) fn finish(&mut self, finish: Finish) {
        let mut text = self.detokenizer.finish();
        if finish != Finish::Abort {
            let (shown, stopped) = self.stop.push(&text);
            text = shown;
            if !stopped {
                text.push_str(&self.stop.finish());
            }
        }
        let output =
            Output { text, finish: Some(finish), cached_tokens: self.cached_tokens, ..Output::default() };
        self.send(output);
    }
}
