//! The clients of a pool over the store ([`StorePool`]), and what they must find.

use std::collections::HashMap;
use std::sync::Arc;

use kvstore_block::BlockIdentity;
use kvstore_remote::{Answer, Description, LookUpResult, PoolBlocks, Readable, Writable, with_identity};

use super::disk::write_slot;
use super::{BLOCK, Random, content};
use crate::memory::NewSlot;
use crate::pool::{Reading, StorePool};
use crate::store::Store;

/// The pool, and what its clients have.
pub(super) struct ModelPool {
    blocks: StorePool,
    next_question: u64,
    /// Look-ups that are answered later: the chains that were asked for.
    asked: HashMap<u64, Vec<BlockIdentity>>,
    /// Blocks that are being registered.
    registering: HashMap<u64, BlockIdentity>,
    reading: Vec<(BlockIdentity, Readable<Reading>)>,
    writing: Vec<(Vec<BlockIdentity>, usize, Writable<NewSlot>)>,
    pub(super) read: u64,
    pub(super) registered: u64,
}

impl ModelPool {
    pub(super) fn new(store: Arc<Store>) -> Self {
        Self {
            blocks: StorePool::new(store),
            next_question: 0,
            asked: HashMap::new(),
            registering: HashMap::new(),
            reading: Vec::new(),
            writing: Vec::new(),
            read: 0,
            registered: 0,
        }
    }

    fn question(&mut self) -> u64 {
        self.next_question += 1;
        self.next_question
    }

    /// A client asks for a chain, writes a block of it, or is done with something. `may_damage`: blocks in memory may be damaged.
    pub(super) fn step(&mut self, chain: Vec<BlockIdentity>, random: &mut Random, may_damage: bool) {
        match random.below(6) {
            0 | 1 => {
                let question = self.question();
                match self.blocks.look_up(question, &chain) {
                    LookUpResult::Ready(blocks) => self.found(&chain, blocks, may_damage),
                    LookUpResult::Pending => drop(self.asked.insert(question, chain)),
                }
            }
            2 | 3 => {
                let at = random.below(chain.len());
                if !self.blocks.contains(&chain[at])
                    && let Some(written) = self.blocks.reserve()
                {
                    write_slot(&written.slot, &content(&chain[at]));
                    self.writing.push((chain, at, written));
                }
            }
            4 => {
                if !self.writing.is_empty() {
                    let at = random.below(self.writing.len());
                    let (chain, at, written) = self.writing.swap_remove(at);
                    // A client that has gone leaves its slot as it is.
                    if random.percent(80) {
                        self.register(&chain, at, written);
                    }
                }
            }
            _ => {
                let left = random.below(self.reading.len() + 1);
                self.check_reading(may_damage);
                self.reading.truncate(left);
                if random.percent(10)
                    && let Some(identity) = chain.last()
                {
                    self.blocks.remove(identity);
                }
            }
        }
        self.take_answers(may_damage);
    }

    fn register(&mut self, chain: &[BlockIdentity], at: usize, written: Writable<NewSlot>) {
        let (identity, question) = (chain[at], self.question());
        let sum = dataplane_checksum::checksum(&content(&identity));
        let description = Description {
            parent: at.checked_sub(1).map_or(crate::disk::NO_PARENT, |before| chain[before]),
            bytes: BLOCK as u32,
            checksum: with_identity(sum, &identity),
            meta: !identity.short(),
        };
        self.registering.insert(question, identity);
        if let Some(is_kept) = self.blocks.register(question, identity, description, written) {
            self.was_registered(question, is_kept);
        }
    }

    fn was_registered(&mut self, question: u64, is_kept: bool) {
        assert!(self.registering.remove(&question).is_some(), "a block is registered once");
        self.registered += u64::from(is_kept);
    }

    fn found(&mut self, chain: &[BlockIdentity], blocks: Vec<Readable<Reading>>, may_damage: bool) {
        assert!(blocks.len() <= chain.len(), "no more than was asked for");
        self.read += blocks.len() as u64;
        self.reading.extend(chain.iter().copied().zip(blocks));
        self.check_reading(may_damage);
    }

    /// Checks that blocks that clients may read lie in the slots that they were told: no such slot may hold
    /// another block.
    fn check_reading(&self, may_damage: bool) {
        for (identity, block) in &self.reading {
            let mut bytes = [0; BLOCK];
            block.slot.slab().read(block.slot.slot(), 0, &mut bytes);
            // Damage is a few bits; another block differs everywhere.
            let wrong = bytes.iter().zip(content(identity)).filter(|(byte, right)| *byte != right).count();
            let most = if may_damage { BLOCK / 8 } else { 0 };
            assert!(wrong <= most, "a slot that a client may read has another block: {wrong} bytes differ");
            let sum = with_identity(dataplane_checksum::checksum(&content(identity)), identity);
            assert_eq!(block.description.checksum, sum, "a reader could not tell damage");
        }
    }

    pub(super) fn take_answers(&mut self, may_damage: bool) {
        while let Some(answer) = self.blocks.next_answer() {
            match answer {
                Answer::Found { question, blocks } => {
                    let chain = self.asked.remove(&question).expect("a look-up is answered once");
                    self.found(&chain, blocks, may_damage);
                }
                Answer::Registered { question, is_kept } => self.was_registered(question, is_kept),
            }
        }
    }

    /// Clients are done with everything that they have.
    pub(super) fn release_held(&mut self) {
        self.reading.clear();
        self.writing.clear();
    }

    /// Blocks that clients have given and that are not known yet.
    pub(super) fn registering(&self) -> impl Iterator<Item = &BlockIdentity> {
        self.registering.values()
    }

    /// Whether everything was answered.
    pub(super) fn is_quiet(&self) -> bool {
        self.asked.is_empty() && self.registering.is_empty() && self.reading.is_empty()
    }
}
