//! Queue pairs, their states, and posting to them.

use std::ffi::c_int;

use rustix::io::Errno;

use super::super::world::{ENTRIES_MAX, INLINE_MAX, PairState, Request, World, strikes};
use super::{PARTITION_KEYS, QUEUE_PAIRS_MAX, READ_ENTRIES_MAX, WORK_REQUESTS_MAX, context_of, error};
use crate::ffi::{
    self, ProtectionDomain, QueuePair, QueuePairAttributes, QueuePairInit, ScatterGatherEntry,
    SendWorkRequest, WorkCompletion,
};

/// Records the calling thread, and waits for the configured duration of a command without holding the lock.
fn take_time(context: u32) {
    let takes = World::lock().device_of_context(context).map(|device| {
        device.command_threads.insert(std::thread::current().id());
        device.faults.command_takes
    });
    if let Some(takes) = takes.filter(|takes| !takes.is_zero()) {
        std::thread::sleep(takes);
    }
}

pub(super) unsafe extern "C" fn create_queue_pair(
    domain: *mut ProtectionDomain,
    init: *mut QueuePairInit,
) -> *mut QueuePair {
    // SAFETY: the caller passes a complete struct.
    let wanted = unsafe { init.read() };
    let capacity = wanted.capacity;
    let is_possible = wanted.kind == ffi::QPT_RC
        && capacity.send_requests <= WORK_REQUESTS_MAX
        && capacity.send_entries as usize <= ENTRIES_MAX
        && capacity.inline_bytes as usize <= INLINE_MAX;
    if !is_possible {
        return error(Errno::INVAL);
    }
    let context = field!(domain, context);
    let number = context_of(context);
    take_time(number);
    let mut world = World::lock();
    let used = world.pairs.values().filter(|pair| pair.context == number).count();
    let strikes = world
        .device_of_context(number)
        .is_some_and(|device| strikes(&mut device.faults.create_pair_fails_after));
    if strikes || used >= QUEUE_PAIRS_MAX {
        return error(Errno::NOMEM);
    }
    let handle = world.handle();
    let raw = Box::into_raw(Box::new(QueuePair {
        context,
        user: wanted.user,
        domain,
        send_completions: wanted.send_completions,
        receive_completions: wanted.receive_completions,
        shared_receives: wanted.shared_receives,
        handle,
        number: handle,
        state: ffi::QPS_RESET,
        kind: ffi::QPT_RC,
    }));
    let state = PairState {
        raw: raw as usize,
        context: number,
        domain: field!(domain, handle),
        completions: field!(wanted.send_completions, handle),
        receives: field!(wanted.shared_receives, handle),
        capacity,
        state: ffi::QPS_RESET,
        destination: 0,
        partition: 0,
        send_psn: 0,
        receive_psn: 0,
        receiver_not_ready_retry: 0,
        queue: std::collections::VecDeque::with_capacity(capacity.send_requests as usize),
        used: 0,
        since_completion: 0,
        ring: vec![[0; 8]; capacity.send_requests.next_power_of_two() as usize].into_boxed_slice(),
        ring_at: 0,
    };
    world.pairs.insert(handle, state);
    raw
}

pub(super) unsafe extern "C" fn destroy_queue_pair(pair: *mut QueuePair) -> c_int {
    let (number, context) = (field!(pair, number), context_of(field!(pair, context)));
    take_time(context);
    let mut world = World::lock();
    if world.device_of_context(context).is_some_and(|device| device.faults.pairs_go_on) {
        return Errno::IO.raw_os_error();
    }
    world.pairs.remove(&number);
    world.blocked.retain(|&blocked| blocked != number);
    free!(pair);
    0
}

/// Returns whether the transition is legal with the attributes in `mask` (ibv_modify_qp(3), table for RC).
fn is_legal(from: u32, to: u32, mask: u32) -> bool {
    let needed = match (from, to) {
        (_, ffi::QPS_ERR) => return from != ffi::QPS_RESET || mask == ffi::QP_STATE,
        (ffi::QPS_RESET, ffi::QPS_INIT) => ffi::QP_PKEY_INDEX | ffi::QP_PORT | ffi::QP_ACCESS_FLAGS,
        (ffi::QPS_INIT, ffi::QPS_RTR) => {
            ffi::QP_AV
                | ffi::QP_PATH_MTU
                | ffi::QP_DEST_QPN
                | ffi::QP_RQ_PSN
                | ffi::QP_MAX_DEST_RD_ATOMIC
                | ffi::QP_MIN_RNR_TIMER
        }
        (ffi::QPS_RTR, ffi::QPS_RTS) => {
            ffi::QP_SQ_PSN
                | ffi::QP_TIMEOUT
                | ffi::QP_RETRY_CNT
                | ffi::QP_RNR_RETRY
                | ffi::QP_MAX_QP_RD_ATOMIC
        }
        _ => return false,
    };
    mask == needed | ffi::QP_STATE
}

pub(super) unsafe extern "C" fn modify_queue_pair(
    pair: *mut QueuePair,
    attributes: *mut QueuePairAttributes,
    mask: c_int,
) -> c_int {
    let number = field!(pair, number);
    // SAFETY: the caller passes a complete struct.
    let wanted = unsafe { attributes.read() };
    let context = context_of(field!(pair, context));
    take_time(context);
    let mut world = World::lock();
    if matches!(wanted.state, ffi::QPS_RTR | ffi::QPS_RTS)
        && world
            .device_of_context(context)
            .is_some_and(|device| strikes(&mut device.faults.connect_pair_fails_after))
    {
        return Errno::INVAL.raw_os_error();
    }
    let goes_on = world.device_of_context(context).is_some_and(|device| device.faults.pairs_go_on);
    if goes_on && wanted.state == ffi::QPS_ERR {
        return Errno::IO.raw_os_error();
    }
    let Some(state) = world.pairs.get_mut(&number) else { return Errno::INVAL.raw_os_error() };
    let is_sane = match wanted.state {
        ffi::QPS_INIT => wanted.port == 1 && usize::from(wanted.partition_key_index) < PARTITION_KEYS.len(),
        ffi::QPS_RTR => {
            (1..=5).contains(&wanted.path_mtu)
                && wanted.address.is_global == 1
                && wanted.address.port == 1
                && wanted.receive_psn >> 24 == 0
                && wanted.reads_as_target <= 16
        }
        ffi::QPS_RTS => wanted.send_psn >> 24 == 0 && wanted.reads_as_initiator <= 16 && wanted.timeout <= 31,
        _ => true,
    };
    if !is_legal(state.state, wanted.state, mask as u32) || !is_sane {
        return Errno::INVAL.raw_os_error();
    }
    match wanted.state {
        ffi::QPS_ERR => {
            world.fail(number);
            return 0;
        }
        ffi::QPS_INIT => {
            state.partition = PARTITION_KEYS[usize::from(wanted.partition_key_index)] & 0x7FFF;
        }
        ffi::QPS_RTR => {
            state.destination = wanted.destination;
            state.receive_psn = wanted.receive_psn;
        }
        ffi::QPS_RTS => {
            state.send_psn = wanted.send_psn;
            state.receiver_not_ready_retry = wanted.receiver_not_ready_retry;
        }
        _ => {}
    }
    state.state = wanted.state;
    0
}

pub(super) unsafe extern "C" fn post_send(
    pair: *mut QueuePair,
    mut next: *mut SendWorkRequest,
    bad: *mut *mut SendWorkRequest,
) -> c_int {
    let number = field!(pair, number);
    let mut world = World::lock();
    let context = context_of(field!(pair, context));
    if world.device_of_context(context).is_some_and(|device| device.is_discarding) {
        return discard(&mut world, number, next, bad);
    }
    while !next.is_null() {
        // SAFETY: the caller passes a chain of complete requests.
        let request = unsafe { next.read() };
        if let Err(errno) = take_request(&mut world, number, &request) {
            put!(bad, next);
            world.progress(number);
            return errno.raw_os_error();
        }
        next = request.next;
    }
    world.progress(number);
    0
}

fn take_request(world: &mut World, number: u32, request: &SendWorkRequest) -> Result<(), Errno> {
    let context = world.pairs.get(&number).map_or(0, |pair| pair.context);
    let device = world.device_of_context(context).ok_or(Errno::INVAL)?;
    if strikes(&mut device.faults.post_send_fails_after) {
        return Err(Errno::NOMEM);
    }
    let pair = world.pairs.get_mut(&number).ok_or(Errno::INVAL)?;
    let count = usize::try_from(request.entry_count).map_err(|_| Errno::INVAL)?;
    if !matches!(pair.state, ffi::QPS_RTS | ffi::QPS_ERR)
        || count > pair.capacity.send_entries as usize
        || request.opcode == ffi::WR_RDMA_READ && count > READ_ENTRIES_MAX
    {
        return Err(Errno::INVAL);
    }
    if pair.used >= pair.capacity.send_requests {
        return Err(Errno::NOMEM);
    }
    let is_signalled = request.flags & ffi::SEND_SIGNALED != 0;
    pair.used += 1;
    let mut copy = Request {
        id: request.id,
        opcode: request.opcode,
        is_signalled,
        is_inline: request.flags & ffi::SEND_INLINE != 0,
        immediate: request.immediate,
        remote_address: request.remote_address,
        remote_key: request.remote_key,
        entry_count: count,
        entries: [ScatterGatherEntry::default(); ENTRIES_MAX],
        inline_bytes: 0,
        inline: [0; INLINE_MAX],
    };
    for (index, slot) in copy.entries[..count].iter_mut().enumerate() {
        // SAFETY: the request has `count` entries.
        *slot = unsafe { request.entries.wrapping_add(index).read() };
    }
    if copy.is_inline {
        for entry in &copy.entries[..count] {
            let (start, length) = (copy.inline_bytes, entry.length as usize);
            if start + length > pair.capacity.inline_bytes as usize {
                pair.used -= 1;
                return Err(Errno::NOMEM);
            }
            let room = &mut copy.inline[start..start + length];
            // SAFETY: inline entries name readable memory of the caller's, whatever its key.
            unsafe { std::ptr::copy_nonoverlapping(entry.address as *const u8, room.as_mut_ptr(), length) };
            copy.inline_bytes += length;
        }
    }
    pair.queue.push_back(copy);
    Ok(())
}

/// Writes requests to a ring as a driver does (control, remote address, a pointer for each entry), and completes
/// those that are signalled.
fn discard(
    world: &mut World,
    number: u32,
    mut next: *mut SendWorkRequest,
    bad: *mut *mut SendWorkRequest,
) -> c_int {
    let Some(pair) = world.pairs.get_mut(&number) else { return Errno::INVAL.raw_os_error() };
    let Some(queue) = world.completions.get_mut(&pair.completions) else {
        return Errno::INVAL.raw_os_error();
    };
    while !next.is_null() {
        // SAFETY: the caller passes a chain of complete requests.
        let request = unsafe { &*next };
        if pair.used >= pair.capacity.send_requests || queue.entries.len() >= queue.capacity {
            put!(bad, next);
            return Errno::NOMEM.raw_os_error();
        }
        let at = pair.ring_at & (pair.ring.len() - 1);
        let line = &mut pair.ring[at];
        line[0] = u64::from(request.opcode) << 32 | u64::from(request.flags);
        line[1] = request.remote_address;
        line[2] = u64::from(request.remote_key) << 32 | u64::from(request.immediate);
        for index in 0..usize::try_from(request.entry_count).unwrap_or(0) {
            // SAFETY: the request has that many entries.
            let entry = unsafe { request.entries.wrapping_add(index).read() };
            line[3 + index % 5] = entry.address ^ u64::from(entry.length) << 32 ^ u64::from(entry.local_key);
        }
        pair.ring_at += 1;
        pair.used += 1;
        pair.since_completion += 1;
        if request.flags & ffi::SEND_SIGNALED != 0 {
            let frees = std::mem::take(&mut pair.since_completion);
            let completion =
                WorkCompletion { id: request.id, queue_pair_number: number, ..Default::default() };
            queue.entries.push_back((completion, frees));
        }
        next = request.next;
    }
    0
}
