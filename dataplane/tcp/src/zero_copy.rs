//! Decision of a connection to send without a copy, and the set of such sends whose memory the network still
//! needs.
//!
//! The kernel reports for each such send whether it copied nevertheless (`IORING_SEND_ZC_REPORT_USAGE`,
//! io_uring_enter(2)); loopback and most virtual devices always do. The first such report ends the attempts
//! on that connection, because such a copy costs more than one made at once.

/// Largest number of sends that wait for their notification; a further send is copied.
const PENDING_MAX: u32 = 32;

#[derive(Debug)]
pub(crate) struct ZeroCopy {
    from: Option<usize>,
    next: u32,
    /// All sends before this one have been notified.
    low: u32,
    /// Bit i: send `low + i` has been notified.
    notified: u32,
}

impl ZeroCopy {
    pub(crate) fn new(from: Option<usize>) -> Self {
        Self { from, next: 0, low: 0, notified: 0 }
    }

    /// Returns the smallest payload to send without a copy; `None` while no such send is allowed.
    pub(crate) fn from(&self) -> Option<usize> {
        self.from.filter(|_| self.next.wrapping_sub(self.low) < PENDING_MAX)
    }

    /// Assigns the next sequence number.
    pub(crate) fn begin(&mut self) -> u32 {
        let sequence = self.next;
        self.next = self.next.wrapping_add(1);
        sequence
    }

    /// Records that the network no longer needs the bytes of a send.
    pub(crate) fn end(&mut self, sequence: u32) {
        let distance = sequence.wrapping_sub(self.low);
        if distance >= self.next.wrapping_sub(self.low) {
            return;
        }
        self.notified |= 1 << distance;
        while self.notified & 1 == 1 {
            self.notified >>= 1;
            self.low = self.low.wrapping_add(1);
        }
    }

    /// Whether the network still needs bytes of a send.
    pub(crate) fn is_pending(&self, sequence: u32) -> bool {
        sequence.wrapping_sub(self.low) < self.next.wrapping_sub(self.low)
    }

    /// Stops sending without a copy.
    pub(crate) fn give_up(&mut self) {
        self.from = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_may_come_in_any_order() {
        let mut zero_copy = ZeroCopy::new(Some(1));
        zero_copy.low = u32::MAX - 1;
        zero_copy.next = zero_copy.low;
        let sends: Vec<u32> = (0..PENDING_MAX).map(|_| zero_copy.begin()).collect();
        assert_eq!(zero_copy.from(), None, "a bound");
        zero_copy.end(sends[1]);
        assert!(zero_copy.is_pending(sends[0]) && zero_copy.is_pending(sends[1]), "in order only");
        zero_copy.end(sends[0]);
        assert!(!zero_copy.is_pending(sends[1]) && zero_copy.is_pending(sends[2]));
        sends[2..].iter().rev().for_each(|send| zero_copy.end(*send));
        assert!(sends.iter().all(|send| !zero_copy.is_pending(*send)));
        zero_copy.end(77);
        assert_eq!(zero_copy.from(), Some(1));
    }
}
