//! The gateway's latencies: quantiles and, where there is room, buckets as bars.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::{BAR, DIM, HEADING, titled, units};
use crate::display::Display;
use crate::state::State;
use crate::wire::{Histogram, Histograms, Status};

/// Width from which the time of the routing decision has room too.
const WITH_ROUTING: u16 = 105;
const LABEL_CELLS: usize = 8;
const COUNT_CELLS: usize = 7;

type Choice = fn(&Histograms) -> &Histogram;

const SHOWN: [(&str, &str, Choice); 3] = [
    ("TTFT", "time to first token", |of| &of.time_to_first_token),
    ("ITL", "inter-token latency", |of| &of.inter_token),
    ("route", "routing decision", |of| &of.routing),
];

fn chosen(state: &State, status: &Status, display: &Display, choice: Choice) -> Histogram {
    if display.is_since_start { choice(&status.histograms).clone() } else { state.history.windowed(choice) }
}

fn period(state: &State, display: &Display) -> String {
    if display.is_since_start {
        "since start".to_owned()
    } else {
        format!("last {}", units::span(state.history.window()))
    }
}

/// The quantiles alone, a line for each of the first two.
pub(super) fn lines(frame: &mut Frame<'_>, area: Rect, state: &State, status: &Status, display: &Display) {
    let line = |(short, _, choice): &(&'static str, &str, Choice)| {
        let histogram = chosen(state, status, display, *choice);
        let mut line = quantiles(&histogram);
        line.spans.insert(0, Span::styled(format!("{short:<5}"), HEADING));
        line.spans.push(mean_and_count(&histogram));
        line
    };
    let lines: Vec<Line<'_>> = SHOWN.iter().take(2).map(line).collect();
    let title = format!("latency, {} (w)", period(state, display));
    frame.render_widget(Paragraph::new(lines).block(titled(title)), area);
}

/// The histograms side by side, as many as have room.
pub(super) fn charts(frame: &mut Frame<'_>, area: Rect, state: &State, status: &Status, display: &Display) {
    let count = if area.width >= WITH_ROUTING { 3 } else { 2 };
    let areas = Layout::horizontal(vec![Constraint::Fill(1); count]).split(area);
    for ((_, title, choice), area) in SHOWN.iter().zip(areas.iter()) {
        let histogram = chosen(state, status, display, *choice);
        let block = titled(format!("{title}, {} (w)", period(state, display)));
        let inner = block.inner(*area);
        let mut lines = vec![quantiles(&histogram), Line::from(mean_and_count(&histogram))];
        lines.extend(bars(&histogram, inner));
        frame.render_widget(Paragraph::new(lines).block(block), *area);
    }
}

fn quantiles(histogram: &Histogram) -> Line<'static> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut spans = Vec::new();
    for (name, share) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)] {
        spans.push(Span::styled(format!("{name} "), DIM));
        spans.push(Span::styled(format!("{:<7} ", units::quantile(histogram.quantile(share))), bold));
    }
    Line::from(spans)
}

fn mean_and_count(histogram: &Histogram) -> Span<'static> {
    let mean = histogram.mean().map_or_else(|| units::UNKNOWN.to_owned(), units::seconds);
    Span::styled(format!("mean {mean}  n {}", units::count(Some(histogram.total()))), DIM)
}

/// One row a bucket, below the two lines of numbers.
fn bars(histogram: &Histogram, area: Rect) -> Vec<Line<'static>> {
    let rows = histogram.rows(usize::from(area.height).saturating_sub(2));
    let highest = rows.iter().map(|(_, count)| *count).max().unwrap_or(0).max(1);
    let room = usize::from(area.width).saturating_sub(LABEL_CELLS + COUNT_CELLS + 2);
    let last_bound = histogram.le.last().copied().unwrap_or(0.0);
    let row = |(bound, count): (Option<f64>, u64)| {
        let label = match bound {
            Some(bound) => format!("≤{}", units::seconds(bound)),
            None => format!(">{}", units::seconds(last_bound)),
        };
        Line::from(vec![
            Span::styled(format!("{label:>LABEL_CELLS$} "), DIM),
            Span::styled(format!("{:<room$} ", units::bar(count as f64 / highest as f64, room)), BAR),
            Span::raw(format!("{:>COUNT_CELLS$}", units::count(Some(count)))),
        ])
    };
    rows.into_iter().map(row).collect()
}
