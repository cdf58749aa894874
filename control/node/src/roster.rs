//! Workers and pools of the configuration and the command line.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use control_config::{PoolSettings, Settings, weight_of};
use router_engines::dialect::{Engine, Hints, Role};
use router_engines::key::EngineKeys;
use router_fleet::{DEFAULT_POOL, FleetConfig, FleetSpec, PoolConfig, RoutingPolicy, WorkerSpec};
use router_gateway::{AccessConfig, Formats, ModelConfig, Split};
use router_policy::{Policy, Strategy};
use router_tokens::ModelText;

use crate::compose::some;
use crate::{compose, secret};

/// Workers given on the command line.
#[derive(Args, Clone, Default)]
pub(crate) struct Workers {
    /// URL of a worker. May be given several times.
    #[arg(long = "worker", value_name = "URL")]
    workers: Vec<String>,
    /// URL of a worker that prefills for decode workers, if its engine does not report this itself (vLLM).
    #[arg(long = "prefill-worker", value_name = "URL")]
    prefill: Vec<String>,
    /// URL of a worker that decodes from prompts that prefill workers computed, if its engine does not report
    /// this itself.
    #[arg(long = "decode-worker", value_name = "URL")]
    decode: Vec<String>,
}

impl Workers {
    /// Returns the URLs of all workers.
    pub(crate) fn urls(&self) -> Vec<&str> {
        let all = [&self.workers, &self.prefill, &self.decode].into_iter().flatten();
        all.map(String::as_str).collect()
    }
}

/// Returns the workers of the command line, or else of `[gateway]`, and those of the pools, with their
/// engines' keys.
pub(crate) fn workers(settings: &Settings, given: &Workers, keys: &EngineKeys) -> Result<Vec<WorkerSpec>> {
    let gateway = &settings.gateway;
    let of_gateway = if given.workers.len() + given.prefill.len() + given.decode.len() > 0 {
        [&given.workers, &given.prefill, &given.decode]
    } else {
        [&gateway.workers, &gateway.prefill_workers, &gateway.decode_workers]
    };
    let mut all: Vec<WorkerSpec> = Vec::new();
    let mut add = |pool: &str, lists: [&Vec<String>; 3]| {
        for (urls, role) in lists.into_iter().zip([None, Some(Role::Prefill), Some(Role::Decode)]) {
            all.extend(urls.iter().map(|url| WorkerSpec {
                role,
                pool: pool.to_owned(),
                ..WorkerSpec::new(url)
            }));
        }
    };
    add(DEFAULT_POOL, of_gateway);
    for pool in &settings.pools {
        add(&pool.name, [&pool.workers, &pool.prefill_workers, &pool.decode_workers]);
    }
    let pools = pools(settings);
    for worker in &mut all {
        let pool = pools.iter().find(|pool| pool.name == worker.pool);
        let is_outside = pool.is_some_and(|pool| pool.engine == Some(Engine::OpenAi));
        worker.key = secret::of_configured(keys, &worker.url, is_outside);
    }
    let spec = FleetSpec { version: 1, workers: all };
    spec.check(|name| pools.iter().any(|pool| pool.name == name))?;
    Ok(spec.workers)
}

/// Returns an error if the configuration and the command line name no worker.
pub(crate) fn require_workers(workers: &[WorkerSpec]) -> Result<()> {
    if workers.is_empty() {
        bail!(
            "no workers: give --worker URL, or `gateway.workers` or a source of `[discovery]` in the configuration"
        );
    }
    Ok(())
}

/// Returns the routing policy of `[router]`.
pub(crate) fn routing(settings: &Settings) -> RoutingPolicy {
    let router = &settings.router;
    RoutingPolicy {
        policy: Policy {
            // The configuration admits only known names.
            strategy: Strategy::from_name(&router.strategy).unwrap_or_default(),
            block_cost: router_policy::BlockCost {
                prefill: router.prefill_weight,
                credit: [1.0, router.host_credit, router.disk_credit, router.remote_credit],
                request: router.request_weight,
            },
            temperature: router.temperature,
            warm_up_share: router.warm_up_share,
        },
        disaggregate_above_tokens: router.disaggregate_above_tokens as usize,
    }
}

fn pools(settings: &Settings) -> Vec<PoolConfig> {
    let gateway = &settings.gateway;
    let routing = routing(settings);
    let first = PoolConfig {
        name: DEFAULT_POOL.to_owned(),
        model: some(&gateway.model).or_else(|| some(&settings.engine.model_name)),
        engine: Engine::from_name(&gateway.engine),
        aliases: Vec::new(),
        has_tokenizer: !gateway.model_folder.is_empty() || compose::model_folder(settings).is_some(),
        routing,
        strategy: None,
    };
    let of = |pool: &PoolSettings| PoolConfig {
        name: pool.name.clone(),
        model: Some(model_of(pool)),
        engine: Engine::from_name(&pool.engine),
        aliases: pool.aliases.clone(),
        has_tokenizer: !pool.model_folder.is_empty(),
        routing,
        strategy: Strategy::from_name(&pool.strategy),
    };
    std::iter::once(first).chain(settings.pools.iter().map(of)).collect()
}

fn model_of(pool: &PoolSettings) -> String {
    some(&pool.model).unwrap_or_else(|| pool.name.clone())
}

/// Returns the fleet configuration of a gateway, without its workers.
pub(crate) fn fleet(settings: &Settings, access: &AccessConfig, keys: EngineKeys) -> FleetConfig {
    let (gateway, router) = (&settings.gateway, &settings.router);
    FleetConfig {
        pools: pools(settings),
        hints: Hints { events: some(&gateway.kv_events), replay: some(&gateway.kv_replay), model: None },
        keys,
        tls: access.tls.clone(),
        index_memory_max: router.index_memory.0 as usize,
        approximate_ttl: router.approximate_ttl,
        peers: gateway.peers.clone(),
        stores: gateway.stores.clone(),
        peer_key: access.peer_key.clone(),
        snapshot_file: some(&gateway.snapshot_file).map(Into::into),
        snapshot_interval: gateway.snapshot_interval,
        health_interval: gateway.health_interval,
        health_timeout: gateway.health_timeout,
        health_misses: gateway.health_misses as u32,
    }
}

/// Returns the models of all pools, as far as the gateway's configuration describes them.
pub(crate) fn models(settings: &Settings) -> Result<Vec<ModelConfig>> {
    let gateway = &settings.gateway;
    let config = |pool: &str, text: ModelText, parsers: [&str; 2], requests_max: u64, fallback: &[String]| {
        let template = text.template.as_ref().map(|template| template.source());
        let most = if requests_max == 0 { gateway.requests_max } else { requests_max };
        ModelConfig {
            pool: pool.to_owned(),
            formats: Formats::new(parsers[0], parsers[1], template),
            requests_max: most as usize,
            fallback: fallback.to_vec(),
            text,
        }
    };
    let parsers = [gateway.tool_parser.as_str(), gateway.reasoning_parser.as_str()];
    let mut all = vec![config(DEFAULT_POOL, gateway_text(settings)?, parsers, 0, &gateway.fallback)];
    for pool in &settings.pools {
        let mut text = match pool.model_folder.as_str() {
            "" => ModelText::tiny().context("built-in model")?,
            folder => {
                let text = ModelText::from_folder(Path::new(folder));
                text.with_context(|| format!("pool {}: model_folder", pool.name))?
            }
        };
        text.tokenizer.remember(gateway.token_cache.0);
        let parsers = [pool.tool_parser.as_str(), pool.reasoning_parser.as_str()];
        all.push(config(&pool.name, text, parsers, pool.requests_max, &pool.fallback));
    }
    Ok(all)
}

/// Returns the tokenizer and the chat template for the gateway's own workers.
fn gateway_text(settings: &Settings) -> Result<ModelText> {
    let mut text = match settings.gateway.model_folder.as_str() {
        "" => compose::model_text(settings)?,
        folder => ModelText::from_folder(Path::new(folder)).context("gateway.model_folder")?,
    };
    text.tokenizer.remember(settings.gateway.token_cache.0);
    Ok(text)
}

/// Returns the model names whose requests are split among pools. The configuration has already been
/// validated.
pub(crate) fn splits(settings: &Settings) -> Vec<Split> {
    let of = |split: &control_config::SplitSettings| {
        let sides = split.pools.iter().filter_map(|side| weight_of(side));
        Split {
            model: split.model.clone(),
            pools: sides.map(|(pool, weight)| (pool.to_owned(), weight)).collect(),
        }
    };
    settings.splits.iter().map(of).collect()
}
