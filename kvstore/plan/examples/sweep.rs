//! Prints the sweep of prefix length × tier speed and draws it: `sweep [seed] [file.svg]`.

use std::error::Error;
use std::time::Duration;

use kvstore_plan::PlanConfig;
use kvstore_plan::sweep::{BYTES_PER_S, Cell, LATENCY_US, PREFIX_TOKENS, sweep};
use plotters::prelude::*;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let seed = arguments.next().map_or(Ok(1000), |seed| seed.parse())?;
    let cells = sweep(seed, PlanConfig::default());
    print_table(seed, &cells);
    if let Some(path) = arguments.next() {
        draw(&path, &cells)?;
    }
    Ok(())
}

fn print_table(seed: u64, cells: &[Cell]) {
    println!("seed {seed}; simulated; seconds to the first token; noise 10 % on transfers, 3 % on prefills");
    println!(
        "{:>10}{:>10}{:>10}{:>12}{:>12}{:>12}{:>12}{:>9}{:>9}",
        "latency", "GB/s", "prefix", "onboard", "recompute", "best split", "chosen", "blocks", "regret"
    );
    for cell in cells.iter().filter(|cell| cell.prefix_tokens.trailing_zeros().is_multiple_of(3)) {
        println!(
            "{:>10}{:>10.3}{:>10}{:>12.5}{:>12.5}{:>12.5}{:>12.5}{:>9}{:>8.2}%",
            format!("{:?}", cell.latency),
            cell.bytes_per_s / 1e9,
            cell.prefix_tokens,
            cell.onboard_s,
            cell.recompute_s,
            cell.best_s,
            cell.chosen_s,
            cell.chosen_blocks,
            100.0 * cell.regret()
        );
    }
    let mut regrets: Vec<f64> = cells.iter().map(Cell::regret).collect();
    regrets.sort_unstable_by(f64::total_cmp);
    let naive = cells.iter().map(|cell| cell.onboard_s / cell.best_s).fold(0.0, f64::max);
    println!(
        "{} cells: regret p50 {:.2} %, p99 {:.2} %, worst {:.2} %; always onboarding is up to {naive:.0} times the best",
        regrets.len(),
        100.0 * regrets[regrets.len() / 2],
        100.0 * regrets[regrets.len() * 99 / 100],
        100.0 * regrets[regrets.len() - 1]
    );
}

/// One panel for each latency: bandwidth to the right, prefix length upwards; blue where the plan onboards,
/// red where it recomputes, the stronger the more it saves against the other.
fn draw(path: &str, cells: &[Cell]) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::new(path, (1500, 420)).into_drawing_area();
    area.fill(&WHITE)?;
    let area =
        area.titled("Chosen plan: blue onboards, red recomputes; number = regret in %", ("sans-serif", 18))?;
    for (panel, us) in area.split_evenly((1, LATENCY_US.len())).iter().zip(LATENCY_US) {
        let latency = Duration::from_micros(us);
        let mut chart = ChartBuilder::on(panel)
            .caption(format!("latency {latency:?}"), ("sans-serif", 14))
            .margin(8)
            .x_label_area_size(34)
            .y_label_area_size(48)
            .build_cartesian_2d(0.0..BYTES_PER_S.len() as f64, 0.0..PREFIX_TOKENS.len() as f64)?;
        let bandwidth = |at: &f64| {
            BYTES_PER_S.get(*at as usize).map_or(String::new(), |bytes| format!("{}", bytes / 1e9))
        };
        let tokens =
            |at: &f64| PREFIX_TOKENS.get(*at as usize).map_or(String::new(), |tokens| format!("{tokens}"));
        chart
            .configure_mesh()
            .disable_mesh()
            .x_desc("GB/s")
            .y_desc("prefix tokens")
            .x_label_formatter(&bandwidth)
            .y_label_formatter(&tokens)
            .draw()?;
        for (number, cell) in cells.iter().filter(|cell| cell.latency == latency).enumerate() {
            let (x, y) = (number / PREFIX_TOKENS.len(), number % PREFIX_TOKENS.len());
            let corner = (x as f64, y as f64);
            chart.draw_series([Rectangle::new(
                [corner, (corner.0 + 1.0, corner.1 + 1.0)],
                colour(cell).filled(),
            )])?;
            let label = format!("{:.0}", 100.0 * cell.regret());
            let place = (corner.0 + 0.3, corner.1 + 0.75);
            chart.draw_series([Text::new(label, place, ("sans-serif", 9))])?;
        }
    }
    area.present()?;
    Ok(())
}

fn colour(cell: &Cell) -> RGBColor {
    let strength = (cell.onboard_s / cell.recompute_s).log10().abs().min(2.0) / 2.0;
    let pale = (220.0 - 150.0 * strength) as u8;
    if cell.chosen_blocks > 0 { RGBColor(pale, pale, 255) } else { RGBColor(255, pale, pale) }
}
