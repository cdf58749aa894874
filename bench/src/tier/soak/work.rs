//! One thread of conversations: turns that offload new blocks, and visits that onboard old ones and compare them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_io::testing::Random;
use kvstore_store::{
    Description, HostBlock, Offload, Onboard, Plan, Prompt, RemoteCoverage, TenantId, Throttled,
};

use super::content;
use super::rig::{
    Answer, BLOCK_TOKENS, CONVERSATION_BLOCKS_MAX, Conversation, ONBOARD_BLOCKS_MAX, Rig, TURN_BLOCKS_MAX,
    add, get,
};
use super::{Plant, SoakArgs};

/// Longest wait for an answer; deadlines are at most half as long.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(20);
/// Most blocks that are held at a time.
const HOLD_BLOCKS_MAX: usize = 6;
/// Number of wrong bytes after which blocks are no longer named.
const REPORTED_WRONG_BYTES_MAX: u64 = 32;
/// Share of the time by which all data should have passed; the rest is for catching up.
const WORK_TIME_SHARE: f64 = 0.9;
/// Blocks that are read back for each new one.
const READS_PER_WRITE: f64 = 4.0;

/// A thread of conversations.
pub(super) struct Worker {
    rig: Arc<Rig>,
    thread: u64,
    random: Random,
    length: Duration,
    /// Distinct blocks that should pass, over all threads.
    wanted: u64,
    plant: Option<Plant>,
    started: Instant,
    stop: Arc<AtomicBool>,
    conversation: Option<Conversation>,
    conversations: u64,
    requests: u64,
    /// Blocks that a planted fault holds forever.
    leaked: Vec<HostBlock>,
}

impl Worker {
    pub(super) fn new(args: &SoakArgs, rig: &Arc<Rig>, thread: usize, stop: &Arc<AtomicBool>) -> Self {
        Self {
            rig: Arc::clone(rig),
            thread: thread as u64,
            random: Random(args.seed ^ ((thread as u64) << 40)),
            length: args.length(),
            wanted: args.data.div_ceil(args.block),
            plant: args.plant,
            started: Instant::now(),
            stop: Arc::clone(stop),
            conversation: None,
            conversations: 0,
            requests: 0,
            leaked: Vec::new(),
        }
    }

    /// Runs until stopped. Returns the blocks that a planted fault holds, to be kept.
    pub(super) fn run(mut self) -> Result<Vec<HostBlock>> {
        while !self.stop.load(Ordering::Relaxed) {
            let share = self.started.elapsed().as_secs_f64() / self.length.as_secs_f64();
            let (wanted, tally) = (self.wanted as f64, &self.rig.tally);
            let (distinct, verified) = (get(&tally.distinct) as f64, get(&tally.verified) as f64);
            // After the planned time the pace stays the same.
            if distinct <= wanted * (share / WORK_TIME_SHARE).min(share.max(1.0)) {
                self.turn()?;
                self.read_back()?;
            } else if verified <= wanted * share * READS_PER_WRITE {
                self.read_back()?;
            } else {
                std::thread::sleep(Duration::from_millis(5).min(self.length / 200));
            }
        }
        Ok(self.leaked)
    }

    /// Continues a conversation or begins one: looks up its blocks, and offloads the missing ones.
    fn turn(&mut self) -> Result<()> {
        let conversation = match self.conversation.take() {
            Some(conversation)
                if conversation.blocks < CONVERSATION_BLOCKS_MAX && self.random.chance(0.9) =>
            {
                conversation
            }
            _ => {
                self.conversations += 1;
                Conversation { number: (self.thread << 32) | self.conversations, blocks: 0 }
            }
        };
        let more = 1 + self.random.below(TURN_BLOCKS_MAX as u64) as u32;
        let blocks = (conversation.blocks + more).min(CONVERSATION_BLOCKS_MAX);
        let chain = conversation.chain(blocks);
        let held = self.rig.store.look_up(&chain);
        for (position, identity) in chain.iter().enumerate().skip(held) {
            if position >= conversation.blocks as usize {
                self.rig.expect(*identity);
            } else {
                add(&self.rig.tally.again, 1);
            }
            let slot = self.slot()?;
            content::fill(&slot, identity);
            let parent = position.checked_sub(1).map(|parent| chain[parent]);
            let description =
                Description { parent, position: position as u32, meta: Arc::from([]), tenant: TenantId(0) };
            self.offload(Offload { identity: *identity, description, slot })?;
        }
        let conversation = Conversation { blocks, ..conversation };
        self.conversation = Some(conversation);
        self.rig.publish(conversation);
        Ok(())
    }

    /// Waits for a free slot of the pool. No answer is expected meanwhile, so messages in the inbox answer
    /// cancelled requests; dropping them releases their slots, without which this thread could wait for its own
    /// slots.
    fn slot(&self) -> Result<SlotRef> {
        let (_, inbox) = self.rig.inboxes.get(self.thread as usize).context("an inbox for each thread")?;
        let since = Instant::now();
        loop {
            inbox.try_iter().for_each(drop);
            if let Some(slot) = self.rig.pool.acquire() {
                return Ok(slot);
            }
            ensure!(since.elapsed() < ANSWER_WITHIN, "no slot of the pool came free in {ANSWER_WITHIN:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn offload(&self, mut offload: Offload) -> Result<()> {
        let since = Instant::now();
        while let Err(Throttled(back)) = self.rig.store.offload(offload) {
            add(&self.rig.tally.throttled, 1);
            ensure!(since.elapsed() < ANSWER_WITHIN, "the store takes no block for {ANSWER_WITHIN:?}");
            std::thread::sleep(Duration::from_millis(1));
            offload = back;
        }
        Ok(())
    }

    /// Returns to a conversation of any thread.
    fn read_back(&mut self) -> Result<()> {
        // With a probability of 0.3 to the thread's own, which host memory probably has.
        let sample_conversation = self.rig.sample_conversation(self.random.draw());
        let Some(conversation) =
            self.conversation.filter(|_| self.random.chance(0.3)).or(sample_conversation)
        else {
            return Ok(());
        };
        let mut chain = conversation.chain(conversation.blocks);
        let held = self.rig.store.look_up(&chain);
        match self.random.below(100) {
            0..2 => {
                let from = self.random.below(chain.len() as u64) as usize;
                add(&self.rig.tally.forgets, 1);
                self.rig.store.forget(chain.split_off(from));
                Ok(())
            }
            2..10 => self.hold(&chain[..held.min(HOLD_BLOCKS_MAX)]),
            _ => self.onboard(&chain, held),
        }
    }

    /// Onboards blocks as an engine would, but with too short deadlines and cancellations.
    fn onboard(&mut self, chain: &[BlockIdentity], held: usize) -> Result<()> {
        self.rig.store.prompt_arrived(chain);
        let prompt = Prompt {
            chain,
            groups: &[],
            device_blocks: 0,
            tokens: chain.len() * BLOCK_TOKENS + 1,
            block_tokens: BLOCK_TOKENS,
            queued_tokens: 0,
        };
        let (blocks, deadline) = match self.rig.store.plan(&prompt, RemoteCoverage::Asked) {
            Plan::Onboard { blocks, deadline } => (blocks, deadline),
            // Onboarded anyway: the test is about bytes, not time.
            Plan::Recompute | Plan::AskOthers { .. } => (held, Instant::now() + PATIENCE),
        };
        let chain = &chain[..blocks.min(ONBOARD_BLOCKS_MAX)];
        if chain.is_empty() {
            return Ok(());
        }
        let (deadline, is_cancelled) = match self.random.below(100) {
            0..10 => (Instant::now() + Duration::from_micros(self.random.below(3000)), false),
            10..20 => (deadline, true),
            _ => (deadline, false),
        };
        let targets = chain.iter().map(|_| self.slot()).collect::<Result<Vec<_>>>()?;
        targets.iter().for_each(content::clear);
        self.requests += 1;
        let request = (self.thread << 32) | self.requests;
        let onboard = Onboard { request, chain: chain.to_vec(), first: 0, targets, deadline };
        if self.rig.store.onboard(onboard).is_err() {
            add(&self.rig.tally.throttled, 1);
            return Ok(());
        }
        if is_cancelled {
            std::thread::sleep(Duration::from_micros(self.random.below(2000)));
            self.rig.store.cancel(request);
            add(&self.rig.tally.cancelled, 1);
            return Ok(());
        }
        let Some((slots, verified)) = self.onboarded(request)? else { return Ok(()) };
        self.compare(&slots[..verified], chain);
        self.rig.store.mark_conversation_idle(chain);
        add(&self.rig.tally.short, usize::from(verified < chain.len()));
        Ok(())
    }

    /// Waits for the answer to this request. Answers to cancelled requests may precede it; their slots are released.
    fn onboarded(&self, request: u64) -> Result<Option<(Vec<SlotRef>, usize)>> {
        loop {
            match self.answer()? {
                Some(Answer::Onboarded { request: answered, slots, verified }) if answered == request => {
                    return Ok(Some((slots, verified)));
                }
                Some(_) => {}
                None => return Ok(None),
            }
        }
    }

    fn answer(&self) -> Result<Option<Answer>> {
        let (_, inbox) = self.rig.inboxes.get(self.thread as usize).context("an inbox for each thread")?;
        let answer = inbox.recv_timeout(ANSWER_WITHIN).ok();
        add(&self.rig.tally.unanswered, usize::from(answer.is_none()));
        Ok(answer)
    }

    fn compare(&mut self, slots: &[SlotRef], chain: &[BlockIdentity]) {
        for (slot, identity) in slots.iter().zip(chain) {
            if self.plant == Some(Plant::Wrong) && self.random.chance(0.1) {
                slot.slab().write(slot.slot(), 0, b"wrong");
            }
            let wrong = content::wrong_in_slot(slot, identity);
            // If all blocks are wrong, not every one needs to be named.
            if wrong > 0 && get(&self.rig.tally.wrong_bytes) < REPORTED_WRONG_BYTES_MAX {
                println!("WRONG: {wrong} bytes of block {:016x}", identity.short());
            }
            add(&self.rig.tally.wrong_bytes, wrong as usize);
            add(&self.rig.tally.verified, 1);
        }
    }

    /// Holds blocks in host memory for a while, and compares them.
    fn hold(&mut self, chain: &[BlockIdentity]) -> Result<()> {
        let (inbox, _) = self.rig.inboxes.get(self.thread as usize).context("an inbox for each thread")?;
        let inbox = inbox.clone();
        let reply = move |blocks| {
            // A thread that has ended expects no blocks.
            let _ended = inbox.send(Answer::Held(blocks));
        };
        if chain.is_empty() || self.rig.store.hold(chain.to_vec(), Instant::now() + PATIENCE, reply).is_err()
        {
            return Ok(());
        }
        add(&self.rig.tally.holds, 1);
        let mut blocks = loop {
            match self.answer()? {
                Some(Answer::Held(blocks)) => break blocks,
                Some(Answer::Onboarded { .. }) => {}
                None => return Ok(()),
            }
        };
        for (block, identity) in blocks.iter().zip(chain) {
            // A damaged block counts as wrong with all of its bytes.
            let wrong = block
                .to_bytes()
                .map_or(block.len() as u64, |bytes| content::wrong_in_bytes(&bytes, identity));
            add(&self.rig.tally.wrong_bytes, wrong as usize);
            add(&self.rig.tally.verified, 1);
        }
        std::thread::sleep(Duration::from_millis(self.random.below(20)));
        if self.plant == Some(Plant::Leak) && self.leaked.len() < HOLD_BLOCKS_MAX {
            self.leaked.append(&mut blocks);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::files::Scratch;
    use super::super::folder;
    use super::*;

    #[test]
    fn the_slots_of_answers_that_nobody_waits_for_come_back() {
        let parent = folder::choose(None).expect("a folder on a disk");
        let folder = Scratch::new(&parent).expect("a folder");
        let (host, disk, block) = (4 << 20, 12 << 20, 32 << 10);
        let args = SoakArgs { host, disk, block, threads: 1, ..SoakArgs::default() };
        let rig = Arc::new(Rig::new(&args, folder.path()).expect("a rig"));
        let worker = Worker::new(&args, &rig, 0, &Arc::new(AtomicBool::new(false)));
        let slots: Vec<SlotRef> = std::iter::from_fn(|| rig.pool.acquire()).collect();
        let count = slots.len();
        rig.inboxes[0].0.send(Answer::Onboarded { request: 1, slots, verified: 0 }).expect("an inbox");
        let started = Instant::now();
        let _slot = worker.slot().expect("a slot");
        assert!(started.elapsed() < ANSWER_WITHIN / 4, "after {:?}", started.elapsed());
        assert_eq!(rig.pool.free_count(), count - 1);
    }
}
