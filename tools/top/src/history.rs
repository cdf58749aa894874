//! Computations over polls: rates by difference, quantiles from buckets, and the time series of the last minutes.
//!
//! Time is a [`Duration`] since an origin of the caller's, at least [`SERIES_LENGTH`] before the first answer if samples of the
//! gateway are recorded, too. A gateway that was restarted counts from zero again: the state that differences need is then
//! dropped, so that no rate is ever negative. The series keeps its points.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::wire::{Counters, Histogram, Histograms, Status, Worker};

/// Length of the window of current rates and quantiles.
pub(crate) const WINDOW: Duration = Duration::from_secs(60);
/// Length of the kept series.
pub(crate) const SERIES_LENGTH: Duration = Duration::from_secs(300);
/// Time between the kept samples of the bytes that workers have sent.
const SENT_EVERY: Duration = Duration::from_secs(5);
/// Largest number of kept points and marks: [`SERIES_LENGTH`] at the shortest interval, plus one.
const KEPT_MAX: usize = 3001;

/// Counters and histograms at a time.
#[derive(Debug, Clone)]
struct Mark {
    at: Duration,
    counters: Counters,
    histograms: Histograms,
}

/// Rates between two polls, per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Rates {
    pub(crate) requests: f64,
    pub(crate) failed: f64,
    pub(crate) prompt_tokens: f64,
    pub(crate) generated_tokens: f64,
    /// Share of prompt tokens that were cached, 0 to 1; `None` when there were no prompts.
    pub(crate) hit_rate: Option<f64>,
}

/// One point of the series; `None` if the gateway did not answer or the value could not be computed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Point {
    pub(crate) at: Duration,
    pub(crate) requests: Option<f64>,
    pub(crate) tokens: Option<f64>,
    pub(crate) active: Option<f64>,
    pub(crate) waiting: Option<f64>,
    pub(crate) hit_rate: Option<f64>,
}

/// State kept of earlier polls.
#[derive(Debug, Default)]
pub(crate) struct History {
    started_unix: u64,
    /// Marks, oldest first; the last is the latest poll. At most one is older than [`WINDOW`].
    marks: VecDeque<Mark>,
    points: VecDeque<Point>,
    /// Bytes that each worker had sent at a time; oldest first, the last is the latest poll.
    sent: VecDeque<(Duration, HashMap<String, u64>)>,
}

impl History {
    /// Records an answer.
    pub(crate) fn record(&mut self, at: Duration, status: &Status) {
        let mark = Mark { at, counters: status.counters, histograms: status.histograms.clone() };
        let is_new_run = status.started_unix != self.started_unix;
        if is_new_run || self.marks.back().is_some_and(|last| !is_later(last, &mark)) {
            self.marks.clear();
            self.sent.clear();
        }
        self.record_sent(at, status);
        self.started_unix = status.started_unix;
        self.marks.push_back(mark);
        // The newest mark that is a whole window old is kept: the latest one is compared with it.
        while self.marks.len() > KEPT_MAX || self.marks.get(1).is_some_and(|second| at - second.at >= WINDOW)
        {
            self.marks.pop_front();
        }
        let rates = self.rates();
        self.push(Point {
            at,
            requests: rates.map(|rates| rates.requests),
            tokens: rates.map(|rates| rates.generated_tokens),
            active: status.active.map(|count| count as f64),
            waiting: status.waiting.map(|count| count as f64),
            hit_rate: rates.and_then(|rates| rates.hit_rate),
        });
    }

    fn record_sent(&mut self, at: Duration, status: &Status) {
        let of = |worker: &Worker| Some((worker.name.clone(), worker.transfers.as_ref()?.bytes_sent));
        let sent: HashMap<String, u64> = status.workers.iter().filter_map(of).collect();
        if sent.is_empty() {
            return;
        }
        let before_last = self.sent.len().checked_sub(2).map(|index| self.sent[index].0);
        if before_last.is_some_and(|before| at.saturating_sub(before) < SENT_EVERY) {
            self.sent.pop_back();
        }
        self.sent.push_back((at, sent));
        while self.sent.get(1).is_some_and(|(second, _)| at.saturating_sub(*second) >= WINDOW) {
            self.sent.pop_front();
        }
    }

    /// Time over which [`Self::sent_per_second`] averages; `None` before there are two polls.
    pub(crate) fn sent_window(&self) -> Option<Duration> {
        let ((first, _), (last, _)) = (self.sent.front()?, self.sent.back()?);
        Some(last.saturating_sub(*first)).filter(|window| !window.is_zero())
    }

    /// Bytes of blocks per second that a worker has sent recently; `None` when unknown, as after a restart.
    pub(crate) fn sent_per_second(&self, worker: &str) -> Option<f64> {
        let window = self.sent_window()?;
        let ((_, first), (_, last)) = (self.sent.front()?, self.sent.back()?);
        let gained = last.get(worker)?.checked_sub(*first.get(worker)?)?;
        Some(gained as f64 / window.as_secs_f64())
    }

    /// Records the gateway's start, when all counters were 0: the next answer's rates are then those since the start.
    pub(crate) fn record_start(&mut self, status: &Status) {
        self.started_unix = status.started_unix;
        let zero = Mark {
            at: Duration::ZERO,
            counters: Counters::default(),
            histograms: Histograms {
                time_to_first_token: status.histograms.time_to_first_token.zeroed(),
                inter_token: status.histograms.inter_token.zeroed(),
                routing: status.histograms.routing.zeroed(),
            },
        };
        self.marks = VecDeque::from([zero]);
    }

    /// Records the gateway's samples that are older than this answer, at most [`SERIES_LENGTH`] old and newer than the last point.
    pub(crate) fn record_samples(&mut self, now: Duration, status: &Status, samples: Vec<Status>) {
        for mut sample in samples {
            let age = Duration::from_millis(status.now_unix_ms.saturating_sub(sample.now_unix_ms));
            let Some(at) = now.checked_sub(age).filter(|at| *at < now && age <= SERIES_LENGTH) else {
                continue;
            };
            if self.points.back().is_none_or(|last| last.at < at) {
                sample.started_unix = status.started_unix;
                self.record(at, &sample);
            }
        }
    }

    /// Records a poll without an answer, as a gap in the series.
    pub(crate) fn record_gap(&mut self, at: Duration) {
        self.push(Point { at, ..Point::default() });
    }

    fn push(&mut self, point: Point) {
        self.points.push_back(point);
        while self.points.len() > KEPT_MAX
            || self.points.front().is_some_and(|first| point.at.saturating_sub(first.at) > SERIES_LENGTH)
        {
            self.points.pop_front();
        }
    }

    /// Rates between the last two polls; `None` before there are two of one run of the gateway.
    pub(crate) fn rates(&self) -> Option<Rates> {
        let earlier = self.marks.len().checked_sub(2)?;
        rates_between(&self.marks[earlier], self.marks.back()?)
    }

    /// Rates over the last minute, or the recorded part of it.
    pub(crate) fn window_rates(&self) -> Option<Rates> {
        rates_between(self.marks.front()?, self.marks.back()?)
    }

    /// Length of the recorded part of the last minute.
    pub(crate) fn window(&self) -> Duration {
        match (self.marks.front(), self.marks.back()) {
            (Some(first), Some(last)) => last.at - first.at,
            _ => Duration::ZERO,
        }
    }

    /// Observations that a histogram gained within [`Self::window`].
    pub(crate) fn windowed(&self, of: impl Fn(&Histograms) -> &Histogram) -> Histogram {
        match (self.marks.front(), self.marks.back()) {
            (Some(first), Some(last)) => {
                of(&last.histograms).since(of(&first.histograms)).unwrap_or_default()
            }
            _ => Histogram::default(),
        }
    }

    /// The shortest of one, two and five minutes that covers the whole series.
    pub(crate) fn series_span(&self) -> Duration {
        let known = match (self.points.front(), self.points.back()) {
            (Some(first), Some(last)) => last.at - first.at,
            _ => Duration::ZERO,
        };
        let spans = [Duration::from_secs(60), Duration::from_secs(120)];
        spans.into_iter().find(|span| known <= *span).unwrap_or(SERIES_LENGTH)
    }

    /// The series in `columns` equal intervals, newest last: the mean of each interval's known values. Intervals begin at
    /// multiples of their length, so that past values do not change when a point is added.
    pub(crate) fn series(&self, columns: usize, of: impl Fn(&Point) -> Option<f64>) -> Vec<Option<f64>> {
        let mut pieces = vec![(0.0, 0_u32); columns];
        let Some(last) = self.points.back().filter(|_| columns > 0) else {
            return vec![None; columns];
        };
        let piece = self.series_span().as_secs_f64() / columns as f64;
        let piece_of = |at: Duration| (at.as_secs_f64() / piece) as usize;
        for point in &self.points {
            let age = piece_of(last.at) - piece_of(point.at);
            if let (Some(value), Some(index)) = (of(point), (columns - 1).checked_sub(age)) {
                pieces[index].0 += value;
                pieces[index].1 += 1;
            }
        }
        pieces.into_iter().map(|(sum, count)| (count > 0).then(|| sum / f64::from(count))).collect()
    }
}

/// Whether both marks can be of one run of the gateway, in this order.
fn is_later(earlier: &Mark, later: &Mark) -> bool {
    let (a, b) = (&earlier.counters, &later.counters);
    let rises = [
        (a.requests, b.requests),
        (a.failed, b.failed),
        (a.prompt_tokens, b.prompt_tokens),
        (a.cached_tokens, b.cached_tokens),
        (a.generated_tokens, b.generated_tokens),
    ];
    let (x, y) = (&earlier.histograms, &later.histograms);
    let histograms = [
        (&x.time_to_first_token, &y.time_to_first_token),
        (&x.inter_token, &y.inter_token),
        (&x.routing, &y.routing),
    ];
    earlier.at <= later.at
        && rises.iter().all(|(before, after)| before <= after)
        && histograms.iter().all(|(before, after)| after.since(before).is_some())
}

fn rates_between(earlier: &Mark, later: &Mark) -> Option<Rates> {
    let seconds = later.at.checked_sub(earlier.at).filter(|span| !span.is_zero())?.as_secs_f64();
    let (a, b) = (&earlier.counters, &later.counters);
    let rate = |before: u64, after: u64| after.saturating_sub(before) as f64 / seconds;
    Some(Rates {
        requests: rate(a.requests, b.requests),
        failed: rate(a.failed, b.failed),
        prompt_tokens: rate(a.prompt_tokens, b.prompt_tokens),
        generated_tokens: rate(a.generated_tokens, b.generated_tokens),
        hit_rate: share(
            b.cached_tokens.saturating_sub(a.cached_tokens),
            b.prompt_tokens.saturating_sub(a.prompt_tokens),
        ),
    })
}

/// `part` divided by `whole`, 0 to 1; `None` if `whole` is 0.
pub(crate) fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| (part as f64 / whole as f64).min(1.0))
}

/// A quantile estimated from buckets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Quantile {
    /// The histogram is empty.
    Unknown,
    /// Seconds; in the same bucket as the true value.
    About(f64),
    /// The quantile is beyond the last bound, which is this value in seconds.
    Above(f64),
}

impl Histogram {
    /// Returns the same buckets with zero counts.
    pub(crate) fn zeroed(&self) -> Self {
        Self { le: self.le.clone(), counts: vec![0; self.counts.len()], sum: 0.0 }
    }

    /// Number of observations.
    pub(crate) fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Mean of the observations, in seconds.
    pub(crate) fn mean(&self) -> Option<f64> {
        let total = self.total();
        (total > 0).then(|| self.sum / total as f64)
    }

    /// Observations since `earlier`; `None` when that is not an earlier state of the same histogram.
    pub(crate) fn since(&self, earlier: &Self) -> Option<Self> {
        if earlier.counts.is_empty() {
            return Some(self.clone());
        }
        if self.le != earlier.le {
            return None;
        }
        let pairs = self.counts.iter().zip(&earlier.counts);
        let counts = pairs.map(|(after, before)| after.checked_sub(*before)).collect::<Option<Vec<u64>>>()?;
        Some(Self { le: self.le.clone(), counts, sum: (self.sum - earlier.sum).max(0.0) })
    }

    /// The quantile `share` (0 to 1), interpolated evenly within its bucket; the first bucket begins at zero.
    pub(crate) fn quantile(&self, share: f64) -> Quantile {
        let (total, Some(last)) = (self.total(), self.le.last()) else {
            return Quantile::Unknown;
        };
        if total == 0 {
            return Quantile::Unknown;
        }
        let rank = share.clamp(0.0, 1.0) * total as f64;
        let mut below = 0.0;
        let mut lower = 0.0;
        for (upper, count) in self.le.iter().zip(&self.counts) {
            let count = *count as f64;
            if count > 0.0 && below + count >= rank {
                return Quantile::About(lower + (upper - lower) * ((rank - below) / count).clamp(0.0, 1.0));
            }
            below += count;
            lower = *upper;
        }
        Quantile::Above(*last)
    }

    /// The buckets from the first to the last that is not empty, neighbours merged until there are at most
    /// `rows`: upper bound (`None` for the last, which has none) and count.
    pub(crate) fn rows(&self, rows: usize) -> Vec<(Option<f64>, u64)> {
        let filled = |count: &u64| *count > 0;
        let (Some(first), Some(last)) =
            (self.counts.iter().position(filled), self.counts.iter().rposition(filled))
        else {
            return Vec::new();
        };
        if rows == 0 {
            return Vec::new();
        }
        let merged = (last - first + 1).div_ceil(rows);
        let indices: Vec<usize> = (first..=last).collect();
        let row = |chunk: &[usize]| {
            let count = chunk.iter().fold(0_u64, |sum, index| sum.saturating_add(self.counts[*index]));
            (chunk.last().and_then(|index| self.le.get(*index).copied()), count)
        };
        indices.chunks(merged).map(row).collect()
    }
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
