//! Objects behind descriptors: eventfds, timers, epoll instances, sockets and rings, and the threads that wait for them.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;

use super::rings::Ring;
use super::sockets::{Socket, SocketState};
use super::threads::{ProcessId, ThreadId};
use super::{Due, Kernel, Nanos, real, report};
use crate::oracle::Oracle;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ObjectId(u32);

#[derive(Debug)]
pub(super) struct Object {
    pub(super) kind: Kind,
    references: u32,
    pub(super) is_nonblocking: bool,
    /// Threads that wait for a change of the object.
    pub(super) waiters: Vec<ThreadId>,
    /// Epoll instances that watch the object, with the watched descriptor.
    watchers: Vec<(ObjectId, c_int)>,
    /// Rings with an operation that waits for the object.
    pub(super) rings: Vec<ObjectId>,
}

#[derive(Debug)]
pub(super) enum Kind {
    Event { count: u64, is_semaphore: bool },
    Timer { interval: Nanos, expirations: u64, setting: u64 },
    Epoll(Epoll),
    Socket(Box<Socket>),
    Ring(Box<Ring>),
}

#[derive(Debug, Default)]
pub(super) struct Epoll {
    interest: BTreeMap<c_int, Interest>,
    /// Descriptors that may be ready.
    pending: BTreeSet<c_int>,
}

#[derive(Debug, Clone, Copy)]
struct Interest {
    object: ObjectId,
    events: u32,
    data: u64,
}

const EDGE: u32 = libc::EPOLLET as u32;
const ONCE: u32 = libc::EPOLLONESHOT as u32;
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;

impl Kernel {
    pub(super) fn add_object(&mut self, kind: Kind, is_nonblocking: bool) -> ObjectId {
        self.next_object += 1;
        let id = ObjectId(self.next_object);
        self.objects.insert(
            id,
            Object {
                kind,
                references: 0,
                is_nonblocking,
                waiters: Vec::new(),
                watchers: Vec::new(),
                rings: Vec::new(),
            },
        );
        id
    }

    /// Creates a descriptor for an object: a descriptor of the real system, so that its number is unique.
    pub(super) fn add_descriptor(&mut self, object: ObjectId) -> c_int {
        let function = real::OPEN.get();
        // SAFETY: the path ends with a zero byte.
        let descriptor = unsafe { function(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC, 0) };
        if descriptor < 0 {
            report::fail(Oracle::Simulator, "the system has no more descriptors");
        }
        self.adopt_descriptor(descriptor, object);
        descriptor
    }

    /// Makes a descriptor of the real system refer to an object.
    pub(super) fn adopt_descriptor(&mut self, descriptor: c_int, object: ObjectId) {
        let owner = self.process();
        self.descriptors.insert(descriptor, (object, owner));
        self.files.remove(&descriptor);
        self.refer(object);
    }

    /// Adds a reference to an object.
    pub(super) fn refer(&mut self, object: ObjectId) {
        if let Some(object) = self.objects.get_mut(&object) {
            object.references += 1;
        }
    }

    pub(super) fn open(&mut self, kind: Kind, is_nonblocking: bool) -> c_int {
        let object = self.add_object(kind, is_nonblocking);
        self.add_descriptor(object)
    }

    pub(super) fn object_of(&self, descriptor: c_int) -> Option<ObjectId> {
        self.descriptors.get(&descriptor).map(|(object, _)| *object)
    }

    pub(super) fn socket(&mut self, id: ObjectId) -> Option<&mut Socket> {
        match &mut self.objects.get_mut(&id)?.kind {
            Kind::Socket(socket) => Some(socket),
            _ => None,
        }
    }

    /// Wakes the threads, epoll instances and ring operations that wait for a change of the object.
    pub(super) fn changed(&mut self, id: ObjectId) {
        let Some(object) = self.objects.get(&id) else { return };
        let (waiters, watchers) = (object.waiters.clone(), object.watchers.clone());
        for thread in waiters {
            self.wake(thread);
        }
        for (epoll, descriptor) in watchers {
            if let Some(Object { kind: Kind::Epoll(state), .. }) = self.objects.get_mut(&epoll) {
                state.pending.insert(descriptor);
                // An epoll instance may itself be watched by another one, by a ring, or in poll(2).
                self.changed(epoll);
            }
        }
        self.advance_rings(id);
    }

    /// Returns the events (`EPOLLIN` and others) that an object is ready for.
    pub(super) fn readiness(&self, id: ObjectId) -> u32 {
        match self.objects.get(&id).map(|object| &object.kind) {
            None => 0,
            Some(Kind::Event { count, .. }) => OUT | if *count > 0 { IN } else { 0 },
            Some(Kind::Timer { expirations, .. }) => IN * u32::from(*expirations > 0),
            Some(Kind::Epoll(epoll)) => {
                let ready = |descriptor: &c_int| {
                    epoll.interest.get(descriptor).is_some_and(|interest| {
                        self.readiness(interest.object) & (interest.events | ALWAYS) != 0
                    })
                };
                if epoll.pending.iter().any(ready) { IN } else { 0 }
            }
            Some(Kind::Socket(socket)) => self.socket_readiness(socket),
            Some(Kind::Ring(ring)) => Self::ring_readiness(ring),
        }
    }

    pub(super) fn fire_timer(&mut self, id: ObjectId, setting: u64) {
        let now = self.now;
        let Some(object) = self.objects.get_mut(&id) else { return };
        let Kind::Timer { interval, expirations, setting: current } = &mut object.kind else { return };
        if *current != setting {
            return;
        }
        *expirations += 1;
        let again = (*interval > 0).then(|| now + *interval);
        if let Some(again) = again {
            self.schedule(again, Due::Timer(id, setting));
        }
        self.changed(id);
    }

    /// Sets a timer: time of the first expiry (`None`: disarmed), and interval of further ones.
    pub(super) fn set_timer(&mut self, id: ObjectId, first: Option<Nanos>, every: Nanos) {
        let Some(Object { kind: Kind::Timer { interval, expirations, setting }, .. }) =
            self.objects.get_mut(&id)
        else {
            return;
        };
        *setting += 1;
        *interval = every;
        *expirations = 0;
        let setting = *setting;
        if let Some(first) = first {
            self.schedule(first, Due::Timer(id, setting));
        }
    }

    pub(super) fn watch(
        &mut self,
        epoll: ObjectId,
        operation: c_int,
        descriptor: c_int,
        events: u32,
        data: u64,
    ) -> Result<(), c_int> {
        let target = self.object_of(descriptor);
        let Some(Object { kind: Kind::Epoll(state), waiters, .. }) = self.objects.get_mut(&epoll) else {
            return Err(libc::EINVAL);
        };
        match operation {
            libc::EPOLL_CTL_DEL => {
                let known = state.interest.remove(&descriptor).ok_or(libc::ENOENT)?;
                state.pending.remove(&descriptor);
                if let Some(object) = self.objects.get_mut(&known.object) {
                    object.watchers.retain(|watcher| *watcher != (epoll, descriptor));
                }
                return Ok(());
            }
            libc::EPOLL_CTL_ADD if state.interest.contains_key(&descriptor) => return Err(libc::EEXIST),
            libc::EPOLL_CTL_MOD if !state.interest.contains_key(&descriptor) => return Err(libc::ENOENT),
            _ => {}
        }
        // Real files and other real descriptors are never ready: no simulated thread waits for one.
        let Some(object) = target else { return Err(libc::EPERM) };
        state.interest.insert(descriptor, Interest { object, events, data });
        state.pending.insert(descriptor);
        let waiters = waiters.clone();
        if operation == libc::EPOLL_CTL_ADD
            && let Some(object) = self.objects.get_mut(&object)
        {
            object.watchers.push((epoll, descriptor));
        }
        for thread in waiters {
            self.wake(thread);
        }
        Ok(())
    }

    /// Returns the ready entries of an epoll instance, as `(events, data)`.
    pub(super) fn collect(&mut self, epoll: ObjectId, max: usize) -> Vec<(u32, u64)> {
        let Some(Object { kind: Kind::Epoll(state), .. }) = self.objects.get(&epoll) else {
            return Vec::new();
        };
        let candidates: Vec<(c_int, Option<Interest>)> = state
            .pending
            .iter()
            .map(|descriptor| (*descriptor, state.interest.get(descriptor).copied()))
            .collect();
        let start =
            if candidates.is_empty() { 0 } else { self.random.below(candidates.len() as u64) as usize };
        let mut found = Vec::new();
        for (descriptor, interest) in candidates[start..].iter().chain(&candidates[..start]) {
            if found.len() == max {
                break;
            }
            let ready =
                interest.map_or(0, |interest| self.readiness(interest.object) & (interest.events | ALWAYS));
            let Some(Object { kind: Kind::Epoll(state), .. }) = self.objects.get_mut(&epoll) else { break };
            let Some(interest) = interest.filter(|_| ready != 0) else {
                state.pending.remove(descriptor);
                continue;
            };
            if interest.events & (EDGE | ONCE) != 0 {
                state.pending.remove(descriptor);
            }
            if interest.events & ONCE != 0
                && let Some(kept) = state.interest.get_mut(descriptor)
            {
                kept.events = 0;
            }
            found.push((ready, interest.data));
        }
        found
    }

    /// Creates another descriptor for the same object.
    pub(super) fn duplicate(&mut self, descriptor: c_int) -> Option<c_int> {
        let object = self.object_of(descriptor)?;
        Some(self.add_descriptor(object))
    }

    /// Removes a descriptor, if it is a simulated one. The real descriptor of that number stays open.
    pub(super) fn close(&mut self, descriptor: c_int) {
        if let Some((id, _)) = self.descriptors.remove(&descriptor) {
            self.release(id, false);
        }
    }

    pub(super) fn release(&mut self, id: ObjectId, silently: bool) {
        let Some(object) = self.objects.get_mut(&id) else { return };
        object.references -= 1;
        if object.references > 0 {
            return;
        }
        for (epoll, descriptor) in std::mem::take(&mut object.watchers) {
            if let Some(Object { kind: Kind::Epoll(state), .. }) = self.objects.get_mut(&epoll) {
                state.interest.remove(&descriptor);
                state.pending.remove(&descriptor);
            }
        }
        self.hang_up(id, silently);
        self.close_ring(id, silently);
        self.objects.remove(&id);
    }

    /// Closes all descriptors of a process.
    pub(super) fn close_all(&mut self, process: ProcessId, silently: bool) {
        let owned: Vec<(c_int, ObjectId)> = self
            .descriptors
            .iter()
            .filter(|(_, (_, owner))| *owner == process)
            .map(|(descriptor, (object, _))| (*descriptor, *object))
            .collect();
        let files: Vec<c_int> =
            self.files.iter().filter(|(_, owner)| **owner == process).map(|(file, _)| *file).collect();
        for (descriptor, object) in owned {
            self.descriptors.remove(&descriptor);
            let is_event = matches!(self.objects.get(&object), Some(Object { kind: Kind::Event { .. }, .. }));
            self.release(object, silently);
            // Mock engines wake each other's tasks through memory. A wake-up after the process's end must
            // find no other object: the number keeps its /dev/null, and is not reused.
            if !is_event {
                really_close(descriptor);
            }
        }
        for file in files {
            self.files.remove(&file);
            really_close(file);
        }
    }

    /// Returns the connections and listeners of a process, as text for diagnosing leaks.
    pub(super) fn open_sockets(&self, process: ProcessId) -> Vec<String> {
        let of_process = self.descriptors.values().filter(|(_, owner)| *owner == process);
        let sockets = of_process.filter_map(|(object, _)| match &self.objects.get(object)?.kind {
            Kind::Socket(socket) if !matches!(socket.state, SocketState::Idle) => Some(socket.describe()),
            _ => None,
        });
        sockets.collect()
    }
}

fn really_close(descriptor: c_int) {
    let function = real::CLOSE.get();
    // SAFETY: the threads that could still use it never run again.
    unsafe { function(descriptor) };
}
