//! The pools: each tier over all workers, and each worker by tier.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::{BAR, DIM, HEADING, titled, units};
use crate::display::Display;
use crate::history::share;
use crate::wire::{Pool, Status};

/// The tiers that there are, fastest first; others follow by name.
const TIERS: [&str; 4] = ["device", "host", "disk", "remote"];
const TIER_LINES: u16 = 6;
const HEADING_LINES: u16 = 3;
const BAR_CELLS_MAX: u16 = 60;

/// A tier over all workers.
#[derive(Debug, Default, Clone, PartialEq)]
struct Tier {
    name: String,
    /// Workers that have it.
    workers: usize,
    /// Of those, the ones whose pool's size is unknown.
    unsized_workers: usize,
    /// Blocks of the pools of known size.
    blocks: u64,
    /// Blocks that the index knows in those pools.
    indexed_sized: u64,
    /// Blocks that the index knows.
    indexed: u64,
}

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, status: &Status, display: &mut Display) {
    let [above, below] = Layout::vertical([Constraint::Length(TIER_LINES), Constraint::Fill(1)]).areas(area);
    tiers(frame, above, status);
    by_worker(frame, below, status, display);
}

/// The tiers as gauges.
pub(super) fn tiers(frame: &mut Frame<'_>, area: Rect, status: &Status) {
    let bar_cells = usize::from((area.width / 3).min(BAR_CELLS_MAX));
    let line = |tier: &Tier| {
        let filled = share(tier.indexed_sized, tier.blocks);
        let mut counted = format!("{} indexed", units::count(Some(tier.indexed)));
        if tier.blocks > 0 {
            counted.push_str(&format!(" of {}", units::count(Some(tier.blocks))));
        }
        let mut workers = format!("  {} workers", tier.workers);
        if tier.unsized_workers > 0 {
            workers.push_str(&format!(", {} of unknown size", tier.unsized_workers));
        }
        Line::from(vec![
            Span::styled(format!("{:<8.8}", tier.name), HEADING),
            Span::styled(format!("{:·<bar_cells$}", units::bar(filled.unwrap_or(0.0), bar_cells)), BAR),
            Span::raw(format!(" {:>4}  {counted}", units::percent(filled))),
            Span::styled(workers, DIM),
        ])
    };
    let lines: Vec<Line<'_>> = summed(status).iter().map(line).collect();
    frame.render_widget(Paragraph::new(lines).block(titled("pools by tier")), area);
}

fn by_worker(frame: &mut Frame<'_>, area: Rect, status: &Status, display: &mut Display) {
    let page = usize::from(area.height.saturating_sub(HEADING_LINES));
    let seen = display.pools.bound(status.workers.len(), page);
    let numeric = |text: String| Cell::from(Text::from(text).alignment(Alignment::Right));
    let rows = status.workers[seen].iter().map(|worker| {
        let mut cells = vec![Cell::from(worker.name.clone())];
        cells.extend(TIERS.iter().map(|tier| {
            numeric(worker.pools.iter().find(|pool| pool.tier == *tier).map(held).unwrap_or_default())
        }));
        Row::new(cells).style(if worker.ready { Style::new() } else { DIM })
    });
    let mut heading = vec![Cell::from("worker")];
    heading.extend(TIERS.iter().map(|tier| numeric((*tier).to_owned())));
    let mut widths = vec![Constraint::Fill(1)];
    widths.extend(TIERS.iter().map(|_| Constraint::Length(13)));
    let table = Table::new(rows, widths).header(Row::new(heading).style(HEADING));
    frame.render_widget(table.block(titled("indexed/blocks by worker")), area);
}

fn held(pool: &Pool) -> String {
    let blocks = pool.blocks.map_or_else(|| "?".to_owned(), |blocks| units::count(Some(blocks)));
    format!("{}/{blocks}", units::count(Some(pool.indexed)))
}

fn summed(status: &Status) -> Vec<Tier> {
    let mut tiers: Vec<Tier> = Vec::new();
    for pool in status.workers.iter().flat_map(|worker| &worker.pools) {
        let index = tiers.iter().position(|tier| tier.name == pool.tier).unwrap_or_else(|| {
            tiers.push(Tier { name: pool.tier.clone(), ..Tier::default() });
            tiers.len() - 1
        });
        let tier = &mut tiers[index];
        tier.workers += 1;
        tier.indexed = tier.indexed.saturating_add(pool.indexed);
        match pool.blocks {
            Some(blocks) => {
                tier.blocks = tier.blocks.saturating_add(blocks);
                tier.indexed_sized = tier.indexed_sized.saturating_add(pool.indexed);
            }
            None => tier.unsized_workers += 1,
        }
    }
    let place = |tier: &Tier| TIERS.iter().position(|name| *name == tier.name).unwrap_or(TIERS.len());
    tiers.sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| a.name.cmp(&b.name)));
    tiers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Worker;

    #[test]
    fn tiers_are_summed_and_the_unknown_size_stays_out_of_the_share() {
        let pool = |tier: &str, blocks, indexed| Pool { tier: tier.to_owned(), blocks, indexed };
        let worker = |pools| Worker { pools, ..Worker::default() };
        let status = Status {
            workers: vec![
                worker(vec![pool("zoo", None, 1), pool("host", None, 40), pool("device", Some(100), 30)]),
                worker(vec![pool("device", Some(300), 70), pool("host", Some(10), u64::MAX)]),
                worker(vec![]),
            ],
            ..Status::default()
        };
        let summed = summed(&status);
        let names: Vec<&str> = summed.iter().map(|tier| tier.name.as_str()).collect();
        assert_eq!(names, ["device", "host", "zoo"]);
        assert_eq!(
            summed[0],
            Tier {
                name: "device".to_owned(),
                workers: 2,
                unsized_workers: 0,
                blocks: 400,
                indexed_sized: 100,
                indexed: 100
            }
        );
        assert_eq!((summed[1].unsized_workers, summed[1].blocks, summed[1].indexed), (1, 10, u64::MAX));
    }
}
