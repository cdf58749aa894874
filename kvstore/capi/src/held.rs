//! Blocks of the store that are pinned in host memory while they are read.
//!
//! A reader of several blocks requests all of them before it waits for the first, so that the disk reads them
//! in parallel. A reader that finds no room for a block releases its later blocks, so that of several readers
//! that do this one always makes progress.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_store::HostBlock;

use crate::backend::{BackendError, Identity, Loaded};
use crate::store::{QUEUE_PAUSE, StoreBackend, failed};

/// Interval at which a thread that waits for the store checks that the store still runs.
const ALIVE_CHECK: Duration = Duration::from_millis(100);

/// A block that was requested.
pub(crate) enum RequestedBlock {
    /// The block is in host memory.
    Resident(Vec<HostBlock>),
    /// The store's thread will answer.
    Pending(Receiver<Vec<HostBlock>>),
}

impl StoreBackend {
    /// Waits for an answer of the store's thread.
    pub(crate) fn answer<T>(&self, operation: &'static str, answer: &Receiver<T>) -> Result<T, BackendError> {
        loop {
            match answer.recv_timeout(ALIVE_CHECK) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) if self.store().is_alive() => {}
                Err(_) => return Err(failed(operation, "the store has stopped")),
            }
        }
    }

    /// Requests that the store hold the blocks of a chain in host memory; `None` when too many requests are in
    /// flight.
    fn ask(
        &self,
        operation: &'static str,
        chain: Vec<BlockIdentity>,
        deadline: Instant,
    ) -> Result<Option<Receiver<Vec<HostBlock>>>, BackendError> {
        let (reply, blocks) = sync_channel(1);
        let reply = move |blocks| {
            // The requester may have given up; dropping the answer releases the blocks.
            let _gone = reply.send(blocks);
        };
        match self.store().hold(chain, deadline, reply) {
            Ok(()) => Ok(Some(blocks)),
            Err(_) if self.store().is_alive() => Ok(None),
            Err(_) => Err(failed(operation, "the store has stopped")),
        }
    }

    /// Holds the blocks of a chain in host memory; `None` when too many requests are in flight.
    pub(crate) fn hold(
        &self,
        operation: &'static str,
        chain: Vec<BlockIdentity>,
        deadline: Instant,
    ) -> Result<Option<Vec<HostBlock>>, BackendError> {
        let asked = self.ask(operation, chain, deadline)?;
        asked.map(|blocks| self.answer(operation, &blocks)).transpose()
    }

    /// Requests a block, and counts it in `loaded` if the disk has to deliver it. `None`: the block is absent,
    /// or cannot be requested now. After the deadline the disk is not used.
    fn begin(
        &self,
        identity: &Identity,
        deadline: Instant,
        loaded: &mut Loaded,
    ) -> Result<Option<RequestedBlock>, BackendError> {
        let chain = [BlockIdentity(*identity)];
        if let Some(held) = self.store().hold_now(&chain) {
            return Ok(Some(RequestedBlock::Resident(held)));
        }
        if !self.is_there(identity) || Instant::now() >= deadline {
            return Ok(None);
        }
        let asked = self.ask("load", chain.into(), deadline)?;
        loaded.asked_of_disk += usize::from(asked.is_some());
        Ok(asked.map(RequestedBlock::Pending))
    }

    /// Requests blocks up to the first that is absent. All are requested before the first is waited for, so
    /// that the disk reads them in parallel. Each is a request of its own: to the store they are no chain.
    pub(crate) fn request_blocks(
        &self,
        identities: &[Identity],
        deadline: Instant,
        loaded: &mut Loaded,
    ) -> Result<VecDeque<RequestedBlock>, BackendError> {
        let mut asked = VecDeque::with_capacity(identities.len());
        for identity in identities {
            let Some(begun) = self.begin(identity, deadline, loaded)? else { break };
            asked.push_back(begun);
        }
        Ok(asked)
    }

    /// Waits for the next requested block, or requests it now. Empty: a miss. `is_alone`: the caller holds no
    /// other blocks, so waiting for a free slot cannot deadlock. Blocks from the disk are counted in `loaded`.
    pub(crate) fn arrive(
        &self,
        identity: &Identity,
        asked: &mut VecDeque<RequestedBlock>,
        is_alone: bool,
        deadline: Instant,
        loaded: &mut Loaded,
    ) -> Result<Vec<HostBlock>, BackendError> {
        let begun = match asked.pop_front() {
            None => self.begin(identity, deadline, loaded)?,
            begun => begun,
        };
        let mut held = match begun {
            None => Vec::new(),
            Some(RequestedBlock::Resident(held)) => held,
            Some(RequestedBlock::Pending(answer)) => {
                let held = self.answer("load", &answer)?;
                loaded.from_disk += held.len();
                held
            }
        };
        while is_alone && held.is_empty() && self.is_there(identity) && Instant::now() < deadline {
            // No slot is free for the block. Later blocks may hold the slots, here or in other loads; every
            // load releases them at this point, so one load always makes progress.
            asked.clear();
            let since = Instant::now();
            std::thread::sleep(QUEUE_PAUSE);
            held = self.hold("load", vec![BlockIdentity(*identity)], deadline)?.unwrap_or_default();
            if held.is_empty() && Instant::now() < deadline {
                loaded.room_wait += since.elapsed();
            }
        }
        Ok(held)
    }

    /// Returns the number of leading identities that have named the held blocks without interruption. A held
    /// block keeps its slot, so an identity that names that slot now has done so all the time.
    pub(crate) fn unchanged(&self, identities: &[Identity], held: &[HostBlock]) -> usize {
        let is_unchanged = |(identity, block): &(&Identity, &HostBlock)| {
            let current = self.store().pin_now(&[BlockIdentity(**identity)]);
            current.is_some_and(|current| current.iter().all(|current| current.is_same(block)))
        };
        identities.iter().zip(held).take_while(is_unchanged).count()
    }

    /// Holds all of these blocks if host memory has every one of them now and `is_right` accepts each;
    /// otherwise none. Does not wait, and does not count as a use: the load that follows does.
    pub(crate) fn hold_present(
        &self,
        identities: &[Identity],
        is_right: impl Fn(&HostBlock) -> bool,
    ) -> Vec<HostBlock> {
        let mut present = Vec::with_capacity(identities.len());
        for identity in identities {
            let held = self.store().pin_now(&[BlockIdentity(*identity)]);
            let Some(block) = held.and_then(|mut held| held.pop()).filter(&is_right) else {
                return Vec::new();
            };
            present.push(block);
        }
        present
    }

    /// Holds the leading blocks that `is_right` accepts, as far as host memory has room for all of them at
    /// once, and at least the first if it is in the store.
    pub(crate) fn hold_prefix(
        &self,
        identities: &[Identity],
        is_right: impl Fn(&HostBlock) -> bool,
        deadline: Instant,
        loaded: &mut Loaded,
    ) -> Result<Vec<HostBlock>, BackendError> {
        let mut asked = self.request_blocks(identities, deadline, loaded)?;
        let mut prefix: Vec<HostBlock> = Vec::with_capacity(asked.len());
        for identity in identities {
            let mut held = self.arrive(identity, &mut asked, prefix.is_empty(), deadline, loaded)?;
            match held.pop() {
                Some(block) if is_right(&block) => prefix.push(block),
                _ => break,
            }
        }
        Ok(prefix)
    }
}
