//! Names of periods after which demand repeats.

/// Returns the seconds of a season of `[planner] seasons`; `None` for an unknown name.
#[must_use]
pub fn seconds(season: &str) -> Option<f64> {
    match season {
        "day" => Some(86_400.0),
        "week" => Some(7.0 * 86_400.0),
        _ => None,
    }
}
