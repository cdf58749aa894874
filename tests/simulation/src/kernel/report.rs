//! Result channel of a simulation: one line to the process that started it.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use super::real;

/// Descriptor for the result, a real one.
static RESULT: AtomicI32 = AtomicI32::new(2);

/// Whether output of programs is shown.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

/// Shows the output of programs on standard error.
pub(crate) fn watch() {
    IS_WATCHED.store(true, Ordering::Relaxed);
}

pub(super) fn is_watched() -> bool {
    IS_WATCHED.load(Ordering::Relaxed)
}

/// Sets the descriptor for the result.
pub(crate) fn to(descriptor: c_int) {
    RESULT.store(descriptor, Ordering::Relaxed);
}

fn write(descriptor: c_int, mut text: &[u8]) {
    let function = real::WRITE.get();
    while !text.is_empty() {
        // SAFETY: the bytes live until after the call.
        let written = unsafe { function(descriptor, text.as_ptr().cast(), text.len()) };
        if written <= 0 {
            return;
        }
        text = &text[written as usize..];
    }
}

/// Prints to the real standard error.
pub(crate) fn print(text: &str) {
    write(2, text.as_bytes());
}

/// Sends the result.
pub(crate) fn send(line: &str) {
    write(RESULT.load(Ordering::Relaxed), line.as_bytes());
    write(RESULT.load(Ordering::Relaxed), b"\n");
}

/// Ends the process at once, without running exit handlers.
pub(crate) fn end(code: c_int) -> ! {
    let function = real::SYSCALL.get();
    // SAFETY: the call does not return and touches no memory of this program.
    unsafe { function(libc::SYS_exit_group, code as usize, 0, 0, 0, 0, 0) };
    std::process::abort()
}

/// Ends a simulation that cannot continue, with the reason as its result.
pub(crate) fn fail(reason: &str) -> ! {
    send(&serde_json::json!({ "failed": reason }).to_string());
    end(1)
}
