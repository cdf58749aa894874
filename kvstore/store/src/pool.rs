//! A store's blocks for other nodes, as a pool serves them ([`PoolBlocks`]).
//!
//! Clients read and write host memory's slots themselves. Blocks that only the disk has are brought into
//! memory first, within [`DISK_WAIT_MAX`]; a block that has not come by then is a miss. A block is verified
//! once by the pool, when it has been written there, and every reader verifies the bytes that it has read.
//!
//! Pools have parts of chains: a client sends each group of blocks to a node of its own. A block whose parent is not in memory here
//! begins a chain of this store.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use dataplane_fabric::wait::Notifier;
use dataplane_memory::{Slab, SlotGrant};
use kvstore_block::BlockIdentity;
use kvstore_catalog::TenantId;
use kvstore_remote::{
    Answer, Description as WireDescription, LookUpResult, PoolBlocks, PoolLevels, Readable, Writable,
    with_identity,
};

use crate::config::WriteMode;
use crate::disk::NO_PARENT;
use crate::memory::{HostBlock, NewSlot};
use crate::store::Store;

/// Longest time that a look-up waits for blocks of the disk: half of the default of `remote_tier.deadline`,
/// so that the answer arrives before a client counts a failure.
const DISK_WAIT_MAX: Duration = Duration::from_millis(100);
/// Slots with writes of former clients under way that are passed over for one new block.
const STRAY_SLOTS_MAX: usize = 8;

/// Serves the blocks of a store to other nodes. Listeners hear of the blocks that it evicts when the store's
/// thread publishes them, and may hear twice that host memory has a block, or does not have it any more.
pub struct StorePool {
    store: Arc<Store>,
    answers: Receiver<StoreReply>,
    sender: Sender<StoreReply>,
    notifier: Option<Arc<Notifier>>,
    /// Blocks that the store's thread has not registered yet, by the question, and their places in their chains.
    registering: HashMap<u64, BlockIdentity>,
    positions: HashMap<BlockIdentity, u32>,
}

/// An answer of the store's thread.
enum StoreReply {
    Held { question: u64, chain: Vec<BlockIdentity>, blocks: Vec<HostBlock> },
    Registered { question: u64, is_kept: bool },
}

/// Keeps a block in a slot whose name a client was told. The name is stale when the last client is done: after that the slot may hold
/// another block, which the client must neither read nor write.
pub struct Reading {
    // Ends before the slot may be used for another block.
    _granted: SlotGrant,
    _block: HostBlock,
}

impl StorePool {
    /// Creates the pool of a store, which other callers may use too. Panics when the store's disk is not
    /// written through: blocks that leave memory would be lost.
    #[must_use]
    pub fn new(store: Arc<Store>) -> Self {
        let is_written_through = store.disk_write().is_none_or(|mode| mode == WriteMode::Through);
        assert!(is_written_through, "the disk below a pool is written through");
        let (sender, answers) = unbounded();
        let (registering, positions) = (HashMap::new(), HashMap::new());
        Self { store, answers, sender, notifier: None, registering, positions }
    }

    /// The callback that sends an answer from the store's thread and notifies the pool's thread.
    fn answering(&self) -> impl FnOnce(StoreReply) + Send + 'static {
        let (sender, notifier) = (self.sender.clone(), self.notifier.clone());
        move |told| {
            // A pool that has ended needs no answers.
            let _ended = sender.send(told);
            if let Some(notifier) = notifier {
                notifier.notify();
            }
        }
    }
}

/// On the pool's thread, which alone makes and ends grants.
fn readable(identity: &BlockIdentity, block: HostBlock) -> Readable<Reading> {
    let description = WireDescription {
        parent: block.parent().unwrap_or(NO_PARENT),
        bytes: block.len() as u32,
        checksum: with_identity(block.checksum(), identity),
        meta: block.word(),
    };
    let slot = block.slot().clone();
    let hold = Reading { _granted: slot.grant(), _block: block };
    Readable { slot, description, hold }
}

/// The leading blocks that this node's own memory has: blocks of another pool are not passed on.
fn all_readable(chain: &[BlockIdentity], blocks: Vec<HostBlock>) -> Vec<Readable<Reading>> {
    let own = blocks.into_iter().take_while(|block| !block.is_mapped());
    chain.iter().zip(own).map(|(identity, block)| readable(identity, block)).collect()
}

impl PoolBlocks for StorePool {
    type Reading = Reading;
    type Writing = NewSlot;

    fn slab(&self) -> &Arc<Slab> {
        self.store.slab()
    }

    fn levels(&self) -> PoolLevels {
        let ([slots, _], (blocks, free)) = (self.store.slots(), self.store.host_usage());
        let evicted = self.store.counters().evicted();
        PoolLevels { slots: slots as usize, free, blocks, evicted }
    }

    fn look_up(&mut self, question: u64, chain: &[BlockIdentity]) -> LookUpResult<Reading> {
        let held = self.store.hold_prefix(chain);
        let is_below = chain.get(held.len()).is_some_and(|next| self.store.is_on_disk(next));
        if !is_below {
            return LookUpResult::Ready(all_readable(chain, held));
        }
        let chain = chain[..self.store.look_up(chain)].to_vec();
        let (answer, asked) = (self.answering(), chain.clone());
        let reply = move |blocks| answer(StoreReply::Held { question, chain: asked, blocks });
        match self.store.hold(chain.clone(), Instant::now() + DISK_WAIT_MAX, reply) {
            Ok(()) => LookUpResult::Pending,
            Err(_) => LookUpResult::Ready(all_readable(&chain, held)),
        }
    }

    fn find(&mut self, identity: &BlockIdentity) -> Option<Readable<Reading>> {
        let block = self.store.pin_now(&[*identity])?.pop()?;
        (!block.is_mapped()).then(|| readable(identity, block))
    }

    fn contains(&mut self, identity: &BlockIdentity) -> bool {
        let is_there = self.store.look_up(&[*identity]) > 0;
        if is_there {
            self.store.touch(&[*identity]);
        }
        is_there
    }

    fn reserve(&mut self) -> Option<Writable<NewSlot>> {
        // A client that is done with a block may still write to its slot: the next one must not be taken for it.
        let mut written = Vec::new();
        while written.len() < STRAY_SLOTS_MAX {
            let slot = self.store.reserve_evicting()?;
            if !slot.slot().has_stray_writes() {
                return Some(Writable { slot: slot.slot().clone(), hold: slot });
            }
            written.push(slot);
        }
        None
    }

    fn register(
        &mut self,
        question: u64,
        identity: BlockIdentity,
        description: WireDescription,
        written: Writable<NewSlot>,
    ) -> Option<bool> {
        let in_memory = self.store.pin_now(&[description.parent]).and_then(|mut parent| parent.pop());
        let of_parent = in_memory.map(|parent| parent.position());
        let of_parent = of_parent.or_else(|| self.positions.get(&description.parent).copied());
        let position = of_parent.map_or(0, |position| position + 1);
        let parent = of_parent.map(|_| description.parent);
        let meta = description.meta.to_le_bytes().into();
        let (bytes, checksum) = (description.bytes as usize, with_identity(description.checksum, &identity));
        let described = crate::Description { parent, position, meta, tenant: TenantId(0) };
        let answer = self.answering();
        let done = move |is_kept| answer(StoreReply::Registered { question, is_kept });
        match self.store.put_verified(identity, described, written.hold, (bytes, checksum), done) {
            Ok(()) => {
                self.registering.insert(question, identity);
                self.positions.insert(identity, position);
                None
            }
            Err(_) => Some(false),
        }
    }

    fn retain(&mut self, chain: &[BlockIdentity], how_long: Duration) {
        // A group of a chain is enough: a pool's store has no tiers on other nodes. Refused blocks are counted there.
        let _full = self.store.retain(chain, how_long);
    }

    fn remove(&mut self, identity: &BlockIdentity) {
        self.store.forget_on_host(vec![*identity]);
    }

    fn next_answer(&mut self) -> Option<Answer<Reading>> {
        match self.answers.try_recv().ok()? {
            StoreReply::Held { question, chain, blocks } => {
                Some(Answer::Found { question, blocks: all_readable(&chain, blocks) })
            }
            StoreReply::Registered { question, is_kept } => {
                if let Some(identity) = self.registering.remove(&question) {
                    self.positions.remove(&identity);
                }
                Some(Answer::Registered { question, is_kept })
            }
        }
    }

    fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    fn set_notifier(&mut self, notifier: Arc<Notifier>) {
        self.notifier = Some(notifier);
    }
}
