//! Measurements as lines, and as a table that can be pasted.

use super::{Mode, Point};
use crate::results::{self, Better};
use crate::size;

/// Legend of [`Row::line`].
pub(super) const LEGEND: &str = "# mode size depth: GB/s, CPU s/GiB, p50/p99/p99.9 us [| fio: the same | ours / fio: \
                                 throughput, CPU, p99]";

/// One measurement.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Measured {
    pub(super) bytes_per_s: f64,
    pub(super) cpu_s_per_gib: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) p99_9_us: f64,
}

impl Measured {
    /// Each figure's median over the rounds.
    fn median(rounds: &[Self]) -> Self {
        let of = |field: fn(&Self) -> f64| median(rounds.iter().map(field).collect());
        Self {
            bytes_per_s: of(|m| m.bytes_per_s),
            cpu_s_per_gib: of(|m| m.cpu_s_per_gib),
            p50_us: of(|m| m.p50_us),
            p99_us: of(|m| m.p99_us),
            p99_9_us: of(|m| m.p99_9_us),
        }
    }

    fn latencies(&self) -> String {
        format!("{:.0}/{:.0}/{:.0}", self.p50_us, self.p99_us, self.p99_9_us)
    }

    fn render(&self) -> String {
        format!("{:.3}, {:.3}, {}", self.bytes_per_s / 1e9, self.cpu_s_per_gib, self.latencies())
    }
}

/// Our figures relative to fio's.
struct FioComparison {
    fio: Measured,
    throughput: f64,
    /// Lowest and highest ratio of the rounds: how much of the ratio is the machine's noise.
    throughput_range: (f64, f64),
    cpu: f64,
    p99: f64,
}

/// One point over all rounds.
pub(super) struct Row {
    point: Point,
    ours: Measured,
    comparison: Option<FioComparison>,
}

impl Row {
    /// `fios` has the same rounds as `ours`, or is empty.
    pub(super) fn new(point: Point, ours: &[Measured], fios: &[Measured]) -> Self {
        let ratio = |of: fn(&Measured) -> f64| {
            median(ours.iter().zip(fios).map(|(ours, fio)| of(ours) / of(fio)).collect())
        };
        let comparison = (!fios.is_empty()).then(|| FioComparison {
            fio: Measured::median(fios),
            throughput: ratio(|m| m.bytes_per_s),
            throughput_range: range(
                ours.iter().zip(fios).map(|(ours, fio)| ours.bytes_per_s / fio.bytes_per_s),
            ),
            cpu: ratio(|m| m.cpu_s_per_gib),
            p99: ratio(|m| m.p99_us),
        });
        Self { point, ours: Measured::median(ours), comparison }
    }

    fn name(&self) -> String {
        name(self.point)
    }

    pub(super) fn line(&self) -> String {
        let mut line = format!("{} {}: {}", self.name(), self.point.depth, self.ours.render());
        if let Some(FioComparison { fio, throughput, throughput_range: (low, high), cpu, p99 }) =
            &self.comparison
        {
            line +=
                &format!(" | {} | {throughput:.3} ({low:.2} to {high:.2}) {cpu:.3} {p99:.3}", fio.render());
        }
        line
    }
}

fn name(point: Point) -> String {
    let mode = match point.mode {
        Mode::Read => "read",
        Mode::Write => "write",
        Mode::Mixed => "mixed",
    };
    format!("{mode} {}", size::render(point.size))
}

/// Adds the rounds of a point to the results. `fios` has the same rounds as `ours`, or is empty.
pub(super) fn add_results(point: Point, ours: &[Measured], fios: &[Measured]) {
    let name = format!("{}, depth {}", name(point), point.depth);
    let add = |what: &str, unit, of: fn(&Measured) -> f64| {
        let values: Vec<f64> = ours.iter().map(of).collect();
        results::add("disk", &format!("{name}: {what}"), unit, &values);
    };
    add("throughput", ("GB/s", Better::Higher), |m| m.bytes_per_s / 1e9);
    add("processor time", ("s/GiB", Better::Lower), |m| m.cpu_s_per_gib);
    add("p50", ("us", Better::Lower), |m| m.p50_us);
    add("p99", ("us", Better::Lower), |m| m.p99_us);
    add("p99.9", ("us", Better::Lower), |m| m.p99_9_us);
    let ratios: Vec<f64> =
        ours.iter().zip(fios).map(|(ours, fio)| ours.bytes_per_s / fio.bytes_per_s).collect();
    results::add("disk", &format!("{name}: throughput over fio's"), ("ratio", Better::Higher), &ratios);
}

/// Renders the rows with a peer as Markdown.
pub(super) fn render(rows: &[Row]) -> String {
    let mut text =
        "| | depth | GB/s, fio | ratio (of the rounds) | CPU s/GiB, fio | ratio | p50/p99/p99.9 us | fio | ratio of p99 |\n\
                    | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
            .to_owned();
    for row in rows {
        let (ours, Some(comparison)) = (&row.ours, &row.comparison) else { continue };
        let FioComparison { fio, throughput, throughput_range: (low, high), cpu, p99 } = comparison;
        text += &format!(
            "\n| {} | {} | {:.3}, {:.3} | {throughput:.2} ({low:.2} to {high:.2}) | {:.3}, {:.3} | {cpu:.2} | {} | {} | {p99:.2} |",
            row.name(),
            row.point.depth,
            ours.bytes_per_s / 1e9,
            fio.bytes_per_s / 1e9,
            ours.cpu_s_per_gib,
            fio.cpu_s_per_gib,
            ours.latencies(),
            fio.latencies()
        );
    }
    text
}

/// The median; of an even number of values the mean of the two in the middle.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        count if count.is_multiple_of(2) => values[middle - 1].midpoint(values[middle]),
        _ => values[middle],
    }
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, 0.0), |(low, high), value| (value.min(low), value.max(high)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middles() {
        assert_eq!(
            [vec![], vec![5.0], vec![9.0, 1.0, 2.0], vec![9.0, 1.0, 2.0, 4.0]].map(median),
            [0.0, 5.0, 2.0, 3.0]
        );
    }

    #[test]
    fn a_ratio_is_the_median_of_the_rounds_ratios() {
        let round = |gb: f64| Measured {
            bytes_per_s: gb * 1e9,
            cpu_s_per_gib: 1.0,
            p99_us: 1.0,
            ..Measured::default()
        };
        // The ratio of the medians would be 2 / 3.
        let (ours, fios) = ([1.0, 2.0, 9.0].map(round), [2.0, 8.0, 3.0].map(round));
        let point = Point { size: 128 << 10, depth: 16, mode: Mode::Mixed };
        let table = render(&[Row::new(point, &ours, &fios), Row::new(point, &ours, &[])]);
        assert_eq!(table.lines().count(), 3, "a row without a peer is left out: {table}");
        assert!(
            table.contains(
                "| mixed 128 KiB | 16 | 2.000, 3.000 | 0.50 (0.25 to 3.00) | 1.000, 1.000 | 1.00 |"
            ),
            "{table}"
        );
    }
}
