//! Plot of throughput by size, ours and the peer's.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::report::Record;

/// Draws the records that have a throughput.
pub(super) fn plot(path: &Path, records: &[Record]) -> Result<()> {
    draw(path, records).map_err(|error| anyhow!("{}: {error}", path.display()))
}

type Line = (String, Vec<(f64, f64)>);

/// One line for each transport and operation, and one for its peer.
fn lines(records: &[Record]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    let mut add = |name: String, point| match lines.iter_mut().find(|(known, _)| *known == name) {
        Some((_, points)) => points.push(point),
        None => lines.push((name, vec![point])),
    };
    for record in records {
        let Some(rate) = record.bytes_per_s else { continue };
        add(format!("{} {}", record.transport, record.op), (record.bytes as f64, rate / 1e9));
        if let (Some(peer), Some(figure)) = (record.peer, record.peer_figure) {
            add(
                format!("{peer} beside {} {}", record.transport, record.op),
                (record.bytes as f64, figure / 1e9),
            );
        }
    }
    lines
}

fn draw(path: &Path, records: &[Record]) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let lines = lines(records);
    let all = || lines.iter().flat_map(|(_, points)| points.iter().copied());
    let Some((least, most)) = all().map(|(size, _)| size).fold(None, |range: Option<(f64, f64)>, size| {
        Some(range.map_or((size, size), |(least, most)| (least.min(size), most.max(size))))
    }) else {
        return Err("no throughput was measured".into());
    };
    let slowest = all().map(|(_, rate)| rate).fold(f64::INFINITY, f64::min).max(1e-6);
    let fastest = all().map(|(_, rate)| rate).fold(0.0, f64::max).max(slowest * 2.0);
    let area = SVGBackend::new(path, (900, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("Throughput by size of a piece", ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(34)
        .y_label_area_size(60)
        .build_cartesian_2d(
            (least * 0.8..most * 1.25).log_scale(),
            (slowest * 0.8..fastest * 1.3).log_scale(),
        )?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("bytes")
        .x_label_formatter(&|size| super::sizes::human(size.round() as u64))
        .y_desc("GB/s")
        .draw()?;
    for (number, (name, points)) in lines.iter().enumerate() {
        let colour = Palette99::pick(number).to_rgba();
        chart
            .draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
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
