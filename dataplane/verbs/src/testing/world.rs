//! State of all software devices of the process, behind one lock.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use rustix::event::EventfdFlags;

use super::accelerator::Beside;
use crate::ffi::{self, ScatterGatherEntry, WorkCompletion};

/// Entries of one work request that a software device takes.
pub(super) const ENTRIES_MAX: usize = 32;
/// Inline bytes of one work request that a software device takes.
pub(super) const INLINE_MAX: usize = 512;

/// Faults that a software device injects.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// `ibv_post_send` accepts this many more work requests, then returns ENOMEM.
    pub post_send_fails_after: Option<u32>,
    /// `ibv_create_qp` creates this many more pairs, then returns ENOMEM.
    pub create_pair_fails_after: Option<u32>,
    /// `ibv_modify_qp` makes this many more steps to "ready to receive" or "ready to send", then returns EINVAL.
    pub connect_pair_fails_after: Option<u32>,
    /// `ibv_reg_mr` registers this many more regions, then returns ENOMEM.
    pub register_fails_after: Option<u32>,
    /// Duration of each `ibv_create_qp`, `ibv_modify_qp` and `ibv_destroy_qp`.
    pub command_takes: Duration,
    /// `ibv_modify_qp` to the error state and `ibv_destroy_qp` fail with EIO, and the pairs stay live.
    pub pairs_go_on: bool,
    /// This many more work requests are carried out, then one completes with this `enum ibv_wc_status`.
    pub completion_fails_after: Option<(u32, u32)>,
}

/// Numbers of objects that exist on a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of open contexts.
    pub contexts: usize,
    /// Protection domains.
    pub domains: usize,
    /// Memory regions.
    pub regions: usize,
    /// Memory regions that peers may read or write.
    pub shown_regions: usize,
    /// Completion queues.
    pub completion_queues: usize,
    /// Completion channels.
    pub channels: usize,
    /// Shared receive queues.
    pub shared_receives: usize,
    /// Queue pairs.
    pub queue_pairs: usize,
}

/// Counts down; true when the count is used up.
pub(super) fn strikes(count: &mut Option<u32>) -> bool {
    match count {
        None => false,
        Some(0) => true,
        Some(left) => {
            *left -= 1;
            false
        }
    }
}

pub(super) struct DeviceState {
    /// Address of the leaked `ibv_device`.
    pub(super) raw: usize,
    pub(super) faults: Faults,
    pub(super) is_cut: bool,
    pub(super) is_holding: bool,
    pub(super) is_discarding: bool,
    /// Threads that made, changed or destroyed pairs.
    pub(super) command_threads: HashSet<ThreadId>,
}

pub(super) struct ContextState {
    pub(super) device: u32,
    pub(super) events: VecDeque<(usize, u32)>,
    pub(super) wake: OwnedFd,
}

pub(super) struct RegionState {
    pub(super) domain: u32,
    pub(super) address: u64,
    pub(super) length: u64,
    /// Flags of the access that peers have.
    pub(super) remote: u32,
}

pub(super) struct CompletionState {
    pub(super) raw: usize,
    pub(super) context: u32,
    pub(super) channel: u32,
    pub(super) capacity: usize,
    pub(super) is_armed: bool,
    /// Completions, each with the send queue slots that polling it frees.
    pub(super) entries: VecDeque<(WorkCompletion, u32)>,
    pub(super) unacknowledged: u32,
}

pub(super) struct Receive {
    pub(super) id: u64,
    pub(super) entry: ScatterGatherEntry,
}

pub(super) struct ReceiveState {
    pub(super) domain: u32,
    pub(super) capacity: usize,
    pub(super) posted: VecDeque<Receive>,
}

/// A work request, copied.
#[derive(Clone)]
pub(super) struct Request {
    pub(super) id: u64,
    pub(super) opcode: u32,
    pub(super) is_signalled: bool,
    pub(super) is_inline: bool,
    pub(super) immediate: u32,
    pub(super) remote_address: u64,
    pub(super) remote_key: u32,
    pub(super) entry_count: usize,
    pub(super) entries: [ScatterGatherEntry; ENTRIES_MAX],
    pub(super) inline_bytes: usize,
    pub(super) inline: [u8; INLINE_MAX],
}

pub(super) struct PairState {
    pub(super) raw: usize,
    pub(super) context: u32,
    pub(super) domain: u32,
    pub(super) completions: u32,
    pub(super) receives: u32,
    pub(super) capacity: ffi::QueuePairCapacity,
    pub(super) state: u32,
    pub(super) destination: u32,
    /// Partition key without the membership bit.
    pub(super) partition: u16,
    pub(super) send_psn: u32,
    pub(super) receive_psn: u32,
    pub(super) receiver_not_ready_retry: u8,
    pub(super) queue: VecDeque<Request>,
    /// Send queue slots in use: freed by polling completions only, as on a card.
    pub(super) used: u32,
    /// Work requests carried out since the last completion.
    pub(super) since_completion: u32,
    /// Buffer that `post_send` writes to when requests are discarded.
    pub(super) ring: Box<[[u64; 8]]>,
    pub(super) ring_at: usize,
}

/// All objects, by the handles that the C objects carry.
#[derive(Default)]
pub(super) struct World {
    pub(super) devices: Vec<DeviceState>,
    pub(super) contexts: HashMap<u32, ContextState>,
    pub(super) domains: HashMap<u32, u32>,
    pub(super) regions: HashMap<u32, RegionState>,
    pub(super) channels: HashMap<u32, (u32, OwnedFd)>,
    pub(super) completions: HashMap<u32, CompletionState>,
    pub(super) receives: HashMap<u32, ReceiveState>,
    pub(super) pairs: HashMap<u32, PairState>,
    /// Pairs whose first request waits for a receive at the peer.
    pub(super) blocked: Vec<u32>,
    /// Accelerators' memory.
    pub(super) beside: Vec<Beside>,
    next_handle: u32,
}

impl World {
    pub(super) fn lock() -> MutexGuard<'static, World> {
        static WORLD: OnceLock<Mutex<World>> = OnceLock::new();
        let world = WORLD.get_or_init(|| {
            Mutex::new(World { next_handle: 100, blocked: Vec::with_capacity(4096), ..World::default() })
        });
        // A test that panicked while holding the lock must not fail the other tests.
        world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handles, keys and queue pair numbers; 24 bits, not reused.
    pub(super) fn handle(&mut self) -> u32 {
        self.next_handle += 1;
        self.next_handle
    }

    pub(super) fn device(&mut self, index: u32) -> &mut DeviceState {
        &mut self.devices[index as usize]
    }

    pub(super) fn device_of_context(&mut self, context: u32) -> Option<&mut DeviceState> {
        let device = self.contexts.get(&context)?.device;
        self.devices.get_mut(device as usize)
    }

    pub(super) fn set_faults(&mut self, index: u32, faults: Faults) {
        self.device(index).faults = faults;
    }

    pub(super) fn hold(&mut self, index: u32, is_holding: bool) {
        self.device(index).is_holding = is_holding;
        let numbers: Vec<u32> = self.pairs.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.progress(number));
    }

    pub(super) fn raise_on_device(&mut self, index: u32, event: u32) {
        let contexts: Vec<u32> = self
            .contexts
            .iter()
            .filter(|(_, context)| context.device == index)
            .map(|(&number, _)| number)
            .collect();
        contexts.into_iter().for_each(|context| self.raise(context, 0, event));
    }

    /// Queues an asynchronous event about the object at `element`.
    pub(super) fn raise(&mut self, context: u32, element: usize, event: u32) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.events.push_back((element, event));
            let _full = rustix::io::write(&context.wake, &1_u64.to_ne_bytes());
        }
    }

    pub(super) fn usage(&self, index: u32) -> Usage {
        let here = |context: &u32| self.contexts.get(context).is_some_and(|state| state.device == index);
        let domain_here = |domain: &u32| self.domains.get(domain).is_some_and(here);
        Usage {
            contexts: self.contexts.values().filter(|context| context.device == index).count(),
            domains: self.domains.values().filter(|context| here(context)).count(),
            regions: self.regions.values().filter(|region| domain_here(&region.domain)).count(),
            shown_regions: self
                .regions
                .values()
                .filter(|region| region.remote != 0 && domain_here(&region.domain))
                .count(),
            completion_queues: self.completions.values().filter(|queue| here(&queue.context)).count(),
            channels: self.channels.values().filter(|(context, _)| here(context)).count(),
            shared_receives: self.receives.values().filter(|queue| domain_here(&queue.domain)).count(),
            queue_pairs: self.pairs.values().filter(|pair| here(&pair.context)).count(),
        }
    }

    /// Adds a completion; raises the event if the queue is armed.
    pub(super) fn complete(&mut self, queue: u32, completion: WorkCompletion, frees: u32) {
        let Some(state) = self.completions.get_mut(&queue) else { return };
        if state.entries.len() >= state.capacity {
            let (context, raw) = (state.context, state.raw);
            self.raise(context, raw, ffi::EVENT_CQ_ERR);
            return;
        }
        state.entries.push_back((completion, frees));
        if !std::mem::take(&mut state.is_armed) {
            return;
        }
        state.unacknowledged += 1;
        if let Some((_, wake)) = self.channels.get(&state.channel) {
            let _full = rustix::io::write(wake, &1_u64.to_ne_bytes());
        }
    }
}

/// A descriptor that counts events: each read takes one.
pub(super) fn event_descriptor() -> Option<OwnedFd> {
    rustix::event::eventfd(0, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC).ok()
}
