//! Blocks of the store that are held in host memory while somebody reads them.
//!
//! Whoever wants several asks for all of them before it waits for the first, so that the disk reads them at a time; and
//! whoever finds no room for one lets go of those behind it, so that of several who do the same one always goes on.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_store::HostBlock;

use crate::backend::{BackendError, Identity, Loaded};
use crate::store::{QUEUE_PAUSE, StoreBackend, failed};

/// How often one who waits for the store looks whether it still runs.
const ALIVE_CHECK: Duration = Duration::from_millis(100);

/// A block that was asked for.
pub(crate) enum Asked {
    /// Memory has it.
    Here(Vec<HostBlock>),
    /// The store's thread will tell.
    Coming(Receiver<Vec<HostBlock>>),
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

    /// Asks the store to hold the blocks of a chain in host memory; `None` when too many requests are inside.
    fn ask(
        &self,
        operation: &'static str,
        chain: Vec<BlockIdentity>,
        deadline: Instant,
    ) -> Result<Option<Receiver<Vec<HostBlock>>>, BackendError> {
        let (reply, blocks) = sync_channel(1);
        let reply = move |blocks| {
            // Whoever asked may have given up; the blocks go back with the answer.
            let _gone = reply.send(blocks);
        };
        match self.store().hold(chain, deadline, reply) {
            Ok(()) => Ok(Some(blocks)),
            Err(_) if self.store().is_alive() => Ok(None),
            Err(_) => Err(failed(operation, "the store has stopped")),
        }
    }

    /// Holds the blocks of a chain in host memory; `None` when too many requests are inside.
    pub(crate) fn hold(
        &self,
        operation: &'static str,
        chain: Vec<BlockIdentity>,
        deadline: Instant,
    ) -> Result<Option<Vec<HostBlock>>, BackendError> {
        let asked = self.ask(operation, chain, deadline)?;
        asked.map(|blocks| self.answer(operation, &blocks)).transpose()
    }

    /// Asks for a block, and counts it in `loaded` if the disk has to give it; `None` when it is not there, or cannot be asked for
    /// now. After the deadline the disk is not asked.
    fn begin(
        &self,
        identity: &Identity,
        deadline: Instant,
        loaded: &mut Loaded,
    ) -> Result<Option<Asked>, BackendError> {
        let chain = [BlockIdentity(*identity)];
        if let Some(held) = self.store().hold_now(&chain) {
            return Ok(Some(Asked::Here(held)));
        }
        if !self.is_there(identity) || Instant::now() >= deadline {
            return Ok(None);
        }
        let asked = self.ask("load", chain.into(), deadline)?;
        loaded.asked_of_disk += usize::from(asked.is_some());
        Ok(asked.map(Asked::Coming))
    }

    /// Asks for blocks up to the first that is not there. All are asked for before the first is waited for, so that the disk
    /// reads them at a time. Each stands for itself: they are no chain for the store.
    pub(crate) fn begin_all(
        &self,
        identities: &[Identity],
        deadline: Instant,
        loaded: &mut Loaded,
    ) -> Result<VecDeque<Asked>, BackendError> {
        let mut asked = VecDeque::with_capacity(identities.len());
        for identity in identities {
            let Some(begun) = self.begin(identity, deadline, loaded)? else { break };
            asked.push_back(begun);
        }
        Ok(asked)
    }

    /// Waits for the next block of those that were asked for, or asks for it now; nothing when it is a miss. `is_alone`: the
    /// caller holds no others, so that it is worth waiting for room. What came from the disk is counted in `loaded`.
    pub(crate) fn arrive(
        &self,
        identity: &Identity,
        asked: &mut VecDeque<Asked>,
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
            Some(Asked::Here(held)) => held,
            Some(Asked::Coming(answer)) => {
                let held = self.answer("load", &answer)?;
                loaded.from_disk += held.len();
                held
            }
        };
        while is_alone && held.is_empty() && self.is_there(identity) && Instant::now() < deadline {
            // There is no room for it now. Those behind it may have taken it, here or in other loads, which do the same: so
            // somebody always goes on.
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

    /// How many of these names, from the first on, have stood for the blocks that are held ever since: what is held keeps
    /// its slot, so a name that stands for that slot still did so all the time.
    pub(crate) fn unchanged(&self, identities: &[Identity], held: &[HostBlock]) -> usize {
        let is_unchanged = |(identity, block): &(&Identity, &HostBlock)| {
            let current = self.store().pin_now(&[BlockIdentity(**identity)]);
            current.is_some_and(|current| current.iter().all(|current| current.is_same(block)))
        };
        identities.iter().zip(held).take_while(is_unchanged).count()
    }

    /// Holds all of these blocks, if host memory has them now and they are right; else none. Waits for nothing. The load that
    /// follows is the use of them.
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

    /// Holds the leading blocks of these that are right in host memory, as far as it has room for all of them at a time, and
    /// the first one if it is there at all.
    pub(crate) fn hold_prefix(
        &self,
        identities: &[Identity],
        is_right: impl Fn(&HostBlock) -> bool,
        deadline: Instant,
        loaded: &mut Loaded,
    ) -> Result<Vec<HostBlock>, BackendError> {
        let mut asked = self.begin_all(identities, deadline, loaded)?;
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
