//! Open-loop sending: at scheduled times, whether or not answers have arrived. A latency measured from the
//! scheduled time includes the delay of a late sender; one measured from the sending leaves it out and is too
//! low (coordinated omission).

use std::time::{Duration, Instant};

/// The scheduled times of `count` sends at a fixed rate.
#[derive(Debug)]
pub(super) struct OpenLoop {
    start: Instant,
    per_second: u32,
    count: u64,
    next: u64,
}

impl OpenLoop {
    pub(super) fn new(start: Instant, per_second: u32, count: u64) -> Self {
        Self { start, per_second: per_second.max(1), count, next: 0 }
    }

    /// Scheduled time of send `number`. Computed from the start, so that rounding errors do not add up.
    pub(super) fn set_time(&self, number: u64) -> Instant {
        let nanoseconds = u128::from(number) * 1_000_000_000 / u128::from(self.per_second);
        self.start + Duration::from_nanos(nanoseconds as u64)
    }

    /// Returns the next send if it is due. To be called again, since several may be due for a late caller.
    pub(super) fn due(&mut self, now: Instant) -> Option<u64> {
        if self.next >= self.count || self.set_time(self.next) > now {
            return None;
        }
        self.next += 1;
        Some(self.next - 1)
    }

    /// Returns the last due send, which could not be sent: it stays due.
    pub(super) fn put_back(&mut self) {
        self.next = self.next.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_sender_owes_every_send_that_was_set_meanwhile() {
        let start = Instant::now();
        let mut plan = OpenLoop::new(start, 1000, 5);
        assert_eq!(plan.due(start), Some(0));
        assert_eq!(plan.due(start), None);
        let late = start + Duration::from_micros(3500);
        assert_eq!(
            [plan.due(late), plan.due(late), plan.due(late), plan.due(late)],
            [Some(1), Some(2), Some(3), None]
        );
        plan.put_back();
        assert_eq!(plan.due(late), Some(3), "a full queue takes nothing off the plan");
        assert_eq!(late - plan.set_time(1), Duration::from_micros(2500), "the wait of the late send counts");
        let end = start + Duration::from_secs(1);
        assert_eq!([plan.due(end), plan.due(end)], [Some(4), None], "no more than were planned");
    }

    #[test]
    fn set_times_do_not_drift() {
        let start = Instant::now();
        let plan = OpenLoop::new(start, 3, u64::MAX);
        assert_eq!(plan.set_time(3_000_000), start + Duration::from_secs(1_000_000));
        assert_eq!(plan.set_time(1), start + Duration::from_nanos(333_333_333));
    }
}
