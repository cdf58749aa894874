//! Access control as configured: API keys and bearer tokens, limits, the gate before the workers, cache
//! salts and the audit log.
//!
//! Without a keys file and without tokens the gateway is open: all clients are one tenant without limits,
//! and a client's own salt and priority count. Where clients must show a certificate, a certificate alone
//! makes a client but not an administrator. The gate is always there.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, StatusCode};
use router_access::{
    Algorithm, AuditLog, BodyPolicy, CONVERSATIONS, ClaimNames, Credential, Decision, Grant, Jwks, JwtConfig,
    JwtVerifier, KeySet, KeyStore, LimitConfig, LimitTable, Limiter, MediaPolicy, Models, RANKED, Refresh,
    Refused, Salter, Scope, Screen, TEMPLATE_FIELDS, TableFull, TokenProblem, TokenVerdict,
};
use router_engines::client::EngineClient;
use router_fleet::{PeerMessageSource, SharedState};
use router_openai::{ApiError, RawBody, Surface};
use router_tls::{ClientTls, ServerTls};
use tokio::sync::Notify;

use crate::caller::Caller;
use crate::service::{Gateway, unix_time};

/// Longest time for an identity provider's response.
const FETCH_WITHIN: Duration = Duration::from_secs(10);
/// Shortest interval between two fetches of an identity provider's keys, whatever clients send.
const FETCH_EVERY_MIN: Duration = Duration::from_secs(5);
/// Keys older than this are fetched again.
const KEYS_AGE_MAX: Duration = Duration::from_secs(600);
/// Prefix of the names that the gateway adds to engines' extra arguments.
const OWN_NAMES: &str = "kvasir_";
/// Interval at which files are checked for changes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Source of an identity provider's keys (JWKS).
#[derive(Debug, Clone)]
pub enum JwksSource {
    /// A file; read again when it changes.
    File(PathBuf),
    /// A URL, fetched at intervals and when a token names an unknown key.
    Url(String),
    /// The URL that the issuer publishes (OpenID Connect Discovery 1.0).
    Issuer,
}

/// Bearer tokens of an identity provider.
#[derive(Debug, Clone)]
pub struct TokenConfig {
    /// Source of the provider's keys.
    pub jwks: JwksSource,
    /// Required issuer of a token.
    pub issuer: String,
    /// Required audience of a token.
    pub audience: String,
    /// Tenant of tokens that name none; without it they are refused.
    pub default_tenant: Option<String>,
}

impl TokenConfig {
    fn file(&self) -> Option<&std::path::Path> {
        match &self.jwks {
            JwksSource::File(file) => Some(file),
            _ => None,
        }
    }
}

/// Clients that are told which workers served a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Explain {
    /// Clients with an administrator's key; all clients where there are no keys.
    #[default]
    Administrators,
    /// All clients.
    All,
    /// No client.
    Nobody,
}

/// Settings of access.
#[derive(Debug, Clone, Default)]
pub struct AccessConfig {
    /// Keys of clients; read again when it changes.
    pub keys_file: Option<PathBuf>,
    /// Bearer tokens.
    pub tokens: Option<TokenConfig>,
    /// Key by which gateways of one fleet authenticate to each other.
    pub peer_key: Option<String>,
    /// TLS for outgoing https connections, except to clients.
    pub tls: Option<Arc<ClientTls>>,
    /// TLS of the listeners: the certificate that the gateway shows to clients.
    pub server_tls: Option<Arc<ServerTls>>,
    /// Clients must show a certificate. A certificate alone makes them clients, not administrators.
    pub needs_certificate: bool,
    /// Secret from which tenants' salts are derived. Without it a random secret of this run keeps caches
    /// apart.
    pub salt_secret: Option<String>,
    /// A client may keep its cache apart further by a salt of its own.
    pub own_salts: bool,
    /// Fields that steer engines and are passed on all the same.
    pub allowed_fields: Vec<String>,
    /// Clients may bring chat templates, and whatever templates read.
    pub client_templates: bool,
    /// Variables of the chat template that clients may set all the same.
    pub template_variables: Vec<String>,
    /// Images, sounds and videos that engines may be asked to fetch.
    pub media: MediaPolicy,
    /// Clients that are told which workers served a request.
    pub explain: Explain,
    /// File of the audit log, one line per request.
    pub audit_file: Option<PathBuf>,
    /// Largest number of requests that wait at the gate.
    pub waiting_max: usize,
    /// Largest number of waiting requests of one tenant.
    pub tenant_waiting_max: usize,
    /// Longest wait that a request is let into the queue for.
    pub wait_max: Duration,
}

/// Rate limits, as gateways of a fleet exchange them.
#[derive(Debug)]
pub(crate) struct SharedLimits(pub(crate) std::sync::Weak<Gateway>);

impl PeerMessageSource for SharedLimits {
    fn state(&self) -> HashMap<String, (u64, serde_json::Value)> {
        let Some(gateway) = self.0.upgrade() else { return HashMap::new() };
        let reports = gateway.access.limits.reports(gateway.access.now()).into_iter();
        let state = reports.map(|(name, report)| (name, (report.version(), serde_json::json!(report))));
        state.collect()
    }

    fn receive(&self, peer: u64, state: SharedState) {
        let Some(gateway) = self.0.upgrade() else { return };
        let read = |(name, value)| Some((name, serde_json::from_value(value).ok()?));
        let reports = state.into_iter().filter_map(read).collect();
        gateway.access.limits.take_reports(peer, reports, gateway.access.now());
    }

    fn forget(&self, peer: u64) {
        if let Some(gateway) = self.0.upgrade() {
            gateway.access.limits.forget_peer(peer);
        }
    }
}

/// All checks that a request passes before it reaches a worker.
pub(crate) struct Access {
    pub(crate) keys: Option<KeyStore>,
    tokens: Option<JwtVerifier>,
    /// Schedule for fetching the tokens' keys again.
    refresh: Arc<Refresh>,
    /// Notified when a token names an unknown key.
    wants_keys: Notify,
    limits: LimitTable,
    salter: Option<Salter>,
    policy: BodyPolicy,
    screen: Screen,
    pub(crate) audit: Option<AuditLog>,
    pub(crate) nobody: Arc<Grant>,
    start: Instant,
    /// Modification times of the files, taken before they were first read.
    stamps_first: Vec<Option<std::time::SystemTime>>,
    config: AccessConfig,
}

fn stamp(file: &std::path::Path) -> Option<std::time::SystemTime> {
    std::fs::metadata(file).ok()?.modified().ok()
}

fn read(file: &std::path::Path) -> Result<String, String> {
    std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))
}

fn verifier(config: &TokenConfig) -> Result<JwtVerifier, String> {
    if config.issuer.is_empty() || config.audience.is_empty() {
        return Err("bearer tokens need `access.token_issuer` and `access.token_audience`".to_owned());
    }
    let verifier = JwtVerifier::new(JwtConfig {
        issuers: vec![config.issuer.clone()],
        audiences: vec![config.audience.clone()],
        algorithms: vec![
            Algorithm::Rs256,
            Algorithm::Rs384,
            Algorithm::Rs512,
            Algorithm::Ps256,
            Algorithm::Es256,
            Algorithm::Es384,
            Algorithm::EdDsa,
        ],
        leeway: Duration::from_secs(30),
        prefix: String::new(),
        claims: ClaimNames::default(),
        default_tenant: config.default_tenant.as_deref().map(Arc::from),
        default_models: Models::All,
        default_priority: 0,
        priorities: (-100, 100),
        weight: 1,
        limits: LimitConfig::default(),
        tenant_limits: LimitConfig::default(),
    });
    let verifier = verifier.map_err(|error| error.to_string())?;
    match &config.jwks {
        JwksSource::File(file) => drop(verifier.set_keys(jwks(file)?)),
        // The keys are fetched once the gateway runs: a provider that is down for a moment does not prevent
        // the start.
        JwksSource::Url(url) => {
            parts(url).ok_or_else(|| bad_url("access.jwks_url", url))?;
        }
        JwksSource::Issuer => {
            let name = "access.token_issuer, without `access.jwks_file` and `access.jwks_url`,";
            parts(&config.issuer).ok_or_else(|| bad_url(name, &config.issuer))?;
        }
    }
    Ok(verifier)
}

fn bad_url(name: &str, url: &str) -> String {
    format!("{name} must be a URL, http or https: {url:?}")
}

/// Base and path of a URL.
fn parts(url: &str) -> Option<(&str, &str)> {
    let scheme = ["http://", "https://"].into_iter().find(|scheme| url.starts_with(scheme))?;
    let rest = &url[scheme.len()..];
    let at = rest.find('/').unwrap_or(rest.len());
    (at > 0).then_some((&url[..scheme.len() + at], &rest[at..]))
}

async fn fetch(url: &str, tls: Option<&Arc<ClientTls>>) -> Result<bytes::Bytes, String> {
    let (base, path) = parts(url).ok_or_else(|| bad_url("it", url))?;
    let client = EngineClient::new(base, tls);
    let path = if path.is_empty() { "/" } else { path };
    match tokio::time::timeout(FETCH_WITHIN, client.get(path)).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("{url}: no answer within {} s", FETCH_WITHIN.as_secs())),
    }
}

/// Fetches the keys of an identity provider.
async fn fetch_jwks(config: &TokenConfig, tls: Option<&Arc<ClientTls>>) -> Result<Jwks, String> {
    let url = match &config.jwks {
        JwksSource::Url(url) => url.clone(),
        _ => {
            let url = format!("{}/.well-known/openid-configuration", config.issuer.trim_end_matches('/'));
            let told: serde_json::Value = serde_json::from_slice(&fetch(&url, tls).await?)
                .map_err(|error| format!("{url}: {error}"))?;
            // Discovery 1.0, section 4.3: the issuer must be the one that was asked.
            if told["issuer"].as_str() != Some(config.issuer.as_str()) {
                return Err(format!("{url}: it speaks for the issuer {}", told["issuer"]));
            }
            let told = told["jwks_uri"].as_str().ok_or_else(|| format!("{url}: it names no jwks_uri"))?;
            // An attacker on a plain connection could replace the keys.
            if url.starts_with("https://") && !told.starts_with("https://") {
                return Err(format!("{url}: its jwks_uri {told} is not https"));
            }
            told.to_owned()
        }
    };
    let keys = fetch(&url, tls).await?;
    Jwks::parse(&keys).map_err(|error| format!("{url}: {error}"))
}

fn jwks(file: &std::path::Path) -> Result<Jwks, String> {
    let text = read(file)?;
    Jwks::parse(text.as_bytes()).map_err(|error| format!("{}: {error}", file.display()))
}

fn refused(status: StatusCode, message: impl Into<String>, code: &'static str) -> ApiError {
    ApiError::new(status, message, code)
}

impl Access {
    pub(crate) fn new(config: &AccessConfig) -> Result<Self, String> {
        let mut stamps_first = None;
        let keys = match &config.keys_file {
            None => None,
            Some(file) => {
                stamps_first = stamp(file);
                let keys = KeySet::parse(&read(file)?);
                Some(KeyStore::new(keys.map_err(|error| format!("{}:\n{error}", file.display()))?))
            }
        };
        let tokens = config.tokens.as_ref().map(verifier).transpose()?;
        let is_closed = keys.is_some() || tokens.is_some();
        let salter = match &config.salt_secret {
            Some(secret) => Some(Salter::new(secret.as_bytes(), config.own_salts)),
            // A random secret cannot be guessed; engines' caches start anew with each run of the gateway.
            None if is_closed => {
                let secret = router_access::new_secret().map_err(|error| error.to_string())?;
                Some(Salter::new(secret.as_bytes(), config.own_salts))
            }
            None => None,
        };
        let audit = config
            .audit_file
            .as_ref()
            .map(|file| AuditLog::open(file).map_err(|error| format!("{}: {error}", file.display())));
        let mut allowed = config.allowed_fields.clone();
        if config.client_templates {
            allowed.extend(TEMPLATE_FIELDS.map(str::to_owned));
        }
        let screen = Screen {
            allowed,
            template_variables: config.template_variables.clone(),
            media: config.media.clone(),
        };
        let nobody = Grant {
            name: "anonymous".into(),
            scope: Scope::Key,
            tenant: "anonymous".into(),
            is_admin: !is_closed && !config.needs_certificate,
            models: Models::All,
            limits: LimitConfig::default(),
            tenant_limits: LimitConfig::default(),
            priority: 0,
            weight: 1,
            expires: None,
        };
        Ok(Self {
            keys,
            tokens,
            refresh: Refresh::new(FETCH_EVERY_MIN, KEYS_AGE_MAX),
            wants_keys: Notify::new(),
            limits: LimitTable::default(),
            salter: salter.transpose().map_err(|error| error.to_string())?,
            policy: BodyPolicy { allowed: config.allowed_fields.clone() },
            screen,
            audit: audit.transpose()?,
            nobody: Arc::new(nobody),
            start: Instant::now(),
            stamps_first: vec![stamps_first, config.tokens.as_ref().and_then(|tokens| stamp(tokens.file()?))],
            config: config.clone(),
        })
    }

    /// Nanoseconds since the start of this run.
    pub(crate) fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Whether clients must say who they are.
    pub(crate) fn is_closed(&self) -> bool {
        self.keys.is_some() || self.tokens.is_some()
    }

    /// Returns the grant of a caller: by a valid key or token, else by a certificate that the keys file
    /// lists. (Clients of OpenAI's libraries cannot omit the key, so an invalid key does not invalidate a
    /// certificate.)
    pub(crate) fn identify(&self, caller: &Caller<'_>) -> Result<Arc<Grant>, ApiError> {
        if !self.is_closed() {
            return Ok(Arc::clone(&self.nobody));
        }
        self.by_credential(caller.headers).or_else(|error| self.by_certificate(caller).ok_or(error))
    }

    /// Returns the grant of the key with this name while the key is valid; for work that continues without
    /// its client.
    pub(crate) fn grant_named(&self, name: &str, tenant: &str) -> Option<Arc<Grant>> {
        if !self.is_closed() {
            return Some(Arc::clone(&self.nobody));
        }
        let keys = self.keys.as_ref()?.load();
        let grant = keys.named(name).filter(|grant| !grant.is_expired(unix_time()))?;
        (*grant.tenant == *tenant).then(|| Arc::clone(grant))
    }

    /// Limits of a tenant, as the keys file has them.
    pub(crate) fn tenant_limits(&self, tenant: &str) -> LimitConfig {
        self.keys.as_ref().and_then(|keys| keys.load().tenant_limits(tenant)).unwrap_or_default()
    }

    fn by_certificate(&self, caller: &Caller<'_>) -> Option<Arc<Grant>> {
        let shown = caller.certificate()?;
        let keys = self.keys.as_ref()?.load();
        let common_name = shown.common_name.as_deref();
        keys.find_certificate(&shown.uris, &shown.dns_names, common_name, unix_time()).cloned()
    }

    fn by_credential(&self, headers: &HeaderMap) -> Result<Arc<Grant>, ApiError> {
        let unauthorized = |message: &str| refused(StatusCode::UNAUTHORIZED, message, "invalid_api_key");
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        match Credential::from_headers(text("authorization"), text("x-api-key")) {
            Credential::Key(key) => {
                let known = self.keys.as_ref().and_then(|keys| keys.load().find(key, unix_time()).cloned());
                known.ok_or_else(|| unauthorized("The API key is not valid."))
            }
            Credential::Token(token) => {
                let Some(tokens) = &self.tokens else {
                    return Err(unauthorized("The API key is not valid."));
                };
                match tokens.verify(token, unix_time()) {
                    TokenVerdict::Valid(mut grant) => {
                        let keys = self.keys.as_ref().map(KeyStore::load);
                        if let Some(limits) = keys.and_then(|keys| keys.tenant_limits(&grant.tenant)) {
                            grant.tenant_limits = limits;
                        }
                        Ok(Arc::new(grant))
                    }
                    TokenVerdict::UnknownKey => {
                        self.wants_keys.notify_one();
                        Err(unauthorized("The token is signed with a key that is not known."))
                    }
                    TokenVerdict::Refused(problem) => Err(unauthorized(&says(&problem))),
                }
            }
            Credential::Missing => Err(unauthorized("An API key is needed: `Authorization: Bearer KEY`.")),
            _ => Err(unauthorized("The `Authorization` header is not understood.")),
        }
    }

    /// Allows administrators and other gateways of the fleet to ask about the gateway itself. An open
    /// gateway has no administrators: it allows callers on its own machine, and any caller of the
    /// administrators' listener.
    pub(crate) fn administrator(&self, caller: &Caller<'_>) -> Result<(), ApiError> {
        if self.shows_peer_key(caller) {
            return Ok(());
        }
        let grant = self.identify(caller)?;
        let (is_allowed, message) = match self.is_closed() {
            true => (grant.is_admin, "This needs an administrator's key."),
            false => (
                caller.is_administrators() || (grant.is_admin && caller.is_local()),
                "This path is served on this gateway's own machine, on `gateway.admin_listen`, or with an administrator's key.",
            ),
        };
        match is_allowed {
            true => Ok(()),
            false => Err(refused(StatusCode::FORBIDDEN, message, "forbidden")),
        }
    }

    /// Allows other gateways of the fleet. Messages among gateways move requests and carry all tenants'
    /// prefixes, so a peer must show the peer key, also to an open gateway. Without a peer key an open
    /// gateway trusts callers on its own machine; addresses of other hosts prove nothing, since every host
    /// behind the same address translation or ingress has them, too.
    pub(crate) fn peer(&self, caller: &Caller<'_>) -> Result<(), ApiError> {
        if self.is_closed() || self.shows_peer_key(caller) {
            return self.administrator(caller);
        }
        let is_believed =
            self.config.peer_key.is_none() && !self.config.needs_certificate && caller.is_local();
        match is_believed {
            true => Ok(()),
            false => {
                let message = "This is for gateways that show the same KVASIR_PEER_KEY.";
                Err(refused(StatusCode::FORBIDDEN, message, "forbidden"))
            }
        }
    }

    pub(crate) fn shows_peer_key(&self, caller: &Caller<'_>) -> bool {
        match (&self.config.peer_key, caller.headers.get("x-kvasir-peer")) {
            (Some(own), Some(given)) => is_equal(own.as_bytes(), given.as_bytes()),
            _ => false,
        }
    }

    /// Whether a client is told which workers its request met.
    pub(crate) fn explains(&self, grant: &Grant) -> bool {
        match self.config.explain {
            Explain::Administrators => grant.is_admin,
            Explain::All => true,
            Explain::Nobody => false,
        }
    }

    /// Refuses fields that would endanger engines, and names them by their path in the client's own body.
    pub(crate) fn screen(&self, body: &RawBody, surface: Surface) -> Result<(), ApiError> {
        let contents: &[&str] = match surface {
            Surface::Rerank | Surface::Score => &RANKED,
            _ => &CONVERSATIONS,
        };
        let checked = self.screen.check(contents, |name| body.get(name));
        checked.map_err(|objection| ApiError::invalid(&objection.param, objection.message))
    }

    /// Returns the limiters of a grant: its own and its tenant's.
    pub(crate) fn limiters(&self, grant: &Grant) -> Result<[Option<Arc<Limiter>>; 2], ApiError> {
        let now = self.now();
        let full = |_: TableFull| ApiError::unavailable("Too many clients are active.");
        let own = self.limits.get(grant.scope, &grant.name, grant.limits, now).map_err(full)?;
        let tenant = self.limits.get(Scope::Tenant, &grant.tenant, grant.tenant_limits, now).map_err(full)?;
        Ok([own, tenant])
    }

    /// Removes the fields of a body that would steer engines, and sets those that only the gateway may set.
    pub(crate) fn clean(&self, body: &mut RawBody, grant: &Grant) {
        body.retain(|name| match self.policy.field(name) {
            Decision::Strip => false,
            // The salt is derived from it.
            Decision::Replace if name == "cache_salt" => true,
            // Priorities count at the gate; engines without a priority scheduler refuse the field.
            Decision::Replace => !self.is_closed() && !matches!(name, "request_id" | "rid"),
            _ => true,
        });
        // Names with the gateway's own prefix have a meaning in the reference engine, even where the field
        // itself is allowed.
        if let Some(serde_json::Value::Object(mut extra)) = body.value("vllm_xargs") {
            let before = extra.len();
            extra.retain(|name, _| !name.starts_with(OWN_NAMES));
            if extra.len() < before {
                body.set("vllm_xargs", serde_json::Value::Object(extra).to_string());
            }
        }
        let own = body.text("cache_salt").ok().flatten().map(std::borrow::Cow::into_owned);
        if let Some(salt) = self.tenants_salt(grant, own.as_deref()) {
            // The salt's characters need no JSON escape.
            body.set("cache_salt", format!("\"{salt}\""));
        }
    }

    /// Returns the salt that keeps a tenant's cache apart; `None` when all clients are one tenant.
    pub(crate) fn tenants_salt(&self, grant: &Grant, own: Option<&str>) -> Option<String> {
        self.salt_of(&grant.tenant, own)
    }

    /// Returns the salt of the tenant with this name; `None` as for `tenants_salt`.
    pub(crate) fn salt_of(&self, tenant: &str, own: Option<&str>) -> Option<String> {
        let salter = self.salter.as_ref().filter(|_| self.is_closed())?;
        Some(salter.salt(tenant, own).as_str().to_owned())
    }

    /// Fetches the identity provider's keys if a fetch is wanted or due, and allowed now.
    async fn fetch_keys(&self, is_wanted: bool) {
        let (Some(tokens), Some(config)) = (&self.tokens, &self.config.tokens) else { return };
        if config.file().is_some() || !(is_wanted || self.refresh.is_due(self.now())) {
            return;
        }
        let Some(ticket) = self.refresh.begin(self.now()) else { return };
        match fetch_jwks(config, self.config.tls.as_ref()).await {
            Ok(keys) => {
                let count = keys.len();
                if tokens.set_keys(keys) {
                    tracing::info!(issuer = config.issuer, count, "the token keys are new");
                }
                ticket.succeeded(self.now());
            }
            Err(error) => tracing::warn!(
                error,
                "the keys of tokens (JWKS) cannot be fetched; the previous ones stay in use"
            ),
        }
    }

    /// Reads all files again and reopens the audit log, on an operator's signal. Blocking.
    pub(crate) fn reload_files(&self) {
        self.reload();
        let server = self.config.server_tls.as_ref().map_or(Ok(()), |tls| tls.reload());
        let upstream = self.config.tls.as_ref().map_or(Ok(()), |tls| tls.reload());
        if let Err(error) = server.and(upstream) {
            tracing::warn!(%error, "certificates cannot be read; the old ones stay");
        }
        if let Some(audit) = &self.audit {
            audit.reopen();
        }
    }

    /// Reads the keys file and the file of token keys again. An invalid file is logged; its previous contents
    /// stay in use.
    fn reload(&self) {
        if let (Some(keys), Some(file)) = (&self.keys, &self.config.keys_file) {
            // A file without a key is still being written.
            let is_empty = |text: &str| KeySet::parse(text).is_ok_and(|keys| keys.is_empty());
            let text =
                read(file).and_then(|text| if is_empty(&text) { Err("no key".to_owned()) } else { Ok(text) });
            match text.and_then(|text| keys.reload(&text).map_err(|error| error.to_string())) {
                Ok(count) => tracing::info!(file = %file.display(), count, "keys read again"),
                Err(error) => {
                    tracing::warn!(file = %file.display(), error, "access.keys_file is invalid; the previous keys stay in use")
                }
            }
        }
        if let (Some(tokens), Some(file)) =
            (&self.tokens, self.config.tokens.as_ref().and_then(TokenConfig::file))
        {
            match jwks(file) {
                Ok(keys) => drop(tokens.set_keys(keys)),
                Err(error) => {
                    tracing::warn!(error, "the keys of tokens are invalid; the previous ones stay in use")
                }
            }
        }
    }

    /// Returns the modification times of the files.
    fn stamps(&self) -> Vec<Option<std::time::SystemTime>> {
        let jwks = self.config.tokens.as_ref().and_then(TokenConfig::file);
        let files = [self.config.keys_file.as_deref(), jwks];
        files.iter().map(|file| stamp(file.as_ref()?)).collect()
    }
}

/// Advances time and reloads changed files until the gateway is dropped.
pub(crate) async fn reload_credentials(gateway: std::sync::Weak<crate::Gateway>) {
    let mut stamps = match gateway.upgrade() {
        Some(gateway) => gateway.access.stamps_first.clone(),
        None => return,
    };
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let Some(gateway) = gateway.upgrade() else { return };
        let access = &gateway.access;
        gateway.models.iter().for_each(|model| model.gate.expire(access.now()));
        let now = access.stamps();
        if std::mem::replace(&mut stamps, now.clone()) != now {
            access.reload();
        }
    }
}

/// Keeps the keys of an identity provider fresh until the gateway is dropped.
pub(crate) async fn keep_keys(gateway: std::sync::Weak<crate::Gateway>) {
    let mut is_wanted = true;
    loop {
        let Some(gateway) = gateway.upgrade() else { return };
        let access = &gateway.access;
        access.fetch_keys(is_wanted).await;
        is_wanted = tokio::time::timeout(POLL_INTERVAL, access.wants_keys.notified()).await.is_ok();
    }
}

/// Compares in a time that does not depend on where the two differ.
fn is_equal(one: &[u8], other: &[u8]) -> bool {
    let differs = one.iter().zip(other).fold(0_u8, |differs, (a, b)| differs | (a ^ b));
    one.len() == other.len() && std::hint::black_box(differs) == 0
}

fn says(problem: &TokenProblem) -> String {
    format!("The token is not valid: {problem}.")
}

/// Returns the 429 error that names the exceeded limit.
pub(crate) fn limited(refusal: &Refused) -> ApiError {
    let whose = if refusal.scope == Scope::Tenant { "your organisation's" } else { "your key's" };
    let message = format!("This is more than {whose} limit of {} allows.", limit_name(refusal));
    refused(StatusCode::TOO_MANY_REQUESTS, message, "rate_limit_exceeded")
}

fn limit_name(refusal: &Refused) -> &'static str {
    match refusal.kind {
        router_access::LimitKind::Requests => "requests per minute",
        router_access::LimitKind::Tokens => "tokens per minute",
        _ => "requests at a time",
    }
}
