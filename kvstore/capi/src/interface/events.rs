//! Events of the tiers.

use super::boundary::{Handle, guarded, invalid, tell};
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
        if count.is_null() {
            return Err(invalid("the place for the count is a null pointer"));
        }
        // SAFETY: writable by this function's contract.
        unsafe { tell(count, 0) };
        if events.is_null() || !events.is_aligned() || capacity == 0 {
            return Err(invalid("no room for events"));
        }
        let opened = handles::find(handle.addr())?;
        let taken = opened.events.take(capacity, |at, event| {
            // SAFETY: `at` is below `capacity`, for which there is room by this function's contract; aligned as checked.
            unsafe { events.wrapping_add(at).write(event) };
        });
        // SAFETY: as above.
        unsafe { tell(count, taken) };
        Ok(Status::Ok)
    })
}
