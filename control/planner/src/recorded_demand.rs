//! Demand as it was measured, kept so that it can be replayed.
//!
//! One record for each tick: how many requests came, and the lengths of a few that finished. Requests of a replay come at
//! random times within their tick, with lengths drawn from those that were seen last; the seed is fixed, so that a replay
//! of equal records is equal.
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

/// Lengths kept of a tick.
const LENGTHS_MAX: usize = 2;
/// Lengths from which those of a request are drawn.
const DRAWN_FROM: usize = 256;
/// Records at most: two weeks of ticks of 5 s.
const RECORDS_MAX: usize = 14 * 24 * 720;
/// A tick that took longer was no tick: the process stood still.
const TICK_MAX: f64 = 120.0;
/// Arrivals of a tick that are believed.
const ARRIVALS_MAX: f64 = 1e7;

#[derive(Debug, Clone, PartialEq)]
struct Record {
    /// End of the tick.
    at: f64,
    seconds: f32,
    arrivals: u32,
    lengths: Vec<[u32; 3]>,
}

/// Demand of one pool, oldest first.
#[derive(Debug, Clone, Default)]
pub struct RecordedDemand {
    records: VecDeque<Record>,
    /// How far back it reaches, in seconds.
    keep: f64,
}

impl RecordedDemand {
    /// Keeps the demand of the last `keep` seconds.
    #[must_use]
    pub fn new(keep: f64) -> Self {
        Self { records: VecDeque::new(), keep }
    }

    /// Takes the arrivals of the `seconds` before `at` (seconds since 1970), and lengths of requests that finished. What is no
    /// count or no time is left out, and so is a tick before the last one: the clock went back.
    pub fn observe(&mut self, at: f64, seconds: f64, arrivals: f64, lengths: &[Lengths]) {
        let is_number = at.is_finite()
            && seconds > 0.0
            && seconds <= TICK_MAX
            && (0.0..=ARRIVALS_MAX).contains(&arrivals);
        if !is_number {
            return;
        }
        let whole = |lengths: &Lengths| [lengths.prompt as u32, lengths.cached as u32, lengths.output as u32];
        let every = lengths.len().div_ceil(LENGTHS_MAX).max(1);
        self.push(Record {
            at,
            seconds: seconds as f32,
            arrivals: arrivals.round() as u32,
            lengths: lengths.iter().step_by(every).map(whole).collect(),
        });
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

    /// Seconds for which demand is known.
    #[must_use]
    pub fn known_seconds(&self) -> f64 {
        self.records.iter().map(|record| f64::from(record.seconds)).sum()
    }

    /// The last record as a line of the file.
    #[must_use]
    pub fn last_line(&self) -> Option<String> {
        self.records.back().map(line)
    }

    /// All records, a line each.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.records.iter().map(|record| line(record) + "\n").collect()
    }

    /// Takes the lines of a file over; how many could not be read.
    pub fn read(&mut self, text: &str) -> usize {
        let mut bad = 0;
        for line in text.lines().filter(|line| !line.is_empty()) {
            match parse(line) {
                Some(record) => self.push(record),
                None => bad += 1,
            }
        }
        bad
    }

    /// The newest requests, `most` of them at most, from time 0 on; times in which nothing was recorded are left out. `None` when
    /// no lengths are known.
    #[must_use]
    pub fn requests(&self, most: usize) -> Option<Vec<Request>> {
        let mut count = 0;
        let of_newest = self.records.iter().rev().take_while(|record| {
            count += record.arrivals as usize;
            count <= most
        });
        let first = self.records.len() - of_newest.count();
        let known: Vec<[u32; 3]> =
            self.records.iter().flat_map(|record| record.lengths.iter().copied()).collect();
        if known.is_empty() {
            return None;
        }
        let mut random = fastrand::Rng::with_seed(1);
        let (mut requests, mut began, mut seen) = (Vec::new(), 0.0, 0);
        for (at, record) in self.records.iter().enumerate() {
            seen += record.lengths.len();
            if at < first {
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
        // Writing into a string cannot fail.
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
            again.read(&format!("{}nonsense\n1010 5\n1010 -1 2\n1010 5 1 1,2\n", recorded.to_text())),
            4
        );
        assert_eq!(again.to_text(), recorded.to_text());
        assert!((again.known_seconds() - 10.0).abs() < 1e-9);
    }

    #[test]
    fn old_demand_is_forgotten_and_nonsense_is_left_out() {
        let mut recorded = RecordedDemand::new(100.0);
        (0..100).for_each(|tick| recorded.observe(1000.0 + 5.0 * f64::from(tick), 5.0, 1.0, &[LENGTHS]));
        assert!((recorded.known_seconds() - 105.0).abs() < 1e-9, "{}", recorded.known_seconds());
        let before = recorded.to_text();
        for (at, seconds, arrivals) in [
            (f64::NAN, 5.0, 1.0),
            (9e9, 0.0, 1.0),
            (9e9, 9e9, 1.0),
            (9e9, 5.0, -1.0),
            (9e9, 5.0, f64::NAN),
            (3.0, 5.0, 1.0),
        ] {
            recorded.observe(at, seconds, arrivals, &[]);
        }
        assert_eq!(recorded.to_text(), before);
    }

    #[test]
    fn a_replay_has_the_counts_and_the_lengths_of_what_was_recorded() {
        let mut recorded = RecordedDemand::new(1e6);
        assert_eq!(recorded.requests(10), None);
        (0..20).for_each(|tick| {
            recorded.observe(1000.0 + 5.0 * f64::from(tick), 5.0, f64::from(tick), &[LENGTHS])
        });
        let all = recorded.requests(1000).expect("lengths are known");
        assert_eq!(all.len(), 190);
        assert!(all.windows(2).all(|pair| pair[0].at <= pair[1].at));
        let within =
            |from: f64, to: f64| all.iter().filter(|request| (from..to).contains(&request.at)).count();
        assert_eq!((within(0.0, 5.0), within(45.0, 50.0)), (0, 9));
        assert!(all.iter().all(|request| request.lengths() == LENGTHS));
        assert_eq!(recorded.requests(1000), Some(all), "equal records, equal replays");
        let newest = recorded.requests(40).expect("lengths are known");
        assert_eq!(newest.len(), 19 + 18);
        assert!(newest[0].at < 5.0);
    }
}
