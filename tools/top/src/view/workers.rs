//! The table of workers. Only the rows that are seen are built, so hundreds of workers cost no more than a few.

use std::cmp::Ordering;

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Row, Table};

use super::{BAD, DIM, GOOD, HEADING, WARN, titled, units};
use crate::display::{Display, SortKey};
use crate::history::share;
use crate::wire::{Status, Worker};

const NAME_CELLS_MIN: u16 = 16;
/// Borders at the sides, or above and below with the heading.
const BORDER_CELLS: u16 = 2;
const HEADING_LINES: u16 = 3;

struct Column {
    title: &'static str,
    cells: u16,
    /// Narrow tables keep those with the lowest rank.
    rank: u8,
    text: fn(&Worker) -> String,
}

const COLUMNS: [Column; 13] = [
    Column { title: "state", cells: 5, rank: 0, text: |worker| standing(worker).0.to_owned() },
    Column { title: "role", cells: 7, rank: 4, text: |worker| worker.role.clone() },
    Column { title: "req", cells: 5, rank: 1, text: |worker| units::count(worker.requests) },
    Column { title: "peers", cells: 5, rank: 9, text: |worker| units::count(worker.peers_requests) },
    Column { title: "run", cells: 5, rank: 3, text: |worker| units::count(worker.engine_running) },
    Column { title: "wait", cells: 5, rank: 2, text: |worker| units::count(worker.engine_waiting) },
    Column { title: "KV", cells: 5, rank: 1, text: |worker| units::percent(worker.kv_usage) },
    Column { title: "", cells: 10, rank: 11, text: |worker| units::bar(worker.kv_usage.unwrap_or(0.0), 10) },
    Column { title: "slow", cells: 5, rank: 5, text: slowness },
    Column { title: "index", cells: 6, rank: 6, text: events },
    Column { title: "exact", cells: 5, rank: 7, text: exactly_predicted },
    Column { title: "ejec", cells: 4, rank: 8, text: |worker| units::count(worker.ejections) },
    Column { title: "engine", cells: 18, rank: 10, text: engine },
];

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, status: &Status, display: &mut Display) {
    let paused = paused(&status.workers, display.sort);
    let seen = display.workers.bound(paused.len(), usize::from(area.height.saturating_sub(HEADING_LINES)));
    let columns = fitting(area.width);
    let rows = paused[seen.clone()].iter().map(|worker| row(worker, &columns));
    let mut widths = vec![Constraint::Fill(1)];
    widths.extend(columns.iter().map(|column| Constraint::Length(column.cells)));
    let mut heading = vec![Cell::from("worker")];
    heading.extend(columns.iter().map(|column| aligned(column, column.title.to_owned())));
    let ready = status.workers.iter().filter(|worker| worker.ready).count();
    let title = format!("workers, {ready} of {} ready, by {} (s)", paused.len(), display.sort.title());
    let place = if seen.len() < paused.len() {
        format!("{}-{} of {}", seen.start + 1, seen.end, paused.len())
    } else {
        String::new()
    };
    let block = titled(title).title(Line::raw(place).right_aligned());
    let table = Table::new(rows, widths).header(Row::new(heading).style(HEADING)).block(block);
    frame.render_widget(table, area);
}

/// In the order of the table, as many as fit beside the name.
fn fitting(width: u16) -> Vec<&'static Column> {
    let mut by_rank: Vec<usize> = (0..COLUMNS.len()).collect();
    by_rank.sort_by_key(|index| COLUMNS[*index].rank);
    let mut left = width.saturating_sub(BORDER_CELLS + NAME_CELLS_MIN);
    let mut fitting = Vec::new();
    for index in by_rank {
        let Some(rest) = left.checked_sub(COLUMNS[index].cells + 1) else { break };
        left = rest;
        fitting.push(index);
    }
    fitting.sort_unstable();
    fitting.into_iter().map(|index| &COLUMNS[index]).collect()
}

fn row(worker: &Worker, columns: &[&Column]) -> Row<'static> {
    let style = standing(worker).1;
    let mut cells = vec![Cell::from(worker.name.clone())];
    for column in columns {
        let is_state = column.rank == 0;
        let text = if worker.ready || is_state { (column.text)(worker) } else { String::new() };
        let cell = aligned(column, text);
        cells.push(if is_state { cell.style(style) } else { cell });
    }
    Row::new(cells).style(if worker.ready { Style::new() } else { DIM })
}

/// Text to the left, numbers to the right.
fn aligned(column: &Column, text: String) -> Cell<'static> {
    let is_text = matches!(column.title, "state" | "role" | "index" | "engine" | "");
    let alignment = if is_text { Alignment::Left } else { Alignment::Right };
    Cell::from(Text::from(text).alignment(alignment))
}

fn standing(worker: &Worker) -> (&'static str, Style) {
    match worker {
        Worker { is_out: true, .. } => ("out", WARN),
        Worker { ready: false, .. } => ("down", BAD),
        _ => ("ok", GOOD),
    }
}

fn slowness(worker: &Worker) -> String {
    worker.slowness.map_or_else(|| units::UNKNOWN.to_owned(), |slowness| format!("{slowness:.2}"))
}

fn events(worker: &Worker) -> String {
    match worker.events {
        Some(true) => "exact".to_owned(),
        Some(false) => "approx".to_owned(),
        None => units::UNKNOWN.to_owned(),
    }
}

fn exactly_predicted(worker: &Worker) -> String {
    units::percent(worker.predictions.and_then(|predictions| share(predictions.exact, predictions.requests)))
}

fn engine(worker: &Worker) -> String {
    format!("{} {}", worker.engine, worker.version)
}

/// By the key, then by name; all but the name fall, and what is not known comes last.
fn paused(workers: &[Worker], key: SortKey) -> Vec<&Worker> {
    let value = |worker: &Worker| match key {
        SortKey::Name => None,
        SortKey::Requests => worker.requests.map(|count| count as f64),
        SortKey::Waiting => worker.engine_waiting.map(|count| count as f64),
        SortKey::KvUsage => worker.kv_usage,
        SortKey::Slowness => worker.slowness,
    };
    let falling = |a: Option<f64>, b: Option<f64>| match (a, b) {
        (Some(a), Some(b)) => b.total_cmp(&a),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => Ordering::Equal,
    };
    let mut paused: Vec<&Worker> = workers.iter().collect();
    paused.sort_by(|a, b| falling(value(a), value(b)).then_with(|| a.name.cmp(&b.name)));
    paused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_sorted_and_the_unknown_is_last() {
        let worker = |name: &str, requests, kv_usage| Worker {
            name: name.to_owned(),
            requests,
            kv_usage,
            ..Worker::default()
        };
        let workers =
            [worker("c", Some(1), Some(0.9)), worker("a", None, None), worker("b", Some(5), Some(0.9))];
        for (key, names) in [
            (SortKey::Name, "abc"),
            (SortKey::Requests, "bca"),
            (SortKey::KvUsage, "bca"),
            (SortKey::Slowness, "abc"),
        ] {
            let given: String = paused(&workers, key).iter().map(|worker| worker.name.as_str()).collect();
            assert_eq!(given, names, "{key:?}");
        }
    }

    #[test]
    fn columns_fit_the_width() {
        let mut most = 0;
        for width in 0..200 {
            let columns = fitting(width);
            let cells: u16 = columns.iter().map(|column| column.cells + 1).sum();
            assert!(columns.is_empty() || cells + NAME_CELLS_MIN + BORDER_CELLS <= width, "at {width}");
            assert!(columns.len() >= most, "a wider table shows no less: {width}");
            most = columns.len();
        }
        assert_eq!(most, COLUMNS.len());
        let at_80: Vec<&str> = fitting(80).iter().map(|column| column.title).collect();
        assert_eq!(at_80, ["state", "role", "req", "run", "wait", "KV", "slow", "index", "exact", "ejec"]);
    }
}
