//! The C library's own functions behind the simulated ones.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A function of the C library, resolved on first use.
pub(crate) struct Real<F> {
    name: &'static CStr,
    address: AtomicUsize,
    of: PhantomData<F>,
}

impl<F: Copy> Real<F> {
    pub(super) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicUsize::new(0), of: PhantomData }
    }

    /// Returns the function.
    pub(crate) fn get(&self) -> F {
        const { assert!(size_of::<F>() == size_of::<usize>(), "a pointer to a function") };
        let mut address = self.address.load(Ordering::Relaxed);
        if address == 0 {
            // SAFETY: the name ends with a zero byte.
            address = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) } as usize;
            if address == 0 {
                std::process::abort();
            }
            self.address.store(address, Ordering::Relaxed);
        }
        // SAFETY: the C library's function of this name has the type with which it is declared below.
        unsafe { std::mem::transmute_copy(&address) }
    }
}

macro_rules! functions {
    ($($constant:ident $name:literal: ($($argument:ty),*) -> $result:ty;)*) => {
        $(pub(crate) static $constant: Real<unsafe extern "C" fn($($argument),*) -> $result> = Real::new($name);)*
    };
}

type StartRoutine = extern "C" fn(*mut c_void) -> *mut c_void;

functions! {
    ACCEPT4 c"accept4": (c_int, *mut libc::sockaddr, *mut libc::socklen_t, c_int) -> c_int;
    BIND c"bind": (c_int, *const libc::sockaddr, libc::socklen_t) -> c_int;
    CLOCK_GETTIME c"clock_gettime": (libc::clockid_t, *mut libc::timespec) -> c_int;
    CLOCK_NANOSLEEP c"clock_nanosleep": (libc::clockid_t, c_int, *const libc::timespec, *mut libc::timespec) -> c_int;
    CLOSE c"close": (c_int) -> c_int;
    CONNECT c"connect": (c_int, *const libc::sockaddr, libc::socklen_t) -> c_int;
    EPOLL_CREATE1 c"epoll_create1": (c_int) -> c_int;
    EPOLL_CTL c"epoll_ctl": (c_int, c_int, c_int, *mut libc::epoll_event) -> c_int;
    EPOLL_WAIT c"epoll_wait": (c_int, *mut libc::epoll_event, c_int, c_int) -> c_int;
    EVENTFD c"eventfd": (libc::c_uint, c_int) -> c_int;
    FCNTL c"fcntl": (c_int, c_int, usize) -> c_int;
    FDATASYNC c"fdatasync": (c_int) -> c_int;
    FSYNC c"fsync": (c_int) -> c_int;
    GETPEERNAME c"getpeername": (c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> c_int;
    GETPID c"getpid": () -> libc::pid_t;
    GETRANDOM c"getrandom": (*mut c_void, usize, libc::c_uint) -> isize;
    GETSOCKNAME c"getsockname": (c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> c_int;
    GETSOCKOPT c"getsockopt": (c_int, c_int, c_int, *mut c_void, *mut libc::socklen_t) -> c_int;
    IOCTL c"ioctl": (c_int, libc::c_ulong, usize) -> c_int;
    LISTEN c"listen": (c_int, c_int) -> c_int;
    NANOSLEEP c"nanosleep": (*const libc::timespec, *mut libc::timespec) -> c_int;
    OPEN c"open": (*const c_char, c_int, libc::mode_t) -> c_int;
    OPENDIR c"opendir": (*const c_char) -> *mut libc::DIR;
    OPENAT c"openat": (c_int, *const c_char, c_int, libc::mode_t) -> c_int;
    OPEN64 c"open64": (*const c_char, c_int, libc::mode_t) -> c_int;
    POLL c"poll": (*mut libc::pollfd, libc::nfds_t, c_int) -> c_int;
    PPOLL c"ppoll": (*mut libc::pollfd, libc::nfds_t, *const libc::timespec, *const libc::sigset_t) -> c_int;
    PREAD64 c"pread64": (c_int, *mut c_void, usize, i64) -> isize;
    PWRITE64 c"pwrite64": (c_int, *const c_void, usize, i64) -> isize;
    PTHREAD_CREATE c"pthread_create": (*mut libc::pthread_t, *const libc::pthread_attr_t, StartRoutine, *mut c_void) -> c_int;
    PTHREAD_JOIN c"pthread_join": (libc::pthread_t, *mut *mut c_void) -> c_int;
    READ c"read": (c_int, *mut c_void, usize) -> isize;
    READV c"readv": (c_int, *const libc::iovec, c_int) -> isize;
    RECV c"recv": (c_int, *mut c_void, usize, c_int) -> isize;
    RECVMSG c"recvmsg": (c_int, *mut libc::msghdr, c_int) -> isize;
    SCHED_GETAFFINITY c"sched_getaffinity": (libc::pid_t, usize, *mut libc::cpu_set_t) -> c_int;
    SCHED_SETAFFINITY c"sched_setaffinity": (libc::pid_t, usize, *const libc::cpu_set_t) -> c_int;
    SCHED_YIELD c"sched_yield": () -> c_int;
    SEND c"send": (c_int, *const c_void, usize, c_int) -> isize;
    SENDMSG c"sendmsg": (c_int, *const libc::msghdr, c_int) -> isize;
    SETSOCKOPT c"setsockopt": (c_int, c_int, c_int, *const c_void, libc::socklen_t) -> c_int;
    SHUTDOWN c"shutdown": (c_int, c_int) -> c_int;
    SOCKET c"socket": (c_int, c_int, c_int) -> c_int;
    SOCKETPAIR c"socketpair": (c_int, c_int, c_int, *mut c_int) -> c_int;
    SYSCALL c"syscall": (c_long, usize, usize, usize, usize, usize, usize) -> c_long;
    TIMERFD_CREATE c"timerfd_create": (c_int, c_int) -> c_int;
    TIMERFD_SETTIME c"timerfd_settime": (c_int, c_int, *const libc::itimerspec, *mut libc::itimerspec) -> c_int;
    UNAME c"uname": (*mut libc::utsname) -> c_int;
    WRITE c"write": (c_int, *const c_void, usize) -> isize;
    WRITEV c"writev": (c_int, *const libc::iovec, c_int) -> isize;
}
