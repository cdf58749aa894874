//! Tables and a picture of simulations.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use router_policy::Strategy;

use crate::Outcome;

/// The line above the outcomes.
#[must_use]
pub fn header() -> String {
    format!(
        "{:<16}{:>7}{:>10}{:>12}{:>12}{:>12}{:>10}{:>10}{:>11}{:>7}{:>9}",
        "policy",
        "load",
        "hit rate",
        "TTFT p50 s",
        "TTFT p90 s",
        "TTFT p99 s",
        "ITL p50",
        "ITL p99",
        "imbalance",
        "busy",
        "pred.err"
    )
}

/// One outcome as a line.
#[must_use]
pub fn line(outcome: &Outcome) -> String {
    let ttft = |quantile| outcome.ttft.value_at_quantile(quantile) as f64 / 1e6;
    let itl = |quantile| outcome.itl.value_at_quantile(quantile) as f64 / 1e3;
    format!(
        "{:<16}{:>7}{:>9.1}%{:>12.3}{:>12.3}{:>12.3}{:>8.1}ms{:>8.1}ms{:>11.2}{:>6.0}%{:>8.0}%",
        outcome.strategy.name(),
        format!("{}x", outcome.speedup),
        100.0 * outcome.hit_rate,
        ttft(0.5),
        ttft(0.9),
        ttft(0.99),
        itl(0.5),
        itl(0.99),
        outcome.imbalance,
        100.0 * outcome.utilisation,
        100.0 * outcome.prediction_error,
    )
}

/// Times to the first token at p50 and p90 over the load, one line for each policy; SVG.
pub fn plot(path: &Path, title: &str, outcomes: &[Outcome]) -> Result<()> {
    draw(path, title, outcomes).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn draw(
    path: &Path,
    title: &str,
    outcomes: &[Outcome],
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::new(path, (1100, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let area = area.titled(title, ("sans-serif", 18))?;
    let seconds = |outcome: &Outcome, quantile| outcome.ttft.value_at_quantile(quantile) as f64 / 1e6;
    let loads = outcomes.iter().map(|outcome| outcome.speedup);
    let (low, high) =
        loads.fold((f64::INFINITY, 0.0), |(low, high), load| (f64::min(low, load), f64::max(high, load)));
    for (panel, quantile) in area.split_evenly((1, 2)).iter().zip([0.5, 0.9]) {
        let values = || outcomes.iter().map(|outcome| seconds(outcome, quantile));
        let least = values().fold(f64::INFINITY, f64::min).max(1e-3);
        let most = values().fold(0.0, f64::max).max(least * 2.0);
        let mut chart = ChartBuilder::on(panel)
            .caption(format!("TTFT p{:.0}", quantile * 100.0), ("sans-serif", 15))
            .margin(12)
            .x_label_area_size(34)
            .y_label_area_size(56)
            .build_cartesian_2d(low * 0.95..high * 1.05, (least * 0.8..most * 1.25).log_scale())?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc("load: how many times as fast as recorded the trace runs")
            .y_desc("seconds")
            .draw()?;
        for (number, strategy) in Strategy::ALL.into_iter().enumerate() {
            let points: Vec<(f64, f64)> = outcomes
                .iter()
                .filter(|outcome| outcome.strategy == strategy)
                .map(|outcome| (outcome.speedup, seconds(outcome, quantile)))
                .collect();
            if points.is_empty() {
                continue;
            }
            let colour = Palette99::pick(number).to_rgba();
            chart
                .draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)).point_size(3))?
                .label(strategy.name())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
    }
    area.present()?;
    Ok(())
}
