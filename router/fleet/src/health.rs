//! The health of one worker: its engine, whether it answers, and whether it is still the same run. One task per worker.
//!
//! One health check is under way at a time, and its answer is waited for however late it comes:
//!
//! | The answer | The worker |
//! | --- | --- |
//! | comes within `health_timeout` | takes requests |
//! | is late | gets no new requests until it comes |
//! | has not come after `health_misses` times that | is given up, with the requests that were silent since the first miss |
//! | is a refused connection, or an error | gets no new requests, and is asked again soon; ever later, up to `health_interval`, while it goes on |
//! | are refused connections for `health_misses` times that | is given up, with the requests that were silent since the first one |
//!
//! An engine that says it is asleep gets no requests; its blocks leave the index, and it is described anew when it wakes.
//!
//! A late answer is one all the same: an engine that computes a long prompt may take seconds for it and generates meanwhile.
//! The engine's load is not asked for here (`report`).

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use router_engines::client::EngineError;
use router_engines::dialect::{Description, Dialect, Engine, Hints, detect};

use crate::changes::DesiredState;
use crate::config::FleetConfig;
use crate::fleet::Fleet;
use crate::served_model::ModelMatch;
use crate::spec::AsleepRun;
use crate::state::Health;
use crate::worker::Worker;

/// Time for which a worker that never answered may refuse connections before a warning is logged: the workers of `serve`
/// start together with their gateway.
const STARTS_WITHIN: Duration = Duration::from_secs(15);
/// Failed checks in a row after which the engine is detected again: another one may have taken its place.
const SAME_ENGINE_FOR: u32 = 20;
/// Time limit of the question whether the engine is asleep. After it the last known answer holds.
const SLEEP_TOLD_WITHIN: Duration = Duration::from_secs(1);
/// First pause between two checks of a worker that is down; see `pause_while_down`.
const QUICK: Duration = Duration::from_millis(100);

/// State kept between two health checks.
#[derive(Default)]
struct HealthCheckState {
    engine: Option<Engine>,
    /// The last check failed, so an engine without instance numbers may have restarted.
    was_down: bool,
    /// This run of the engine does not tell whether it is asleep.
    hides_sleep: bool,
}

impl HealthCheckState {
    /// Runs one health check; an error says why the worker cannot be used.
    async fn ask(&mut self, worker: &Worker, config: &FleetConfig) -> Result<Answer, EngineError> {
        let client = &worker.client;
        let engine = match self.engine.or(worker.pool.engine) {
            Some(engine) => engine,
            None => detect(client).await?,
        };
        self.engine = Some(engine);
        let dialect = engine.dialect();
        if self.is_asleep(worker, dialect).await? {
            dialect.alive_asleep(client).await?;
            return Ok(match has_restarted(worker, dialect, config).await {
                true => Answer::Restarted,
                false => Answer::Asleep,
            });
        }
        let run = worker.runs.load().first().cloned();
        let mut same_run = None;
        if let Some(run) = run {
            let before = run.description.instance;
            let mut now = dialect.alive(client).await?;
            let may_have_restarted = worker.take_possible_restart() || self.was_down;
            if may_have_restarted && now.is_none() && before.is_some() {
                // A late report must not keep the worker out; if it is another run after all, `report` notices.
                let reported = tokio::time::timeout(config.health_timeout, dialect.report(client)).await;
                now = reported.map_or(Ok(before), |report| report.map(|report| report.instance))?;
            }
            let is_same = match (before, now) {
                (Some(before), Some(now)) => before == now,
                _ => !self.was_down,
            };
            // An engine that reports no run number is recognised by its models.
            if is_same && !(may_have_restarted && before.is_none()) {
                return Ok(Answer::Same);
            }
            same_run = Some(run).filter(|_| is_same);
        }
        let model = worker.pool.model.name().map(|name| name.to_string());
        let hints = Hints { model, ..config.hints.clone() };
        self.hides_sleep = false;
        let Some(run) = same_run else {
            return Ok(Answer::New(Box::new(dialect.describe(client, &hints).await?)));
        };
        // A late or refused description must not keep a worker out that is alive.
        let described = tokio::time::timeout(config.health_timeout, dialect.describe(client, &hints)).await;
        Ok(match described {
            Ok(Ok(description)) if description.models != run.description.models => {
                Answer::New(Box::new(description))
            }
            _ => Answer::Same,
        })
    }
}

impl HealthCheckState {
    /// Whether the worker is asleep, by its engine's report; by an administrator's change, for an engine that reports nothing.
    async fn is_asleep(&mut self, worker: &Worker, dialect: &dyn Dialect) -> Result<bool, EngineError> {
        if self.hides_sleep {
            return Ok(worker.sleep_request().is_some());
        }
        // vLLM's scheduler answers this between two steps, which may take seconds; that says nothing of whether it is well.
        match tokio::time::timeout(SLEEP_TOLD_WITHIN, dialect.is_asleep(&worker.client)).await {
            Ok(Ok(Some(is_asleep))) => Ok(is_asleep),
            Ok(Ok(None)) => {
                self.hides_sleep = true;
                Ok(worker.sleep_request().is_some())
            }
            Ok(Err(error @ EngineError::Connection { .. })) => Err(error),
            Ok(Err(_)) | Err(_) => Ok(worker.is_asleep()),
        }
    }
}

/// Whether the process of a worker that was put to sleep has started again since: it is awake then.
async fn has_restarted(worker: &Worker, dialect: &dyn Dialect, config: &FleetConfig) -> bool {
    let Some(AsleepRun(Some(run))) = worker.sleep_request() else { return false };
    // A late or refused report says nothing.
    let reported = tokio::time::timeout(config.health_timeout, dialect.report(&worker.client)).await;
    matches!(reported, Ok(Ok(report)) if report.instance.is_some_and(|now| now != run))
}

enum Answer {
    Asleep,
    /// The worker was put to sleep, and is another run of its process now.
    Restarted,
    Same,
    New(Box<Description>),
}

async fn look(fleet: &Arc<Fleet>, worker: &Arc<Worker>, answer: Answer) -> ModelMatch {
    let description = match answer {
        Answer::Same => return ModelMatch::Serves,
        Answer::Asleep => {
            let _turn = fleet.joining.lock().await;
            // The engine's blocks are gone, and requests sent to it would wait until it is woken.
            fleet.end_runs(worker).await;
            worker.give_up(Instant::now());
            worker.update(|condition| condition.is_asleep = true);
            return ModelMatch::Serves;
        }
        Answer::Restarted => {
            tracing::info!(worker = worker.name, "worker was asleep, and has started again");
            // The worker may have left the roster meanwhile.
            let _gone = fleet.set_desired_state(&worker.name, DesiredState::Serve);
            return ModelMatch::Waits;
        }
        Answer::New(description) => description,
    };
    worker.is_sleep_state_unknown.store(false, Ordering::Release);
    worker.update(|condition| condition.is_asleep = false);
    // Joins run one at a time: of two workers that come at the same instant the second must see the first.
    let _turn = fleet.joining.lock().await;
    if worker.is_removed() {
        return ModelMatch::Waits;
    }
    let verdict = worker.pool.judge(worker, &description);
    if verdict == ModelMatch::Serves {
        fleet.start_runs(*description, worker).await;
    }
    verdict
}

/// Result of one health check.
struct Outcome {
    /// The answer; `None`: the worker was given up.
    answered: Option<Result<Answer, EngineError>>,
    /// Times `health_timeout` that passed before the answer.
    misses: u32,
}

/// Runs one check, and waits for its answer as long as the configuration allows.
async fn check(asked: &mut HealthCheckState, worker: &Worker, config: &FleetConfig) -> Outcome {
    let question = asked.ask(worker, config);
    tokio::pin!(question);
    let mut misses = 0;
    while misses < config.health_misses {
        if let Ok(answered) = tokio::time::timeout(config.health_timeout, &mut question).await {
            return Outcome { answered: Some(answered), misses };
        }
        misses += 1;
        worker.update(|condition| {
            if condition.health == Health::Answers {
                condition.health = Health::Suspect;
            }
        });
        worker.set_reason(&format!(
            "its health check takes more than {} ms",
            config.health_timeout.as_millis()
        ));
    }
    Outcome { answered: None, misses }
}

/// Watches a worker until it is removed or the fleet is gone.
pub(crate) async fn watch(fleet: Weak<Fleet>, worker: Arc<Worker>) {
    let Some(config) = fleet.upgrade().map(|fleet| fleet.config.clone()) else { return };
    if let Some(known) = fleet.upgrade() {
        tokio::select! {
            () = worker.removed() => return,
            () = known.known.loaded() => {}
        }
    }
    let interval = config.health_interval;
    let mut asked = HealthCheckState::default();
    let mut failures = 0;
    // Time since which connections are refused without an answer in between.
    let mut refused_since: Option<Instant> = None;
    let began = tokio::time::Instant::now();
    let mut complained = String::new();
    loop {
        let Outcome { answered, misses } = tokio::select! {
            () = worker.removed() => return watch_removed(&worker, &config, asked.engine).await,
            outcome = check(&mut asked, &worker, &config) => outcome,
        };
        let Some(fleet) = fleet.upgrade() else { return };
        worker.upstream.sweep();
        let was_refused = matches!(answered, Some(Err(EngineError::Connection { .. })));
        if was_refused {
            worker.disconnected.notify_waiters();
            // An engine that is stopped may close its port, and leave the requests that it has without an end.
            let since = *refused_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= config.health_timeout * config.health_misses {
                worker.give_up(since);
            }
        } else {
            refused_since = None;
        }
        let verdict = match answered {
            None => {
                // The first miss; the later ones have passed since.
                let since = Instant::now().checked_sub(config.health_timeout * misses.saturating_sub(1));
                worker.give_up(since.unwrap_or_else(Instant::now));
                let patience = config.health_timeout * misses;
                ModelMatch::Differs(format!(
                    "no answer to its health check within {} ms",
                    patience.as_millis()
                ))
            }
            Some(Err(error)) => ModelMatch::Differs(error.to_string()),
            Some(Ok(answer)) => {
                worker.answered();
                // Not cancelled half-way when the worker is removed: it joins the index here, and leaves it again then.
                look(&fleet, &worker, answer).await
            }
        };
        if worker.is_removed() {
            drop(fleet);
            return watch_removed(&worker, &config, asked.engine).await;
        }
        asked.was_down = verdict != ModelMatch::Serves;
        match verdict {
            ModelMatch::Serves => {
                failures = 0;
                worker.set_health(Health::Answers);
                worker.set_reason("");
                let late =
                    format!("its health check took more than {} ms", config.health_timeout.as_millis());
                match misses {
                    0 => complained.clear(),
                    _ if complained == late => {}
                    _ => {
                        tracing::warn!(worker = worker.name, "{late}: it got no new requests meanwhile");
                        complained = late;
                    }
                }
            }
            ModelMatch::Waits => {
                worker.set_health(Health::Unknown);
                worker.set_reason("its pool waits for other workers before it chooses a model");
            }
            ModelMatch::Differs(reason) => {
                worker.set_health(Health::Down);
                worker.set_reason(&reason);
                failures += 1;
                if failures % SAME_ENGINE_FOR == 0 {
                    asked.engine = None;
                }
                // Workers that start beside the gateway are not there yet.
                let is_starting =
                    was_refused && worker.runs.load().is_empty() && began.elapsed() < STARTS_WITHIN;
                if is_starting {
                    tracing::debug!(worker = worker.name, reason, "worker is not there yet");
                } else if complained != reason {
                    tracing::warn!(worker = worker.name, reason, "worker is not usable");
                    complained = reason;
                }
            }
        }
        // Requests that wait for a worker look again, and are told when the workers disagree.
        fleet.changed.notify_waiters();
        drop(fleet);
        let quick = interval.min(QUICK);
        let pause = if worker.answers() { interval } else { pause_while_down(failures, quick, interval) };
        tokio::select! {
            () = worker.removed() => return watch_removed(&worker, &config, asked.engine).await,
            () = tokio::time::sleep(pause) => {}
            // Not at once: a worker that died needs a moment to come back.
            () = worker.suspected.notified() => tokio::time::sleep(quick / 2).await,
        }
    }
}

/// Pause before the next check of a worker after this many failures in a row: short at first, for a process that is
/// restarted; then longer, since a thousand pods that have not started yet must not keep a core busy.
fn pause_while_down(failures: u32, quick: Duration, interval: Duration) -> Duration {
    quick.saturating_mul(1 << (failures / SAME_ENGINE_FOR).min(16)).min(interval)
}

/// Watches a worker that was removed, for the requests that it still has: they are given up with it if it falls silent.
async fn watch_removed(worker: &Arc<Worker>, config: &FleetConfig, engine: Option<Engine>) {
    // Requests hold references to the worker, and for a moment so does the task that ends its runs.
    while let Some(engine) = engine.filter(|_| Arc::strong_count(worker) > 1) {
        let started = Instant::now();
        let patience = config.health_timeout * config.health_misses;
        let alive = tokio::time::timeout(patience, engine.dialect().alive(&worker.client)).await;
        match alive {
            Ok(Ok(_)) => worker.answered(),
            Ok(Err(EngineError::Connection { .. })) => worker.disconnected.notify_waiters(),
            Ok(Err(_)) => {}
            Err(_) => worker.give_up(started),
        }
        tokio::time::sleep(config.health_interval).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_that_stay_down_are_asked_ever_later_up_to_the_interval() {
        let (quick, interval) = (Duration::from_millis(100), Duration::from_secs(1));
        for (failures, pause) in [(0, 100), (19, 100), (20, 200), (60, 800), (80, 1_000), (u32::MAX, 1_000)] {
            assert_eq!(
                pause_while_down(failures, quick, interval),
                Duration::from_millis(pause),
                "{failures}"
            );
        }
        let short = Duration::from_millis(50);
        assert_eq!(pause_while_down(0, short, short), short);
    }
}
