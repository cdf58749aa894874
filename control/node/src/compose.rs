//! Conversion of the settings into the configurations of the other crates.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use control_config::Settings;
use dataplane_memory::PageSize;
use dataplane_rails::Transport;
use dataplane_transfer::{HeadRange, Limits, PieceLayout};
use kvstore_block::BlockLayout;
use router_access::MediaPolicy;
use router_engines::dialect::legs::Protocol;
use router_engines::key::ApiKey;
use router_fleet::WorkerSpec;
use router_gateway::{
    AccessConfig, Explain, GatewayConfig, GuardrailConfig, JwksSource, TextSource, TokenConfig, Tuning,
};
use router_tokens::ModelText;
use router_trace::TraceConfig;
use tools_engine::model::{Model, ModelConfig};
use tools_engine::{EngineConfig, KvPool};

use crate::roster;

/// Name of the built-in model.
const TINY_MODEL_NAME: &str = "kvasir-tiny";

pub(crate) fn model_folder(settings: &Settings) -> Option<&Path> {
    let folder = &settings.engine.model_folder;
    (!folder.is_empty()).then(|| Path::new(folder))
}

pub(crate) fn model_name(settings: &Settings) -> String {
    let given = &settings.engine.model_name;
    if !given.is_empty() {
        return given.clone();
    }
    let folder = model_folder(settings).and_then(Path::file_name);
    folder.map_or_else(|| TINY_MODEL_NAME.to_owned(), |name| name.to_string_lossy().into_owned())
}

pub(crate) fn model_config(settings: &Settings) -> Result<ModelConfig> {
    let mut config = match model_folder(settings) {
        Some(folder) => ModelConfig::from_folder(folder)?,
        None => ModelConfig::tiny(),
    };
    config.kv_f32 = kv_f32(settings, config.kv_f32);
    Ok(config)
}

fn kv_f32(settings: &Settings, of_model: bool) -> bool {
    match settings.engine.kv_type.as_str() {
        "bf16" => false,
        "f32" => true,
        _ => of_model,
    }
}

pub(crate) fn model(settings: &Settings) -> Result<Model> {
    let model = match model_folder(settings) {
        Some(folder) => match some(&settings.engine.weights_folder) {
            None => Model::from_folder(folder)?,
            Some(images) => {
                let began = std::time::Instant::now();
                let image =
                    Path::new(&images).join(format!("{}.weights", model_name(settings).replace('/', "-")));
                let (model, was_mapped) = Model::from_folder_and_image(folder, &image)?;
                tracing::info!(was_mapped, took = ?began.elapsed(), "weights");
                model
            }
        },
        None => Model::tiny(settings.engine.seed),
    };
    let kv_f32 = kv_f32(settings, model.config().kv_f32);
    Ok(model.with_kv_f32(kv_f32))
}

pub(crate) fn model_text(settings: &Settings) -> Result<ModelText> {
    match model_folder(settings) {
        Some(folder) => ModelText::from_folder(folder).context("model folder"),
        None => ModelText::tiny().context("built-in model"),
    }
}

pub(crate) fn engine(settings: &Settings, model: &ModelConfig, threads: usize) -> EngineConfig {
    let engine = &settings.engine;
    EngineConfig {
        batch_tokens_max: engine.batch_tokens_max as usize,
        sequences_max: engine.sequences_max as usize,
        waiting_max: engine.waiting_max as usize,
        context_tokens: model.context_tokens.min(engine.context_tokens as usize),
        threads,
        transfer_deadline: settings.transfer.deadline,
        offload_at_once: settings.host_tier.write == "through",
        event_tokens: settings.worker.event_tokens,
    }
}

pub(crate) fn pages(settings: &Settings) -> PageSize {
    if settings.transfer.huge_pages { PageSize::HugeIfAvailable } else { PageSize::Standard }
}

/// Returns the number of blocks of the host tier.
pub(crate) fn host_blocks(settings: &Settings, layout: &BlockLayout) -> usize {
    settings.host_tier.capacity.0 as usize / layout.block_bytes()
}

/// Returns the bytes of a worker's KV pool, which a NIC registers; `None` if the model cannot be read.
pub(crate) fn slab_bytes(settings: &Settings) -> Option<u64> {
    let layout =
        KvPool::layout_of(&model_config(settings).ok()?, settings.engine.block_tokens as usize).ok()?;
    Some(layout.block_bytes() as u64 * settings.engine.blocks)
}

pub(crate) fn pieces(layout: &BlockLayout, model_fingerprint: u64) -> PieceLayout {
    PieceLayout {
        layers: layout.layers,
        // The heads of one token are contiguous.
        rows: u32::from(layout.parts) * layout.tokens,
        heads: HeadRange { first: 0, count: layout.kv_heads as u16 },
        head_bytes: layout.head_dim * layout.element.bytes() as u32,
        fingerprint: layout.fingerprint() ^ model_fingerprint,
    }
}

pub(crate) fn limits(settings: &Settings) -> Limits {
    Limits {
        transfers_max: settings.transfer.transfers_max as usize,
        lease: settings.transfer.lease,
        reconnect_max: settings.transfer.reconnect_max,
        seed: u64::from(std::process::id()),
        ..Limits::default()
    }
}

/// Returns the transports to use, best first.
pub(crate) fn transports(settings: &Settings) -> Vec<Transport> {
    let named = |transport: &Transport| transport.name() == settings.transfer.transport;
    match Transport::HOST.into_iter().find(named) {
        Some(transport) => vec![transport],
        None => Transport::HOST.to_vec(),
    }
}

pub(crate) fn socket_folder(settings: &Settings) -> PathBuf {
    match settings.transfer.socket_folder.as_str() {
        "" => std::env::temp_dir(),
        folder => PathBuf::from(folder),
    }
}

/// Environment variable with the secret from which tenants' cache salts are derived.
const SALT_SECRET: &str = "KVASIR_SALT_SECRET";

/// Environment variable with the key that gateways of one fleet share.
pub(crate) const PEER_KEY: &str = "KVASIR_PEER_KEY";

pub(crate) fn peer_key() -> Option<String> {
    std::env::var(PEER_KEY).ok().filter(|key| !key.is_empty())
}

/// Whether clients of the gateway must show a key or a token.
pub(crate) fn is_closed(settings: &Settings) -> bool {
    let access = &settings.access;
    [&access.keys_file, &access.jwks_file, &access.jwks_url, &access.token_issuer]
        .into_iter()
        .any(|name| !name.is_empty())
}

/// Returns the token configuration; `None` if neither keys nor an issuer of bearer tokens are set.
pub(crate) fn tokens(settings: &Settings) -> Result<Option<TokenConfig>> {
    let access = &settings.access;
    let jwks = match (some(&access.jwks_file), some(&access.jwks_url)) {
        (Some(_), Some(_)) => {
            bail!("`access.jwks_file` and `access.jwks_url` are both set: the keys are in one place")
        }
        (Some(file), None) => JwksSource::File(file.into()),
        (None, Some(url)) => JwksSource::Url(url),
        (None, None) if access.token_issuer.is_empty() => return Ok(None),
        (None, None) => JwksSource::Issuer,
    };
    Ok(Some(TokenConfig {
        jwks,
        issuer: access.token_issuer.clone(),
        audience: access.token_audience.clone(),
        default_tenant: some(&access.token_default_tenant),
    }))
}

/// Environment variable with headers for the trace collector.
const TRACE_HEADERS: &str = "KVASIR_TRACE_HEADERS";

pub(crate) fn trace(settings: &Settings, listen: SocketAddr) -> Result<Option<TraceConfig>> {
    let trace = &settings.trace;
    let Some(endpoint) = some(&trace.endpoint) else { return Ok(None) };
    let headers = std::env::var(TRACE_HEADERS).unwrap_or_default();
    let headers = headers.split(',').filter(|header| !header.trim().is_empty()).map(|header| {
        let (name, value) =
            header.split_once('=').with_context(|| format!("{TRACE_HEADERS}: not name=value"))?;
        Ok((name.trim().to_owned(), value.trim().to_owned()))
    });
    let read = |file: String| std::fs::read(&file).with_context(|| file);
    Ok(Some(TraceConfig {
        endpoint,
        service_name: trace.service_name.clone(),
        instance: format!("{}:{}", host_name(), listen.port()),
        sample_ratio: trace.sample_ratio,
        headers: headers.collect::<Result<_>>()?,
        authority: some(&settings.tls.upstream_ca_file).map(read).transpose()?,
        queue_max: trace.queue_max as usize,
        ..TraceConfig::default()
    }))
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

pub(crate) fn access(settings: &Settings, workers: &[WorkerSpec]) -> Result<AccessConfig> {
    let (access, gateway) = (&settings.access, &settings.gateway);
    let mut urls: Vec<&str> = workers.iter().map(|worker| worker.url.as_str()).collect();
    urls.extend(settings.gateway.peers.iter().map(String::as_str));
    urls.extend(settings.gateway.stores.iter().map(String::as_str));
    urls.push(&access.jwks_url);
    urls.push(&settings.guardrail.url);
    let tokens = tokens(settings)?;
    if tokens.as_ref().is_some_and(|tokens| matches!(tokens.jwks, JwksSource::Issuer)) {
        urls.push(&access.token_issuer);
    }
    Ok(AccessConfig {
        keys_file: some(&access.keys_file).map(PathBuf::from),
        tokens,
        tls: crate::tls::upstream(settings, &urls)?,
        server_tls: None,
        needs_certificate: settings.tls.client_certificate == "required",
        salt_secret: std::env::var(SALT_SECRET).ok().filter(|secret| !secret.is_empty()),
        peer_key: peer_key(),
        own_salts: access.own_salts,
        allowed_fields: access.allowed_fields.clone(),
        client_templates: gateway.client_templates,
        template_variables: gateway.template_variables.clone(),
        media: MediaPolicy {
            schemes: gateway.media_schemes.clone(),
            hosts: gateway.media_hosts.clone(),
            private_hosts: gateway.media_private_hosts,
            count_max: gateway.media_max as usize,
            data_bytes_max: gateway.media_data_max.0 as usize,
        },
        explain: match gateway.explain.as_str() {
            "all" => Explain::All,
            "none" => Explain::Nobody,
            _ => Explain::Administrators,
        },
        audit_file: some(&access.audit_file).map(PathBuf::from),
        waiting_max: access.waiting_max as usize,
        tenant_waiting_max: access.tenant_waiting_max as usize,
        wait_max: access.wait_max,
    })
}

pub(crate) fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

pub(crate) fn gateway(
    settings: &Settings,
    access: AccessConfig,
    listen: SocketAddr,
) -> Result<GatewayConfig> {
    let gateway = &settings.gateway;
    Ok(GatewayConfig {
        models: roster::models(settings)?,
        splits: roster::splits(settings),
        protocol: match gateway.handoff.as_str() {
            "kvasir" => Some(Protocol::Kvasir),
            "nixl" => Some(Protocol::Nixl),
            "mooncake" => Some(Protocol::Mooncake),
            "bootstrap" => Some(Protocol::Bootstrap),
            "tensorrt-llm" => Some(Protocol::TensorRtLlm),
            _ => None,
        },
        mooncake_bootstrap: gateway.mooncake_bootstrap.clone(),
        access,
        trace: trace(settings, listen)?,
        text: match gateway.text.as_str() {
            "engine" => TextSource::Engine,
            "gateway" => TextSource::Gateway,
            _ => TextSource::Auto,
        },
        body_bytes_max: gateway.body_max.0 as usize,
        cors_origins: gateway.cors_origins.clone(),
        request_memory_max: gateway.request_memory.0 as usize,
        compute_threads: match gateway.compute_threads {
            0 => crate::process::available_cores(),
            threads => threads as usize,
        },
        write_timeout: gateway.write_timeout,
        guardrail: guardrail(settings)?,
        database: database(settings),
        batch_requests_max: settings.database.batch_requests as usize,
        follows_engines: gateway.follow_engines,
    })
}

/// Environment variable with the key for the guardrail service.
const GUARDRAIL_KEY: &str = "KVASIR_GUARDRAIL_KEY";

fn guardrail(settings: &Settings) -> Result<Option<GuardrailConfig>> {
    let guardrail = &settings.guardrail;
    let Some(url) = some(&guardrail.url) else { return Ok(None) };
    let host = url.strip_prefix("http://").or(url.strip_prefix("https://"));
    if host.is_none_or(|host| host.is_empty() || host.trim_end_matches('/').contains('/')) {
        anyhow::bail!("guardrail.url must be a URL without a path, http or https: {url:?}");
    }
    let key = std::env::var(GUARDRAIL_KEY).ok().filter(|key| !key.is_empty());
    let key = key.map(|key| ApiKey::new(&key).with_context(|| format!("{GUARDRAIL_KEY} is no plain text")));
    Ok(Some(GuardrailConfig {
        url,
        key: key.transpose()?,
        requests: guardrail.check != "answers",
        answers: guardrail.check != "requests",
        timeout: guardrail.timeout,
        passes_on_failure: guardrail.on_failure == "pass",
    }))
}

fn database(settings: &Settings) -> Option<router_database::Config> {
    let database = &settings.database;
    Some(router_database::Config {
        path: some(&database.file)?.into(),
        keep: database.keep,
        bytes_max: database.bytes_max.0,
        tenant_bytes_max: database.tenant_bytes_max.0,
    })
}

/// Returns the values that may change while a gateway runs: the keys declared `live`.
pub(crate) fn tuning(settings: &Settings) -> Tuning {
    let gateway = &settings.gateway;
    Tuning {
        routing: roster::routing(settings),
        answer_within: gateway.answer_within,
        stall: gateway.stall,
        retries: gateway.retries as u32,
        hedge_after: gateway.hedge_after,
        request_time_max: gateway.request_time_max,
        worker_wait: gateway.worker_wait,
        prompt_cache_retention_max: gateway.prompt_cache_retention_max,
    }
}
