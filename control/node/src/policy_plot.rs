//! Plot of policies: attainment over workers.

use std::path::Path;

use anyhow::{Result, anyhow};
use control_planner::PolicyResult;
use plotters::prelude::*;

/// Draws each policy as a point in an SVG file: cost to the right, attainment upwards.
pub(crate) fn plot(path: &Path, title: &str, rows: &[PolicyResult]) -> Result<()> {
    draw(path, title, rows).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn draw(
    path: &Path,
    title: &str,
    rows: &[PolicyResult],
) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::new(path, (960, 520)).into_drawing_area();
    area.fill(&WHITE)?;
    let least = rows.iter().map(|row| row.attained).fold(1.0, f64::min);
    let most = rows.iter().map(|row| row.mean_workers).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 17))
        .margin(14)
        .x_label_area_size(38)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..most * 1.35, (100.0 * least - 3.0).max(0.0)..102.0)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("mean workers")
        .y_desc("requests in time, %")
        .draw()?;
    for (number, row) in rows.iter().enumerate() {
        let colour = Palette99::pick(number).to_rgba();
        let point = (row.mean_workers, 100.0 * row.attained);
        chart
            .draw_series(std::iter::once(Circle::new(point, 5, colour.filled())))?
            .label(row.name)
            .legend(move |(x, y)| Circle::new((x + 8, y), 5, colour.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    area.present()?;
    Ok(())
}
