//! The latest decisions: where requests went, and why.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Rect};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, Wrap};

use super::{BAD, DIM, HEADING, titled, units};
use crate::display::Scroll;
use crate::state::State;
use crate::wire::{Decision, Status};

const HEADING_LINES: u16 = 3;
/// Width from which the size of the prompt and the time of the decision have room.
const WITH_DETAILS: u16 = 120;
/// The workers' names take what they need from here up to a third of the width.
const NAME_CELLS_MIN: u16 = 6;

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, status: &Status, scroll: &mut Scroll) {
    let block = titled("decisions, newest first");
    if let Some(error) = &state.decisions_error {
        let text = Paragraph::new(error.as_str()).style(BAD).wrap(Wrap { trim: true });
        frame.render_widget(text.block(block), area);
        return;
    }
    let count = state.decisions.len();
    let seen = scroll.bound(count, usize::from(area.height.saturating_sub(HEADING_LINES)));
    let place = if seen.len() < count {
        format!("{}-{} of {count}", seen.start + 1, seen.end)
    } else {
        String::new()
    };
    let has_details = area.width >= WITH_DETAILS;
    let longest =
        state.decisions.range(seen.clone()).map(|decision| Span::raw(route(decision)).width()).max();
    let longest = u16::try_from(longest.unwrap_or(0)).unwrap_or(u16::MAX);
    let names = longest.min(area.width / 3).max(NAME_CELLS_MIN);
    let rows = state.decisions.range(seen).map(|decision| row(decision, status.now_unix_ms, has_details));
    let numeric = |text: &'static str| Cell::from(Text::from(text).alignment(Alignment::Right));
    let mut heading = vec![numeric("ago"), Cell::from("worker"), numeric("overlap"), numeric("predicted")];
    let mut widths: Vec<Constraint> = [6, names, 9, 9].map(Constraint::Length).to_vec();
    if has_details {
        heading.extend([numeric("prompt"), numeric("of"), numeric("took")]);
        widths.extend([6, 4, 7].map(Constraint::Length));
    }
    heading.push(Cell::from("reason"));
    widths.push(Constraint::Fill(1));
    let table = Table::new(rows, widths).header(Row::new(heading).style(HEADING));
    frame.render_widget(table.block(block.title(Line::styled(place, DIM).right_aligned())), area);
}

/// The worker, behind the one that prefills for it.
fn route(decision: &Decision) -> String {
    if decision.prefill.is_empty() {
        decision.worker.clone()
    } else {
        format!("{}→{}", decision.prefill, decision.worker)
    }
}

fn row(decision: &Decision, now_unix_ms: u64, has_details: bool) -> Row<'static> {
    let numeric = |text: String| Cell::from(Text::from(text).alignment(Alignment::Right));
    let ago = decision.unix_ms.map(|at| Duration::from_millis(now_unix_ms.saturating_sub(at)));
    let overlap = format!("{}/{}", units::count(decision.overlap_blocks), units::count(decision.blocks));
    let time = |value: Option<f64>, scale: f64| {
        value.map_or_else(|| units::UNKNOWN.to_owned(), |value| units::seconds(value * scale))
    };
    let mut cells = vec![
        numeric(ago.map_or_else(|| units::UNKNOWN.to_owned(), units::span)),
        Cell::from(route(decision)),
        numeric(overlap),
        numeric(time(decision.predicted_ms, 1e-3)),
    ];
    if has_details {
        cells.extend([
            numeric(units::count(decision.prompt_tokens)),
            numeric(units::count(decision.candidates)),
            numeric(time(decision.decided_us, 1e-6)),
        ]);
    }
    cells.push(Cell::from(decision.reason.clone()));
    Row::new(cells)
}
