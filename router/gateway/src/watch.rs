//! The health of one worker: which make it is, whether it answers, and whether it is still the same run.

use std::sync::{Arc, Weak};
use std::time::Duration;

use router_engines::client::EngineError;
use router_engines::dialect::{Description, Engine, Pulse, detect};

use crate::GatewayConfig;
use crate::fleet::Fleet;
use crate::worker::Worker;

/// Questions in a row that may go unanswered before a worker is given up.
const MISSES_MAX: u32 = 2;
/// Questions in a row that may fail before its make is asked again: another engine may have taken its place.
const SAME_ENGINE_FOR: u32 = 20;
/// A busy engine needs a while to tell its metrics.
const PATIENCE: Duration = Duration::from_secs(2);
/// A worker that is down is asked this often.
const QUICK: Duration = Duration::from_millis(100);

/// Why a worker that describes itself so cannot be used, if it cannot.
fn unusable(fleet: &Fleet, worker: &Worker, description: &Description) -> Option<String> {
    let first = || description.models.first().cloned().unwrap_or_default();
    let model = fleet.model.get_or_init(first);
    if !description.models.contains(model) {
        return Some(format!("it serves {:?}, not {model:?}", description.models));
    }
    let roster = fleet.roster.load();
    let other = roster.iter().find(|other| other.worker.name != worker.name && other.worker.is_up());
    let expected = other.map_or(description.block_tokens, |other| other.live.description.block_tokens);
    if description.block_tokens == 0 || description.block_tokens != expected {
        return Some(format!(
            "its blocks have {} tokens, those of the others {expected}",
            description.block_tokens
        ));
    }
    None
}

/// What is remembered between two questions.
#[derive(Default)]
struct Asked {
    engine: Option<Engine>,
    /// It did not answer the last time, so an engine without instance numbers may have started again.
    was_down: bool,
}

impl Asked {
    /// Asks once; an error says why the worker cannot be used.
    async fn ask(&mut self, worker: &Worker, config: &GatewayConfig) -> Result<Answer, EngineError> {
        let client = &worker.client;
        let engine = match self.engine.or(config.engine) {
            Some(engine) => engine,
            None => detect(client).await?,
        };
        self.engine = Some(engine);
        let dialect = engine.dialect();
        let before = worker.lives.load().first().and_then(|live| live.description.instance);
        if !worker.lives.load().is_empty() {
            let pulse = dialect.pulse(client).await?;
            let is_same = match (before, pulse.instance) {
                (Some(before), Some(now)) => before == now,
                _ => !self.was_down,
            };
            if is_same {
                return Ok(Answer::Same(pulse));
            }
        }
        Ok(Answer::New(Box::new(dialect.describe(client, &config.hints).await?)))
    }
}

enum Answer {
    Same(Pulse),
    New(Box<Description>),
}

async fn look(fleet: &Arc<Fleet>, worker: &Arc<Worker>, answer: Answer) -> Option<String> {
    match answer {
        Answer::Same(pulse) => {
            for (live, load) in worker.lives.load().iter().zip(&pulse.loads) {
                live.reported.set(load);
            }
            None
        }
        Answer::New(description) => {
            // One after the other: of two that come at the same instant the second must see the first.
            let _turn = fleet.joining.lock().await;
            let reason = unusable(fleet, worker, &description);
            if reason.is_none() {
                fleet.begin(*description, worker).await;
                worker.set_up(true);
            }
            reason
        }
    }
}

/// Watches a worker until the fleet is gone.
pub(crate) async fn watch(fleet: Weak<Fleet>, worker: Arc<Worker>, config: GatewayConfig) {
    let interval = config.health_interval;
    let patience = interval.max(PATIENCE);
    let mut asked = Asked::default();
    let (mut misses, mut failures) = (0, 0);
    let mut complained = String::new();
    loop {
        let answered = tokio::time::timeout(patience, asked.ask(&worker, &config)).await;
        let Some(fleet) = fleet.upgrade() else { return };
        worker.upstream.sweep();
        if matches!(answered, Ok(Err(EngineError::Connection { .. }))) {
            worker.gone.notify_waiters();
        }
        let complaint = match answered {
            Err(_) => {
                misses += 1;
                Some(format!("no answer within {} ms", patience.as_millis()))
            }
            Ok(Err(error)) => Some(error.to_string()),
            Ok(Ok(answer)) => look(&fleet, &worker, answer).await,
        };
        asked.was_down = complaint.is_some();
        match complaint {
            None => {
                (misses, failures) = (0, 0);
                complained.clear();
                worker.set_up(true);
                fleet.changed.notify_waiters();
            }
            Some(reason) => {
                worker.set_up(false);
                failures += 1;
                if failures % SAME_ENGINE_FOR == 0 {
                    asked.engine = None;
                }
                if complained != reason {
                    tracing::warn!(worker = worker.name, reason, "worker is not usable");
                    complained = reason;
                }
                if misses >= MISSES_MAX {
                    worker.down.notify_waiters();
                }
            }
        }
        drop(fleet);
        let quick = interval.min(QUICK);
        let pause = if worker.is_up() { interval } else { quick };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // Not at once: a worker that died needs a moment to come back.
            () = worker.suspected.notified() => tokio::time::sleep(quick / 2).await,
        }
    }
}
