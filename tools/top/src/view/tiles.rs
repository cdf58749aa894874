//! Current values as numbers, each with a sparkline of the last minutes.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Sparkline;

use super::{BAD, BAR, DIM, titled, units};
use crate::history::{Point, WINDOW, share};
use crate::state::State;
use crate::wire::Status;

/// Sparklines take whole numbers: thousandths are precise enough.
const SCALE: f64 = 1000.0;

struct Tile {
    title: &'static str,
    value: String,
    beside: String,
    series: fn(&Point) -> Option<f64>,
    /// Upper end of the sparkline; `None`: the highest value.
    top: Option<f64>,
}

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, status: &Status) {
    let tiles = tiles(state, status);
    let areas = Layout::horizontal(tiles.iter().map(|_| Constraint::Fill(1))).split(area);
    for (tile, area) in tiles.iter().zip(areas.iter()) {
        draw_tile(frame, *area, tile, state);
    }
}

fn tiles(state: &State, status: &Status) -> [Tile; 5] {
    let now = state.history.rates();
    let window = state.history.window_rates();
    // A single frame is compared with the gateway's start, a minute or an hour ago.
    let span = if state.history.window() > WINDOW * 3 / 2 { "all" } else { "1m" };
    let rate = |value: Option<f64>| value.map_or_else(|| units::UNKNOWN.to_owned(), units::number);
    let counters = &status.counters;
    [
        Tile {
            title: "requests/s",
            value: rate(now.map(|rates| rates.requests)),
            beside: format!("{span} {}", rate(window.map(|rates| rates.requests))),
            series: |point| point.requests,
            top: None,
        },
        Tile {
            title: "tokens/s",
            value: rate(now.map(|rates| rates.generated_tokens)),
            beside: format!("in {}", rate(now.map(|rates| rates.prompt_tokens))),
            series: |point| point.tokens,
            top: None,
        },
        Tile {
            title: "active",
            value: units::count(status.active),
            beside: format!("of {}", units::count(Some(counters.requests))),
            series: |point| point.active,
            top: None,
        },
        Tile {
            title: "waiting",
            value: units::count(status.waiting),
            beside: format!("shed {}", units::count(Some(counters.shed))),
            series: |point| point.waiting,
            top: None,
        },
        Tile {
            title: "hit rate",
            value: units::percent(window.and_then(|rates| rates.hit_rate)),
            beside: format!("all {}", units::percent(share(counters.cached_tokens, counters.prompt_tokens))),
            series: |point| point.hit_rate,
            top: Some(1.0),
        },
    ]
}

fn draw_tile(frame: &mut Frame<'_>, area: Rect, tile: &Tile, state: &State) {
    let block = titled(tile.title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [value, series] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(inner);
    let line = Line::from(vec![
        Span::styled(tile.value.as_str(), Style::new().add_modifier(Modifier::BOLD)),
        Span::styled(format!("  {}", tile.beside), DIM),
    ]);
    frame.render_widget(line, value);
    let points = state.history.series(usize::from(series.width), tile.series);
    let scaled: Vec<Option<u64>> =
        points.iter().map(|value| value.map(|value| (value * SCALE) as u64)).collect();
    // A series of zeros is scaled by 1.
    let highest = scaled.iter().flatten().max().copied().unwrap_or(0).max(1);
    let top = tile.top.map_or(highest, |top| (top * SCALE) as u64);
    frame.render_widget(Sparkline::default().data(scaled).max(top).style(BAR), series);
}

/// Draws the counters of failures and the size of the index.
pub(super) fn counters(frame: &mut Frame<'_>, area: Rect, status: &Status, span: Duration) {
    let counters = &status.counters;
    let mut spans = vec![Span::styled(format!(" graphs {} ", units::span(span)), DIM)];
    for (name, value, is_bad) in [
        ("failed", counters.failed, true),
        ("broken", counters.broken_streams, true),
        ("migrated", counters.migrations, false),
        ("hedged", counters.hedged, false),
        ("disaggregated", counters.disaggregated, false),
    ] {
        let style = if is_bad && value > 0 { BAD } else { Style::new() };
        spans.push(Span::styled(format!(" {name} "), DIM));
        spans.push(Span::styled(units::count(Some(value)), style));
    }
    spans.push(Span::styled("  index ", DIM));
    spans.push(Span::raw(format!("{} blocks ", units::count(status.index.blocks))));
    spans.push(Span::raw(units::bytes(status.index.bytes)));
    frame.render_widget(Line::from(spans), area);
}
