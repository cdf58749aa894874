//! Faults that the model test plants into the store, to see that it finds them. In every other build they do not exist.

/// Faults that can be planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Planted {
    /// A block that is forgotten while it is written becomes known on the disk all the same.
    ForgottenWrite,
    /// The disk is not told that a block of it was forgotten.
    LostTombstone,
    /// A damaged block is handed out.
    DamageServed,
    /// The second load that waits for a read is not told of its end.
    LostWaiter,
    /// Listeners are not told that a block has left host memory.
    SilentRemoval,
    /// Blocks of pools stay known, and with them their leases.
    KeptLease,
    /// A write to the disk that the device did not answer is taken out of the tables.
    LostWrite,
    /// A block counts as retained and may be evicted.
    LostRetention,
}

#[cfg(test)]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Planted>> = const { std::cell::Cell::new(None) };
}

/// Whether the fault is planted, on this thread.
#[cfg(test)]
pub(crate) fn is_planted(fault: Planted) -> bool {
    PLANTED.get() == Some(fault)
}

#[cfg(not(test))]
#[inline]
pub(crate) const fn is_planted(_fault: Planted) -> bool {
    false
}

/// Plants a fault on this thread.
#[cfg(test)]
pub(crate) fn plant(fault: Option<Planted>) {
    PLANTED.set(fault);
}
