//! Results of a run as rows, one for each quantity: written as JSON lines or CSV, and compared with an earlier run.
//!
//! A benchmark adds a row beside each line that it prints. The rows of all benchmarks of a run are written at its end, after a header
//! that names the machine, so that a file says where its numbers come from.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::measure::{Latencies, median};

/// Exit code of a run that is slower than its baseline.
pub(crate) const EXIT_SLOWER: u8 = 3;

static ROWS: Mutex<Vec<Row>> = Mutex::new(Vec::new());

/// Files that results are written to and compared with.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct OutputArgs {
    /// File to write results to: a line with the machine, then one JSON object a line.
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
    /// File to write results to, as CSV.
    #[arg(long, global = true, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// File of an earlier run (`--json`) to compare medians with. Exit code 3 if a quantity is worse.
    #[arg(long, global = true, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Percent by which a median may be worse than the baseline's.
    #[arg(long, global = true, value_name = "PERCENT", default_value_t = 10.0)]
    tolerance: f64,
}

/// Direction in which a quantity is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Better {
    /// Times and counts of resources.
    Lower,
    /// Rates.
    Higher,
}

/// Machine and program of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) machine: String,
    pub(crate) cores: usize,
    pub(crate) kernel: String,
    pub(crate) version: String,
    pub(crate) date: String,
}

impl Header {
    pub(crate) fn of_this_machine() -> Self {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let model = text("/proc/cpuinfo").lines().find_map(|line| {
            line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name.trim().to_owned())
        });
        Self {
            machine: model.unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            date: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
        }
    }

    /// The first line of a run's output.
    pub(crate) fn line(&self) -> String {
        let Self { machine, cores, kernel, version, date } = self;
        format!("# {machine}, {cores} cores, Linux {kernel}, kvasir {version}, {date}")
    }
}

/// One quantity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) bench: String,
    pub(crate) name: String,
    pub(crate) unit: String,
    pub(crate) better: Better,
    #[serde(flatten)]
    pub(crate) summary: Summary,
    /// Facts that only this benchmark has.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub(crate) details: Value,
}

/// Distribution of the values of a quantity, in its unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// Number of rounds, or of measured operations.
    pub(crate) samples: u64,
    pub(crate) min: f64,
    pub(crate) mean: f64,
    /// Standard deviation.
    pub(crate) deviation: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p99_9: f64,
    pub(crate) max: f64,
}

/// Columns of the CSV file after those of the header.
const COLUMNS: &str = "bench,name,unit,better,samples,min,mean,deviation,p50,p99,p99_9,max";

/// Adds a row of values of rounds. Without a value there is no row.
pub(crate) fn add(bench: &str, name: &str, (unit, better): (&str, Better), values: &[f64]) {
    add_with(bench, name, (unit, better), values, Value::Null);
}

/// Adds a row with facts that only this benchmark has.
pub(crate) fn add_with(
    bench: &str,
    name: &str,
    (unit, better): (&str, Better),
    values: &[f64],
    details: Value,
) {
    if values.is_empty() {
        return;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len() as f64;
    let mean = sorted.iter().sum::<f64>() / count;
    let variance = sorted.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    // The smallest value that is not below this share of all.
    let at = |share: f64| sorted[((share * count).ceil() as usize).clamp(1, sorted.len()) - 1];
    push(Row {
        bench: bench.to_owned(),
        name: name.to_owned(),
        unit: unit.to_owned(),
        better,
        summary: Summary {
            samples: sorted.len() as u64,
            min: sorted[0],
            mean,
            deviation: variance.sqrt(),
            p50: median(values.to_vec()),
            p99: at(0.99),
            p99_9: at(0.999),
            max: sorted[sorted.len() - 1],
        },
        details,
    });
}

/// Adds a row of latencies, in microseconds.
pub(crate) fn add_latencies(bench: &str, name: &str, latencies: &Latencies) {
    if latencies.count() == 0 {
        return;
    }
    let micros = |quantile| latencies.at(quantile) / 1e3;
    let (mean, deviation) = latencies.mean_and_deviation();
    let summary = Summary {
        samples: latencies.count(),
        min: micros(0.0),
        mean: mean / 1e3,
        deviation: deviation / 1e3,
        p50: micros(0.5),
        p99: micros(0.99),
        p99_9: micros(0.999),
        max: micros(1.0),
    };
    add_summary((bench, name), summary, Value::Null);
}

/// Adds a row of latencies that were summed up already, in microseconds.
pub(crate) fn add_summary((bench, name): (&str, &str), summary: Summary, details: Value) {
    let (bench, name, unit) = (bench.to_owned(), name.to_owned(), "us".to_owned());
    push(Row { bench, name, unit, better: Better::Lower, summary, details });
}

fn push(row: Row) {
    ROWS.lock().unwrap_or_else(PoisonError::into_inner).push(row);
}

/// Some quantities are worse than in the baseline.
#[derive(Debug, thiserror::Error)]
#[error("{0} of {1} quantities are worse than the baseline's by more than {2} %")]
pub(crate) struct Slower(usize, usize, f64);

impl OutputArgs {
    /// Fails before the run if its end would: a baseline that cannot be read.
    pub(crate) fn check(&self) -> Result<()> {
        self.baseline.as_deref().map_or(Ok(()), |file| read(file).map(drop))
    }

    /// Writes the rows of the run, and compares them with the baseline.
    pub(crate) fn finish(&self) -> Result<()> {
        let rows = std::mem::take(&mut *ROWS.lock().unwrap_or_else(PoisonError::into_inner));
        let header = Header::of_this_machine();
        if let Some(file) = &self.json {
            write(file, &json(&header, &rows)?)?;
        }
        if let Some(file) = &self.csv {
            write(file, &csv(&header, &rows))?;
        }
        let Some(file) = &self.baseline else { return Ok(()) };
        let (before, base) = read(file)?;
        println!(
            "\n# compared with {}: {}, {} cores, version {}, {}",
            file.display(),
            before.machine,
            before.cores,
            before.version,
            before.date
        );
        if (&before.machine, before.cores) != (&header.machine, header.cores) {
            println!("# another machine: this is {}, {} cores", header.machine, header.cores);
        }
        let (text, compared, worse) = compare(&base, &rows, self.tolerance);
        print!("{text}");
        if compared == 0 {
            bail!("{} has none of the quantities of this run", file.display());
        }
        if worse > 0 { Err(Slower(worse, compared, self.tolerance).into()) } else { Ok(()) }
    }
}

fn json(header: &Header, rows: &[Row]) -> Result<String> {
    let mut text = serde_json::to_string(header)? + "\n";
    for row in rows {
        text += &serde_json::to_string(row)?;
        text.push('\n');
    }
    Ok(text)
}

fn csv(header: &Header, rows: &[Row]) -> String {
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let mut text = format!("machine,cores,kernel,version,date,{COLUMNS}\n");
    for row in rows {
        let better = if row.better == Better::Lower { "lower" } else { "higher" };
        let _never_fails = writeln!(
            text,
            "{},{},{},{},{},{},{},{},{better},{},{},{},{},{},{},{},{}",
            quoted(&header.machine),
            header.cores,
            quoted(&header.kernel),
            header.version,
            header.date,
            quoted(&row.bench),
            quoted(&row.name),
            quoted(&row.unit),
            row.summary.samples,
            row.summary.min,
            row.summary.mean,
            row.summary.deviation,
            row.summary.p50,
            row.summary.p99,
            row.summary.p99_9,
            row.summary.max
        );
    }
    text
}

fn write(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| format!("write {}", file.display()))
}

/// Reads a file of an earlier run.
pub(crate) fn read(file: &Path) -> Result<(Header, Vec<Row>)> {
    let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    let mut lines = text.lines().enumerate();
    let (_, first) = lines.next().with_context(|| format!("{} is empty", file.display()))?;
    let header = serde_json::from_str(first)
        .with_context(|| format!("{}, line 1: no header of a run", file.display()))?;
    let row = |(number, line): (usize, &str)| {
        serde_json::from_str(line).with_context(|| format!("{}, line {}", file.display(), number + 1))
    };
    Ok((header, lines.map(row).collect::<Result<_>>()?))
}

/// Compares medians. Returns a table, the number of compared quantities and that of worse ones.
fn compare(base: &[Row], rows: &[Row], tolerance: f64) -> (String, usize, usize) {
    let mut text = format!(
        "{:<10} {:<56} {:>12} {:>12} {:>8}  verdict\n",
        "bench", "quantity", "baseline", "now", "ratio"
    );
    let (mut compared, mut worse) = (0, 0);
    for row in rows {
        let same =
            |other: &&Row| (&other.bench, &other.name, &other.unit) == (&row.bench, &row.name, &row.unit);
        let Some(before) = base.iter().find(same) else { continue };
        let ratio = row.summary.p50 / before.summary.p50;
        // Above 1 is worse.
        let change = if row.better == Better::Lower { ratio } else { 1.0 / ratio };
        let verdict = match change {
            change if change > 1.0 + tolerance / 100.0 => "worse",
            change if change < 1.0 / (1.0 + tolerance / 100.0) => "better",
            change if change.is_finite() => "same",
            _ => "unknown",
        };
        compared += 1;
        worse += usize::from(verdict == "worse");
        let name = format!("{}, {}", row.name, row.unit);
        let _never_fails = writeln!(
            text,
            "{:<10} {name:<56} {:>12.3} {:>12.3} {ratio:>8.3}  {verdict}",
            row.bench, before.summary.p50, row.summary.p50
        );
    }
    (text, compared, worse)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, better: Better, p50: f64) -> Row {
        let (bench, name, unit) = ("disk".to_owned(), name.to_owned(), "GB/s".to_owned());
        Row {
            bench,
            name,
            unit,
            better,
            summary: Summary {
                samples: 3,
                min: p50,
                mean: p50,
                deviation: 0.0,
                p50,
                p99: p50,
                p99_9: p50,
                max: p50,
            },
            details: Value::Null,
        }
    }

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let header = Header::of_this_machine();
        assert!(header.cores > 0 && header.date.ends_with('Z'), "{header:?}");
        let rows = [row("reads, \"4K\"", Better::Higher, 1.5), row("writes", Better::Lower, 0.25)];
        let file = std::env::temp_dir().join(format!("kvasir-results-{}", std::process::id()));
        write(&file, &json(&header, &rows).expect("JSON")).expect("written");
        assert_eq!(read(&file).expect("read"), (header.clone(), rows.to_vec()));
        write(&file, "{}\n").expect("written");
        assert!(read(&file).expect_err("no header").to_string().contains("line 1"));
        std::fs::remove_file(&file).expect("removed");
        let text = csv(&header, &rows);
        assert_eq!(text.lines().count(), 3);
        assert!(text.contains("\"reads, \"\"4K\"\"\""), "{text}");
        let columns = |line: &str| line.split(',').count();
        assert_eq!(columns(text.lines().next().expect("heads")), 17);
    }

    #[test]
    fn medians_are_compared_by_direction() {
        let base =
            [row("a", Better::Higher, 10.0), row("b", Better::Lower, 10.0), row("c", Better::Lower, 10.0)];
        let now = [
            row("a", Better::Higher, 8.0),
            row("b", Better::Lower, 8.0),
            row("c", Better::Lower, 10.4),
            row("d", Better::Lower, 1.0),
        ];
        let (text, compared, worse) = compare(&base, &now, 5.0);
        assert_eq!((compared, worse), (3, 1), "{text}");
        let verdicts: Vec<&str> =
            text.lines().skip(1).filter_map(|line| line.split_whitespace().last()).collect();
        assert_eq!(verdicts, ["worse", "better", "same"]);
    }

    #[test]
    fn a_row_sums_its_values_up() {
        let values: Vec<f64> = (1..=101).map(f64::from).collect();
        add_with("test", "values", ("us", Better::Lower), &values, serde_json::json!({"a": 1}));
        let rows = ROWS.lock().expect("no panic");
        let row = rows.iter().find(|row| row.bench == "test").expect("the row");
        assert_eq!(
            (
                row.summary.samples,
                row.summary.min,
                row.summary.mean,
                row.summary.p50,
                row.summary.p99,
                row.summary.max
            ),
            (101, 1.0, 51.0, 51.0, 100.0, 101.0)
        );
        assert!((row.summary.deviation - 29.15).abs() < 0.01, "{}", row.summary.deviation);
    }
}
