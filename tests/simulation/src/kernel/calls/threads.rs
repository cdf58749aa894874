//! Threads, words of memory that are waited for, and what a process is told about itself.

use std::ffi::{c_char, c_int, c_long, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use super::super::threads::{self, WakeReason, current, preemption_point, yield_now};
use super::super::{real, report, with};
use super::{descriptors, fail, given, nanos, rings};
use crate::oracle::Oracle;

/// System calls by number that the real system answers: of memory and files.
const REAL_CALLS: [c_long; 10] = [
    libc::SYS_memfd_create,
    libc::SYS_mlock2,
    libc::SYS_statx,
    libc::SYS_renameat2,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_copy_file_range,
    libc::SYS_getdents64,
    libc::SYS_syncfs,
];
/// Processors that each host has.
const PROCESSORS: usize = 2;

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    routine: threads::Routine,
    argument: *mut c_void,
) -> c_int {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::PTHREAD_CREATE.get()(thread, attributes, routine, argument) };
    }
    let created = threads::create(thread, attributes, routine, argument);
    preemption_point();
    created
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_join(thread: libc::pthread_t, result: *mut *mut c_void) -> c_int {
    if current().is_some() {
        threads::join(thread);
    }
    // SAFETY: the caller's own arguments; a simulated thread is over, or about to be without needing a turn.
    unsafe { real::PTHREAD_JOIN.get()(thread, result) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sched_yield() -> c_int {
    if current().is_none() {
        // SAFETY: it takes nothing.
        return unsafe { real::SCHED_YIELD.get()() };
    }
    yield_now();
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sched_getaffinity(
    process: libc::pid_t,
    bytes: usize,
    set: *mut libc::cpu_set_t,
) -> c_int {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::SCHED_GETAFFINITY.get()(process, bytes, set) };
    }
    // SAFETY: the caller gives room for so many bytes.
    let room = unsafe { std::slice::from_raw_parts_mut(set.cast::<u8>(), bytes) };
    room.fill(0);
    room[0] = (1 << PROCESSORS) - 1;
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sched_setaffinity(
    process: libc::pid_t,
    bytes: usize,
    set: *const libc::cpu_set_t,
) -> c_int {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::SCHED_SETAFFINITY.get()(process, bytes, set) };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getpid() -> libc::pid_t {
    if current().is_none() {
        // SAFETY: it takes nothing.
        return unsafe { real::GETPID.get()() };
    }
    with(|kernel| 1000 + kernel.process().0 as libc::pid_t)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn uname(names: *mut libc::utsname) -> c_int {
    // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
    let failed = unsafe { real::UNAME.get()(names) };
    if failed != 0 || current().is_none() {
        return failed;
    }
    let name = with(|kernel| kernel.hosts[kernel.host().index()].name.clone());
    // SAFETY: the function has filled it.
    let names = unsafe { &mut *names };
    names.nodename.fill(0);
    for (to, from) in names.nodename.iter_mut().zip(name.bytes().take(63)) {
        *to = from as c_char;
    }
    0
}

/// Ends of processes that nobody asked for are failures of a simulation.
#[unsafe(no_mangle)]
unsafe extern "C" fn exit(code: c_int) -> ! {
    if current().is_some() {
        let name = with(|kernel| kernel.processes[kernel.process().index()].name.clone());
        report::fail(Oracle::Alive, &format!("{name} has called exit({code})"));
    }
    report::end(code)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    if current().is_some() {
        match number {
            libc::SYS_futex => return futex(a, b as c_int, c as u32, d, f as u32),
            libc::SYS_getrandom => {
                // SAFETY: the caller gives room for so many bytes.
                let room = unsafe { std::slice::from_raw_parts_mut(a as *mut u8, b) };
                with(|kernel| kernel.entropy.fill(room));
                return b as c_long;
            }
            libc::SYS_gettid => return with(|kernel| 100_000 + c_long::from(kernel.current.0)),
            // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
            libc::SYS_eventfd2 => return c_long::from(unsafe { descriptors::eventfd(a as u32, b as c_int) }),
            libc::SYS_epoll_pwait2 => {
                let (events, timeout) = (b as *mut libc::epoll_event, d as *const libc::timespec);
                // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
                let found = unsafe {
                    descriptors::epoll_pwait2(a as c_int, events, c as c_int, timeout, std::ptr::null())
                };
                return c_long::from(found);
            }
            libc::SYS_io_uring_setup => return rings::setup(a as u32, b),
            libc::SYS_io_uring_enter => return rings::enter(a as c_int, b as u32, c as u32, d as u32, e),
            libc::SYS_io_uring_register => return rings::register(a as c_int, b as u32, c, d as u32),
            number if REAL_CALLS.contains(&number) => {}
            other => {
                let reason = format!(
                    "system call {other} is not simulated: define it, or add it to REAL_CALLS if it has to do with memory or \
                     files only"
                );
                report::fail(Oracle::Simulator, &reason)
            }
        }
    }
    // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
    unsafe { real::SYSCALL.get()(number, a, b, c, d, e, f) }
}

fn futex(address: usize, operation: c_int, value: u32, timeout: usize, _bits: u32) -> c_long {
    let is_realtime = operation & libc::FUTEX_CLOCK_REALTIME != 0;
    match operation & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME) {
        command @ (libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET) => {
            // SAFETY: the caller gives a time or none.
            let timeout = unsafe { given(timeout as *const libc::timespec) }.map(nanos);
            // SAFETY: the caller waits for a word that lives as long as the wait.
            let word = unsafe { AtomicU32::from_ptr(address as *mut u32) };
            if word.load(Ordering::SeqCst) != value {
                preemption_point();
                return c_long::from(fail(libc::EAGAIN));
            }
            with(|kernel| {
                kernel.call();
                let until = timeout.map(|timeout| match command {
                    libc::FUTEX_WAIT => kernel.now + timeout,
                    _ if is_realtime => {
                        let offset = kernel.hosts[kernel.host().index()].clock_offset;
                        timeout.saturating_sub(super::super::EPOCH).saturating_add_signed(-offset)
                    }
                    _ => timeout,
                });
                let me = kernel.current;
                kernel.begin_wait(until);
                kernel.futexes.entry(address).or_default().push_back(me);
            });
            let woken = threads::wait();
            if woken == WakeReason::TimedOut {
                with(|kernel| {
                    let me = kernel.current;
                    if let Some(waiting) = kernel.futexes.get_mut(&address) {
                        waiting.retain(|thread| *thread != me);
                    }
                });
                return c_long::from(fail(libc::ETIMEDOUT));
            }
            0
        }
        libc::FUTEX_WAKE | libc::FUTEX_WAKE_BITSET => {
            let woken = with(|kernel| {
                kernel.call();
                kernel.wake_futex(address, value as usize)
            });
            preemption_point();
            woken as c_long
        }
        libc::FUTEX_REQUEUE | libc::FUTEX_CMP_REQUEUE => {
            // All are woken, and look again: allowed, since wake-ups may come for nothing.
            let woken = with(|kernel| kernel.wake_futex(address, usize::MAX));
            yield_now();
            woken as c_long
        }
        other => report::fail(Oracle::Simulator, &format!("futex operation {other} is not simulated")),
    }
}

/// Name of the host.
#[unsafe(no_mangle)]
unsafe extern "C" fn gethostname(room: *mut c_char, bytes: usize) -> c_int {
    let name = if current().is_some() {
        with(|kernel| kernel.hosts[kernel.host().index()].name.clone())
    } else {
        "outside".to_owned()
    };
    // SAFETY: the caller gives room for so many bytes.
    let room = unsafe { std::slice::from_raw_parts_mut(room.cast::<u8>(), bytes) };
    room.fill(0);
    for (to, from) in room.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    0
}
