//! The model name of a pool, agreed on by its workers.
//!
//! A configured name is final, and a worker without it is left out. Otherwise the pool's workers must agree on a name,
//! independently of the order of their answers: the name is chosen when every worker has reported its models, or
//! [`CHOSEN_AFTER`] after the first report, and it is settled when all have reported. A worker that disagrees before that
//! leaves the pool without a model: requests are refused, with an error that names the models, until the workers agree. In a
//! settled pool a worker that comes with another model is left out and the rest continues. A pool whose last worker is removed
//! chooses again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

/// Time from the first worker's description after which a model is chosen although some workers have not answered.
const CHOSEN_AFTER: Duration = Duration::from_secs(3);

/// Result of comparing a worker's models with the pool's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ModelMatch {
    /// The worker serves the pool's model.
    Serves,
    /// The pool waits for its other workers before it chooses a model.
    Waits,
    /// The worker cannot be used, for this reason.
    Differs(String),
}

/// A disagreement: the workers of a pool serve different models.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Dispute {
    /// Text for clients: names the models only.
    models: String,
    /// Text for the operator: names each model with its workers.
    workers: String,
}

#[derive(Debug)]
struct Told {
    /// The workers in the order of the roster, each with its model names; `None` until the worker has answered.
    models: Vec<(String, Option<Vec<String>>)>,
    /// Whether the name is configured by the operator.
    is_configured: bool,
    /// Time of the first worker's description.
    first: Option<Instant>,
    /// The name is configured, or all workers have agreed on it.
    is_name_final: bool,
    dispute: Option<Dispute>,
}

/// The model of a pool.
#[derive(Debug)]
pub(crate) struct ServedModel {
    name: ArcSwapOption<String>,
    /// Whether there is a dispute. Relaxed: a request that misses a change came before it.
    is_disputed: AtomicBool,
    /// Relaxed: as `is_disputed`.
    has_workers: AtomicBool,
    told: Mutex<Told>,
}

impl ServedModel {
    /// Returns a pool's model: the configured one, or one that the workers have yet to agree on.
    pub(crate) fn new(configured: Option<String>) -> Self {
        Self {
            told: Mutex::new(Told {
                models: Vec::new(),
                is_configured: configured.is_some(),
                first: None,
                is_name_final: configured.is_some(),
                dispute: None,
            }),
            is_disputed: AtomicBool::new(false),
            has_workers: AtomicBool::new(false),
            name: ArcSwapOption::new(configured.map(Arc::new)),
        }
    }

    /// Replaces the pool's workers.
    pub(crate) fn set_workers(&self, workers: impl Iterator<Item = String>) {
        let mut told = self.lock();
        let mut before: HashMap<String, Option<Vec<String>>> =
            std::mem::take(&mut told.models).into_iter().collect();
        let said_before = |worker: String| {
            let said = before.remove(&worker).flatten();
            (worker, said)
        };
        told.models = workers.map(said_before).collect();
        self.has_workers.store(!told.models.is_empty(), Ordering::Relaxed);
        if told.models.is_empty() && !told.is_configured {
            (told.first, told.is_name_final) = (None, false);
            self.name.store(None);
        }
        // A worker that disagreed, or that has never answered, may be gone.
        if !told.is_name_final && self.name().is_some() && !told.models.is_empty() {
            told.is_name_final = told.models.iter().all(|(_, said)| said.is_some());
        }
        if told.dispute.is_some()
            && (told.said().next().is_none() || told.agreed(self.name().as_deref()).is_some())
        {
            told.dispute = None;
            self.is_disputed.store(false, Ordering::Relaxed);
        }
    }

    /// Whether there is any worker of the pool.
    pub(crate) fn has_workers(&self) -> bool {
        self.has_workers.load(Ordering::Relaxed)
    }

    /// Name of the model; `None` until it is chosen.
    pub(crate) fn name(&self) -> Option<Arc<String>> {
        self.name.load_full()
    }

    /// Whether requests are refused because the workers serve different models.
    pub(crate) fn is_disputed(&self) -> bool {
        self.is_disputed.load(Ordering::Relaxed)
    }

    /// Error text for clients while requests are refused; `None` while they are not.
    pub(crate) fn refusal(&self) -> Option<String> {
        if !self.is_disputed() {
            return None;
        }
        let told = self.lock();
        let models = &told.dispute.as_ref()?.models;
        Some(format!(
            "The workers serve different models, {models}: set `gateway.model` to the one that this gateway serves."
        ))
    }

    /// Error text for the operator, which also names the workers.
    pub(crate) fn problem(&self) -> Option<String> {
        self.lock().dispute.as_ref().map(Dispute::problem)
    }

    /// Records the models that a worker serves, the preferred one first.
    pub(crate) fn tell(&self, worker: &str, models: &[String], now: Instant) -> ModelMatch {
        let mut told = self.lock();
        if told.is_name_final
            && let Some(name) = self.name()
        {
            return match models.contains(&name) {
                true => ModelMatch::Serves,
                false => ModelMatch::Differs(format!("it serves {models:?}, not {name:?}")),
            };
        }
        match told.models.iter_mut().find(|(name, _)| name == worker) {
            Some((_, said)) => *said = Some(models.to_vec()),
            // The worker was removed meanwhile.
            None => return ModelMatch::Waits,
        }
        let first = *told.first.get_or_insert(now);
        let Some(name) = told.agreed(self.name().as_deref()) else {
            let dispute = told.disputed(self.name().as_deref());
            let problem = dispute.problem();
            if told.dispute.as_ref() != Some(&dispute) {
                tracing::error!("{problem}");
            }
            told.dispute = Some(dispute);
            self.is_disputed.store(true, Ordering::Relaxed);
            return ModelMatch::Differs(problem);
        };
        if told.dispute.take().is_some() {
            tracing::warn!(model = name, "the workers agree on a model now");
        }
        self.is_disputed.store(false, Ordering::Relaxed);
        let is_name_final = told.models.iter().all(|(_, said)| said.is_some());
        let is_late = now.saturating_duration_since(first) >= CHOSEN_AFTER;
        if !is_name_final && !is_late && self.name().is_none() {
            return ModelMatch::Waits;
        }
        told.is_name_final = is_name_final;
        if self.name().is_none() {
            self.name.store(Some(Arc::new(name)));
        }
        ModelMatch::Serves
    }

    fn lock(&self) -> MutexGuard<'_, Told> {
        // Each change is whole when anything that could panic runs.
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dispute {
    fn problem(&self) -> String {
        format!("the workers serve different models, {}: set `gateway.model`", self.workers)
    }
}

impl Told {
    fn said(&self) -> impl Iterator<Item = &Vec<String>> {
        self.models.iter().filter_map(|(_, said)| said.as_ref())
    }

    /// The name that is served by every worker that has answered: the one chosen before, or else one that some worker
    /// names first.
    fn agreed(&self, chosen: Option<&String>) -> Option<String> {
        let is_everywhere = |name: &&String| self.said().all(|models| models.contains(name));
        match chosen {
            Some(name) => Some(name).filter(is_everywhere).cloned(),
            None => self.said().filter_map(|models| models.first()).find(is_everywhere).cloned(),
        }
    }

    /// The models that the workers name first, each with the first worker that does.
    fn disputed(&self, chosen: Option<&String>) -> Dispute {
        const SO_FAR: &str = "served so far";
        let mut named: Vec<(&str, &str)> = chosen.map(|name| (name.as_str(), SO_FAR)).into_iter().collect();
        for (worker, said) in &self.models {
            let model = said.as_ref().map(|models| models.first().map_or("", String::as_str));
            let Some(model) = model else { continue };
            match named.iter().position(|(other, _)| *other == model) {
                Some(at) if named[at].1 == SO_FAR => named[at].1 = worker.as_str(),
                Some(_) => {}
                None => named.push((model, worker.as_str())),
            }
        }
        let models: Vec<String> = named.iter().map(|(model, _)| format!("{model:?}")).collect();
        let workers: Vec<String> = named.iter().map(|(model, by)| format!("{model:?} ({by})")).collect();
        Dispute { models: models.join(" and "), workers: workers.join(" and ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn pool(workers: &[&str]) -> ServedModel {
        let model = ServedModel::new(None);
        model.set_workers(names(workers).into_iter());
        model
    }

    fn name(model: &ServedModel) -> String {
        model.name().map_or_else(String::new, |name| name.to_string())
    }

    #[test]
    fn two_models_are_an_error_that_names_both_whoever_answers_first() {
        let now = Instant::now();
        let later = now + 2 * CHOSEN_AFTER;
        for (order, second) in [([0, 1], now), ([1, 0], now), ([0, 1], later), ([1, 0], later)] {
            let model = pool(&["w0", "w1"]);
            let served = [names(&["alpha"]), names(&["beta"])];
            let tell = |which: usize, now| model.tell(["w0", "w1"][which], &served[which], now);
            assert_eq!(tell(order[0], now), ModelMatch::Waits);
            if second == later {
                // The second worker does not answer for so long that the first one is served alone.
                assert_eq!(tell(order[0], now + CHOSEN_AFTER), ModelMatch::Serves);
            }
            assert!(!model.is_disputed());
            assert!(matches!(tell(order[1], second), ModelMatch::Differs(_)));
            let refusal = model.refusal().expect("a refusal");
            for part in ["\"alpha\"", "\"beta\"", "gateway.model"] {
                assert!(refusal.contains(part), "{refusal}");
            }
            let problem = model.problem().expect("a problem");
            assert!(problem.contains("\"alpha\" (w0)") && problem.contains("\"beta\" (w1)"), "{problem}");
            assert!(!refusal.contains("w0"), "{refusal}");
        }
    }

    #[test]
    fn workers_that_agree_after_all_are_served() {
        let now = Instant::now();
        let model = pool(&["w0", "w1"]);
        model.tell("w0", &names(&["alpha"]), now);
        model.tell("w1", &names(&["beta"]), now);
        assert!(model.is_disputed());
        assert_eq!(model.tell("w0", &names(&["beta"]), now), ModelMatch::Serves);
        assert_eq!((name(&model).as_str(), model.refusal(), model.problem()), ("beta", None, None));
        // Once the model is settled, a worker that comes back with another model is left out.
        assert!(matches!(model.tell("w1", &names(&["alpha"]), now), ModelMatch::Differs(_)));
        assert!(!model.is_disputed());
    }

    #[test]
    fn aliases_are_no_dispute_and_a_configured_name_is_final() {
        let now = Instant::now();
        let model = pool(&["w0", "w1"]);
        assert_eq!(model.tell("w1", &names(&["b", "a"]), now), ModelMatch::Waits);
        assert_eq!(model.tell("w0", &names(&["a", "b"]), now), ModelMatch::Serves);
        assert_eq!(name(&model), "a", "the first in the order of the roster");
        let model = ServedModel::new(Some("b".to_owned()));
        model.set_workers(names(&["w0", "w1"]).into_iter());
        assert_eq!(model.tell("w1", &names(&["b"]), now), ModelMatch::Serves);
        assert!(matches!(model.tell("w0", &names(&["a"]), now), ModelMatch::Differs(_)));
        assert!(!model.is_disputed());
    }

    #[test]
    fn a_pool_that_was_emptied_chooses_anew_and_a_dispute_ends_with_the_worker_that_made_it() {
        let now = Instant::now();
        let model = pool(&["w0"]);
        assert_eq!(model.tell("w0", &names(&["alpha"]), now), ModelMatch::Serves);
        model.set_workers(names(&["w0", "w1"]).into_iter());
        assert!(matches!(model.tell("w1", &names(&["beta"]), now), ModelMatch::Differs(_)), "it is settled");
        model.set_workers(std::iter::empty());
        assert_eq!(name(&model), "");
        model.set_workers(names(&["w1"]).into_iter());
        assert_eq!(model.tell("w1", &names(&["beta"]), now), ModelMatch::Serves);
        assert_eq!(name(&model), "beta");
        let model = pool(&["w0", "w1"]);
        model.tell("w0", &names(&["alpha"]), now);
        model.tell("w1", &names(&["beta"]), now);
        assert!(model.is_disputed());
        model.set_workers(names(&["w0"]).into_iter());
        assert!(!model.is_disputed());
        assert_eq!(model.tell("w0", &names(&["alpha"]), now), ModelMatch::Serves);
    }
}
