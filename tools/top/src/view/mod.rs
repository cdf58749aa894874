//! One frame: the header, the tabs, what is wrong, the chosen view, and the keys.
//!
//! Everything shown is text out of `wire` or a number, at every size of the terminal: what does not fit is left
//! out, least important first.

mod decisions;
mod header;
mod latency;
mod pools;
mod tiles;
mod transfers;
mod units;
mod workers;

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Wrap};

use crate::display::{Display, View};
use crate::state::State;
use crate::wire::Status;

/// Heights of the body from which the overview shows more.
const WITH_DECISIONS: u16 = 26;
const WITH_CHARTS_AND_POOLS: u16 = 40;
/// Most lines of a problem.
const PROBLEM_LINES_MAX: usize = 3;

const DIM: Style = Style::new().fg(Color::DarkGray);
const BAD: Style = Style::new().fg(Color::Red);
const WARN: Style = Style::new().fg(Color::Yellow);
const GOOD: Style = Style::new().fg(Color::Green);
const BAR: Style = Style::new().fg(Color::Cyan);
const HEADING: Style = Style::new().fg(Color::Blue);

/// Draws a frame; bounds how far lists are scrolled.
pub(crate) fn draw(frame: &mut Frame<'_>, state: &State, display: &mut Display, now: Duration) {
    let width = usize::from(frame.area().width).max(1);
    // Before the first answer the body says what is wrong.
    let problem = state.error.as_deref().filter(|_| state.status.is_some()).unwrap_or_default();
    let problem_lines = Span::raw(problem).width().div_ceil(width).min(PROBLEM_LINES_MAX);
    let keys = header::keys(display);
    let keys_lines = if display.has_help { keys.width().div_ceil(width).min(PROBLEM_LINES_MAX) } else { 1 };
    let [head, tabs, problem_area, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(problem_lines as u16),
        Constraint::Min(0),
        Constraint::Length(keys_lines as u16),
    ])
    .areas(frame.area());
    header::draw(frame, head, state, display, now);
    header::tabs(frame, tabs, display);
    frame.render_widget(Paragraph::new(problem).style(BAD).wrap(Wrap { trim: true }), problem_area);
    frame.render_widget(Paragraph::new(keys).wrap(Wrap { trim: true }), foot);
    match &state.status {
        Some(status) => draw_body(frame, body, state, status, display),
        None => draw_waiting(frame, body, state),
    }
}

fn draw_waiting(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let mut lines = vec![Line::default(), Line::raw(format!("No answer of {} so far.", state.gateway))];
    if let Some(error) = &state.error {
        lines.push(Line::styled(error.as_str(), BAD));
        lines.push(Line::styled("It is tried again.", DIM));
    }
    frame.render_widget(Paragraph::new(lines).centered().wrap(Wrap { trim: true }), area);
}

fn draw_body(frame: &mut Frame<'_>, area: Rect, state: &State, status: &Status, display: &mut Display) {
    match display.view {
        View::Overview => draw_overview(frame, area, state, status, display),
        View::Workers => workers::draw(frame, area, status, display),
        View::Latency => latency::charts(frame, area, state, status, display),
        View::Pools => pools::draw(frame, area, status, display),
        View::Transfers => transfers::draw(frame, area, state, status, display),
        View::Decisions => decisions::draw(frame, area, state, status, &mut display.decisions),
    }
}

fn draw_overview(frame: &mut Frame<'_>, area: Rect, state: &State, status: &Status, display: &mut Display) {
    let is_tall = area.height >= WITH_CHARTS_AND_POOLS;
    let has_decisions = area.height >= WITH_DECISIONS;
    let [tiles_area, counters, latency_area, workers_area, pools_area, decisions_area] = Layout::vertical([
        Constraint::Length(if is_tall { 6 } else { 5 }),
        Constraint::Length(1),
        Constraint::Length(if is_tall { 13 } else { 4 }),
        Constraint::Fill(3),
        Constraint::Length(if is_tall { 6 } else { 0 }),
        Constraint::Fill(if has_decisions { 2 } else { 0 }),
    ])
    .areas(area);
    tiles::draw(frame, tiles_area, state, status);
    tiles::counters(frame, counters, status, state.history.series_span());
    if is_tall {
        latency::charts(frame, latency_area, state, status, display);
        pools::tiers(frame, pools_area, status);
    } else {
        latency::lines(frame, latency_area, state, status, display);
    }
    workers::draw(frame, workers_area, status, display);
    if has_decisions {
        // The newest; scrolling is for the workers here.
        decisions::draw(frame, decisions_area, state, status, &mut Default::default());
    }
}

/// A frame around a part, with its title.
fn titled<'a>(title: impl Into<Line<'a>>) -> Block<'a> {
    Block::bordered().border_style(DIM).title(title)
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
