//! A store's blocks for other nodes: what a pool serves ([`PoolBlocks`]).
//!
//! Clients read and write host memory's slots themselves. What only the disk has is brought into memory first, for
//! [`BELOW_MAX`] at most; what has not come by then is a miss. A block is verified once, by the pool when it has been written there, and
//! every reader verifies what it has read.
//!
//! Pools have parts of chains: a client sends each group of blocks to a node of its own. A block whose parent is not in memory here
//! begins a chain of this store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use dataplane_fabric::wait::Bell;
use dataplane_memory::Slab;
use kvstore_block::BlockIdentity;
use kvstore_catalog::TenantId;
use kvstore_remote::{Answer, Description, LookedUp, PoolBlocks, PoolLevels, Readable, Writable, named};

use crate::memory::{HostBlock, NewSlot};
use crate::store::Store;

/// How long a look-up waits for blocks of the disk: about what clients wait for an answer.
const BELOW_MAX: Duration = Duration::from_millis(100);
/// The parent of a chain's first block.
const NO_PARENT: BlockIdentity = BlockIdentity([0; 16]);

/// The blocks of a store, whose disk, if it has one, is written through, and to whose events nobody listens.
pub struct StorePool {
    store: Arc<Store>,
    answers: Receiver<Answer<HostBlock>>,
    sender: Sender<Answer<HostBlock>>,
    bell: Option<Arc<Bell>>,
}

impl StorePool {
    /// The blocks of this store, which others may use too.
    #[must_use]
    pub fn new(store: Arc<Store>) -> Self {
        let (sender, answers) = unbounded();
        Self { store, answers, sender, bell: None }
    }

    /// What hands an answer over, from another thread.
    fn answering(&self) -> impl FnOnce(Answer<HostBlock>) + Send + 'static {
        let (sender, bell) = (self.sender.clone(), self.bell.clone());
        move |answer| {
            // A pool that has ended needs no answers.
            let _ended = sender.send(answer);
            if let Some(bell) = bell {
                bell.ring();
            }
        }
    }
}

fn readable(identity: &BlockIdentity, block: HostBlock) -> Readable<HostBlock> {
    let description = Description {
        parent: block.parent().unwrap_or(NO_PARENT),
        bytes: block.len() as u32,
        checksum: named(block.checksum(), identity),
        meta: block.word(),
    };
    Readable { slot: block.slot().clone(), description, hold: block }
}

fn all_readable(chain: &[BlockIdentity], blocks: Vec<HostBlock>) -> Vec<Readable<HostBlock>> {
    chain.iter().zip(blocks).map(|(identity, block)| readable(identity, block)).collect()
}

impl PoolBlocks for StorePool {
    type Reading = HostBlock;
    type Writing = NewSlot;

    fn slab(&self) -> &Arc<Slab> {
        self.store.slab()
    }

    fn levels(&self) -> PoolLevels {
        let ([slots, _], (blocks, free)) = (self.store.slots(), self.store.host_usage());
        let evicted = self.store.counters().evicted();
        PoolLevels { slots: slots as usize, free, blocks, evicted }
    }

    fn look_up(&mut self, question: u64, chain: &[BlockIdentity]) -> LookedUp<HostBlock> {
        let held = self.store.hold_prefix(chain);
        let is_below = chain.get(held.len()).is_some_and(|next| self.store.is_on_disk(next));
        if !is_below {
            return LookedUp::Now(all_readable(chain, held));
        }
        let chain = chain[..self.store.look_up(chain)].to_vec();
        let (answer, asked) = (self.answering(), chain.clone());
        let reply = move |blocks| answer(Answer::Found { question, blocks: all_readable(&asked, blocks) });
        match self.store.hold(chain.clone(), Instant::now() + BELOW_MAX, reply) {
            Ok(()) => LookedUp::Later,
            Err(_) => LookedUp::Now(all_readable(&chain, held)),
        }
    }

    fn find(&mut self, identity: &BlockIdentity) -> Option<Readable<HostBlock>> {
        let block = self.store.pin_now(&[*identity])?.pop()?;
        Some(readable(identity, block))
    }

    fn contains(&mut self, identity: &BlockIdentity) -> bool {
        let is_there = self.store.look_up(&[*identity]) > 0;
        if is_there {
            self.store.touch(&[*identity]);
        }
        is_there
    }

    fn reserve(&mut self) -> Option<Writable<NewSlot>> {
        let slot = self.store.reserve_evicting()?;
        Some(Writable { slot: slot.slot().clone(), hold: slot })
    }

    fn register(
        &mut self,
        question: u64,
        identity: BlockIdentity,
        description: Description,
        written: Writable<NewSlot>,
    ) -> Option<bool> {
        let parent = self.store.pin_now(&[description.parent]).and_then(|mut parent| parent.pop());
        let place = parent.map_or((None, 0), |parent| (Some(description.parent), parent.position() + 1));
        let (parent, position) = place;
        let meta = description.meta.to_le_bytes().into();
        let (bytes, checksum) = (description.bytes as usize, named(description.checksum, &identity));
        let described = crate::Description { parent, position, meta, tenant: TenantId(0) };
        let answer = self.answering();
        let done = move |is_kept| answer(Answer::Registered { question, is_kept });
        match self.store.put_verified(identity, described, written.hold, (bytes, checksum), done) {
            Ok(()) => None,
            Err(_) => Some(false),
        }
    }

    fn remove(&mut self, identity: &BlockIdentity) {
        self.store.forget_on_host(vec![*identity]);
    }

    fn next_answer(&mut self) -> Option<Answer<HostBlock>> {
        self.answers.try_recv().ok()
    }

    fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    fn set_bell(&mut self, bell: Arc<Bell>) {
        self.bell = Some(bell);
    }
}
