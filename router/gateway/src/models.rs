//! The models that the gateway serves, by the names that requests ask for.
//!
//! Each pool of the fleet is a model here, with the gateway's own settings for it: tokenizer and chat
//! template, format of tool calls, and a gate. A name is, in this order: a split of the configuration, a
//! model or one of its aliases, an adapter that some worker has. A split draws a pool by weight, and always
//! the same one for a conversation. A pool that cannot serve now is replaced by the first of its fallbacks
//! that can.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use router_access::{Gate, GateConfig};
use router_fleet::Pool;
use router_openai::ApiError;
use router_openai::RawBody;
use router_tokens::ModelText;

use crate::answer::output_parser::Formats;
use crate::service::{Gateway, fresh_number};
use crate::{GatewayConfig, TextSource};

/// The gateway's own settings of a pool's model.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// The pool's name.
    pub pool: String,
    /// The model's tokenizer and chat template.
    pub text: ModelText,
    /// Format of the model's tool calls and reasoning, where the gateway makes the text.
    pub formats: Formats,
    /// Largest number of requests in flight; more wait.
    pub requests_max: usize,
    /// Names of the pools that take its requests while its own workers cannot, in order.
    pub fallback: Vec<String>,
}

/// A name whose requests are split among pools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// The name that requests ask for.
    pub model: String,
    /// Names of pools and their weights; at least one is not 0.
    pub pools: Vec<(String, u32)>,
}

/// A model that is served.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) pool: Arc<Pool>,
    pub(crate) text: ModelText,
    pub(crate) formats: Formats,
    /// Lets in as many requests as the pool's engines can take.
    pub(crate) gate: Arc<Gate>,
    pub(crate) requests_max: u32,
    fallback: Vec<String>,
    text_by: TextSource,
}

impl Model {
    /// Whether prompts become the same tokens here as at the engines: because the gateway has the model's
    /// own tokenizer, or because the gateway makes the prompts.
    pub(crate) fn knows_tokens(&self) -> bool {
        self.pool.has_tokenizer || (self.text_by != TextSource::Engine && self.pool.is_native())
    }

    /// Returns error 503 when the pool's workers serve different models and none is configured.
    fn dispute(&self) -> Option<ApiError> {
        let refusal = self.pool.refusal()?;
        Some(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, refusal, "models_differ"))
    }
}

/// Numbers of requests at the admission gates of all models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GateTotals {
    /// Requests that were admitted and have not ended.
    pub(crate) running: u32,
    /// Requests in the queues.
    pub(crate) waiting: u32,
    /// Requests that the gates admit at a time.
    pub(crate) running_max: u32,
}

/// Model and adapter that a request is for.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) model: Arc<Model>,
    /// The adapter that the request names, if it does not ask for the model itself.
    pub(crate) adapter: Option<String>,
}

impl Target {
    #[cfg(test)]
    pub(crate) fn for_tests() -> Self {
        let pool = router_fleet::Pool::for_tests();
        let model = Model {
            pool,
            text: ModelText::tiny().expect("the built-in model"),
            formats: Formats::default(),
            gate: Gate::new(GateConfig::default()).expect("a gate"),
            requests_max: 1,
            fallback: Vec::new(),
            text_by: TextSource::Auto,
        };
        Self { model: Arc::new(model), adapter: None }
    }

    /// Returns the name under which engines know the target.
    pub(crate) fn engine_name(&self) -> String {
        self.adapter.clone().unwrap_or_else(|| self.model.pool.model().to_string())
    }

    /// Replaces the model name of a request by the name that engines know.
    pub(crate) fn name_in(&self, body: &mut RawBody) -> Result<(), ApiError> {
        let name = self.engine_name();
        if body.text("model")?.is_some_and(|asked| *asked != *name) && !name.is_empty() {
            body.set("model", serde_json::Value::from(name).to_string());
        }
        Ok(())
    }
}

/// All models, and the names that are split among them.
#[derive(Debug)]
pub(crate) struct Models {
    all: Vec<Arc<Model>>,
    splits: Vec<Split>,
    /// Largest number of requests in flight or waiting, of all models together.
    pub(crate) inside_max: usize,
}

impl Models {
    pub(crate) fn new(config: &GatewayConfig, pools: &[Arc<Pool>]) -> Result<Self, String> {
        let of = |pool: &Arc<Pool>| {
            let own = config.models.iter().find(|model| model.pool == pool.name);
            let own =
                own.ok_or_else(|| format!("nothing is configured of the model of pool {:?}", pool.name))?;
            let requests_max = u32::try_from(own.requests_max).unwrap_or(u32::MAX).max(1);
            Ok::<_, String>(Arc::new(Model {
                pool: Arc::clone(pool),
                requests_max,
                text: own.text.clone(),
                formats: own.formats.clone(),
                gate: Gate::new(GateConfig {
                    running_max: requests_max,
                    waiting_max: config.access.waiting_max,
                    tenant_waiting_max: config.access.tenant_waiting_max,
                    wait_max: config.access.wait_max,
                })
                .map_err(|error| error.to_string())?,
                fallback: own.fallback.clone(),
                text_by: config.text,
            }))
        };
        let all = pools.iter().map(of).collect::<Result<Vec<_>, String>>()?;
        let places = all.iter().map(|model| model.requests_max as usize + config.access.waiting_max);
        let inside_max = places.fold(0, usize::saturating_add);
        let models = Self { all, splits: config.splits.clone(), inside_max };
        let named = models.splits.iter().flat_map(|split| split.pools.iter().map(|(name, _)| name));
        for name in named.chain(models.all.iter().flat_map(|model| &model.fallback)) {
            models.of_pool(name).ok_or_else(|| format!("there is no pool {name:?}"))?;
        }
        Ok(models)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Model>> {
        self.all.iter()
    }

    /// Returns the first model whose name is known.
    pub(crate) fn first(&self) -> &Arc<Model> {
        self.all.iter().find(|model| !model.pool.model().is_empty()).unwrap_or(&self.all[0])
    }

    /// Returns the model for requests that name none: the model of all workers, if there is exactly one.
    fn only(&self) -> Option<&Arc<Model>> {
        let mut used = self.all.iter().filter(|model| model.pool.has_workers());
        match (used.next(), used.next()) {
            (Some(model), None) => Some(model),
            (None, _) if self.all.len() == 1 => self.all.first(),
            _ => None,
        }
    }

    fn of_pool(&self, name: &str) -> Option<&Arc<Model>> {
        self.all.iter().find(|model| model.pool.name == name)
    }

    /// Returns the names that requests may ask for, each once: models and aliases, splits, adapters.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        let mut add = |name: &str| {
            if !name.is_empty() && !names.iter().any(|other| other == name) {
                names.push(name.to_owned());
            }
        };
        for model in &self.all {
            add(&model.pool.model());
            model.pool.aliases.iter().for_each(|alias| add(alias));
        }
        self.splits.iter().for_each(|split| add(&split.model));
        for model in &self.all {
            for rank in model.pool.roster().iter() {
                rank.run.description.models.iter().for_each(|name| add(name));
            }
        }
        names
    }

    /// Returns the model of this name, or the model that has an adapter of this name; of a split the first
    /// model.
    pub(crate) fn named(&self, name: &str) -> Option<Target> {
        if let Some(split) = self.splits.iter().find(|split| split.model == name) {
            let model = split.pools.first().and_then(|(pool, _)| self.of_pool(pool))?;
            return Some(Target { model: Arc::clone(model), adapter: None });
        }
        self.all_named(name).next()
    }

    /// Returns every model of this name, then those with an adapter of this name. A name from the
    /// configuration comes before one that workers report.
    fn all_named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = Target> + 'a {
        let configured = self.all.iter().filter(|model| model.pool.has_configured_model);
        let said = self.all.iter().filter(|model| !model.pool.has_configured_model);
        let named = configured.chain(said).filter(|model| model.pool.is_named(name));
        let named = named.map(|model| Target { model: Arc::clone(model), adapter: None });
        let is_other = |model: &&Arc<Model>| !model.pool.is_named(name) && model.pool.has_adapter(name);
        let adapted = self.all.iter().filter(is_other);
        named.chain(adapted.map(|model| Target { model: Arc::clone(model), adapter: Some(name.to_owned()) }))
    }

    /// Returns the first model of this name that can serve, or a fallback of one; while none can, the
    /// first.
    fn able_named(&self, name: &str) -> Option<Target> {
        let mut able = self.all_named(name).map(|target| self.able(target));
        able.find(|target| target.model.pool.can_serve()).or_else(|| self.all_named(name).next())
    }

    /// Returns the target for requests that ask for this name now. `session` keeps a conversation at one
    /// side of a split.
    fn resolve(&self, name: Option<&str>, session: Option<u64>) -> Result<Target, ApiError> {
        let target = match name {
            Some(name) => match self.splits.iter().find(|split| split.model == name) {
                Some(split) => self.drawn(split, session.unwrap_or_else(fresh_number)),
                None => self.able_named(name),
            }
            .ok_or_else(|| ApiError::no_such_model(name))?,
            None => {
                if let Some(model) = self.only() {
                    return Ok(self.able(Target { model: Arc::clone(model), adapter: None }));
                }
                let message =
                    "`model` is required: this gateway serves several, see `GET /v1/models`.".to_owned();
                return Err(ApiError::invalid("model", message));
            }
        };
        Ok(self.able(target))
    }

    /// Draws one side of a split by its weight; a side that cannot serve is drawn only if none can.
    fn drawn(&self, split: &Split, random: u64) -> Option<Target> {
        let sides = || split.pools.iter().filter_map(|(pool, weight)| Some((self.of_pool(pool)?, *weight)));
        let able: Vec<_> = sides().filter(|(model, weight)| *weight > 0 && model.pool.can_serve()).collect();
        let sides = if able.is_empty() { sides().filter(|(_, weight)| *weight > 0).collect() } else { able };
        let total: u64 = sides.iter().map(|(_, weight)| u64::from(*weight)).sum();
        // Numbers of sessions are hashes, others random: both are even over their range.
        let mut left = ((u128::from(random) * u128::from(total)) >> 64) as u64;
        for (model, weight) in sides {
            if left < u64::from(weight) {
                return Some(Target { model: Arc::clone(model), adapter: None });
            }
            left -= u64::from(weight);
        }
        None
    }

    /// Returns the target itself or, while its pool cannot serve, the first fallback that can.
    fn able(&self, target: Target) -> Target {
        if target.model.pool.can_serve() {
            return target;
        }
        let fallbacks = target.model.fallback.iter().filter_map(|name| self.of_pool(name));
        let able = fallbacks.filter(|model| model.pool.can_serve()).find_map(|model| match &target.adapter {
            None => Some(Target { model: Arc::clone(model), adapter: None }),
            Some(name) if model.pool.has_adapter(name) => {
                Some(Target { model: Arc::clone(model), adapter: Some(name.clone()) })
            }
            Some(_) => None,
        });
        able.unwrap_or(target)
    }

    /// Returns the reason why no request can be served although workers are there: for health checks.
    pub(crate) fn problem(&self) -> Option<ApiError> {
        if self.all.iter().any(|model| model.pool.can_serve()) {
            return None;
        }
        self.all.iter().find_map(|model| model.dispute())
    }

    pub(crate) fn can_serve(&self) -> bool {
        self.all.iter().any(|model| model.pool.can_serve())
    }

    /// Returns the sums over all admission gates.
    pub(crate) fn gates(&self) -> GateTotals {
        let sum =
            |of: fn(&Gate) -> u32| self.all.iter().map(|model| of(&model.gate)).fold(0, u32::saturating_add);
        GateTotals {
            running: sum(|gate| gate.stats().running),
            waiting: sum(|gate| gate.stats().waiting),
            running_max: sum(|gate| gate.running_max()),
        }
    }
}

impl Gateway {
    /// Returns the target of a request. Waits up to `ready_timeout` for workers that have yet to report their
    /// model. Fails when no model has this name, or when its workers disagree on it.
    pub(crate) async fn target(
        &self,
        model: Option<&str>,
        session: Option<u64>,
        ready_timeout: Duration,
    ) -> Result<Target, ApiError> {
        let deadline = tokio::time::Instant::now() + ready_timeout;
        loop {
            let changed = self.fleet.changed.notified();
            match self.models.resolve(model, session) {
                Ok(target) => {
                    if let Some(error) = target.model.dispute() {
                        return Err(error);
                    }
                    if !target.model.pool.roster().is_empty() {
                        return Ok(target);
                    }
                }
                Err(error) => {
                    if let Some(dispute) = self.models.iter().find_map(|model| model.dispute()) {
                        return Err(dispute);
                    }
                    // The name may be that of a pool whose workers have yet to report it.
                    let may_come =
                        |model: &Arc<Model>| model.pool.model().is_empty() && model.pool.has_workers();
                    // Or discovery has yet to find the first worker.
                    let finds_first = self.discovery().is_some() && self.fleet.workers().is_empty();
                    if !finds_first && !self.models.iter().any(may_come) {
                        return Err(error);
                    }
                }
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Err(ApiError::unavailable("No worker is available."));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use router_fleet::testing::{config, ready_pools};
    use router_fleet::{Fleet, PoolConfig};
    use router_policy::Policy;

    use super::*;

    /// Pools `gateway`, `b` and `c` with models of their names in capitals and so many ready workers each. `gateway` falls back
    /// to `b` and then `c`.
    fn models(workers: [usize; 3]) -> (Arc<Fleet>, Models) {
        let mut config = config(Policy::default());
        let first = config.pools[0].clone();
        config.pools = ["gateway", "b", "c"]
            .map(|name| PoolConfig {
                name: name.to_owned(),
                model: Some(name.to_uppercase()),
                aliases: vec![format!("alias-{name}")],
                ..first.clone()
            })
            .into();
        let fleet = ready_pools(config, &workers, 16);
        let fallback = |name: &str| match name {
            "gateway" => vec!["b".to_owned(), "c".to_owned()],
            _ => Vec::new(),
        };
        let all = fleet.pools().iter().map(|pool| {
            let model = Target::for_tests().model;
            let model = Arc::into_inner(model).expect("it is nobody else's");
            Arc::new(Model { pool: Arc::clone(pool), fallback: fallback(&pool.name), ..model })
        });
        let split = Split {
            model: "split".to_owned(),
            pools: vec![("gateway".to_owned(), 90), ("b".to_owned(), 10), ("c".to_owned(), 0)],
        };
        let models = Models { all: all.collect(), splits: vec![split], inside_max: 1 };
        (fleet, models)
    }

    fn pool_of(models: &Models, name: Option<&str>, session: u64) -> String {
        let target = models.resolve(name, Some(session));
        target.map_or_else(|error| error.status.as_u16().to_string(), |target| target.model.pool.name.clone())
    }

    #[tokio::test]
    async fn names_lead_to_their_pools_and_to_fallbacks_while_those_cannot_serve() {
        let (_fleet, all) = models([2, 2, 2]);
        for (name, pool) in [("GATEWAY", "gateway"), ("alias-b", "b"), ("C", "c"), ("c", "404"), ("", "404")]
        {
            assert_eq!(pool_of(&all, Some(name), 1), pool, "{name:?}");
        }
        assert_eq!(pool_of(&all, None, 1), "400", "several models, and none is named");
        assert_eq!(all.names(), ["GATEWAY", "alias-gateway", "B", "alias-b", "C", "alias-c", "split"]);
        let (_fleet, first_away) = models([0, 2, 2]);
        assert_eq!(pool_of(&first_away, Some("GATEWAY"), 1), "b");
        let (_fleet, two_away) = models([0, 0, 2]);
        assert_eq!(pool_of(&two_away, Some("GATEWAY"), 1), "c", "the next in order");
        assert_eq!(pool_of(&two_away, Some("B"), 1), "b", "it has no fallback, and its requests wait");
        assert_eq!(pool_of(&two_away, None, 1), "c", "the only one with workers");
        let (_fleet, all_away) = models([0, 0, 0]);
        assert_eq!(pool_of(&all_away, Some("GATEWAY"), 1), "gateway");
        assert!(!all_away.can_serve());
    }

    #[tokio::test]
    async fn a_split_keeps_its_weights_and_its_conversations() {
        let (_fleet, all) = models([2, 2, 2]);
        const DRAWS: u64 = 100_000;
        // Numbers of sessions are hashes: even over their range.
        let session = |number: u64| number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut second = 0;
        for number in 0..DRAWS {
            let pool = pool_of(&all, Some("split"), session(number));
            assert_eq!(pool, pool_of(&all, Some("split"), session(number)), "a conversation stays");
            assert!(pool == "gateway" || pool == "b", "a weight of 0 is never drawn");
            second += u64::from(pool == "b");
        }
        assert!((DRAWS * 98 / 1000..=DRAWS * 102 / 1000).contains(&second), "{second} of {DRAWS}");
        let (_fleet, one_away) = models([0, 2, 2]);
        assert!((0..1000).all(|number| pool_of(&one_away, Some("split"), session(number)) == "b"));
        let random: std::collections::HashSet<String> = (0..500)
            .filter_map(|_| all.resolve(Some("split"), None).ok())
            .map(|t| t.model.pool.name.clone())
            .collect();
        assert_eq!(random.len(), 2, "without a conversation it is drawn");
    }
}
