//! Sending at set times, whether or not answers are back. A latency that counts from the set time contains the waiting that
//! a late sender causes; one that counts from the sending leaves it out and is too good (coordinated omission).

use std::time::{Duration, Instant};

/// The set times of `count` sends, so many a second.
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

    /// When send `number` is set. Computed from the start, so that rounding does not add up.
    pub(super) fn set_time(&self, number: u64) -> Instant {
        let nanoseconds = u128::from(number) * 1_000_000_000 / u128::from(self.per_second);
        self.start + Duration::from_nanos(nanoseconds as u64)
    }

    /// The next send if it is due; call again, since a late caller owes several.
    pub(super) fn due(&mut self, now: Instant) -> Option<u64> {
        if self.next >= self.count || self.set_time(self.next) > now {
            return None;
        }
        self.next += 1;
        Some(self.next - 1)
    }

    /// The one that was due could not be sent: it stays due.
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
