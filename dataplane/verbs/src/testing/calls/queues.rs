//! Completion queues, their channels, and shared receive queues.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::super::world::{CompletionState, Receive, ReceiveState, World, event_descriptor};
use super::{WORK_REQUESTS_MAX, context_of, error, set_errno};
use crate::ffi::{
    CompletionChannel, CompletionQueue, Context, ProtectionDomain, ReceiveWorkRequest, SharedReceiveInit,
    SharedReceiveQueue, WorkCompletion,
};

pub(super) unsafe extern "C" fn create_channel(context: *mut Context) -> *mut CompletionChannel {
    let mut world = World::lock();
    let Some(wake) = event_descriptor() else { return error(Errno::MFILE) };
    let (descriptor, handle) = (wake.as_raw_fd(), world.handle());
    world.channels.insert(handle, (context_of(context), wake));
    Box::into_raw(Box::new(CompletionChannel { context, descriptor, references: handle as c_int }))
}

pub(super) unsafe extern "C" fn destroy_channel(channel: *mut CompletionChannel) -> c_int {
    World::lock().channels.remove(&(field!(channel, references) as u32));
    free!(channel);
    0
}

pub(super) unsafe extern "C" fn create_completions(
    context: *mut Context,
    entries: c_int,
    user: *mut c_void,
    channel: *mut CompletionChannel,
    _vector: c_int,
) -> *mut CompletionQueue {
    let Some(capacity) = usize::try_from(entries).ok().filter(|&entries| entries > 0) else {
        return error(Errno::INVAL);
    };
    let mut world = World::lock();
    let handle = world.handle();
    let raw = Box::into_raw(Box::new(CompletionQueue { context, channel, user, handle, entries }));
    let state = CompletionState {
        raw: raw as usize,
        context: context_of(context),
        channel: field!(channel, references) as u32,
        capacity,
        is_armed: false,
        entries: std::collections::VecDeque::with_capacity(capacity),
        unacknowledged: 0,
    };
    world.completions.insert(handle, state);
    raw
}

pub(super) unsafe extern "C" fn destroy_completions(queue: *mut CompletionQueue) -> c_int {
    let mut world = World::lock();
    let handle = field!(queue, handle);
    if world.pairs.values().any(|pair| pair.completions == handle) {
        return Errno::BUSY.raw_os_error();
    }
    world.completions.remove(&handle);
    free!(queue);
    0
}

pub(super) unsafe extern "C" fn get_completion_event(
    channel: *mut CompletionChannel,
    queue: *mut *mut CompletionQueue,
    user: *mut *mut c_void,
) -> c_int {
    let descriptor = field!(channel, descriptor);
    // SAFETY: the channel keeps its descriptor open.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let mut count = [0; 8];
    if let Err(errno) = rustix::io::read(descriptor, &mut count) {
        set_errno(errno);
        return -1;
    }
    let handle = field!(channel, references) as u32;
    let world = World::lock();
    let found = world.completions.values().find(|state| state.channel == handle);
    put!(queue, found.map_or(0, |state| state.raw) as *mut CompletionQueue);
    put!(user, std::ptr::null_mut());
    0
}

pub(super) unsafe extern "C" fn acknowledge_completion_events(queue: *mut CompletionQueue, count: u32) {
    if let Some(state) = World::lock().completions.get_mut(&field!(queue, handle)) {
        assert!(state.unacknowledged >= count, "more events acknowledged than taken");
        state.unacknowledged -= count;
    }
}

pub(super) unsafe extern "C" fn create_shared_receives(
    domain: *mut ProtectionDomain,
    init: *mut SharedReceiveInit,
) -> *mut SharedReceiveQueue {
    let attributes = field!(init, attributes);
    if attributes.requests == 0 || attributes.requests > WORK_REQUESTS_MAX || attributes.entries != 1 {
        return error(Errno::INVAL);
    }
    let mut world = World::lock();
    let (handle, capacity) = (world.handle(), attributes.requests as usize);
    let posted = std::collections::VecDeque::with_capacity(capacity);
    world.receives.insert(handle, ReceiveState { domain: field!(domain, handle), capacity, posted });
    let context = field!(domain, context);
    Box::into_raw(Box::new(SharedReceiveQueue { context, user: std::ptr::null_mut(), domain, handle }))
}

pub(super) unsafe extern "C" fn destroy_shared_receives(queue: *mut SharedReceiveQueue) -> c_int {
    let mut world = World::lock();
    let handle = field!(queue, handle);
    if world.pairs.values().any(|pair| pair.receives == handle) {
        return Errno::BUSY.raw_os_error();
    }
    world.receives.remove(&handle);
    free!(queue);
    0
}

pub(super) unsafe extern "C" fn poll_cq(
    queue: *mut CompletionQueue,
    room: c_int,
    completions: *mut WorkCompletion,
) -> c_int {
    let mut world = World::lock();
    if !world.blocked.is_empty() {
        world.progress_blocked();
    }
    let handle = field!(queue, handle);
    let mut count = 0;
    while count < room {
        let next = world.completions.get_mut(&handle).and_then(|state| state.entries.pop_front());
        let Some((completion, frees)) = next else { break };
        if let Some(pair) = world.pairs.get_mut(&completion.queue_pair_number) {
            pair.used -= frees;
        }
        put!(completions.wrapping_add(count as usize), completion);
        count += 1;
    }
    count
}

pub(super) unsafe extern "C" fn request_notify(queue: *mut CompletionQueue, _solicited: c_int) -> c_int {
    if let Some(state) = World::lock().completions.get_mut(&field!(queue, handle)) {
        state.is_armed = true;
    }
    0
}

pub(super) unsafe extern "C" fn post_shared_receive(
    queue: *mut SharedReceiveQueue,
    mut next: *mut ReceiveWorkRequest,
    bad: *mut *mut ReceiveWorkRequest,
) -> c_int {
    let mut world = World::lock();
    let handle = field!(queue, handle);
    while !next.is_null() {
        // SAFETY: the caller passes a chain of complete requests.
        let request = unsafe { next.read() };
        let Some(state) = world.receives.get_mut(&handle) else { return Errno::INVAL.raw_os_error() };
        if state.posted.len() >= state.capacity || request.entry_count != 1 {
            put!(bad, next);
            return Errno::NOMEM.raw_os_error();
        }
        // SAFETY: the request has one entry.
        let entry = unsafe { request.entries.read() };
        state.posted.push_back(Receive { id: request.id, entry });
        next = request.next;
    }
    if !world.blocked.is_empty() {
        world.progress_blocked();
    }
    0
}
