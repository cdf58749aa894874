//! Opening and closing a store.

use std::ffi::c_char;
use std::sync::Arc;

use dataplane_gpu::LayoutKernels;
use dataplane_rails::RailsConfig;
use dataplane_verbs::Library;

use super::boundary::{Handle, caught, copy_text, guarded, invalid, string, write_optional};
use crate::backend::Backend;
use crate::compose::{self, StoreParts};
use crate::device::{CopyThreads, MakeKernels};
use crate::handles::{self, Opened};
use crate::handoff::{self, DeviceParts, HandOffs};
use crate::queue::Queue;
use crate::registry::Registry;
use crate::status::{Failure, Status};

/// Largest configuration file.
const CONFIGURATION_BYTES_MAX: u64 = 1 << 20;

fn open(text: &str) -> Result<*mut Handle, Failure> {
    open_with(text, &LayoutKernels::compile, None)
}

/// As [`open`], with kernels loaded by `kernels`, and with another verbs library than this machine's.
pub(crate) fn open_with(
    text: &str,
    kernels: MakeKernels<'_>,
    verbs_library: Option<Arc<Library>>,
) -> Result<*mut Handle, Failure> {
    must_unwind(cfg!(panic = "abort"))?;
    let StoreParts { backend, fetches, events, queue, device, transfer, rdma, remote_counters } =
        compose::open(text, kernels, verbs_library.as_ref())?;
    let queue = Arc::new(Queue::new(backend.clone(), &queue)?);
    fetches.complete_to(queue.completions());
    let for_handoffs = device.as_ref().map(|prepared| DeviceParts {
        device: prepared.device.clone(),
        kernels: Arc::clone(&prepared.kernels),
        capacity: prepared.handoff_capacity,
        is_direct: prepared.is_direct,
    });
    let device =
        device.map(|prepared| CopyThreads::start(prepared, &backend, &queue.completions())).transpose()?;
    let (device, tensors) = (device.map(Arc::new), Arc::new(Registry::new()));
    let handoffs = transfer
        .map(|transfer| {
            let is_direct = for_handoffs.as_ref().is_some_and(|parts| parts.is_direct);
            let rails = RailsConfig { verbs_library, ..handoff::rails_config(&transfer, &rdma, is_direct)? };
            HandOffs::open(&transfer, rails, for_handoffs, queue.completions())
        })
        .transpose()?;
    handles::insert(Opened { backend, fetches, events, queue, tensors, device, handoffs, remote_counters })
        .map(std::ptr::without_provenance_mut)
}

/// Refuses a build that aborts on panic: a panic in it would end the caller's process.
fn must_unwind(is_aborting: bool) -> Result<(), Failure> {
    let reason = "open: libkvasir_kv was built with panic = \"abort\", so that a bug in it would end this process; \
        build it with `cargo build --profile capi -p kvstore-capi`";
    if is_aborting { Err(Failure::new(Status::Failed, reason)) } else { Ok(()) }
}

/// # Safety
/// As in the header: `handle` and `error` null or writable.
unsafe fn open_into(
    made: impl FnOnce() -> Result<*mut Handle, Failure>,
    handle: *mut *mut Handle,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    guarded(|| {
        // SAFETY: null or writable by this function's contract.
        unsafe { write_optional(handle, std::ptr::null_mut()) };
        let made = if handle.is_null() {
            Err(invalid("the place for the handle is a null pointer"))
        } else {
            caught(made)
        };
        let reason = made.as_ref().err().map_or("", |failure| &failure.text);
        // SAFETY: null or writable for `error_bytes` by this function's contract.
        unsafe { copy_text(reason, error, error_bytes) };
        // SAFETY: as above.
        unsafe { write_optional(handle, made?) };
        Ok(Status::Ok)
    })
}

/// Opens the store described by a configuration.
///
/// # Safety
/// As in the header: `configuration` a string, `handle` writable, `error` null or writable for `error_bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_open(
    configuration: *const c_char,
    handle: *mut *mut Handle,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    // SAFETY: the caller promised a string with an end.
    let made = || unsafe { string(configuration, "the configuration is a null pointer") }.and_then(open);
    // SAFETY: handed on from the caller.
    unsafe { open_into(made, handle, error, error_bytes) }
}

/// Opens the store described by a configuration file.
///
/// # Safety
/// As for [`kvasir_kv_open`], with a path.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_open_file(
    path: *const c_char,
    handle: *mut *mut Handle,
    error: *mut c_char,
    error_bytes: usize,
) -> i32 {
    let made = || {
        // SAFETY: the caller promised a string with an end.
        let path = unsafe { string(path, "the path is a null pointer") }?;
        let refuse = |error: std::io::Error| Failure::new(Status::Configuration, format!("{path}: {error}"));
        if std::fs::metadata(path).map_err(refuse)?.len() > CONFIGURATION_BYTES_MAX {
            return Err(Failure::new(Status::Configuration, format!("{path}: larger than 1 MiB")));
        }
        open(&std::fs::read_to_string(path).map_err(refuse)?)
    };
    // SAFETY: handed on from the caller.
    unsafe { open_into(made, handle, error, error_bytes) }
}

/// Closes a store: drops requests that have not begun, waits for those that have, and closes its files.
#[unsafe(no_mangle)]
pub extern "C" fn kvasir_kv_close(handle: *mut Handle) -> i32 {
    guarded(|| {
        let opened = handles::remove(handle.addr())?;
        if let Some(handoffs) = &opened.handoffs {
            handoffs.close();
        }
        opened.queue.close();
        if let Some(device) = &opened.device {
            device.close();
        }
        opened.backend.close();
        Ok(Status::Ok)
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    /// Returns the status, the text of the error buffer, and whether there is a handle.
    fn opening(made: impl FnOnce() -> Result<*mut Handle, Failure>, room: usize) -> (i32, String, bool) {
        let mut handle = std::ptr::dangling_mut();
        let mut error = [0xEE_u8; 200];
        // SAFETY: both places are this function's own.
        let status = unsafe { open_into(made, &raw mut handle, error.as_mut_ptr().cast(), room) };
        assert!(error[room..].iter().all(|byte| *byte == 0xEE), "written past its end");
        let text = CStr::from_bytes_until_nul(&error).expect("an end").to_str().expect("whole characters");
        (status, text.to_owned(), !handle.is_null())
    }

    #[test]
    fn the_reason_of_a_refusal_is_told_whatever_it_was() {
        let panicked = opening(|| panic!("a planted bug"), 200);
        assert_eq!((panicked.0, panicked.2), (Status::Panicked as i32, false));
        assert!(panicked.1.contains("a bug in libkvasir_kv"), "{}", panicked.1);
        let refused = || Err(Failure::new(Status::Configuration, "path = \"/größe\""));
        for (room, text) in [
            (13, "path = \"/gr"),
            (14, "path = \"/grö"),
            (15, "path = \"/grö"),
            (16, "path = \"/größ"),
            (1, ""),
        ] {
            let cut = opening(refused, room);
            // The umlaut takes the bytes 11 and 12, the sharp s 13 and 14.
            assert_eq!(cut, (Status::Configuration as i32, text.to_owned(), false), "{room} bytes");
        }
        assert_eq!(opening(|| Ok(std::ptr::dangling_mut()), 200), (0, String::new(), true));
    }

    #[test]
    fn a_library_that_aborts_opens_nothing() {
        let refused = must_unwind(true).expect_err("refused");
        assert!(
            refused.status == Status::Failed && refused.text.contains("--profile capi"),
            "{}",
            refused.text
        );
        assert_eq!(must_unwind(false), Ok(()));
    }
}
