//! Demand that repeats: by day, or by week.
//!
//! A profile of demand by slot of the period, by seasonal exponential smoothing (Holt-Winters without level
//! and trend). The planner takes the larger of the present level and the profile, so the profile only has to
//! know what comes, and a wrong one costs workers, never answers.

/// Weight of the newest period in the profile, after the first period.
const NEW_SHARE: f64 = 0.5;
/// Complete periods that are required for a forecast.
const PERIODS_MIN: u32 = 2;

/// A profile of demand over one period.
#[derive(Debug, Clone)]
pub(crate) struct Season {
    period: f64,
    slot: f64,
    profile: Vec<f64>,
    /// The running period: demand × seconds, and seconds, by slot.
    current: Vec<(f64, f64)>,
    number: Option<i64>,
    periods: u32,
}

impl Season {
    /// Creates a season of `period` seconds in slots of about `slot` seconds.
    pub(crate) fn new(period: f64, slot: f64) -> Self {
        let slots = (period / slot).round().max(1.0) as usize;
        Self {
            period,
            slot: period / slots as f64,
            profile: vec![0.0; slots],
            current: vec![(0.0, 0.0); slots],
            number: None,
            periods: 0,
        }
    }

    /// Adds the demand of the `seconds` before `at`. Times always count from the same origin; with the wall
    /// clock, the day begins at midnight UTC.
    pub(crate) fn observe(&mut self, at: f64, demand: f64, seconds: f64) {
        if !(at.is_finite() && demand.is_finite() && seconds > 0.0) {
            return;
        }
        let number = (at / self.period).floor() as i64;
        match self.number {
            Some(current) if current == number => {}
            Some(current) => self.close(number > current),
            None => {}
        }
        self.number = Some(number);
        let slot = self.slot_of(at);
        self.current[slot].0 += demand * seconds;
        self.current[slot].1 += seconds;
    }

    /// Ends a period. A period is dropped if a tenth of it was not observed, or if the clock was set back
    /// from it.
    fn close(&mut self, is_past: bool) {
        let seen: f64 = self.current.iter().map(|slot| slot.1).sum();
        let current = std::mem::replace(&mut self.current, vec![(0.0, 0.0); self.profile.len()]);
        if !is_past || seen < 0.9 * self.period {
            return;
        }
        for (known, (demand, seconds)) in self.profile.iter_mut().zip(current) {
            if seconds > 0.0 {
                let new = demand / seconds;
                *known = if self.periods == 0 { new } else { *known + (new - *known) * NEW_SHARE };
            }
        }
        self.periods += 1;
    }

    fn slot_of(&self, at: f64) -> usize {
        ((at.rem_euclid(self.period) / self.slot) as usize).min(self.profile.len() - 1)
    }

    /// Returns the highest demand from `at` to `at + horizon`; `None` before two periods are recorded.
    pub(crate) fn forecast(&self, at: f64, horizon: f64) -> Option<f64> {
        if self.periods < PERIODS_MIN {
            return None;
        }
        let slots =
            ((horizon.clamp(0.0, self.period) / self.slot).ceil() as usize).min(self.profile.len() - 1);
        let first = self.slot_of(at);
        let within = (0..=slots).map(|ahead| self.profile[(first + ahead) % self.profile.len()]);
        within.reduce(f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(at: f64) -> f64 {
        if (1000.0..2000.0).contains(&at.rem_euclid(3600.0)) { 6.0 } else { 1.0 }
    }

    fn observe(season: &mut Season, from: f64, to: f64) {
        let mut at = from;
        while at < to {
            season.observe(at, demand(at), 10.0);
            at += 10.0;
        }
    }

    #[test]
    fn a_step_is_known_before_it_comes_the_third_time() {
        let mut season = Season::new(3600.0, 30.0);
        observe(&mut season, 0.0, 7190.0);
        assert_eq!(season.forecast(7190.0, 60.0), None, "one period is no season");
        observe(&mut season, 7190.0, 7210.0);
        let at = |at: f64, horizon| season.forecast(7200.0 + at, horizon).expect("a forecast");
        assert!((at(500.0, 100.0) - 1.0).abs() < 1e-9);
        assert!((at(950.0, 100.0) - 6.0).abs() < 1e-9, "within the horizon");
        assert!((at(2100.0, 1000.0) - 1.0).abs() < 1e-9);
        assert!((at(2100.0, 1e9) - 6.0).abs() < 1e-9);
    }

    #[test]
    fn a_period_with_a_gap_is_dropped() {
        let mut season = Season::new(3600.0, 30.0);
        observe(&mut season, 0.0, 3600.0);
        observe(&mut season, 5400.0, 7200.0);
        observe(&mut season, 7200.0, 7210.0);
        assert_eq!(season.forecast(7210.0, 60.0), None);
        season.observe(f64::NAN, 1.0, 1.0);
        season.observe(1e18, 1.0, 1.0);
        season.observe(-5.0, 1.0, 1.0);
        assert_eq!(season.forecast(0.0, 60.0), None, "jumps of the clock make no season");
    }
}
