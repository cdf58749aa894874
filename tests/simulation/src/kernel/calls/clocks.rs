//! Time, sleep and randomness.

use std::ffi::{c_int, c_uint, c_void};

use super::super::threads::{current, preemption_point, sleep_until};
use super::super::{EPOCH, real, with};
use super::{given, nanos, timespec};

fn clock(id: libc::clockid_t) -> u64 {
    with(|kernel| {
        kernel.call();
        match id {
            libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE | libc::CLOCK_TAI => {
                let offset = kernel.hosts[kernel.host().index()].clock_offset;
                (EPOCH + kernel.now).saturating_add_signed(offset)
            }
            _ => kernel.now,
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(id: libc::clockid_t, time: *mut libc::timespec) -> c_int {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::CLOCK_GETTIME.get()(id, time) };
    }
    let value = timespec(clock(id));
    // SAFETY: the caller passes a pointer that is valid for writing a `timespec`.
    unsafe { time.write(value) };
    preemption_point();
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn gettimeofday(time: *mut libc::timeval, _zone: *mut c_void) -> c_int {
    let mut spec = timespec(0);
    // SAFETY: there is room for a time.
    unsafe { clock_gettime(libc::CLOCK_REALTIME, &raw mut spec) };
    let value = libc::timeval { tv_sec: spec.tv_sec, tv_usec: (spec.tv_nsec / 1000) as libc::suseconds_t };
    if !time.is_null() {
        // SAFETY: the caller passes a pointer that is valid for writing a `timespec`.
        unsafe { time.write(value) };
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn time(place: *mut libc::time_t) -> libc::time_t {
    let mut spec = timespec(0);
    // SAFETY: there is room for a time.
    unsafe { clock_gettime(libc::CLOCK_REALTIME, &raw mut spec) };
    if !place.is_null() {
        // SAFETY: the caller passes a pointer that is valid for writing a `timespec`.
        unsafe { place.write(spec.tv_sec) };
    }
    spec.tv_sec
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nanosleep(wanted: *const libc::timespec, left: *mut libc::timespec) -> c_int {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::NANOSLEEP.get()(wanted, left) };
    }
    // SAFETY: the caller gives a time.
    let wanted = unsafe { given(wanted) }.map_or(0, nanos);
    sleep_until(super::super::now() + wanted);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn clock_nanosleep(
    id: libc::clockid_t,
    flags: c_int,
    wanted: *const libc::timespec,
    left: *mut libc::timespec,
) -> c_int {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::CLOCK_NANOSLEEP.get()(id, flags, wanted, left) };
    }
    // SAFETY: the caller gives a time.
    let wanted = unsafe { given(wanted) }.map_or(0, nanos);
    let now = super::super::now();
    let wait = if flags & libc::TIMER_ABSTIME == 0 { wanted } else { wanted.saturating_sub(clock(id)) };
    sleep_until(now + wait);
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(room: *mut c_void, bytes: usize, flags: c_uint) -> isize {
    if current().is_none() {
        // SAFETY: the arguments are passed on unchanged; the caller upholds the contract of the C function.
        return unsafe { real::GETRANDOM.get()(room, bytes, flags) };
    }
    // SAFETY: the caller gives room for so many bytes.
    let room = unsafe { std::slice::from_raw_parts_mut(room.cast::<u8>(), bytes) };
    with(|kernel| {
        kernel.call();
        kernel.entropy.fill(room);
    });
    bytes as isize
}
