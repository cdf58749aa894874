//! Events of the tiers.

use super::boundary::{Handle, check_room, guarded, write_optional};
use crate::events::Event;
use crate::handles;
use crate::status::Status;

/// Takes events of the tiers.
///
/// # Safety
/// As in the header: room for `capacity` events, `count` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvasir_kv_take_events(
    handle: *mut Handle,
    events: *mut Event,
    capacity: usize,
    count: *mut usize,
) -> i32 {
    guarded(|| {
        // SAFETY: `count` is writable by this function's contract.
        unsafe { check_room(events, capacity, count, "events") }?;
        let opened = handles::find(handle.addr())?;
        let taken = opened.events.take(capacity, |at, event| {
            // SAFETY: `at` is below `capacity`, for which there is room by this function's contract; aligned as checked.
            unsafe { events.wrapping_add(at).write(event) };
        });
        // SAFETY: as above.
        unsafe { write_optional(count, taken) };
        Ok(Status::Ok)
    })
}
