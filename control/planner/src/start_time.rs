//! Measured seconds from the request for a worker until it takes requests.

use std::collections::VecDeque;

/// Most starts that are remembered.
const STARTS_MAX: usize = 16;
/// A worker that has been starting for this multiple of the usual time is stuck.
const STUCK_FACTOR: f64 = 2.0;

#[derive(Debug, Clone)]
pub(crate) struct StartTime {
    /// Start time that is assumed before the first start.
    expected: f64,
    measured: VecDeque<f64>,
}

impl StartTime {
    pub(crate) fn new(expected: f64) -> Self {
        Self { expected, measured: VecDeque::new() }
    }

    pub(crate) fn observe(&mut self, seconds: f64) {
        if seconds.is_finite() && seconds >= 0.0 {
            self.measured.truncate(STARTS_MAX - 1);
            self.measured.push_front(seconds);
        }
    }

    /// Returns the 90th percentile of the last starts.
    pub(crate) fn p90(&self) -> f64 {
        let mut sorted: Vec<f64> = self.measured.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => self.expected,
            count => sorted[(count * 9 / 10).min(count - 1)],
        }
    }

    pub(crate) fn is_stuck(&self, age: f64) -> bool {
        age > STUCK_FACTOR * self.p90()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_starts_count() {
        let mut time = StartTime::new(120.0);
        assert!((time.p90() - 120.0).abs() < 1e-9);
        assert!(time.is_stuck(241.0) && !time.is_stuck(239.0));
        time.observe(f64::NAN);
        (1..=40).for_each(|start| time.observe(f64::from(start)));
        assert!((time.p90() - 39.0).abs() < 1e-9, "{}", time.p90());
    }
}
