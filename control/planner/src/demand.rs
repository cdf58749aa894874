//! Arrivals per second, from counts at irregular times.

use std::collections::VecDeque;

/// Counts kept at most; more often than this a window is not looked at.
const COUNTS_MAX: usize = 1024;

/// A rate over a sliding window. (An exponential average of the same noise takes four times as long to forget a demand that
/// was a hundred times as high.)
#[derive(Debug, Clone)]
pub(crate) struct Level {
    /// Seconds.
    window: f64,
    /// Count and seconds, newest last.
    counts: VecDeque<(f64, f64)>,
}

impl Level {
    /// A rate over so many seconds, and as much more as the oldest count within them reaches back.
    pub(crate) fn new(window: f64) -> Self {
        Self { window, counts: VecDeque::new() }
    }

    /// Takes `count` arrivals of the last `seconds`. Numbers that are no count or no time are left out.
    pub(crate) fn observe(&mut self, count: f64, seconds: f64) {
        if !(count.is_finite() && count >= 0.0 && seconds.is_finite() && seconds > 0.0) {
            return;
        }
        self.counts.push_back((count, seconds));
        let mut all: f64 = self.counts.iter().map(|count| count.1).sum();
        while let Some(&(_, oldest)) = self.counts.front()
            && (all - oldest >= self.window || self.counts.len() > COUNTS_MAX)
        {
            self.counts.pop_front();
            all -= oldest;
        }
    }

    /// Arrivals per second; 0 before the first observation.
    pub(crate) fn rate(&self) -> f64 {
        let (count, seconds) =
            self.counts.iter().fold((0.0, 0.0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
        if seconds > 0.0 { count / seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_right_from_the_first_count_and_forgets_after_the_window() {
        let mut level = Level::new(40.0);
        assert!(level.rate().abs() < f64::EPSILON);
        level.observe(20.0, 5.0);
        assert!((level.rate() - 4.0).abs() < 1e-9);
        (0..7).for_each(|_| level.observe(5.0, 5.0));
        assert!((level.rate() - 55.0 / 40.0).abs() < 1e-9, "{}", level.rate());
        level.observe(5.0, 5.0);
        assert!((level.rate() - 1.0).abs() < 1e-9, "{}", level.rate());
        let before = level.rate();
        for (count, seconds) in [(f64::NAN, 5.0), (5.0, 0.0), (5.0, -3.0), (-1.0, 5.0), (5.0, f64::INFINITY)]
        {
            level.observe(count, seconds);
        }
        assert!((level.rate() - before).abs() < f64::EPSILON, "nonsense changes nothing");
        level.observe(0.0, 3600.0);
        assert!(level.rate().abs() < f64::EPSILON, "an hour without requests");
        (0..5000).for_each(|_| level.observe(1.0, 1e-6));
        assert!(level.counts.len() <= COUNTS_MAX);
    }
}
