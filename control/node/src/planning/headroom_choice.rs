//! Choice of the share of a worker's capacity that is used, by replaying the fleet's recorded demand.
//!
//! Each tick's demand is recorded, in memory and in a file for each pool. Every `choose_every`, once
//! `choose_after` of demand is recorded, a thread replays it through the planner in simulation with each
//! share of a grid (`control-planner`, `headroom`). The fleet's decisions continue meanwhile.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use control_config::PlannerSettings;
use control_planner::{
    Headroom, Observation, Planner, PlannerConfig, PoolConfig, RecordedDemand, Setup, Trial, choose_headroom,
};
use serde_json::{Value, json};

use crate::compose::some;

/// Most requests of a replay; if more are recorded, those around the steepest rise are used
/// ([`RecordedDemand::requests`]). More requests would take minutes of a core.
const REPLAYED_MAX: usize = 100_000;
/// Seconds at the beginning that are replayed and not judged: the simulated fleet begins at its minimum.
const WARM_UP: f64 = 600.0;

/// Demand of one pool, and the result of its last replay.
struct Pool {
    config: PoolConfig,
    demand: RecordedDemand,
    file: Option<(PathBuf, File)>,
    trials: Vec<Trial>,
}

/// Records demand, and chooses the share of capacity for each pool.
pub(super) struct HeadroomChoice {
    /// Empty if no demand is recorded.
    pools: Vec<Pool>,
    planner: PlannerConfig,
    choose_after: f64,
    choose_every: Duration,
    /// Start of the last choice, and the receiver of its result.
    begun: Option<Instant>,
    choosing: Option<Receiver<(usize, Headroom, Vec<Trial>)>>,
}

impl HeadroomChoice {
    /// Loads the demand in the files of `planner.history_folder`. A file that cannot be read or written is
    /// logged; that pool's demand is then kept in memory only.
    pub(super) fn new(settings: &PlannerSettings, planner: &PlannerConfig, pools: &[PoolConfig]) -> Self {
        let keep = settings.history.as_secs_f64();
        let pool = |config: &PoolConfig| {
            let mut demand = RecordedDemand::new(keep);
            let file = some(&settings.history_folder).and_then(|folder| {
                let path = PathBuf::from(folder).join(format!("{}.demand", config.name));
                open(&path, &mut demand)
                    .inspect_err(|error| {
                        tracing::warn!("{}: demand is not recorded there: {error}", path.display())
                    })
                    .ok()
                    .map(|file| (path, file))
            });
            Pool { config: config.clone(), demand, file, trials: Vec::new() }
        };
        Self {
            pools: if keep > 0.0 { pools.iter().map(pool).collect() } else { Vec::new() },
            planner: planner.clone(),
            choose_after: settings.choose_after.as_secs_f64(),
            choose_every: settings.choose_every,
            begun: None,
            choosing: None,
        }
    }

    /// Records the demand of a tick, and passes chosen shares to the planner.
    pub(super) fn tick(&mut self, now: f64, observations: &[Observation], planner: &mut Planner) {
        // Demand that only some of the gateways reported would lead to too few workers.
        let whole = self.pools.iter_mut().zip(observations).filter(|(_, seen)| !seen.is_partial);
        for (pool, seen) in whole {
            if pool.demand.observe(now, seen.seconds, seen.arrivals, &seen.finished) {
                pool.write_last();
            }
        }
        self.take_choice(planner);
        let is_due = self.begun.is_none_or(|begun| begun.elapsed() >= self.choose_every);
        let is_known = self.pools.iter().any(|pool| pool.demand.known_seconds() >= self.choose_after);
        if is_due && is_known && self.choosing.is_none() {
            self.begin(planner);
        }
    }

    fn take_choice(&mut self, planner: &mut Planner) {
        let Some(choosing) = &self.choosing else { return };
        loop {
            match choosing.try_recv() {
                Ok((number, chosen, trials)) => {
                    let Some(pool) = self.pools.get_mut(number) else { continue };
                    tracing::info!(
                        pool = pool.config.name,
                        utilisation = chosen.utilisation,
                        "chosen by replaying {:.1} h of demand",
                        pool.demand.known_seconds() / 3600.0
                    );
                    planner.set_headroom(number, chosen);
                    pool.trials = trials;
                }
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => break,
            }
        }
        self.choosing = None;
    }

    fn begin(&mut self, planner: &Planner) {
        self.begun = Some(Instant::now());
        let mut replays = Vec::new();
        for (number, pool) in self.pools.iter().enumerate() {
            let is_known = pool.demand.known_seconds() >= self.choose_after;
            let requests =
                pool.demand.requests(REPLAYED_MAX).filter(|requests| is_known && !requests.is_empty());
            let (Some(requests), Some((engine, start_time))) = (requests, planner.learned(number)) else {
                continue;
            };
            let setup = Setup {
                engine,
                believed: engine,
                role: pool.config.role,
                level: self.planner.level,
                min: pool.config.min.max(1),
                max: pool.config.max,
                start_time,
                down_after: self.planner.down_after,
                seasons: self.planner.seasons.clone(),
            };
            replays.push((number, setup, requests));
        }
        let (sender, choosing) = channel();
        let run = move || {
            for (number, setup, requests) in replays {
                let seconds = requests.last().map_or(0.0, |request| request.at);
                let (chosen, trials) = choose_headroom(&setup, &requests, WARM_UP.min(seconds / 4.0));
                if sender.send((number, chosen, trials)).is_err() {
                    return;
                }
            }
        };
        match std::thread::Builder::new().name("headroom".to_owned()).spawn(run) {
            Ok(_) => self.choosing = Some(choosing),
            Err(error) => tracing::warn!("the share of capacity cannot be chosen now: {error}"),
        }
    }

    /// Returns the trials of a pool's last replay: share, attainment, mean count of workers.
    pub(super) fn trials(&self, pool: usize) -> Vec<Value> {
        let trials = self.pools.get(pool).map_or(&[][..], |pool| &pool.trials);
        trials.iter().map(|trial| json!([trial.utilisation, trial.attained, trial.mean_workers])).collect()
    }
}

impl Pool {
    fn write_last(&mut self) {
        let Some((path, file)) = &mut self.file else { return };
        let Some(line) = self.demand.last_line() else { return };
        if let Err(error) = writeln!(file, "{line}") {
            tracing::warn!("{}: demand is not recorded there any more: {error}", path.display());
            self.file = None;
        }
    }
}

/// Reads a file of demand, rewrites it without expired records, and opens it for appending.
fn open(path: &PathBuf, demand: &mut RecordedDemand) -> std::io::Result<File> {
    match std::fs::read(path) {
        Ok(bytes) => {
            let bad = demand.read(&String::from_utf8_lossy(&bytes), super::unix_now().as_secs_f64());
            if bad > 0 {
                tracing::warn!("{}: {bad} lines are no records and were left out", path.display());
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let new = path.with_extension("new");
    std::fs::write(&new, demand.to_text())?;
    std::fs::rename(&new, path)?;
    OpenOptions::new().append(true).open(path)
}

#[cfg(test)]
mod tests {
    use control_planner::{Lengths, Planner};

    use super::*;
    use crate::planning::{config, pool};

    fn seen(arrivals: f64) -> Observation {
        let lengths = Lengths { prompt: 400.0, cached: 0.0, output: 100.0 };
        Observation { seconds: 5.0, arrivals, finished: vec![lengths], ..Observation::default() }
    }

    /// Enough demand is recorded, the process restarts, and the share is chosen from the demand in the file.
    #[test]
    fn the_share_is_chosen_from_recorded_demand_that_outlives_the_process() {
        let folder = std::env::temp_dir().join(format!("kvasir-headroom-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let settings = PlannerSettings {
            history_folder: folder.display().to_string(),
            choose_after: Duration::from_secs(1800),
            decode_max: 16,
            ..PlannerSettings::default()
        };
        let pools = vec![pool(&settings, control_planner::WorkerRole::Both)];
        let config = config(&settings, false, &pools);
        let start =
            || (HeadroomChoice::new(&settings, &config, &pools), Planner::new(config.clone(), pools.clone()));
        let (mut first, mut planner) = start();
        for tick in 0..359 {
            first.tick(1e9 + 5.0 * f64::from(tick), &[seen(30.0)], &mut planner);
        }
        assert!(first.choosing.is_none() && first.trials(0).is_empty());
        drop(first);
        std::fs::OpenOptions::new()
            .append(true)
            .open(folder.join("both.demand"))
            .and_then(|mut file| file.write_all(b"torn li"))
            .expect("written");
        let (mut second, mut planner) = start();
        let partial = Observation { is_partial: true, ..seen(1.0) };
        second.tick(1e9 + 1795.0, &[partial], &mut planner);
        assert!(second.choosing.is_none(), "a part of the demand is not recorded");
        second.tick(1e9 + 1800.0, &[seen(30.0)], &mut planner);
        let deadline = Instant::now() + Duration::from_secs(120);
        let mut at = 1e9 + 1805.0;
        while second.trials(0).is_empty() {
            assert!(Instant::now() < deadline, "the choice comes to its end");
            second.tick(at, &[seen(30.0)], &mut planner);
            at += 1e-3;
            std::thread::sleep(Duration::from_millis(20));
        }
        let trials = second.trials(0);
        assert_eq!(trials.len(), control_planner::HEADROOMS.len());
        let decisions = planner.decide(at, &[seen(30.0)]);
        let chosen = decisions[0].utilisation;
        assert!(trials.iter().any(|trial| trial[0].as_f64() == Some(chosen)), "{chosen}");
        println!("chosen: {chosen}");
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
