//! A pool: one model under its names, and the workers that serve it.
//!
//! Workers of a pool have one model and one block size; a worker whose description does not fit is shown with the reason
//! and is not served. Decisions read [`Pool::roster`], one atomic load; it is replaced whenever a worker begins another run
//! or leaves.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use arc_swap::{ArcSwap, Guard};
use router_engines::dialect::{Description, Engine, Role};
use router_policy::{Policy, Strategy};

use crate::config::{PoolConfig, RoutingPolicy};
use crate::load::LearnedCoefficients;
use crate::roster::Roster;
use crate::served_model::{ModelMatch, ServedModel};
use crate::worker::{RankRef, Worker, able_to_decode};

/// A model and the workers that serve it.
#[derive(Debug)]
pub struct Pool {
    /// Name of the pool in the roster.
    pub name: String,
    /// Engine of the workers, when the operator configures it.
    pub(crate) engine: Option<Engine>,
    /// Other names of the pool's model.
    pub aliases: Vec<String>,
    /// The gateway has the model's own tokenizer.
    pub has_tokenizer: bool,
    /// Whether the operator configures the model's name.
    pub has_configured_model: bool,
    strategy: Option<Strategy>,
    routing: ArcSwap<RoutingPolicy>,
    pub(crate) model: ServedModel,
    roster: ArcSwap<Roster>,
    /// Held while the list of ranks is rebuilt.
    pub(crate) remaking: Mutex<()>,
    /// Coefficients of the time to the first token, learned from all workers.
    pub learned_coefficients: LearnedCoefficients,
}

fn with_strategy(routing: RoutingPolicy, strategy: Option<Strategy>) -> RoutingPolicy {
    let strategy = strategy.unwrap_or(routing.policy.strategy);
    RoutingPolicy { policy: Policy { strategy, ..routing.policy }, ..routing }
}

impl Pool {
    pub(crate) fn new(config: &PoolConfig) -> Arc<Self> {
        Arc::new(Self {
            name: config.name.clone(),
            engine: config.engine,
            aliases: config.aliases.clone(),
            has_tokenizer: config.has_tokenizer,
            has_configured_model: config.model.is_some(),
            strategy: config.strategy,
            routing: ArcSwap::from_pointee(with_strategy(config.routing, config.strategy)),
            model: ServedModel::new(config.model.clone()),
            roster: ArcSwap::default(),
            remaking: Mutex::new(()),
            learned_coefficients: LearnedCoefficients::default(),
        })
    }

    /// A pool without workers.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn for_tests() -> Arc<Self> {
        let routing = RoutingPolicy { policy: Policy::default(), disaggregate_above_tokens: usize::MAX };
        Self::new(&PoolConfig {
            name: crate::DEFAULT_POOL.to_owned(),
            model: None,
            engine: None,
            aliases: Vec::new(),
            has_tokenizer: true,
            routing,
            strategy: None,
        })
    }

    /// Every rank that has described itself, as decisions see it. Callers must not hold the guard for long.
    pub fn roster(&self) -> Guard<Arc<Roster>> {
        self.roster.load()
    }

    pub(crate) fn set_roster(&self, ranks: Vec<RankRef>) {
        self.roster.store(Arc::new(Roster::new(ranks)));
    }

    /// Engine of the workers, when the operator configures it.
    #[must_use]
    pub fn engine(&self) -> Option<Engine> {
        self.engine
    }

    /// Rules that assign requests to the workers.
    pub fn routing(&self) -> Guard<Arc<RoutingPolicy>> {
        self.routing.load()
    }

    /// Replaces the routing rules; the pool's own strategy stays.
    pub fn set_routing(&self, routing: RoutingPolicy) {
        self.routing.store(Arc::new(with_strategy(routing, self.strategy)));
    }

    /// Name of the pool's model at the engines; empty until the workers have agreed on one.
    #[must_use]
    pub fn model(&self) -> Arc<String> {
        self.model.name().unwrap_or_default()
    }

    /// Error text for clients while requests are refused because the workers serve different models.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        self.model.refusal()
    }

    /// Error text for the operator, which also names the workers.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.model.problem()
    }

    /// Whether some worker can decode, and the workers' model is known.
    #[must_use]
    pub fn can_serve(&self) -> bool {
        let roster = self.roster();
        let can_decode = able_to_decode(&roster, None);
        !self.model.is_disputed() && roster.iter().any(|rank| rank.is_ready() && can_decode(rank))
    }

    /// Whether the roster has workers of this pool, in whatever state.
    #[must_use]
    pub fn has_workers(&self) -> bool {
        self.model.has_workers()
    }

    /// Whether a request may ask for the pool's model by this name. Adapters are not among its names.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        self.aliases.iter().any(|alias| alias == name) || *self.model() == name
    }

    /// Whether one of its workers serves an adapter of this name.
    #[must_use]
    pub fn has_adapter(&self, name: &str) -> bool {
        self.roster().iter().any(|rank| rank.serves(Some(name)))
    }

    /// Whether every worker takes and returns token ids, and computes both prompt and answer.
    #[must_use]
    pub fn supports_token_ids(&self) -> bool {
        let roster = self.roster();
        !roster.is_empty()
            && roster.iter().all(|rank| {
                let engine = rank.run.description.engine;
                engine.dialect().returns_token_ids()
                    && (engine == Engine::Native || rank.run.role == Role::Both)
            })
    }

    /// Whether all workers are the reference engine, whose text is made by the gateway. False while no worker is known: the
    /// kind of the only worker must not be guessed while it begins another run.
    #[must_use]
    pub fn is_native(&self) -> bool {
        let roster = self.roster();
        !roster.is_empty() && roster.iter().all(|rank| rank.run.description.engine == Engine::Native)
    }

    /// Longest sequence that every ready worker takes; 0 when none is ready.
    #[must_use]
    pub fn context_tokens(&self) -> usize {
        let roster = self.roster();
        let ready = roster.iter().filter(|rank| rank.is_ready());
        ready.map(|rank| rank.run.description.context_tokens).min().unwrap_or(0)
    }

    /// Decides whether a worker with this description can be used.
    pub(crate) fn judge(&self, worker: &Worker, description: &Description) -> ModelMatch {
        let verdict = self.model.tell(&worker.name, &description.models, Instant::now());
        if verdict != ModelMatch::Serves {
            return verdict;
        }
        let roster = self.roster();
        let other = roster.iter().find(|other| other.worker.name != worker.name && other.worker.answers());
        let expected = other.map_or(description.block_tokens, |other| other.run.description.block_tokens);
        if description.block_tokens == 0 || description.block_tokens != expected {
            return ModelMatch::Differs(format!(
                "its blocks have {} tokens, those of the others {expected}",
                description.block_tokens
            ));
        }
        ModelMatch::Serves
    }
}
