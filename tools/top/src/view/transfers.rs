//! Hand-offs of blocks: what each worker has sent and received, over which transports, and where their time goes.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::{BAD, DIM, HEADING, WARN, titled, units};
use crate::display::Display;
use crate::state::State;
use crate::wire::{Histogram, Status, TransferRail, Transfers, Worker};

const HEADING_LINES: u16 = 3;
const BORDER_LINES: u16 = 2;
/// A table lower than this is of no use: the stages are left out.
const TABLE_LINES_MIN: u16 = 8;

const NAME_CELLS_MIN: u16 = 24;
/// There are seven.
const STAGES_MAX: usize = 16;

/// Title, cells and rank of each column behind the name; narrow tables keep those with the lowest ranks.
const COLUMNS: [(&str, u16, u8); 11] = [
    ("sent", 9, 0),
    ("/s", 9, 1),
    ("ns/KiB", 6, 2),
    ("blocks in", 9, 7),
    ("whole", 6, 4),
    ("part", 5, 3),
    ("cancel", 6, 9),
    ("expire", 6, 8),
    ("damage", 6, 5),
    ("lost", 5, 6),
    ("retry", 5, 10),
];

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, status: &Status, display: &mut Display) {
    let workers: Vec<(&Worker, &Transfers)> =
        status.workers.iter().filter_map(|worker| Some((worker, worker.transfers.as_ref()?))).collect();
    if workers.is_empty() {
        let words = "No worker has a data plane of Kvasir's: the reference engine has one, and vLLM with KvasirConnector.";
        frame.render_widget(Paragraph::new(words).style(DIM).block(titled("hand-offs")), area);
        return;
    }
    let stages = summed(&workers);
    let wanted = stages.len() as u16 + BORDER_LINES;
    let has_stages = !stages.is_empty() && area.height >= wanted + TABLE_LINES_MIN;
    let [above, below] =
        Layout::vertical([Constraint::Length(if has_stages { wanted } else { 0 }), Constraint::Fill(1)])
            .areas(area);
    if has_stages {
        draw_stages(frame, above, &stages);
    }
    draw_table(frame, below, state, &workers, display);
}

fn draw_stages(frame: &mut Frame<'_>, area: Rect, stages: &[(String, Histogram)]) {
    let line = |(stage, times): &(String, Histogram)| {
        Line::raw(format!(
            "{stage:<12.12} n {:>6}   p50 {:>8}   p99 {:>8}   mean {:>8}",
            units::count(Some(times.total())),
            units::quantile(times.quantile(0.5)),
            units::quantile(times.quantile(0.99)),
            times.mean().map_or_else(|| units::UNKNOWN.to_owned(), units::seconds),
        ))
    };
    let lines: Vec<Line<'_>> = stages.iter().map(line).collect();
    frame.render_widget(Paragraph::new(lines).block(titled("stages of hand-offs, since start")), area);
}

/// A line for each worker, and below it one for each of its transports.
fn draw_table(
    frame: &mut Frame<'_>,
    area: Rect,
    state: &State,
    workers: &[(&Worker, &Transfers)],
    display: &mut Display,
) {
    let rows: usize = workers.iter().map(|(_, transfers)| 1 + transfers.rails.len()).sum();
    let seen = display.transfers.bound(rows, usize::from(area.height.saturating_sub(HEADING_LINES)));
    let columns = fitting(area.width);
    let drawn = workers.iter().flat_map(|(worker, transfers)| {
        let whole = worker_row(worker, transfers, state.history.sent_per_second(&worker.name));
        std::iter::once(whole).chain(transfers.rails.iter().map(rail_row))
    });
    let row = |(name, mut cells, style): (String, [Cell<'static>; COLUMNS.len()], Style)| {
        let mut row = vec![Cell::from(name)];
        row.extend(columns.iter().map(|&column| std::mem::take(&mut cells[column])));
        Row::new(row).style(style)
    };
    let drawn: Vec<Row<'_>> = drawn.skip(seen.start).take(seen.len()).map(row).collect();
    let mut heading = vec![Cell::from("worker, transport")];
    heading.extend(columns.iter().map(|&column| number(COLUMNS[column].0.to_owned())));
    let mut widths = vec![Constraint::Fill(1)];
    widths.extend(columns.iter().map(|&column| Constraint::Length(COLUMNS[column].1)));
    let place =
        if seen.len() < rows { format!("{}-{} of {rows}", seen.start + 1, seen.end) } else { String::new() };
    let window = state.history.sent_window();
    let title = match window {
        Some(window) => format!("hand-offs, rate of the last {}", units::span(window)),
        None => "hand-offs".to_owned(),
    };
    let block = titled(title).title(Line::raw(place).right_aligned());
    frame
        .render_widget(Table::new(drawn, widths).header(Row::new(heading).style(HEADING)).block(block), area);
}

/// Columns that fit beside the name, in the order of the table.
fn fitting(width: u16) -> Vec<usize> {
    let mut by_rank: Vec<usize> = (0..COLUMNS.len()).collect();
    by_rank.sort_by_key(|&column| COLUMNS[column].2);
    let mut left = width.saturating_sub(NAME_CELLS_MIN + 2);
    let mut fitting = Vec::new();
    for column in by_rank {
        let Some(rest) = left.checked_sub(COLUMNS[column].1 + 1) else { break };
        left = rest;
        fitting.push(column);
    }
    fitting.sort_unstable();
    fitting
}

/// Name, cells by column, and style.
type TableLine = (String, [Cell<'static>; COLUMNS.len()], Style);

fn worker_row(worker: &Worker, transfers: &Transfers, rate: Option<f64>) -> TableLine {
    let count = |value: u64| number(units::count(Some(value)));
    let bad = |value: u64, style: Style| count(value).style(if value > 0 { style } else { Style::new() });
    let cells = [
        number(units::bytes(Some(transfers.bytes_sent))),
        number(rate.map_or_else(|| units::UNKNOWN.to_owned(), |rate| units::bytes(Some(rate as u64)))),
        empty(),
        count(transfers.blocks_received),
        count(transfers.completed),
        bad(transfers.incomplete, WARN),
        count(transfers.cancelled),
        bad(transfers.leases_expired, WARN),
        bad(transfers.checksum_failures, BAD),
        bad(transfers.peers_lost, WARN),
        empty(),
    ];
    (worker.name.clone(), cells, if worker.ready { Style::new() } else { DIM })
}

/// A transport has no transfers of its own: those columns stay empty. The last two are its failed connections and the slices that
/// were posted again because of them.
fn rail_row(rail: &TransferRail) -> TableLine {
    let mut cells: [Cell<'static>; COLUMNS.len()] = std::array::from_fn(|_| empty());
    cells[0] = number(units::bytes(Some(rail.bytes)));
    if rail.nanoseconds_per_kib > 0 {
        cells[2] = number(units::count(Some(rail.nanoseconds_per_kib)));
    }
    cells[COLUMNS.len() - 2] = number(units::count(Some(rail.failures)));
    cells[COLUMNS.len() - 1] = number(units::count(Some(rail.retries)));
    let marked = if rail.is_slow { " slow" } else { "" };
    (format!("  {}{marked}", rail.name), cells, if rail.is_slow { WARN } else { DIM })
}

/// A cell of one column; the default one spans none.
fn empty() -> Cell<'static> {
    Cell::from("")
}

fn number(text: String) -> Cell<'static> {
    Cell::from(Text::from(text).alignment(Alignment::Right))
}

/// The stages over all workers whose buckets have the bounds of the first; the first [`STAGES_MAX`] names.
fn summed(workers: &[(&Worker, &Transfers)]) -> Vec<(String, Histogram)> {
    let mut all: Vec<(String, Histogram)> = Vec::new();
    for stage in workers.iter().flat_map(|(_, transfers)| &transfers.stages) {
        let Some((_, known)) = all.iter_mut().find(|(name, _)| *name == stage.stage) else {
            if all.len() < STAGES_MAX {
                all.push((stage.stage.clone(), stage.times.clone()));
            }
            continue;
        };
        if known.le == stage.times.le {
            for (sum, count) in known.counts.iter_mut().zip(&stage.times.counts) {
                *sum = sum.saturating_add(*count);
            }
            known.sum += stage.times.sum;
        }
    }
    all
}
