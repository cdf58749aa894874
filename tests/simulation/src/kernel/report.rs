//! Result channel of a simulation: one line to the process that started it.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use super::real;
use crate::oracle::Oracle;

/// Descriptor for the result, a real one.
static RESULT: AtomicI32 = AtomicI32::new(2);

/// Whether output of programs is shown.
static SHOWS_PROGRAM_OUTPUT: AtomicBool = AtomicBool::new(false);

/// Shows the output of programs on standard error.
pub(crate) fn show_program_output() {
    SHOWS_PROGRAM_OUTPUT.store(true, Ordering::Relaxed);
}

pub(super) fn shows_program_output() -> bool {
    SHOWS_PROGRAM_OUTPUT.load(Ordering::Relaxed)
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

/// Ends a simulation that cannot continue. Its result is the oracle that failed, the simulated time, and the reason.
pub(crate) fn fail(oracle: Oracle, reason: &str) -> ! {
    let time = match super::failing_at() {
        Some(nanos) => format!(", at {:.3} s", nanos as f64 / 1e9),
        None => String::new(),
    };
    send(&serde_json::json!({ "failed": format!("{oracle} {reason}{time}") }).to_string());
    end(1)
}
