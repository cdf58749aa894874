//! The lines around the view: who is watched and how fresh it is, the tabs, the keys.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};

use super::{BAD, DIM, GOOD, HEADING, WARN, units};
use crate::display::{Display, View};
use crate::keys::HELP;
use crate::state::State;

/// The connection comes first when there is little room.
pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, display: &Display, now: Duration) {
    let connection = connection(state, display, now);
    let width = u16::try_from(connection.width()).unwrap_or(u16::MAX);
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Length(width)]).areas(area);
    frame.render_widget(gateway(state), left);
    frame.render_widget(connection, right);
}

fn gateway(state: &State) -> Line<'_> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let Some(status) = &state.status else { return Line::styled("kvasir", bold) };
    let known = |text: &'_ str| if text.is_empty() { units::UNKNOWN.to_owned() } else { text.to_owned() };
    let up = match (status.now_unix_ms / 1000).checked_sub(status.started_unix) {
        Some(seconds) if status.started_unix > 0 => units::span(Duration::from_secs(seconds)),
        _ => units::UNKNOWN.to_owned(),
    };
    Line::from(vec![
        Span::styled("kvasir ", bold),
        Span::raw(known(&status.version)),
        Span::styled("  model ", DIM),
        Span::styled(known(&status.model), bold),
        Span::styled("  strategy ", DIM),
        Span::raw(known(&status.strategy)),
        Span::styled("  up ", DIM),
        Span::raw(up),
    ])
}

fn connection(state: &State, display: &Display, now: Duration) -> Line<'static> {
    let age = state.age(now).map(units::span);
    let gateway = &state.gateway;
    match (age, &state.error, display.is_paused) {
        (Some(age), _, true) => Line::styled(format!(" ‖ paused, {age} old "), WARN),
        (None, _, true) => Line::styled(" ‖ paused ", WARN),
        (Some(age), Some(_), false) => Line::styled(format!(" ✗ error, data {age} old "), BAD),
        (None, Some(_), false) => Line::styled(format!(" ✗ error at {gateway} "), BAD),
        (None, None, false) => Line::styled(format!(" … asking {gateway} "), WARN),
        (Some(_), None, false) => Line::styled(format!(" ● {gateway} "), GOOD),
    }
}

pub(super) fn tabs(frame: &mut Frame<'_>, area: Rect, display: &Display) {
    let tab = |(index, view): (usize, &View)| {
        let text = format!(" {} {} ", index + 1, view.title());
        let style = if *view == display.view { HEADING.add_modifier(Modifier::REVERSED) } else { DIM };
        Span::styled(text, style)
    };
    frame.render_widget(Line::from_iter(View::ALL.iter().enumerate().map(tab)), area);
}

/// All keys after `?`, otherwise the ones to begin with.
pub(super) fn keys(display: &Display) -> Line<'static> {
    let shown: &[(&str, &str)] =
        if display.has_help { &HELP } else { &[("q", "quit"), ("Tab", "view"), ("?", "keys")] };
    let spans = shown.iter().flat_map(|(keys, meaning)| {
        [Span::styled(format!("{keys} "), HEADING), Span::styled(format!("{meaning}  "), DIM)]
    });
    Line::from_iter(spans)
}
