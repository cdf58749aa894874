//! Idle conversations, and the choice of those that are about to continue.
//!
//! A conversation is known by the last block of its chain: a prompt whose chain runs through that block continues it.
//! Memory is bounded by [`CONVERSATIONS_MAX`] and [`BLOCKS_MAX`]; the one that has been idle longest is dropped first, and
//! counts as one that did not return while it was watched.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use crate::plan::{ReturnConfig, ReturnTimes};
use kvstore_block::BlockIdentity;

use crate::held::HeldBlock;

/// Conversations that are watched.
const CONVERSATIONS_MAX: usize = 4096;
/// Blocks of all of their chains together: 16 MiB of identities.
const BLOCKS_MAX: usize = 1 << 20;
/// A conversation that has not returned after so many leads is given up: the blocks fetched for it were
/// fetched in vain.
const PATIENCE_LEADS: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No block has been brought up.
    Waiting,
    /// Blocks are being brought up, from the block `next` on.
    Fetching { next: usize, since: Instant },
    /// As many blocks as possible have been brought up.
    Fetched { at: Instant },
}

impl State {
    /// Blocks from `next` on are brought up now.
    fn fetching(self, next: usize, now: Instant) -> Self {
        match self {
            Self::Fetching { since, .. } => Self::Fetching { next, since },
            Self::Waiting | Self::Fetched { .. } => Self::Fetching { next, since: now },
        }
    }
}

#[derive(Debug)]
struct Idle {
    since: Instant,
    chain: Arc<[BlockIdentity]>,
    state: State,
    /// Blocks that are held for the conversation, or being fetched to be held.
    ahead: usize,
    /// Fetched blocks among `ahead`.
    fetched: usize,
    /// Fetched blocks that have arrived. If they were not held, the policy would evict them first, because no request has used them.
    held: Vec<HeldBlock>,
}

/// Idle conversations, and the blocks that are held for them.
#[derive(Debug)]
pub(crate) struct Conversations {
    config: ReturnConfig,
    times: ReturnTimes,
    /// By the last block of the chain.
    idle: HashMap<BlockIdentity, Idle>,
    /// In the order of going idle; entries whose time is not the conversation's any more are stale.
    order: VecDeque<(Instant, BlockIdentity)>,
    blocks: usize,
    /// Blocks held or fetched for conversations that have not returned.
    ahead: usize,
}

impl Conversations {
    pub(crate) fn new(config: ReturnConfig) -> Self {
        Self {
            config,
            times: ReturnTimes::new(config),
            idle: HashMap::new(),
            order: VecDeque::new(),
            blocks: 0,
            ahead: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.idle.is_empty()
    }

    /// Blocks held or fetched for conversations that have not returned.
    pub(crate) fn ahead(&self) -> usize {
        self.ahead
    }

    /// Records that no worker computes on this chain any more: its conversation is idle.
    pub(crate) fn mark_conversation_idle(&mut self, chain: Vec<BlockIdentity>, now: Instant) {
        let Some(&last) = chain.last() else { return };
        if let Some(before) = self.idle.remove(&last) {
            self.left(&before);
        }
        self.blocks += chain.len();
        self.order.push_back((now, last));
        self.idle.insert(
            last,
            Idle {
                since: now,
                chain: chain.into(),
                state: State::Waiting,
                ahead: 0,
                fetched: 0,
                held: Vec::new(),
            },
        );
        while self.idle.len() > CONVERSATIONS_MAX || self.blocks > BLOCKS_MAX {
            let Some((since, oldest)) = self.order.pop_front() else { return };
            if self.idle.get(&oldest).is_some_and(|idle| idle.since == since)
                && let Some(dropped) = self.idle.remove(&oldest)
            {
                self.left(&dropped);
                self.times.dropped(now.saturating_duration_since(dropped.since));
            }
        }
        if self.order.len() > 2 * CONVERSATIONS_MAX {
            self.order.retain(|(since, last)| self.idle.get(last).is_some_and(|idle| idle.since == *since));
        }
    }

    /// Ends the idle time of the conversation that a prompt continues. Returns the number of blocks that had
    /// been fetched for it, and the blocks that are held.
    pub(crate) fn prompt_arrived(
        &mut self,
        chain: &[BlockIdentity],
        now: Instant,
    ) -> (usize, Vec<HeldBlock>) {
        let Some(idle) = chain.iter().rev().find_map(|identity| self.idle.remove(identity)) else {
            return (0, Vec::new());
        };
        self.left(&idle);
        self.times.returned(now.saturating_duration_since(idle.since));
        (idle.fetched, idle.held)
    }

    /// Blocks that are held.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.idle.values().map(|idle| idle.held.len()).sum()
    }

    /// Holds blocks that were fetched for a conversation.
    pub(crate) fn hold(&mut self, last: &BlockIdentity, blocks: Vec<HeldBlock>) {
        if let Some(idle) = self.idle.get_mut(last).filter(|idle| idle.ahead > 0) {
            idle.held.extend(blocks);
        }
    }

    fn left(&mut self, idle: &Idle) {
        self.blocks -= idle.chain.len();
        self.ahead -= idle.ahead;
    }

    /// The conversation whose blocks are to be brought up next, the likeliest first: its name, its chain, and the first
    /// block that was not looked at yet.
    pub(crate) fn next(&self, now: Instant) -> Option<(BlockIdentity, Arc<[BlockIdentity]>, usize)> {
        let chance = |idle: &Idle| {
            let silent = now.saturating_duration_since(idle.since);
            self.times.should_prefetch(silent).then(|| self.times.chance(silent, self.config.lead))
        };
        let candidates = self.idle.iter().filter_map(|(&last, idle)| match idle.state {
            // A fetch that was begun is finished first.
            State::Fetching { next, .. } => Some((f64::INFINITY, last, idle, next)),
            State::Waiting => chance(idle).map(|chance| (chance, last, idle, 0)),
            State::Fetched { .. } => None,
        });
        // Of equal chances, the conversation that has been idle longest is first.
        let order = |idle: &Idle, last: &BlockIdentity| (std::cmp::Reverse(idle.since), last.0);
        let (_, last, idle, next) = candidates.max_by(|one, other| {
            one.0.total_cmp(&other.0).then_with(|| order(one.2, &one.1).cmp(&order(other.2, &other.1)))
        })?;
        Some((last, Arc::clone(&idle.chain), next))
    }

    /// Records that the blocks before `next` have been handled; `fetched` of them are on their way.
    pub(crate) fn record_progress(
        &mut self,
        last: &BlockIdentity,
        next: usize,
        fetched: usize,
        now: Instant,
    ) {
        if let Some(idle) = self.idle.get_mut(last) {
            idle.state = idle.state.fetching(next, now);
            idle.fetched += fetched;
            idle.ahead += fetched;
            self.ahead += fetched;
        }
    }

    /// The same for blocks that were in host memory and are held there.
    pub(crate) fn found(&mut self, last: &BlockIdentity, next: usize, blocks: Vec<HeldBlock>, now: Instant) {
        if let Some(idle) = self.idle.get_mut(last) {
            idle.state = idle.state.fetching(next, now);
            idle.ahead += blocks.len();
            self.ahead += blocks.len();
            idle.held.extend(blocks);
        }
    }

    /// Records that no further block can be brought up for the conversation.
    pub(crate) fn fetched(&mut self, last: &BlockIdentity, now: Instant) {
        if let Some(idle) = self.idle.get_mut(last) {
            idle.state = State::Fetched { at: now };
        }
    }

    /// Gives up on conversations that blocks were fetched for and that did not return; returns the number of
    /// blocks fetched in vain.
    pub(crate) fn give_up(&mut self, now: Instant) -> usize {
        let patience = self.config.lead * PATIENCE_LEADS;
        let (mut wasted, mut given_up) = (0, 0);
        for idle in self.idle.values_mut() {
            let (State::Fetched { at } | State::Fetching { since: at, .. }) = idle.state else { continue };
            if now.saturating_duration_since(at) > patience {
                wasted += std::mem::take(&mut idle.fetched);
                given_up += std::mem::take(&mut idle.ahead);
                idle.held.clear();
                idle.state = State::Fetched { at };
            }
        }
        self.ahead -= given_up;
        wasted
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn chain(of: u8, blocks: u8) -> Vec<BlockIdentity> {
        (0..blocks)
            .map(|block| BlockIdentity([of, block, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]))
            .collect()
    }

    /// Conversations that return after four seconds each.
    fn learnt() -> (Conversations, Instant) {
        let mut conversations =
            Conversations::new(ReturnConfig { lead: Duration::from_secs(1), ..ReturnConfig::default() });
        let mut now = Instant::now();
        for turn in 0..40 {
            conversations.mark_conversation_idle(chain(1, turn + 1), now);
            now += Duration::from_secs(4);
            assert_eq!(conversations.prompt_arrived(&chain(1, turn + 3), now).0, 0);
        }
        (conversations, now)
    }

    #[test]
    fn a_conversation_is_fetched_shortly_before_it_returns_and_once() {
        let (mut conversations, start) = learnt();
        let turn = chain(2, 9);
        conversations.mark_conversation_idle(turn.clone(), start);
        assert!(conversations.next(start + Duration::from_millis(500)).is_none(), "too early");
        let now = start + Duration::from_millis(3500);
        let (last, blocks, next) = conversations.next(now).expect("due");
        assert_eq!((last, blocks.len(), next), (turn[8], 9, 0));
        conversations.record_progress(&last, 6, 4, now);
        assert_eq!(conversations.next(now).map(|(_, _, next)| next), Some(6), "what was begun is ended");
        conversations.fetched(&last, now);
        assert!(conversations.next(now).is_none() && conversations.ahead() == 4);
        assert_eq!(conversations.prompt_arrived(&chain(2, 12), now).0, 4);
        assert!(conversations.is_empty() && conversations.ahead() == 0);
    }

    #[test]
    fn what_was_fetched_in_vain_is_given_up_once() {
        let (mut conversations, start) = learnt();
        conversations.mark_conversation_idle(chain(3, 5), start);
        let (last, ..) = conversations.next(start + Duration::from_secs(4)).expect("due");
        conversations.record_progress(&last, 5, 5, start + Duration::from_secs(4));
        conversations.fetched(&last, start + Duration::from_secs(4));
        assert_eq!(conversations.give_up(start + Duration::from_secs(5)), 0);
        assert_eq!(conversations.give_up(start + Duration::from_secs(9)), 5);
        assert_eq!(conversations.give_up(start + Duration::from_secs(10)), 0);
        assert_eq!((conversations.ahead(), conversations.prompt_arrived(&chain(3, 6), start).0), (0, 0));
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_go_first() {
        let mut conversations = Conversations::new(ReturnConfig::default());
        let now = Instant::now();
        let named = |number: usize| {
            let mut name = [0; 16];
            name[..8].copy_from_slice(&(number as u64).to_le_bytes());
            vec![BlockIdentity([7; 16]), BlockIdentity(name)]
        };
        for number in 0..3 * CONVERSATIONS_MAX {
            // One of them again and again: its old entries in the order are stale.
            conversations.mark_conversation_idle(named(1), now + Duration::from_micros(2 * number as u64));
            conversations.mark_conversation_idle(
                named(10 + number),
                now + Duration::from_micros(2 * number as u64 + 1),
            );
        }
        assert_eq!(conversations.idle.len(), CONVERSATIONS_MAX);
        assert_eq!(conversations.blocks, 2 * CONVERSATIONS_MAX);
        assert!(conversations.order.len() <= 2 * CONVERSATIONS_MAX);
        assert!(conversations.idle.contains_key(&named(1)[1]), "the latest stay");
        assert!(!conversations.idle.contains_key(&named(10)[1]), "the oldest go");
        conversations.mark_conversation_idle(
            vec![BlockIdentity([9; 16]); BLOCKS_MAX + 1],
            now + Duration::from_secs(1),
        );
        assert!(conversations.blocks <= BLOCKS_MAX, "{}", conversations.blocks);
    }
}
