//! Descriptors: eventfds, timers, epoll and poll, reads, writes and close.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};

use super::super::objects::{Epoll, Kind, ObjectId};
use super::super::threads::{WakeReason, current, preemption_point, sleep_until, wait_for};
use super::super::{MILLISECOND, Nanos, now, real, report, with};
use super::{fail, given, nanos, outcome, slices, sockets};

/// Returns the simulated object of a descriptor, on a simulated thread.
pub(super) fn object(descriptor: c_int) -> Option<ObjectId> {
    current()?;
    with(|kernel| {
        kernel.call();
        kernel.object_of(descriptor)
    })
}

fn opens() -> bool {
    current().is_some()
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn eventfd(count: c_uint, flags: c_int) -> c_int {
    if !opens() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::EVENTFD.get()(count, flags) };
    }
    let kind = Kind::Event { count: u64::from(count), is_semaphore: flags & libc::EFD_SEMAPHORE != 0 };
    with(|kernel| kernel.open(kind, flags & libc::EFD_NONBLOCK != 0))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn timerfd_create(clock: c_int, flags: c_int) -> c_int {
    if !opens() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::TIMERFD_CREATE.get()(clock, flags) };
    }
    let kind = Kind::Timer { interval: 0, expirations: 0, setting: 0 };
    with(|kernel| kernel.open(kind, flags & libc::TFD_NONBLOCK != 0))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn timerfd_settime(
    timer: c_int,
    flags: c_int,
    wanted: *const libc::itimerspec,
    before: *mut libc::itimerspec,
) -> c_int {
    let Some(id) = object(timer) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::TIMERFD_SETTIME.get()(timer, flags, wanted, before) };
    };
    // SAFETY: the caller gives a setting.
    let Some(wanted) = (unsafe { given(wanted) }) else { return fail(libc::EFAULT) };
    let (first, every) = (nanos(&wanted.it_value), nanos(&wanted.it_interval));
    with(|kernel| {
        let at = if flags & libc::TFD_TIMER_ABSTIME == 0 { kernel.now + first } else { first };
        kernel.set_timer(id, (first != 0).then_some(at), every);
    });
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_create1(flags: c_int) -> c_int {
    if !opens() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::EPOLL_CREATE1.get()(flags) };
    }
    with(|kernel| kernel.open(Kind::Epoll(Epoll::default()), false))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_ctl(
    epoll: c_int,
    operation: c_int,
    descriptor: c_int,
    event: *mut libc::epoll_event,
) -> c_int {
    let Some(id) = object(epoll) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::EPOLL_CTL.get()(epoll, operation, descriptor, event) };
    };
    // SAFETY: the caller gives an event, or none to forget a descriptor.
    let (events, data) = unsafe { given(event) }.map_or((0, 0), |event| (event.events, event.u64));
    match with(|kernel| kernel.watch(id, operation, descriptor, events, data)) {
        Ok(()) => 0,
        Err(errno) => fail(errno),
    }
}

fn wait_in_epoll(id: ObjectId, room: &mut [libc::epoll_event], until: Option<Nanos>) -> c_int {
    loop {
        let found = with(|kernel| {
            kernel.catch_up();
            kernel.collect(id, room.len())
        });
        for (place, (events, data)) in room.iter_mut().zip(&found) {
            *place = libc::epoll_event { events: *events, u64: *data };
        }
        if !found.is_empty() || until.is_some_and(|until| until <= now()) {
            if found.is_empty() {
                preemption_point();
            }
            return found.len() as c_int;
        }
        wait_for(&[id], until);
    }
}

/// Returns the end of a wait given in milliseconds; a negative timeout waits forever.
fn until_millis(timeout: c_int) -> Option<Nanos> {
    u64::try_from(timeout).ok().map(|millis| if millis == 0 { 0 } else { now() + millis * MILLISECOND })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_wait(
    epoll: c_int,
    events: *mut libc::epoll_event,
    max: c_int,
    timeout: c_int,
) -> c_int {
    let Some(id) = object(epoll) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::EPOLL_WAIT.get()(epoll, events, max, timeout) };
    };
    // SAFETY: the caller gives room for so many events.
    let room = unsafe { std::slice::from_raw_parts_mut(events, max as usize) };
    wait_in_epoll(id, room, until_millis(timeout))
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn epoll_pwait2(
    epoll: c_int,
    events: *mut libc::epoll_event,
    max: c_int,
    timeout: *const libc::timespec,
    _mask: *const libc::sigset_t,
) -> c_int {
    // For real descriptors, programs fall back to `epoll_wait`.
    let Some(id) = object(epoll) else { return fail(libc::ENOSYS) };
    // SAFETY: the caller gives a time or none.
    let timeout = unsafe { given(timeout) }.map(nanos);
    // SAFETY: the caller gives room for so many events.
    let room = unsafe { std::slice::from_raw_parts_mut(events, max as usize) };
    wait_in_epoll(id, room, timeout.map(|timeout| if timeout == 0 { 0 } else { now() + timeout }))
}

fn poll_descriptors(polled: &mut [libc::pollfd], until: Option<Nanos>) -> c_int {
    let objects: Vec<Option<ObjectId>> = polled.iter().map(|entry| object(entry.fd)).collect();
    let waits_for: Vec<ObjectId> = objects.iter().flatten().copied().collect();
    loop {
        let mut ready = 0;
        with(|kernel| {
            kernel.catch_up();
            for (entry, object) in polled.iter_mut().zip(&objects) {
                // `POLLIN` and the other poll events are the epoll events in 16 bits.
                let bits = object.map_or(0, |object| kernel.readiness(object)) as i16;
                entry.revents = bits & (entry.events | libc::POLLERR | libc::POLLHUP);
                ready += c_int::from(entry.revents != 0);
            }
        });
        if ready > 0 || until.is_some_and(|until| until <= now()) {
            if ready == 0 {
                preemption_point();
            }
            return ready;
        }
        wait_for(&waits_for, until);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn poll(polled: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::POLL.get()(polled, count, timeout) };
    }
    if count == 0 {
        return poll_descriptors(&mut [], until_millis(timeout));
    }
    // SAFETY: the caller gives so many entries.
    let polled = unsafe { std::slice::from_raw_parts_mut(polled, count as usize) };
    poll_descriptors(polled, until_millis(timeout))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ppoll(
    polled: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::PPOLL.get()(polled, count, timeout, mask) };
    }
    // SAFETY: the caller gives a time or none.
    let timeout = unsafe { given(timeout) }.map(nanos);
    let until = timeout.map(|timeout| if timeout == 0 { 0 } else { now() + timeout });
    if count == 0 {
        return poll_descriptors(&mut [], until);
    }
    // SAFETY: the caller gives so many entries.
    let polled = unsafe { std::slice::from_raw_parts_mut(polled, count as usize) };
    poll_descriptors(polled, until)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close(descriptor: c_int) -> c_int {
    if current().is_some() {
        with(|kernel| {
            kernel.call();
            kernel.close(descriptor);
            kernel.files.remove(&descriptor);
        });
    }
    // SAFETY: the caller's own argument; a simulated descriptor holds a number of the real system.
    unsafe { real::CLOSE.get()(descriptor) }
}

/// Whether a path shows properties of the real process, which differ between runs.
///
/// # Safety
/// The path ends with a zero byte.
unsafe fn is_of_real_process(path: *const c_char) -> bool {
    // SAFETY: as the caller warrants.
    current().is_some() && unsafe { CStr::from_ptr(path) }.to_bytes().starts_with(b"/proc/")
}

fn opened(descriptor: c_int) -> c_int {
    if descriptor >= 0 && current().is_some() {
        with(|kernel| {
            let owner = kernel.process();
            kernel.files.insert(descriptor, owner);
        });
    }
    descriptor
}

#[unsafe(no_mangle)]
unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: the caller gives a path.
    if unsafe { is_of_real_process(path) } {
        return fail(libc::ENOENT);
    }
    // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
    opened(unsafe { real::OPEN.get()(path, flags, mode) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: the caller gives a path.
    if unsafe { is_of_real_process(path) } {
        return fail(libc::ENOENT);
    }
    // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
    opened(unsafe { real::OPEN64.get()(path, flags, mode) })
}

/// Whether a descriptor is one of a file that a simulated process has opened; if so, its disk takes its time.
fn waits_for_disk(descriptor: c_int) -> bool {
    if current().is_none() {
        return false;
    }
    let until = with(|kernel| {
        let is_file = kernel.files.contains_key(&descriptor);
        is_file.then(|| kernel.now + kernel.disk_delay())
    });
    if let Some(until) = until {
        sleep_until(until);
    }
    until.is_some()
}

fn moved(result: c_int) -> isize {
    if result < 0 { fail(-result) as isize } else { result as isize }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pread64(descriptor: c_int, room: *mut c_void, bytes: usize, offset: i64) -> isize {
    if !waits_for_disk(descriptor) {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::PREAD64.get()(descriptor, room, bytes, offset) };
    }
    // SAFETY: the caller gives room for so many bytes.
    let room = unsafe { std::slice::from_raw_parts_mut(room.cast::<u8>(), bytes) };
    moved(with(|kernel| kernel.read_file(kernel.process(), descriptor, room, offset)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pwrite64(descriptor: c_int, content: *const c_void, bytes: usize, offset: i64) -> isize {
    if !waits_for_disk(descriptor) {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::PWRITE64.get()(descriptor, content, bytes, offset) };
    }
    // SAFETY: the caller gives so many bytes.
    let content = unsafe { std::slice::from_raw_parts(content.cast::<u8>(), bytes) };
    moved(with(|kernel| kernel.write_file(kernel.process(), descriptor, content, offset)))
}

fn sync(descriptor: c_int) -> c_int {
    let (until, done) =
        with(|kernel| (kernel.now + kernel.disk_delay(), kernel.sync(kernel.process(), descriptor)));
    sleep_until(until);
    done.map_or_else(fail, |()| 0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fdatasync(descriptor: c_int) -> c_int {
    if current().is_some() {
        return sync(descriptor);
    }
    // SAFETY: the caller's own argument.
    unsafe { real::FDATASYNC.get()(descriptor) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fsync(descriptor: c_int) -> c_int {
    if current().is_some() {
        return sync(descriptor);
    }
    // SAFETY: the caller's own argument.
    unsafe { real::FSYNC.get()(descriptor) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn openat(folder: c_int, path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: the caller gives a path.
    if unsafe { is_of_real_process(path) } {
        return fail(libc::ENOENT);
    }
    // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
    opened(unsafe { real::OPENAT.get()(folder, path, flags, mode) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn opendir(path: *const c_char) -> *mut libc::DIR {
    // SAFETY: the caller gives a path.
    if unsafe { is_of_real_process(path) } {
        fail(libc::ENOENT);
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's own argument.
    unsafe { real::OPENDIR.get()(path) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(descriptor: c_int, command: c_int, argument: usize) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        let result = unsafe { real::FCNTL.get()(descriptor, command, argument) };
        return match command {
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => opened(result),
            _ => result,
        };
    };
    with(|kernel| match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => kernel.duplicate(descriptor).unwrap_or(-1),
        libc::F_GETFL => {
            let is_nonblocking = kernel.objects.get(&id).is_some_and(|object| object.is_nonblocking);
            libc::O_RDWR | if is_nonblocking { libc::O_NONBLOCK } else { 0 }
        }
        libc::F_SETFL => {
            if let Some(object) = kernel.objects.get_mut(&id) {
                object.is_nonblocking = argument as c_int & libc::O_NONBLOCK != 0;
            }
            0
        }
        libc::F_GETFD => libc::FD_CLOEXEC,
        libc::F_SETFD => 0,
        _ => fail(libc::EINVAL),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(descriptor: c_int, request: c_ulong, argument: usize) -> c_int {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::IOCTL.get()(descriptor, request, argument) };
    };
    let place = argument as *mut c_int;
    let value = match request {
        libc::FIONBIO => {
            // SAFETY: the caller gives a number.
            let is_nonblocking = unsafe { given(place) }.is_some_and(|value| *value != 0);
            with(|kernel| {
                if let Some(object) = kernel.objects.get_mut(&id) {
                    object.is_nonblocking = is_nonblocking;
                }
            });
            return 0;
        }
        libc::FIONREAD => with(|kernel| kernel.unread(id)),
        libc::TIOCOUTQ => with(|kernel| kernel.in_flight_to_peer(id)),
        _ => return fail(libc::ENOTTY),
    };
    // SAFETY: the caller gives room for a number.
    unsafe { place.write(value as c_int) };
    0
}

/// Repeats `attempt` until it does not return `EAGAIN`; once if the descriptor is non-blocking.
pub(super) fn until_possible(
    id: ObjectId,
    waits: bool,
    limit: Nanos,
    mut attempt: impl FnMut() -> Result<usize, c_int>,
) -> Result<usize, c_int> {
    let until = (limit > 0).then(|| now() + limit);
    loop {
        match attempt() {
            Err(libc::EAGAIN) if waits => {
                if wait_for(&[id], until) == WakeReason::TimedOut {
                    return Err(libc::EAGAIN);
                }
            }
            done => return done,
        }
    }
}

/// Whether calls on an object block: its descriptor is a blocking one.
pub(super) fn waits(id: ObjectId) -> bool {
    with(|kernel| kernel.objects.get(&id).is_some_and(|object| !object.is_nonblocking))
}

/// Reads and resets the number of an eventfd or a timer; takes 1 from an eventfd that is a semaphore.
fn take_number(id: ObjectId) -> Result<u64, c_int> {
    with(|kernel| {
        let Some(object) = kernel.objects.get_mut(&id) else { return Err(libc::EBADF) };
        let (taken, was_event) = match &mut object.kind {
            Kind::Event { count: 0, .. } | Kind::Timer { expirations: 0, .. } => return Err(libc::EAGAIN),
            Kind::Event { count, is_semaphore: true } => {
                *count -= 1;
                (1, true)
            }
            Kind::Event { count, .. } => (std::mem::take(count), true),
            Kind::Timer { expirations, .. } => (std::mem::take(expirations), false),
            _ => return Err(libc::EINVAL),
        };
        if was_event {
            kernel.changed(id);
        }
        Ok(taken)
    })
}

fn is_socket(id: ObjectId) -> bool {
    with(|kernel| kernel.socket(id).is_some())
}

fn read_parts(id: ObjectId, parts: &mut [&mut [u8]]) -> isize {
    if is_socket(id) {
        return sockets::receive(id, parts, 0);
    }
    let number = until_possible(id, waits(id), 0, || {
        let number = take_number(id)?;
        if let Some(room) = parts.first_mut().and_then(|part| part.get_mut(..8)) {
            room.copy_from_slice(&number.to_ne_bytes());
        }
        Ok(8)
    });
    outcome(number)
}

fn write_parts(id: ObjectId, parts: &[&[u8]]) -> isize {
    if is_socket(id) {
        return sockets::transmit(id, parts, 0);
    }
    let added = parts.first().and_then(|part| part.get(..8)).and_then(|bytes| bytes.try_into().ok());
    let Some(added) = added.map(u64::from_ne_bytes) else { return outcome(Err(libc::EINVAL)) };
    let written = with(|kernel| {
        let Some(object) = kernel.objects.get_mut(&id) else { return Err(libc::EBADF) };
        let Kind::Event { count, .. } = &mut object.kind else { return Err(libc::EINVAL) };
        *count = count.checked_add(added).filter(|count| *count < u64::MAX).ok_or(libc::EAGAIN)?;
        kernel.changed(id);
        Ok(8)
    });
    preemption_point();
    outcome(written)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn read(descriptor: c_int, room: *mut c_void, bytes: usize) -> isize {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::READ.get()(descriptor, room, bytes) };
    };
    // SAFETY: the caller gives room for so many bytes.
    let room = unsafe { std::slice::from_raw_parts_mut(room.cast::<u8>(), bytes) };
    read_parts(id, &mut [room])
}

#[unsafe(no_mangle)]
unsafe extern "C" fn write(descriptor: c_int, content: *const c_void, bytes: usize) -> isize {
    let Some(id) = object(descriptor) else {
        if current().is_some() && (descriptor == 1 || descriptor == 2 && !report::shows_program_output()) {
            // Output for users is dropped.
            return bytes as isize;
        }
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::WRITE.get()(descriptor, content, bytes) };
    };
    // SAFETY: the caller gives so many bytes.
    let content = unsafe { std::slice::from_raw_parts(content.cast::<u8>(), bytes) };
    write_parts(id, &[content])
}

#[unsafe(no_mangle)]
unsafe extern "C" fn readv(descriptor: c_int, parts: *const libc::iovec, count: c_int) -> isize {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::READV.get()(descriptor, parts, count) };
    };
    // SAFETY: the caller gives so much room.
    let mut rooms = unsafe { slices(parts, count as usize) };
    read_parts(id, &mut rooms)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn writev(descriptor: c_int, parts: *const libc::iovec, count: c_int) -> isize {
    let Some(id) = object(descriptor) else {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::WRITEV.get()(descriptor, parts, count) };
    };
    // SAFETY: the caller gives so many bytes.
    let contents = unsafe { slices(parts, count as usize) };
    write_parts(id, &contents.iter().map(|part| &**part).collect::<Vec<&[u8]>>())
}
