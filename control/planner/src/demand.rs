//! Arrivals per second, from counts at irregular times.

/// An exponentially weighted rate. Its weights add up to one from the first count on, so that it does not begin at zero.
#[derive(Debug, Clone, Copy)]
pub struct Level {
    /// Seconds after which a count's weight is down to 1/e.
    window: f64,
    count: f64,
    seconds: f64,
}

impl Level {
    /// A rate over about so many seconds.
    #[must_use]
    pub fn new(window: f64) -> Self {
        Self { window, count: 0.0, seconds: 0.0 }
    }

    /// Takes `count` arrivals of the last `seconds`. What is no count or no time is left out.
    pub fn observe(&mut self, count: f64, seconds: f64) {
        if !(count.is_finite() && count >= 0.0 && seconds.is_finite() && seconds > 0.0) {
            return;
        }
        let faded = (-seconds / self.window).exp();
        self.count = self.count * faded + count;
        self.seconds = self.seconds * faded + seconds;
    }

    /// Arrivals per second; 0 before the first observation.
    #[must_use]
    pub fn rate(&self) -> f64 {
        if self.seconds > 0.0 { self.count / self.seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_right_from_the_first_count_and_follows() {
        let mut level = Level::new(30.0);
        assert!(level.rate().abs() < f64::EPSILON);
        level.observe(20.0, 5.0);
        assert!((level.rate() - 4.0).abs() < 1e-9);
        (0..60).for_each(|_| level.observe(5.0, 5.0));
        assert!((level.rate() - 1.0).abs() < 0.01, "{}", level.rate());
        let before = level.rate();
        for (count, seconds) in [(f64::NAN, 5.0), (5.0, 0.0), (5.0, -3.0), (-1.0, 5.0), (5.0, f64::INFINITY)]
        {
            level.observe(count, seconds);
        }
        assert!((level.rate() - before).abs() < f64::EPSILON, "nonsense changes nothing");
        level.observe(0.0, 3600.0);
        assert!(level.rate() < 1e-3, "an hour without requests");
    }
}
