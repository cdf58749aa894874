//! `bench report`: files of results as one HTML page, with a table and a plot for each benchmark.
//!
//! The page needs nothing beside it: styles and pictures are inside. A plot has a row for each quantity of one unit, on one
//! axis from zero: a bar to the median, a line from the smallest value to p99.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::results::{Better, Header, Row, read};

/// Pixels of a row, of its label, and of the axis.
const ROW: usize = 22;
const LABEL: usize = 420;
const AXIS: usize = 480;

/// Files of results to draw.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReportArgs {
    /// Files of results (`--json`), one column each.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The page.
    #[arg(long, default_value = "report.html", value_name = "FILE")]
    output: PathBuf,
}

/// One file of results.
struct Run {
    name: String,
    header: Header,
    rows: Vec<Row>,
}

pub(crate) fn run(args: &ReportArgs) -> Result<()> {
    let read = |file: &PathBuf| -> Result<Run> {
        let (header, rows) = read(file)?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Run { name, header, rows })
    };
    let runs = args.files.iter().map(read).collect::<Result<Vec<_>>>()?;
    let count: usize = runs.iter().map(|run| run.rows.len()).sum();
    ensure!(count > 0, "the files have no results");
    std::fs::write(&args.output, page(&runs)).with_context(|| format!("write {}", args.output.display()))?;
    println!("{count} results of {} runs in {}", runs.len(), absolute(&args.output).display());
    Ok(())
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A number with four significant digits.
fn short(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let digits = (3.0 - value.abs().log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.digits$}")
}

fn page(runs: &[Run]) -> String {
    let mut text = String::from(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Kvasir: benchmarks</title><style>\
         body{font:14px system-ui,sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse}\
         td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}\
         h2{margin-top:2em}svg text{font:12px system-ui,sans-serif}</style><h1>Benchmarks</h1>",
    );
    text += "<table><tr><th>run<th>machine<th>cores<th>kernel<th>version<th>date";
    for Run { name, header, .. } in runs {
        let Header { machine, cores, kernel, version, date } = header;
        let cells = [name, machine, &cores.to_string(), kernel, version, date].map(|cell| escaped(cell));
        let _never_fails = write!(text, "<tr><td>{}", cells.join("<td>"));
    }
    text += "</table>";
    let mut benches: Vec<&str> = Vec::new();
    for row in runs.iter().flat_map(|run| &run.rows) {
        if !benches.contains(&row.bench.as_str()) {
            benches.push(&row.bench);
        }
    }
    for bench in benches {
        let _never_fails = write!(text, "<h2>{}</h2>", escaped(bench));
        text += &table(runs, bench);
        // One axis for each unit.
        let mut units: BTreeMap<&str, Vec<(String, &Row)>> = BTreeMap::new();
        for (run, row) in rows_of(runs, bench) {
            let label =
                if runs.len() > 1 { format!("{} ({})", row.name, run.name) } else { row.name.clone() };
            units.entry(&row.unit).or_default().push((label, row));
        }
        for (unit, rows) in units {
            text += &plot(unit, &rows);
        }
    }
    text
}

fn rows_of<'a>(runs: &'a [Run], bench: &str) -> impl Iterator<Item = (&'a Run, &'a Row)> {
    runs.iter()
        .flat_map(move |run| run.rows.iter().filter(move |row| row.bench == bench).map(move |row| (run, row)))
}

fn table(runs: &[Run], bench: &str) -> String {
    let mut text = String::from(
        "<table><tr><th>quantity<th>run<th>unit<th>samples<th>min<th>mean<th>deviation<th>p50<th>p99<th>p99.9<th>max",
    );
    for (run, row) in rows_of(runs, bench) {
        let arrow = if row.better == Better::Lower { "↓" } else { "↑" };
        let _never_fails = write!(
            text,
            "<tr><td>{}<td>{}<td>{} {arrow}<td>{}",
            escaped(&row.name),
            escaped(&run.name),
            escaped(&row.unit),
            row.summary.samples
        );
        for value in [
            row.summary.min,
            row.summary.mean,
            row.summary.deviation,
            row.summary.p50,
            row.summary.p99,
            row.summary.p99_9,
            row.summary.max,
        ] {
            let _never_fails = write!(text, "<td>{}", short(value));
        }
    }
    text + "</table>"
}

fn plot(unit: &str, rows: &[(String, &Row)]) -> String {
    let largest = rows.iter().map(|(_, row)| row.summary.p99.max(row.summary.p50)).fold(0.0, f64::max);
    let at = |value: f64| if largest > 0.0 { (value / largest).clamp(0.0, 1.0) * AXIS as f64 } else { 0.0 };
    let (width, height) = (LABEL + AXIS + 90, ROW * (rows.len() + 1));
    let mut text = format!(
        "<p><svg width=\"{width}\" height=\"{height}\" role=\"img\"><text x=\"{LABEL}\" y=\"14\">{}</text>",
        escaped(unit)
    );
    for (number, (label, row)) in rows.iter().enumerate() {
        let (y, colour) =
            (ROW * (number + 1), if row.better == Better::Lower { "#4878a8" } else { "#4a9a5a" });
        let (middle, end) = (y + 9, LABEL as f64 + at(row.summary.p99.max(row.summary.p50)) + 6.0);
        let _never_fails = write!(
            text,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LABEL}\" y=\"{}\" width=\"{:.1}\" height=\"12\" fill=\"{colour}\"/>\
             <line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"#222\"/>\
             <text x=\"{end:.1}\" y=\"{}\">{}</text>",
            LABEL - 8,
            y + 13,
            escaped(label),
            y + 3,
            at(row.summary.p50),
            LABEL as f64 + at(row.summary.min),
            LABEL as f64 + at(row.summary.p99),
            y + 13,
            short(row.summary.p50)
        );
    }
    text + "</svg></p>"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_a_table_and_a_plot_of_each_unit() {
        let header = Header::of_this_machine();
        let row = |name: &str, unit: &str, p50: f64| -> Row {
            serde_json::from_value(serde_json::json!({
                "bench": "disk", "name": name, "unit": unit, "better": "higher", "samples": 3, "min": p50, "mean": p50,
                "deviation": 0.0, "p50": p50, "p99": 2.0 * p50, "p99_9": 2.0 * p50, "max": 2.0 * p50
            }))
            .expect("a row")
        };
        let rows = vec![row("reads <4K>", "GB/s", 1.5), row("writes", "GB/s", 3.0), row("time", "us", 0.0)];
        let text = page(&[Run { name: "today".to_owned(), header, rows }]);
        assert_eq!((text.matches("<svg").count(), text.matches("<rect").count()), (2, 3));
        assert!(text.contains("reads &lt;4K&gt;") && !text.contains("<4K>"), "{text}");
        // Half of the largest p99, which is 6.
        assert!(text.contains("width=\"240.0\" height=\"12\""), "{text}");
    }

    #[test]
    fn numbers_have_four_digits() {
        let cases =
            [(0.0, "0"), (1234.6, "1235"), (1.5, "1.500"), (0.000_123_45, "0.0001234"), (98_765.4, "98765")];
        for (value, expected) in cases {
            let text = short(value);
            assert!(text == expected || (text.len() == expected.len() && value < 0.01), "{value}: {text}");
        }
    }
}
