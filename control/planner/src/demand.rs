//! Arrivals per second, from counts at irregular times.

use std::collections::VecDeque;

/// Most counts kept; ticks are too rare to need more within a window.
const COUNTS_MAX: usize = 1024;

/// A rate over a sliding window. (An exponential average with the same noise takes four times as long to
/// forget demand that was a hundred times as high.)
#[derive(Debug, Clone)]
pub(crate) struct Level {
    /// Length of the window, in seconds.
    window: f64,
    /// Count and duration in seconds of each observation, newest last.
    counts: VecDeque<(f64, f64)>,
}

impl Level {
    /// Creates a rate over this many seconds; the oldest count within the window may extend it.
    pub(crate) fn new(window: f64) -> Self {
        Self { window, counts: VecDeque::new() }
    }

    /// Adds `count` arrivals of the last `seconds`. Invalid counts or times are ignored.
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

    /// Returns the arrivals per second; 0 before the first observation.
    pub(crate) fn rate(&self) -> f64 {
        let (count, seconds) =
            self.counts.iter().fold((0.0, 0.0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
        if seconds > 0.0 { count / seconds } else { 0.0 }
    }
}

/// Interval between two forecasts that are judged, in seconds, as between a planner's ticks.
const TICK: f64 = 5.0;

/// Returns the error of a forecast of the next `ahead` seconds: the sum of absolute errors over the sum of
/// requests (WAPE), if the forecast is the rate of the last `window` seconds. Every period of `ahead` seconds
/// except the first is forecast once. `arrivals` are seconds in rising order. `None` if they fill fewer than
/// two periods, or `ahead` is no multiple of 5 s.
#[must_use]
pub fn forecast_error(arrivals: &[f64], window: f64, ahead: f64) -> Option<f64> {
    let ticks_ahead = (ahead / TICK).round() as usize;
    if ticks_ahead == 0 || (ticks_ahead as f64 * TICK - ahead).abs() > 1e-9 {
        return None;
    }
    let count = |from: f64, to: f64| {
        arrivals.partition_point(|at| *at < to) - arrivals.partition_point(|at| *at < from)
    };
    let stretches = (arrivals.last()? / ahead) as usize;
    let mut level = Level::new(window);
    let (mut errors, mut all) = (0.0, 0.0);
    for stretch in 0..stretches {
        let begun = stretch as f64 * ahead;
        if stretch > 0 {
            let arrived = count(begun, begun + ahead) as f64;
            errors += (level.rate() * ahead - arrived).abs();
            all += arrived;
        }
        for tick in 0..ticks_ahead {
            let tick = begun + tick as f64 * TICK;
            level.observe(count(tick, tick + TICK) as f64, TICK);
        }
    }
    (all > 0.0).then(|| errors / all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forecast_of_steady_demand_is_right_and_one_of_a_step_is_late() {
        let steady: Vec<f64> = (0..600).map(|at| f64::from(at) + 0.5).collect();
        assert!(forecast_error(&steady, 40.0, 30.0).is_some_and(|error| error < 1e-9));
        // 30 s of 1 request/s, 30 s of 3, and one instant that ends the second period: 30 are forecast, 90
        // arrive.
        let step: Vec<f64> = (0..30)
            .map(f64::from)
            .chain((0..90).map(|at| 30.0 + f64::from(at) / 3.0))
            .chain([60.0])
            .collect();
        let error = forecast_error(&step, 40.0, 30.0).expect("two stretches");
        assert!((error - 60.0 / 90.0).abs() < 1e-9, "{error}");
        assert_eq!(forecast_error(&step, 40.0, 7.0), None, "no multiple of a tick");
        assert_eq!(forecast_error(&step[..40], 40.0, 60.0), None, "less than two stretches");
        assert_eq!(forecast_error(&[], 40.0, 30.0), None);
    }

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
