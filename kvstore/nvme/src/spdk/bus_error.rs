//! Bus errors after SPDK was loaded.
//!
//! A constructor of SPDK's environment takes over SIGBUS. Its handler maps other memory in the place of the
//! registers of a device that was pulled out, and returns. It also returns from a bus error of any other kind
//! (a mapped file that was cut short, memory that failed), so that the instruction is repeated for ever. The
//! handler installed here calls SPDK's once for each address; an error that comes back is left to the
//! disposition from before SPDK, by default the end of the process.
//!
//! Sources: `lib/env_dpdk/sigbus_handler.c` of SPDK, sigaction(2), signal-safety(7).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A disposition of SIGBUS.
#[derive(Clone, Copy)]
pub(super) struct BusErrorHandler(libc::sigaction);

struct Handlers {
    before: BusErrorHandler,
    of_spdk: BusErrorHandler,
}

static HANDLERS: OnceLock<Handlers> = OnceLock::new();
/// The address of the last bus error.
static LAST: AtomicUsize = AtomicUsize::new(usize::MAX);

impl BusErrorHandler {
    pub(super) fn current() -> Self {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: only reads the disposition; `action` has room for it.
        unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), action.as_mut_ptr()) };
        // SAFETY: filled in, or zeroed, which is the default disposition.
        Self(unsafe { action.assume_init() })
    }

    /// Called with the disposition from before SPDK was loaded: if SPDK has replaced it, installs the handler
    /// of this module in front of SPDK's.
    pub(super) fn install_in_front(self) {
        let of_spdk = Self::current();
        let is_taken = of_spdk.0.sa_sigaction != self.0.sa_sigaction;
        if !is_taken || of_spdk.0.sa_flags & libc::SA_SIGINFO == 0 {
            return;
        }
        if HANDLERS.set(Handlers { before: self, of_spdk }).is_ok() {
            let mut action = of_spdk.0;
            action.sa_sigaction = on_bus_error as *const () as usize;
            // SAFETY: the handler calls only what signal-safety(7) permits.
            unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
        }
    }
}

unsafe extern "C" fn on_bus_error(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let Some(Handlers { before, of_spdk }) = HANDLERS.get() else { return };
    // SAFETY: the kernel gives a handler with SA_SIGINFO the error's description, which is not written to.
    let info_of = unsafe { &*info };
    // SAFETY: a bus error has an address; a signal that was sent has other bytes there, which are not used.
    let address = unsafe { info_of.si_addr() } as usize;
    let is_sent = info_of.si_code <= 0;
    if is_sent || LAST.swap(address, Ordering::Relaxed) == address {
        // SAFETY: restores a disposition that the process had; async-signal-safe.
        unsafe { libc::sigaction(signal, &raw const before.0, std::ptr::null_mut()) };
        if is_sent {
            // A signal that was sent is not repeated; it is delivered when this handler returns.
            // SAFETY: async-signal-safe.
            unsafe { libc::raise(signal) };
        }
        return;
    }
    // SAFETY: a handler with SA_SIGINFO has this signature; SPDK's library is never unloaded.
    let handler: unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
        unsafe { std::mem::transmute(of_spdk.0.sa_sigaction) };
    // SAFETY: called as the kernel would.
    unsafe { handler(signal, info, context) };
}
