//! The arithmetic against exact values.

use super::*;

const BOUNDS: [f64; 8] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0];

fn histogram(values: &[f64]) -> Histogram {
    let mut counts = vec![0; BOUNDS.len() + 1];
    for value in values {
        counts[BOUNDS.partition_point(|bound| bound < value)] += 1;
    }
    Histogram { le: BOUNDS.to_vec(), counts, sum: values.iter().sum() }
}

fn seconds(value: u64) -> Duration {
    Duration::from_secs(value)
}

/// A gateway's answer after `requests` requests of 100 prompt tokens (60 cached) and 10 generated ones.
fn status(started_unix: u64, requests: u64) -> Status {
    let counters = Counters {
        requests,
        failed: requests / 10,
        prompt_tokens: requests * 100,
        cached_tokens: requests * 60,
        generated_tokens: requests * 10,
        ..Counters::default()
    };
    let mut time_to_first_token = histogram(&[]);
    time_to_first_token.counts[2] = requests;
    let histograms = Histograms { time_to_first_token, ..Histograms::default() };
    Status { started_unix, counters, histograms, active: Some(requests % 7), ..Status::default() }
}

#[test]
fn quantiles_of_known_buckets() {
    let of = |counts: [u64; 4]| Histogram { le: vec![1.0, 2.0, 4.0], counts: counts.to_vec(), sum: 0.0 };
    for (counts, share, expected) in [
        ([0, 0, 0, 0], 0.5, Quantile::Unknown),
        ([10, 0, 0, 0], 0.5, Quantile::About(0.5)),
        ([10, 0, 0, 0], 1.0, Quantile::About(1.0)),
        ([10, 0, 0, 0], 0.0, Quantile::About(0.0)),
        ([0, 10, 0, 0], 0.5, Quantile::About(1.5)),
        ([0, 10, 0, 0], 0.0, Quantile::About(1.0)),
        ([5, 0, 5, 0], 0.5, Quantile::About(1.0)),
        ([5, 0, 5, 0], 0.75, Quantile::About(3.0)),
        ([0, 0, 10, 0], 0.9, Quantile::About(3.8)),
        ([98, 0, 0, 2], 0.99, Quantile::Above(4.0)),
        ([0, 0, 0, 1], 0.5, Quantile::Above(4.0)),
        ([u64::MAX, u64::MAX, 0, 0], 0.25, Quantile::About(0.25)),
    ] {
        match (of(counts).quantile(share), expected) {
            (Quantile::About(value), Quantile::About(wanted)) => {
                assert!((value - wanted).abs() < 1e-9, "{counts:?} at {share}: {value}, not {wanted}");
            }
            (given, wanted) => assert_eq!(given, wanted, "{counts:?} at {share}"),
        }
    }
    assert_eq!(Histogram::default().quantile(0.5), Quantile::Unknown);
}

#[test]
fn quantiles_lie_in_the_bucket_of_the_exact_value() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..200 {
        let count = 1 + round * 3;
        let mut values: Vec<f64> = (0..count)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // From 0.1 ms to 3 s, evenly by order of magnitude.
                10_f64.powf(-4.0 + 4.5 * ((state >> 11) as f64 / (1_u64 << 53) as f64))
            })
            .collect();
        values.sort_by(f64::total_cmp);
        let histogram = histogram(&values);
        for share in [0.5, 0.9, 0.99] {
            let rank = ((share * count as f64).ceil() as usize).max(1) - 1;
            let bucket = BOUNDS.partition_point(|bound| *bound < values[rank]);
            match histogram.quantile(share) {
                Quantile::About(value) => {
                    let lower = if bucket == 0 { 0.0 } else { BOUNDS[bucket - 1] };
                    assert!(
                        bucket < BOUNDS.len() && lower <= value && value <= BOUNDS[bucket],
                        "round {round}: p{share} is {}, said to be {value}",
                        values[rank]
                    );
                }
                Quantile::Above(_) => assert_eq!(bucket, BOUNDS.len(), "round {round}: {}", values[rank]),
                Quantile::Unknown => panic!("round {round}: there are {count} values"),
            }
        }
    }
}

#[test]
fn rates_are_differences_over_time() {
    let mut history = History::default();
    history.record(seconds(0), &status(1, 1000));
    assert_eq!((history.rates(), history.window()), (None, Duration::ZERO), "one poll makes no rate");
    history.record(seconds(2), &status(1, 1010));
    let expected = Rates {
        requests: 5.0,
        failed: 0.5,
        prompt_tokens: 500.0,
        generated_tokens: 50.0,
        hit_rate: Some(0.6),
    };
    assert_eq!(history.rates(), Some(expected));
    history.record(seconds(4), &status(1, 1010));
    assert_eq!(history.rates(), Some(Rates::default()), "nothing happened, and no hit rate of nothing");
    let window = history.window_rates().expect("three polls");
    assert_eq!((window.requests, window.hit_rate), (2.5, Some(0.6)));
}

#[test]
fn the_window_is_a_minute() {
    let mut history = History::default();
    for second in 0..=200 {
        history.record(seconds(second), &status(1, second * second));
        let earlier = second.saturating_sub(60);
        assert_eq!(history.window(), seconds(second - earlier));
        let in_window = history.windowed(|histograms| &histograms.time_to_first_token);
        assert_eq!(in_window.total(), second * second - earlier * earlier, "at {second}");
    }
    // A long silence: the last poll before it is what the next is compared with.
    history.record(seconds(1000), &status(1, 50_000));
    assert_eq!(history.window(), seconds(800));
    assert_eq!(history.rates().expect("a rate").requests, 12.5);
}

#[test]
fn a_restart_gives_no_negative_rate() {
    let quiet = |started_unix| status(started_unix, 0);
    for (case, after) in [
        ("counters fell", status(1, 5)),
        ("a new start with higher counters", status(2, 5000)),
        ("all zero", quiet(1)),
        (
            "other buckets",
            Status {
                histograms: Histograms {
                    time_to_first_token: Histogram { le: vec![1.0], counts: vec![9000, 0], sum: 1.0 },
                    ..Histograms::default()
                },
                ..status(1, 2000)
            },
        ),
    ] {
        let mut history = History::default();
        history.record(seconds(0), &status(1, 900));
        history.record(seconds(1), &status(1, 1000));
        history.record(seconds(2), &after);
        assert_eq!((history.rates(), history.window_rates()), (None, None), "{case}");
        assert_eq!(history.windowed(|histograms| &histograms.time_to_first_token).total(), 0, "{case}");
        let mut later = after.clone();
        later.counters.requests += 30;
        history.record(seconds(3), &later);
        assert_eq!(history.rates().expect(case).requests, 30.0, "{case}");
        let series = history.series(60, |point| point.requests);
        let known: Vec<f64> = series.into_iter().flatten().collect();
        assert_eq!(known, [100.0, 30.0], "{case}: the restart itself is a gap");
    }
}

#[test]
fn time_that_stands_still_gives_no_rate() {
    let mut history = History::default();
    history.record(seconds(5), &status(1, 1));
    history.record(seconds(5), &status(1, 2));
    assert_eq!(history.rates(), None);
}

#[test]
fn the_course_has_gaps_and_bounds() {
    let mut history = History::default();
    assert_eq!(history.series(3, |point| point.active), [None; 3]);
    assert!(history.series(0, |point| point.active).is_empty());
    for second in 0..60 {
        if second % 20 < 10 {
            history.record(seconds(second), &Status { active: Some(second), ..Status::default() });
        } else {
            history.record_gap(seconds(second));
        }
    }
    assert_eq!(history.series_span(), seconds(60));
    let series = history.series(6, |point| point.active);
    assert_eq!(series, [Some(4.5), None, Some(24.5), None, Some(44.5), None]);
    for tenth in 600..40_000 {
        history.record(Duration::from_millis(tenth * 100), &status(1, tenth));
    }
    assert_eq!(history.series_span(), SERIES_LENGTH);
    assert!(history.points.len() <= KEPT_MAX && history.marks.len() <= 602, "{}", history.marks.len());
    assert!(history.series(50, |point| point.requests).iter().all(|rate| rate.is_some()));
}

#[test]
fn rows_are_trimmed_and_merged() {
    let histogram = Histogram { le: vec![1.0, 2.0, 3.0, 4.0, 5.0], counts: vec![0, 7, 0, 1, 2, 3], sum: 0.0 };
    let whole = vec![(Some(2.0), 7), (Some(3.0), 0), (Some(4.0), 1), (Some(5.0), 2), (None, 3)];
    assert_eq!(histogram.rows(10), whole);
    assert_eq!(histogram.rows(5), whole);
    assert_eq!(histogram.rows(4), [(Some(3.0), 7), (Some(5.0), 3), (None, 3)]);
    assert_eq!(histogram.rows(1), [(None, 13)]);
    assert!(histogram.rows(0).is_empty());
    assert!(Histogram::default().rows(9).is_empty());
    assert_eq!(histogram.mean(), Some(0.0));
}

#[test]
fn the_course_begins_before_the_first_answer() {
    let mut history = History::default();
    let at = |second: u64| Status { now_unix_ms: second * 1000, ..status(7, second * 2) };
    // Every ten seconds for ten minutes; the answer comes at second 600.
    let samples = (0..60).map(|sample| Status { started_unix: 0, ..at(sample * 10) }).collect();
    history.record_samples(SERIES_LENGTH, &at(600), samples);
    history.record(SERIES_LENGTH, &at(600));
    assert_eq!(history.window(), seconds(60));
    assert_eq!(history.window_rates().map(|rates| rates.requests), Some(2.0));
    assert_eq!(history.windowed(|of| &of.time_to_first_token).total(), 120);
    assert_eq!(history.series_span(), SERIES_LENGTH);
    let known = history.series(30, |point| point.requests);
    assert!(
        known.iter().flatten().all(|rate| *rate == 2.0) && known.iter().flatten().count() >= 29,
        "{known:?}"
    );
    // After a restart the new run's samples are added; earlier points stay.
    let restarted = Status { started_unix: 650, now_unix_ms: 680_000, ..status(650, 30) };
    let sample = Status { now_unix_ms: 670_000, ..status(0, 20) };
    history.record_samples(SERIES_LENGTH + seconds(80), &restarted, vec![sample]);
    history.record(SERIES_LENGTH + seconds(80), &restarted);
    assert_eq!((history.window(), history.points.len()), (seconds(10), 25));
}
