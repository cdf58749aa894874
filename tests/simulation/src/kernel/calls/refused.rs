//! Functions with which a program would bypass the simulated kernel: on a simulated thread they end the run
//! with an error.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::super::real::Real;
use super::super::report;
use super::super::threads::current;
use crate::oracle::Oracle;

macro_rules! not_simulated {
    ($($name:ident $text:literal ($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            static REAL: Real<unsafe extern "C" fn($($type),*) -> $result> = Real::new($text);
            if current().is_some() {
                let reason = concat!(
                    stringify!($name),
                    " is not simulated: define it in kernel/calls, or do without it in the program"
                );
                report::fail(Oracle::Simulator, reason);
            }
            // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
            unsafe { REAL.get()($($argument),*) }
        }
    )*};
}

not_simulated! {
    dup c"dup" (descriptor: c_int) -> c_int;
    dup2 c"dup2" (from: c_int, to: c_int) -> c_int;
    dup3 c"dup3" (from: c_int, to: c_int, flags: c_int) -> c_int;
    epoll_pwait c"epoll_pwait" (
        epoll: c_int, events: *mut c_void, count: c_int, timeout: c_int, signals: *const c_void
    ) -> c_int;
    execvp c"execvp" (file: *const c_char, arguments: *const *const c_char) -> c_int;
    fork c"fork" () -> libc::pid_t;
    getaddrinfo c"getaddrinfo" (
        node: *const c_char, service: *const c_char, hints: *const libc::addrinfo, found: *mut *mut libc::addrinfo
    ) -> c_int;
    inotify_init1 c"inotify_init1" (flags: c_int) -> c_int;
    pipe2 c"pipe2" (ends: *mut c_int, flags: c_int) -> c_int;
    posix_spawn c"posix_spawn" (
        process: *mut libc::pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char
    ) -> c_int;
    posix_spawnp c"posix_spawnp" (
        process: *mut libc::pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: *const *mut c_char, environment: *const *mut c_char
    ) -> c_int;
    preadv64 c"preadv64" (descriptor: c_int, parts: *const libc::iovec, count: c_int, offset: i64) -> isize;
    pwritev64 c"pwritev64" (descriptor: c_int, parts: *const libc::iovec, count: c_int, offset: i64) -> isize;
    recvmmsg c"recvmmsg" (
        descriptor: c_int, messages: *mut c_void, count: c_uint, flags: c_int, timeout: *mut libc::timespec
    ) -> c_int;
    select c"select" (
        count: c_int, reads: *mut c_void, writes: *mut c_void, errors: *mut c_void, timeout: *mut libc::timeval
    ) -> c_int;
    sendfile64 c"sendfile64" (to: c_int, from: c_int, offset: *mut i64, count: usize) -> isize;
    sendmmsg c"sendmmsg" (descriptor: c_int, messages: *mut c_void, count: c_uint, flags: c_int) -> c_int;
    signalfd c"signalfd" (descriptor: c_int, signals: *const c_void, flags: c_int) -> c_int;
    sleep c"sleep" (seconds: c_uint) -> c_uint;
    splice c"splice" (
        from: c_int, from_offset: *mut i64, to: c_int, to_offset: *mut i64, bytes: usize, flags: c_uint
    ) -> isize;
    unshare c"unshare" (flags: c_int) -> c_int;
    usleep c"usleep" (microseconds: c_uint) -> c_int;
}
