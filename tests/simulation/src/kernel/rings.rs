//! io_uring: submission and completion queues in shared memory, as `io_uring_setup(2)` lays them out.
//!
//! An operation is attempted when it is submitted, and again whenever its socket or eventfd changes; reads
//! and writes of files complete after a delay. Operations that the programs do not use are refused as by an
//! old kernel.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use super::calls::slices;
use super::objects::{Kind, Object, ObjectId};
use super::sockets::{Socket, SocketState};
use super::threads::ProcessId;
use super::{Due, Kernel};

/// `IORING_OFF_SQES` of io_uring.h: offset at which the entries are mapped. The queues are at 0.
const ENTRIES_AT: usize = 0x1000_0000;
const ENTRY_BYTES: usize = 64;
const COMPLETION_BYTES: usize = 16;
/// Offsets of the queues' parts in their memory.
const ARRAY_AT: usize = 256;

/// `IORING_SETUP_…`.
const SETUP_POLLED: u32 = 1 | 2;
const SETUP_CQSIZE: u32 = 1 << 3;
/// `IORING_FEAT_SINGLE_MMAP | NODROP | SUBMIT_STABLE | EXT_ARG`.
const FEATURES: u32 = 1 | 1 << 1 | 1 << 2 | 1 << 8;
const FLAG_OVERFLOW: u32 = 1 << 1;
const EVENT_DISABLED: u32 = 1;
const FIXED_FILE: u8 = 1;

const POLL_ADD: u8 = 6;
const SENDMSG: u8 = 9;
const RECVMSG: u8 = 10;
const ASYNC_CANCEL: u8 = 14;
const READ_FIXED: u8 = 4;
const WRITE_FIXED: u8 = 5;
const READ: u8 = 22;
const WRITE: u8 = 23;
const SEND: u8 = 26;
const RECV: u8 = 27;
const NOP: u8 = 0;
const FSYNC: u8 = 3;

const CANCEL_ALL: u32 = 1;
const CANCEL_BY_DESCRIPTOR: u32 = 1 << 1;
const CANCEL_ANY: u32 = 1 << 2;
const CANCEL_FIXED: u32 = 1 << 3;

/// `struct io_sqring_offsets`, `struct io_cqring_offsets` and `struct io_uring_params` of io_uring.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    resv: [u32; 3],
    /// head, tail, mask, entries, flags, dropped, array, and 12 bytes more.
    sq_off: [u32; 10],
    /// head, tail, mask, entries, overflow, completions, flags, and 12 bytes more.
    cq_off: [u32; 10],
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    operation: u8,
    flags: u8,
    descriptor: i32,
    offset: u64,
    address: u64,
    length: u32,
    operation_flags: u32,
    user_data: u64,
}

#[derive(Debug)]
struct Pending {
    entry: Entry,
    object: ObjectId,
    /// Bytes that the operation has moved so far.
    done: usize,
}

#[derive(Debug)]
pub(super) struct Ring {
    /// Addresses at which the simulation maps the queues and the entries.
    queues: usize,
    entries: usize,
    entry_count: u32,
    completion_count: u32,
    completions_at: usize,
    files: Vec<Option<Registered>>,
    event: Option<ObjectId>,
    pending: Vec<Pending>,
    overflown: VecDeque<(u64, i32)>,
}

/// Target of an operation: an entry of a ring's table of registered files, or a descriptor.
#[derive(Debug, Clone, Copy)]
enum Registered {
    Object(ObjectId),
    /// A file of the real system.
    File(c_int),
}

/// An operation on a file, which takes effect when it completes.
#[derive(Debug)]
pub(super) struct FileOperation {
    ring: ObjectId,
    entry: Entry,
    file: c_int,
    owner: ProcessId,
}

/// Words of the queues, by their offset.
#[derive(Debug, Clone, Copy)]
enum Word {
    SubmissionHead = 0,
    SubmissionTail = 1,
    SubmissionMask = 2,
    SubmissionEntries = 3,
    SubmissionFlags = 4,
    SubmissionDropped = 5,
    CompletionHead = 6,
    CompletionTail = 7,
    CompletionMask = 8,
    CompletionEntries = 9,
    CompletionOverflow = 10,
    CompletionFlags = 11,
}

impl Ring {
    fn word(&self, word: Word) -> &AtomicU32 {
        let at = self.queues + word as usize * 4;
        // SAFETY: the queues are mapped as long as the simulation runs, and their words are aligned.
        unsafe { AtomicU32::from_ptr(at as *mut u32) }
    }

    fn array(&self, index: u32) -> u32 {
        let at = self.queues + ARRAY_AT + (index & (self.entry_count - 1)) as usize * 4;
        // SAFETY: the index is within the array, which is mapped as long as the simulation runs.
        let word = unsafe { AtomicU32::from_ptr(at as *mut u32) };
        word.load(Ordering::Acquire)
    }

    fn entry(&self, index: u32) -> Entry {
        let at = self.entries + (index & (self.entry_count - 1)) as usize * ENTRY_BYTES;
        // SAFETY: the index is within the entries, which are mapped as long as the simulation runs; their owner has filled them.
        let bytes: [u8; ENTRY_BYTES] = unsafe { (at as *const [u8; ENTRY_BYTES]).read() };
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Entry {
            operation: bytes[0],
            flags: bytes[1],
            descriptor: word(4) as i32,
            offset: long(8),
            address: long(16),
            length: word(24),
            operation_flags: word(28),
            user_data: long(32),
        }
    }

    fn waiting_completions(&self) -> u32 {
        let (head, tail) = (self.word(Word::CompletionHead), self.word(Word::CompletionTail));
        tail.load(Ordering::Acquire).wrapping_sub(head.load(Ordering::Acquire))
    }

    /// Writes a completion to the queue; returns false if the queue is full.
    fn put(&self, user_data: u64, result: i32) -> bool {
        if self.waiting_completions() >= self.completion_count {
            return false;
        }
        let tail = self.word(Word::CompletionTail);
        let position = tail.load(Ordering::Acquire);
        let at = self.completions_at + (position & (self.completion_count - 1)) as usize * COMPLETION_BYTES;
        let completion = u128::from(user_data) | u128::from(result as u32) << 64;
        // SAFETY: the place is within the queue, and its reader does not look at it before the tail has passed it.
        unsafe { (at as *mut [u8; COMPLETION_BYTES]).write(completion.to_ne_bytes()) };
        tail.store(position.wrapping_add(1), Ordering::Release);
        true
    }

    /// Writes completions that did not fit before.
    fn flush(&mut self) {
        while let Some((user_data, result)) = self.overflown.front().copied() {
            if !self.put(user_data, result) {
                return;
            }
            self.overflown.pop_front();
        }
        self.word(Word::SubmissionFlags).fetch_and(!FLAG_OVERFLOW, Ordering::AcqRel);
    }
}

impl Kernel {
    /// Turns a memory descriptor into a ring, fills in the parameters and returns the descriptor.
    pub(super) fn make_ring(
        &mut self,
        descriptor: c_int,
        wanted: u32,
        params: &mut Params,
    ) -> Result<c_int, c_int> {
        if params.flags & SETUP_POLLED != 0 || wanted == 0 {
            return Err(libc::EINVAL);
        }
        let entries = wanted.next_power_of_two().min(32_768);
        let completions = if params.flags & SETUP_CQSIZE == 0 { entries * 2 } else { params.cq_entries };
        let completions = completions.next_power_of_two().min(65_536);
        let completions_at = (ARRAY_AT + entries as usize * 4).next_multiple_of(64);
        let queue_bytes = completions_at + completions as usize * COMPLETION_BYTES;
        let (queues, places) = map(descriptor, queue_bytes, entries as usize * ENTRY_BYTES)?;
        let ring = Ring {
            queues,
            entries: places,
            entry_count: entries,
            completion_count: completions,
            completions_at: queues + completions_at,
            files: Vec::new(),
            event: None,
            pending: Vec::new(),
            overflown: VecDeque::new(),
        };
        for (word, value) in [
            (Word::SubmissionMask, entries - 1),
            (Word::SubmissionEntries, entries),
            (Word::CompletionMask, completions - 1),
            (Word::CompletionEntries, completions),
        ] {
            ring.word(word).store(value, Ordering::Release);
        }
        let place = |word: Word| (word as usize * 4) as u32;
        params.sq_entries = entries;
        params.cq_entries = completions;
        params.features = FEATURES;
        params.sq_off = [0; 10];
        params.sq_off[..7].copy_from_slice(&[
            place(Word::SubmissionHead),
            place(Word::SubmissionTail),
            place(Word::SubmissionMask),
            place(Word::SubmissionEntries),
            place(Word::SubmissionFlags),
            place(Word::SubmissionDropped),
            ARRAY_AT as u32,
        ]);
        params.cq_off = [0; 10];
        params.cq_off[..7].copy_from_slice(&[
            place(Word::CompletionHead),
            place(Word::CompletionTail),
            place(Word::CompletionMask),
            place(Word::CompletionEntries),
            place(Word::CompletionOverflow),
            completions_at as u32,
            place(Word::CompletionFlags),
        ]);
        let object = self.add_object(Kind::Ring(Box::new(ring)), false);
        self.adopt_descriptor(descriptor, object);
        Ok(descriptor)
    }

    fn ring(&mut self, id: ObjectId) -> Option<&mut Ring> {
        match self.objects.get_mut(&id) {
            Some(Object { kind: Kind::Ring(ring), .. }) => Some(ring),
            _ => None,
        }
    }

    pub(super) fn ring_readiness(ring: &Ring) -> u32 {
        if ring.waiting_completions() > 0 {
            (libc::EPOLLIN | libc::EPOLLOUT) as u32
        } else {
            libc::EPOLLOUT as u32
        }
    }

    /// Consumes submitted entries; returns how many.
    pub(super) fn submit(&mut self, id: ObjectId, count: u32) -> Result<usize, c_int> {
        let mut taken = 0;
        while taken < count {
            let Some(ring) = self.ring(id) else { return Err(libc::EBADF) };
            ring.flush();
            let (head, tail) = (ring.word(Word::SubmissionHead), ring.word(Word::SubmissionTail));
            let position = head.load(Ordering::Acquire);
            if position == tail.load(Ordering::Acquire) {
                break;
            }
            let entry = ring.entry(ring.array(position));
            head.store(position.wrapping_add(1), Ordering::Release);
            taken += 1;
            self.begin_operation(id, entry);
        }
        if let Some(ring) = self.ring(id) {
            ring.flush();
        }
        Ok(taken as usize)
    }

    /// Returns the number of completions that can be consumed.
    pub(super) fn completions(&mut self, id: ObjectId) -> u32 {
        self.ring(id).map_or(0, |ring| ring.waiting_completions())
    }

    /// Returns the target of an entry: its descriptor, or the one registered at its index.
    fn target(&mut self, id: ObjectId, descriptor: c_int, is_registered: bool) -> Result<Registered, c_int> {
        if is_registered {
            let registered =
                self.ring(id).and_then(|ring| ring.files.get(descriptor as usize).copied().flatten());
            return registered.ok_or(libc::EBADF);
        }
        Ok(self.object_of(descriptor).map_or(Registered::File(descriptor), Registered::Object))
    }

    fn begin_operation(&mut self, id: ObjectId, entry: Entry) {
        match entry.operation {
            NOP => return self.complete(id, entry.user_data, 0),
            ASYNC_CANCEL => return self.cancel(id, &entry),
            _ => {}
        }
        if entry.flags & !FIXED_FILE != 0 {
            return self.complete(id, entry.user_data, -libc::EINVAL);
        }
        let object = match self.target(id, entry.descriptor, entry.flags & FIXED_FILE != 0) {
            Ok(Registered::Object(object)) => object,
            Ok(Registered::File(file)) => return self.begin_file_operation(id, entry, file),
            Err(errno) => return self.complete(id, entry.user_data, -errno),
        };
        let mut operation = Pending { entry, object, done: 0 };
        match self.attempt(&mut operation) {
            Some(result) => self.complete(id, entry.user_data, result),
            None => {
                if let Some(ring) = self.ring(id) {
                    ring.pending.push(operation);
                }
                if let Some(object) = self.objects.get_mut(&object)
                    && !object.rings.contains(&id)
                {
                    object.rings.push(id);
                }
            }
        }
    }

    /// Attempts an operation; returns its result when it is complete.
    fn attempt(&mut self, operation: &mut Pending) -> Option<i32> {
        let Pending { entry, object, .. } = operation;
        let object = *object;
        if !self.objects.contains_key(&object) {
            return Some(-libc::ECANCELED);
        }
        match entry.operation {
            POLL_ADD => {
                let ready =
                    self.readiness(object) & (entry.operation_flags | (libc::POLLERR | libc::POLLHUP) as u32);
                (ready != 0).then_some(ready as i32)
            }
            READ | READ_FIXED => self.read_number(object, entry),
            RECV | RECVMSG => self.attempt_receive(object, operation),
            SEND | SENDMSG => self.attempt_send(object, operation),
            _ => Some(-libc::EINVAL),
        }
    }

    fn read_number(&mut self, object: ObjectId, entry: &Entry) -> Option<i32> {
        let number = match self.objects.get_mut(&object).map(|object| &mut object.kind) {
            Some(Kind::Event { count: 0, .. }) => return None,
            Some(Kind::Event { count, .. }) => std::mem::take(count),
            _ => return Some(-libc::EINVAL),
        };
        // SAFETY: the program gives room for a number until the operation is over.
        unsafe { (entry.address as *mut [u8; 8]).write(number.to_ne_bytes()) };
        Some(8)
    }

    fn attempt_receive(&mut self, object: ObjectId, operation: &mut Pending) -> Option<i32> {
        let entry = operation.entry;
        // SAFETY: the program keeps the room that it names until the operation is over.
        let mut room = unsafe { memory_of(&entry, RECVMSG) };
        let wanted: usize = room.iter().map(|part| part.len()).sum();
        let waits_for_all = entry.operation_flags & libc::MSG_WAITALL as u32 != 0;
        loop {
            let mut rest = skip(&mut room, operation.done);
            match self.receive(object, &mut rest, false) {
                Ok(0) => return Some(operation.done as i32),
                Ok(count) => {
                    operation.done += count;
                    if operation.done >= wanted || !waits_for_all {
                        return Some(operation.done as i32);
                    }
                }
                Err(libc::EAGAIN) => return None,
                Err(_) if operation.done > 0 => return Some(operation.done as i32),
                Err(errno) => return Some(-errno),
            }
        }
    }

    fn attempt_send(&mut self, object: ObjectId, operation: &mut Pending) -> Option<i32> {
        let entry = operation.entry;
        // SAFETY: the program keeps the bytes that it names until the operation is over.
        let mut content = unsafe { memory_of(&entry, SENDMSG) };
        let wanted: usize = content.iter().map(|part| part.len()).sum();
        let waits_for_all = entry.operation_flags & libc::MSG_WAITALL as u32 != 0;
        loop {
            let rest = skip(&mut content, operation.done);
            let parts: Vec<&[u8]> = rest.iter().map(|part| &**part).collect();
            match self.transmit(object, &parts) {
                Ok(count) => {
                    operation.done += count;
                    if operation.done >= wanted || !waits_for_all {
                        return Some(operation.done as i32);
                    }
                }
                Err(libc::EAGAIN) => return None,
                Err(_) if operation.done > 0 => return Some(operation.done as i32),
                Err(errno) => return Some(-errno),
            }
        }
    }

    /// Attempts the operations again that wait for an object.
    pub(super) fn advance_rings(&mut self, object: ObjectId) {
        let Some(state) = self.objects.get_mut(&object) else { return };
        let rings = std::mem::take(&mut state.rings);
        for id in rings {
            let Some(ring) = self.ring(id) else { continue };
            let mut pending = std::mem::take(&mut ring.pending);
            let mut over = Vec::new();
            pending.retain_mut(|operation| {
                if operation.object != object {
                    return true;
                }
                let result = self.attempt(operation);
                if let Some(result) = result {
                    over.push((operation.entry.user_data, result));
                }
                result.is_none()
            });
            let waits_on = pending.iter().any(|operation| operation.object == object);
            if let Some(ring) = self.ring(id) {
                // Operations submitted meanwhile follow the older ones.
                pending.append(&mut ring.pending);
                ring.pending = pending;
            }
            if waits_on
                && let Some(state) = self.objects.get_mut(&object)
                && !state.rings.contains(&id)
            {
                state.rings.push(id);
            }
            for (user_data, result) in over {
                self.complete(id, user_data, result);
            }
        }
    }

    pub(super) fn complete(&mut self, id: ObjectId, user_data: u64, result: i32) {
        self.trace.step("complete", self.now, user_data, result as u64);
        let Some(ring) = self.ring(id) else { return };
        if !ring.overflown.is_empty() || !ring.put(user_data, result) {
            ring.overflown.push_back((user_data, result));
            ring.word(Word::SubmissionFlags).fetch_or(FLAG_OVERFLOW, Ordering::AcqRel);
        }
        let event = ring
            .event
            .filter(|_| ring.word(Word::CompletionFlags).load(Ordering::Acquire) & EVENT_DISABLED == 0);
        if let Some(event) = event
            && let Some(Object { kind: Kind::Event { count, .. }, .. }) = self.objects.get_mut(&event)
        {
            *count += 1;
            self.changed(event);
        }
        self.changed(id);
    }

    fn cancel(&mut self, id: ObjectId, entry: &Entry) {
        let flags = entry.operation_flags;
        let target = match self.target(id, entry.descriptor, flags & CANCEL_FIXED != 0) {
            Ok(Registered::Object(object)) => Some(object),
            _ => None,
        };
        let Some(ring) = self.ring(id) else { return };
        let mut cancelled = Vec::new();
        ring.pending.retain(|operation| {
            let fits = if flags & CANCEL_ANY != 0 {
                true
            } else if flags & CANCEL_BY_DESCRIPTOR != 0 {
                Some(operation.object) == target
            } else {
                operation.entry.user_data == entry.address
            };
            let goes = fits && (flags & CANCEL_ALL != 0 || cancelled.is_empty());
            if goes {
                cancelled.push(operation.entry.user_data);
            }
            !goes
        });
        let count = cancelled.len() as i32;
        for user_data in cancelled {
            self.complete(id, user_data, -libc::ECANCELED);
        }
        let result = match (count, flags & CANCEL_ALL != 0) {
            (0, false) => -libc::ENOENT,
            (_, false) => 0,
            (count, true) => count,
        };
        self.complete(id, entry.user_data, result);
    }

    fn begin_file_operation(&mut self, id: ObjectId, entry: Entry, file: c_int) {
        if !matches!(entry.operation, READ | READ_FIXED | WRITE | WRITE_FIXED | FSYNC) {
            return self.complete(id, entry.user_data, -libc::EINVAL);
        }
        let at = self.now + self.disk_delay();
        let operation = FileOperation { ring: id, entry, file, owner: self.process() };
        self.schedule(at, Due::File(Box::new(operation)));
    }

    /// Completes an operation on a file. An operation of a process that has ended has no effect.
    pub(super) fn finish_file_operation(&mut self, operation: &FileOperation) {
        let FileOperation { ring, entry, file, owner } = operation;
        if self.ring(*ring).is_none() {
            return;
        }
        let (address, bytes, offset) = (entry.address, entry.length as usize, entry.offset as i64);
        let result = match entry.operation {
            READ | READ_FIXED => {
                // SAFETY: the program gives room for so many bytes until the operation is over.
                let room = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) };
                self.read_file(*owner, *file, room, offset)
            }
            WRITE | WRITE_FIXED => {
                // SAFETY: the program keeps so many bytes until the operation is over.
                let content = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
                self.write_file(*owner, *file, content, offset)
            }
            _ => self.sync(*owner, *file).map_or_else(|errno| -errno, |()| 0),
        };
        self.complete(*ring, entry.user_data, result);
    }

    pub(super) fn register_event(&mut self, id: ObjectId, event: Option<ObjectId>) -> Result<(), c_int> {
        let ring = self.ring(id).ok_or(libc::EBADF)?;
        ring.event = event;
        Ok(())
    }

    pub(super) fn register_files(&mut self, id: ObjectId, count: usize) -> Result<(), c_int> {
        let ring = self.ring(id).ok_or(libc::EBADF)?;
        ring.files = vec![None; count];
        Ok(())
    }

    pub(super) fn unregister_files(&mut self, id: ObjectId) -> Result<(), c_int> {
        let files = std::mem::take(&mut self.ring(id).ok_or(libc::EBADF)?.files);
        self.release_registered(files, false);
        Ok(())
    }

    /// Registers descriptors at positions; -1 clears one.
    pub(super) fn update_files(
        &mut self,
        id: ObjectId,
        first: usize,
        descriptors: &[c_int],
    ) -> Result<(), c_int> {
        for (position, descriptor) in (first..).zip(descriptors) {
            let registered = match *descriptor {
                -1 => None,
                descriptor => Some(self.target(id, descriptor, false)?),
            };
            let ring = self.ring(id).ok_or(libc::EBADF)?;
            let place = ring.files.get_mut(position).ok_or(libc::EINVAL)?;
            let before = std::mem::replace(place, registered);
            if let Some(Registered::Object(object)) = registered {
                self.refer(object);
            }
            self.release_registered(vec![before], false);
        }
        Ok(())
    }

    /// Closes a ring when its last descriptor is closed.
    pub(super) fn close_ring(&mut self, id: ObjectId, silently: bool) {
        // The ring's process may have ended: no operation completes any more.
        let Some(ring) = self.ring(id) else { return };
        ring.pending.clear();
        let files = std::mem::take(&mut ring.files);
        self.release_registered(files, silently);
    }

    fn release_registered(&mut self, files: Vec<Option<Registered>>, silently: bool) {
        for registered in files.into_iter().flatten() {
            if let Registered::Object(object) = registered {
                self.release(object, silently);
            }
        }
    }

    /// Ends a connection with a reset, as connecting to `AF_UNSPEC` does.
    pub(super) fn abort(&mut self, id: ObjectId) {
        let now = self.now;
        let Some(Socket { state: SocketState::Open(end), host, .. }) = self.socket(id) else { return };
        let (peer, host, peer_host) = (end.abort(), *host, end.peer_host);
        if let Some(peer) = peer {
            self.send_reset(peer, now, host, peer_host);
        }
        self.changed(id);
    }
}

/// Maps the memory of a ring in the simulation; its program maps the same file.
fn map(descriptor: c_int, queue_bytes: usize, entry_bytes: usize) -> Result<(usize, usize), c_int> {
    // SAFETY: the descriptor is the caller's, and was made for this.
    let failed = unsafe { libc::ftruncate(descriptor, (ENTRIES_AT + entry_bytes) as i64) };
    if failed != 0 {
        return Err(libc::ENOMEM);
    }
    let map = |bytes: usize, at: usize| {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, of a file that is as long.
        let place = unsafe {
            libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, descriptor, at as i64)
        };
        if place == libc::MAP_FAILED { Err(libc::ENOMEM) } else { Ok(place as usize) }
    };
    Ok((map(queue_bytes, 0)?, map(entry_bytes, ENTRIES_AT)?))
}

/// Returns the memory that an operation reads or writes.
///
/// # Safety
/// The entry describes memory that its program keeps for it.
unsafe fn memory_of<'a>(entry: &Entry, by_message: u8) -> Vec<&'a mut [u8]> {
    let (start, bytes) = (entry.address as *mut u8, entry.length as usize);
    if entry.operation != by_message {
        // SAFETY: as the caller warrants.
        return vec![unsafe { std::slice::from_raw_parts_mut(start, bytes) }];
    }
    // SAFETY: as the caller warrants.
    let message = unsafe { &*start.cast::<libc::msghdr>() };
    // SAFETY: as the caller warrants.
    unsafe { slices(message.msg_iov, message.msg_iovlen) }
}

/// Returns the parts without their first `bytes` bytes.
fn skip<'a>(parts: &'a mut [&mut [u8]], mut bytes: usize) -> Vec<&'a mut [u8]> {
    let mut rest = Vec::new();
    for part in parts {
        let skipped = bytes.min(part.len());
        bytes -= skipped;
        if skipped < part.len() {
            rest.push(&mut part[skipped..]);
        }
    }
    rest
}
