//! Share of a worker's capacity that is used: chosen by replaying recorded demand, not set by hand.
//!
//! No fixed share is right: long answers tolerate a late worker, short chats with a tight TTFT do not, and
//! slow starts need more headroom than fast ones. So the recorded requests are replayed through the planner
//! in simulation with each share of a grid, and the share that keeps the service level with the fewest
//! workers is used.

use crate::fleet_simulation::{PlannerPolicy, Request, Setup, simulate};

/// The share of a worker's capacity that is used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Headroom {
    /// The share, above 0 and at most 1.
    pub utilisation: f64,
}

impl Default for Headroom {
    /// The share that is used until enough demand is recorded to choose one.
    fn default() -> Self {
        Self { utilisation: 0.7 }
    }
}

/// Candidate shares.
pub const HEADROOMS: [f64; 11] = [1.0, 0.94, 0.89, 0.84, 0.79, 0.74, 0.69, 0.62, 0.55, 0.47, 0.4];

/// A share, with the result of its replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    /// Share of the capacity that was used.
    pub utilisation: f64,
    /// Share of the judged requests that were in time.
    pub attained: f64,
    /// Mean count of workers.
    pub mean_workers: f64,
}

/// Replays `requests` with each share of [`HEADROOMS`]. Returns the cheapest share that keeps the service
/// level, and all trials. Requests that arrive before `from` seconds are replayed and not judged.
///
/// Attainment drops sharply if the fleet is too small, and recorded demand is one sample of future demand: on
/// the ramp of `kvasir bench scaling`, 94 % keep the level in three draws and lose 2.4 % in two others. A
/// share is therefore used only if the next larger one keeps the level too. If none keeps it (a step that no
/// policy can foresee), the cheapest share is used whose attainment is below the best by no more than the
/// service level allows to miss.
#[must_use]
pub fn choose(setup: &Setup, requests: &[Request], from: f64) -> (Headroom, Vec<Trial>) {
    let trials: Vec<Trial> = HEADROOMS
        .iter()
        .map(|&utilisation| {
            let mut policy = PlannerPolicy::new(setup, Headroom { utilisation });
            let outcome = simulate(setup, requests, &mut policy);
            let attained = outcome.attained_from(requests, from);
            Trial { utilisation, attained, mean_workers: outcome.mean_workers }
        })
        .collect();
    let wanted = setup.level.attainment;
    let best = trials.iter().map(|trial| trial.attained).fold(0.0, f64::max);
    let enough = if best >= wanted { wanted } else { best - (1.0 - wanted) };
    let keeps = |at: usize| trials[at].attained >= enough && trials[at.saturating_sub(1)].attained >= enough;
    let cheapest = (0..trials.len())
        .filter(|&at| keeps(at))
        .min_by(|&a, &b| trials[a].mean_workers.total_cmp(&trials[b].mean_workers));
    // Without two adjacent shares that keep the level, the lowest share is used.
    let chosen = cheapest.unwrap_or(trials.len() - 1);
    (Headroom { utilisation: trials[chosen].utilisation }, trials)
}
