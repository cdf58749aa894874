//! Recorded demand, for replays.
//!
//! One record for each tick: the number of arrivals, and the lengths of a few requests that finished.
//! Requests of a replay arrive at random times within their tick, with lengths drawn from the most recent
//! ones; the seed is fixed, so that replays of equal records are equal.
//!
//! In a file each record is a line: the time (seconds since 1970), the seconds of the tick, the arrivals, and
//! `prompt,cached,output` of each length that was kept:
//!
//! ```text
//! 1795642800 5 12 4000,512,250 900,0,31
//! ```

use std::collections::VecDeque;
use std::fmt::Write;

use crate::capacity::Lengths;
use crate::fleet_simulation::Request;

/// Most lengths kept of a tick.
const LENGTHS_MAX: usize = 2;
/// Most recent lengths from which those of a request are drawn.
const DRAWN_FROM: usize = 256;
/// Most records: two weeks of ticks of 5 s.
const RECORDS_MAX: usize = 14 * 24 * 720;
/// Duration of a tick, in seconds, above which it is ignored: the process was stopped.
const TICK_MAX: f64 = 120.0;
/// Most arrivals of a tick; more are ignored as invalid.
const ARRIVALS_MAX: f64 = 1e7;

#[derive(Debug, Clone, PartialEq)]
struct Record {
    /// End of the tick, in seconds since 1970.
    at: f64,
    seconds: f32,
    arrivals: u32,
    lengths: Vec<[u32; 3]>,
}

/// Demand of one pool, oldest record first.
#[derive(Debug, Clone, Default)]
pub struct RecordedDemand {
    records: VecDeque<Record>,
    /// Age in seconds up to which records are kept.
    keep: f64,
}

impl RecordedDemand {
    /// Creates an empty record that keeps the demand of the last `keep` seconds.
    #[must_use]
    pub fn new(keep: f64) -> Self {
        Self { records: VecDeque::new(), keep }
    }

    /// Adds the arrivals of the `seconds` before `at` (seconds since 1970), and lengths of finished requests;
    /// returns whether they were valid. Invalid counts or times are ignored. If the clock was set back,
    /// records with later times are dropped.
    pub fn observe(&mut self, at: f64, seconds: f64, arrivals: f64, lengths: &[Lengths]) -> bool {
        let is_number = at.is_finite()
            && seconds > 0.0
            && seconds <= TICK_MAX
            && (0.0..=ARRIVALS_MAX).contains(&arrivals);
        if !is_number {
            return false;
        }
        while self.records.back().is_some_and(|last| last.at > at) {
            self.records.pop_back();
        }
        let whole = |lengths: &Lengths| [lengths.prompt as u32, lengths.cached as u32, lengths.output as u32];
        let every = lengths.len().div_ceil(LENGTHS_MAX).max(1);
        self.push(Record {
            at,
            seconds: seconds as f32,
            arrivals: arrivals.round() as u32,
            lengths: lengths.iter().step_by(every).map(whole).collect(),
        });
        true
    }

    fn push(&mut self, record: Record) {
        if self.records.back().is_some_and(|last| record.at < last.at) {
            return;
        }
        let oldest = record.at - self.keep;
        self.records.push_back(record);
        while self.records.len() > RECORDS_MAX || self.records.front().is_some_and(|first| first.at < oldest)
        {
            self.records.pop_front();
        }
    }

    /// Returns the seconds for which demand is recorded.
    #[must_use]
    pub fn known_seconds(&self) -> f64 {
        self.records.iter().map(|record| f64::from(record.seconds)).sum()
    }

    /// Returns the last record as a line of the file.
    #[must_use]
    pub fn last_line(&self) -> Option<String> {
        self.records.back().map(line)
    }

    /// Returns all records, one per line.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.records.iter().map(|record| line(record) + "\n").collect()
    }

    /// Reads the lines of a file that are earlier than `now`; returns how many were skipped.
    pub fn read(&mut self, text: &str, now: f64) -> usize {
        let mut bad = 0;
        for line in text.lines().filter(|line| !line.is_empty()) {
            match parse(line).filter(|record| record.at <= now) {
                Some(record) => self.push(record),
                None => bad += 1,
            }
        }
        bad
    }

    /// Returns the records to replay, with at most `most` requests: if there are more, those around the
    /// steepest rise, two thirds of them before it. A quiet night alone would suggest that no headroom is
    /// needed.
    fn window(&self, most: usize) -> std::ops::Range<usize> {
        let arrivals = |at: usize| self.records[at].arrivals as usize;
        let all = 0..self.records.len();
        if all.clone().map(arrivals).sum::<usize>() <= most {
            return all;
        }
        // Number of records in each of the two sums, before and after a time.
        const SIDE: usize = 60;
        let sum = |range: std::ops::Range<usize>| range.map(arrivals).sum::<usize>() as f64;
        let rise = |at: usize| sum(at..(at + SIDE).min(all.end)) - sum(at.saturating_sub(SIDE)..at);
        let steepest = all.clone().max_by(|&a, &b| rise(a).total_cmp(&rise(b))).unwrap_or(0);
        let (mut begin, mut count) = (steepest, 0);
        while begin > 0 && count + arrivals(begin - 1) <= most * 2 / 3 {
            begin -= 1;
            count += arrivals(begin);
        }
        let mut end = steepest;
        while end < all.end && count + arrivals(end) <= most {
            count += arrivals(end);
            end += 1;
        }
        begin..end
    }

    /// Returns at most `most` requests of a replay, from time 0 on; times without records are skipped. `None`
    /// if no lengths are recorded.
    #[must_use]
    pub fn requests(&self, most: usize) -> Option<Vec<Request>> {
        let window = self.window(most);
        let known: Vec<[u32; 3]> =
            self.records.iter().flat_map(|record| record.lengths.iter().copied()).collect();
        if known.is_empty() {
            return None;
        }
        let mut random = fastrand::Rng::with_seed(1);
        let (mut requests, mut began, mut seen) = (Vec::new(), 0.0, 0);
        for (at, record) in self.records.iter().enumerate() {
            seen += record.lengths.len();
            if !window.contains(&at) {
                continue;
            }
            let lengths = &known[seen.saturating_sub(DRAWN_FROM)..seen.max(1).min(known.len())];
            let seconds = f64::from(record.seconds);
            let mut times: Vec<f64> = (0..record.arrivals).map(|_| random.f64() * seconds).collect();
            times.sort_by(f64::total_cmp);
            for time in times {
                let [prompt, cached, output] = lengths[random.usize(..lengths.len())].map(f64::from);
                requests.push(Request::new(began + time, Lengths { prompt, cached, output }));
            }
            began += seconds;
        }
        Some(requests)
    }
}

fn line(record: &Record) -> String {
    let mut text = format!("{:.0} {} {}", record.at, record.seconds, record.arrivals);
    for [prompt, cached, output] in &record.lengths {
        // Writing to a String cannot fail.
        let _infallible = write!(text, " {prompt},{cached},{output}");
    }
    text
}

fn parse(line: &str) -> Option<Record> {
    let mut words = line.split_ascii_whitespace();
    let at: f64 = words.next()?.parse().ok()?;
    let seconds: f32 = words.next()?.parse().ok()?;
    let arrivals: u32 = words.next()?.parse().ok()?;
    let is_tick = at.is_finite()
        && seconds > 0.0
        && f64::from(seconds) <= TICK_MAX
        && f64::from(arrivals) <= ARRIVALS_MAX;
    if !is_tick {
        return None;
    }
    let length = |word: &str| -> Option<[u32; 3]> {
        let mut numbers = word.split(',').map(|number| number.parse().ok());
        Some([numbers.next()??, numbers.next()??, numbers.next()??])
    };
    let lengths = words.take(LENGTHS_MAX).map(length).collect::<Option<_>>()?;
    Some(Record { at, seconds, arrivals, lengths })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTHS: Lengths = Lengths { prompt: 4000.0, cached: 512.0, output: 250.0 };

    #[test]
    fn what_was_recorded_comes_back_from_its_file() {
        let mut recorded = RecordedDemand::new(3600.0);
        recorded.observe(1000.0, 5.0, 12.0, &[LENGTHS, LENGTHS, LENGTHS]);
        recorded.observe(1005.0, 5.0, 0.0, &[]);
        assert_eq!(recorded.to_text(), "1000 5 12 4000,512,250 4000,512,250\n1005 5 0\n");
        assert_eq!(recorded.last_line().as_deref(), Some("1005 5 0"));
        let mut again = RecordedDemand::new(3600.0);
        assert_eq!(
            again.read(
                &format!("{}2000 5 1\nnonsense\n1010 5\n1010 -1 2\n1010 5 1 1,2\n", recorded.to_text()),
                1500.0
            ),
            5
        );
        assert_eq!(again.to_text(), recorded.to_text());
        assert!((again.known_seconds() - 10.0).abs() < 1e-9);
    }

    #[test]
    fn old_demand_is_forgotten_and_nonsense_is_left_out() {
        let mut recorded = RecordedDemand::new(100.0);
        (0..100).for_each(|tick| {
            assert!(recorded.observe(1000.0 + 5.0 * f64::from(tick), 5.0, 1.0, &[LENGTHS]));
        });
        assert!((recorded.known_seconds() - 105.0).abs() < 1e-9, "{}", recorded.known_seconds());
        let before = recorded.to_text();
        for (at, seconds, arrivals) in
            [(f64::NAN, 5.0, 1.0), (9e9, 0.0, 1.0), (9e9, 9e9, 1.0), (9e9, 5.0, -1.0), (9e9, 5.0, f64::NAN)]
        {
            assert!(!recorded.observe(at, seconds, arrivals, &[]));
        }
        assert_eq!(recorded.to_text(), before);
        // The clock was wrong for a tick.
        assert!(recorded.observe(9e9, 5.0, 7.0, &[]));
        assert!(recorded.observe(2000.0, 5.0, 8.0, &[]));
        assert_eq!(recorded.to_text(), "2000 5 8\n");
    }

    #[test]
    fn a_replay_has_the_counts_and_the_lengths_of_what_was_recorded() {
        let mut recorded = RecordedDemand::new(1e6);
        assert_eq!(recorded.requests(10), None);
        (0..20).for_each(|tick| {
            assert!(recorded.observe(1000.0 + 5.0 * f64::from(tick), 5.0, f64::from(tick), &[LENGTHS]));
        });
        let all = recorded.requests(1000).expect("lengths are known");
        assert_eq!(all.len(), 190);
        assert!(all.windows(2).all(|pair| pair[0].at <= pair[1].at));
        let within =
            |from: f64, to: f64| all.iter().filter(|request| (from..to).contains(&request.at)).count();
        assert_eq!((within(0.0, 5.0), within(45.0, 50.0)), (0, 9));
        assert!(all.iter().all(|request| request.lengths() == LENGTHS));
        assert_eq!(recorded.requests(1000), Some(all), "equal records, equal replays");
    }

    #[test]
    fn of_more_than_can_be_replayed_the_steepest_rise_is() {
        let mut recorded = RecordedDemand::new(1e6);
        // A quiet time, a step, a busy time, and a quiet one again.
        let arrivals = |tick: u32| if (400..700).contains(&tick) { 20.0 } else { 1.0 };
        (0..1200).for_each(|tick| {
            assert!(recorded.observe(1000.0 + 5.0 * f64::from(tick), 5.0, arrivals(tick), &[LENGTHS]));
        });
        let requests = recorded.requests(1500).expect("lengths are known");
        assert!(requests.len() <= 1500 && requests.len() > 1000, "{}", requests.len());
        let within =
            |from: f64| requests.iter().filter(|request| (from..from + 5.0).contains(&request.at)).count();
        assert_eq!(within(0.0), 1, "it begins before the step");
        let last = requests.last().expect("some").at;
        assert!(within(last - 5.0) >= 10, "and ends after it");
    }
}
