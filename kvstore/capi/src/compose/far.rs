//! Adds the tiers outside this node to a store that is being built: pools of other nodes, then object storage.

use std::sync::Arc;
use std::time::Duration;

use dataplane_rails::{PeerRole, Place, RailsConfig};
use dataplane_transfer::ThreadPolicy;
use dataplane_verbs::Library;
use kvstore_remote::{PoolNode, RemoteCounters};
use kvstore_store::far::object::{ObjectTier, ObjectTierConfig};
use kvstore_store::far::remote::{RemoteTier, RemoteTierConfig};
use kvstore_store::{BandwidthLimit, BandwidthTier, StoreBuilder};

use super::FINGERPRINT;
use crate::config::{RdmaSettings, Settings, TransferSettings, Transports};
use crate::handoff;
use crate::status::{Failure, Status};

/// Returns the bandwidth limits of these tiers, by tier index.
pub(super) fn bandwidth(
    settings: &Settings,
    block_bytes: usize,
) -> [Option<BandwidthLimit>; BandwidthTier::ALL.len()] {
    let limits = [
        (BandwidthTier::Remote, settings.remote_tier.bandwidth.0),
        (BandwidthTier::Object, settings.object_tier.bandwidth.0),
    ];
    BandwidthLimit::of_tiers(&limits, block_bytes)
}

/// Longest time of a search through the configured tiers, one after the other. `None`: no such tier.
pub(super) fn search_deadline(settings: &Settings) -> Option<Duration> {
    let remote = settings.remote_tier.is_on().then_some(settings.remote_tier.deadline.0);
    let object = settings.object_tier.is_on().then_some(settings.object_tier.deadline.0);
    remote.into_iter().chain(object).reduce(|all, one| all + one)
}

/// Adds the configured tiers. Returns the counters of the remote tier. `near` is the place of the engine's
/// device, if there is one and its driver reports it.
pub(super) fn add_tiers(
    settings: &Settings,
    near: Option<&Place>,
    verbs_library: Option<&Arc<Library>>,
    builder: StoreBuilder,
) -> Result<(StoreBuilder, Option<Arc<RemoteCounters>>), Failure> {
    let (mut builder, mut counters) = (builder, None);
    if settings.remote_tier.is_on() {
        let (with_tier, counted) = remote_tier(settings, near, verbs_library, builder)?;
        (builder, counters) = (with_tier, Some(counted));
    }
    if settings.object_tier.is_on() {
        builder = object_tier(settings, builder)?;
    }
    Ok((builder, counters))
}

fn remote_tier(
    settings: &Settings,
    near: Option<&Place>,
    verbs_library: Option<&Arc<Library>>,
    builder: StoreBuilder,
) -> Result<(StoreBuilder, Arc<RemoteCounters>), Failure> {
    let failed =
        |error: &dyn std::fmt::Display| Failure::new(Status::Failed, format!("open: [remote_tier]: {error}"));
    let tier = &settings.remote_tier;
    let config = RemoteTierConfig {
        nodes: RemoteTierConfig::parse_nodes(&tier.nodes).map_err(|error| failed(&error))?,
        group: tier.group as u32,
        replicas: tier.replicas,
        deadline: tier.deadline.0,
        fingerprint: FINGERPRINT,
        // Blocks of a pool on this host are copied once, by the load. Blocks that go to a lower tier must be in
        // host memory.
        maps: settings.device.is_none()
            && settings.disk_tier.capacity.0 == 0
            && !settings.object_tier.is_on(),
    };
    let mut rails = client_rails(settings, &config.nodes)?;
    if rails.near.is_none() {
        rails.near = near.cloned();
    }
    rails.verbs_library = verbs_library.cloned();
    let rails = dataplane_rails::open(&rails, builder.slab()).map_err(|error| failed(&error))?;
    // The thread sleeps when idle: look-ups are not on an engine's hot path.
    let opened = RemoteTier::open(&config, rails.bond, &builder, ThreadPolicy::default());
    let (tier, counters) = opened.map_err(|error| failed(&error))?;
    Ok((builder.other(Box::new(tier)), counters))
}

/// Returns the transports of a client that connects to the pools of these nodes. No peer connects to it.
fn client_rails(settings: &Settings, nodes: &[PoolNode]) -> Result<RailsConfig, Failure> {
    let of_transfer = settings.transfer.clone().unwrap_or_default();
    let transport = match PoolNode::only_transport(nodes) {
        Some("shm") => Transports::Shm,
        Some("rdma") => Transports::Rdma,
        Some("tcp") => Transports::Tcp,
        _ => Transports::Auto,
    };
    let secret_file = match settings.remote_tier.secret_file.as_str() {
        "" => of_transfer.secret_file,
        named => named.to_owned(),
    };
    let socket_folder = of_transfer.socket_folder;
    let transfer = TransferSettings { transport, secret_file, socket_folder, ..TransferSettings::default() };
    let rdma = RdmaSettings { listen: RdmaSettings::default().listen, ..settings.rdma.clone() };
    Ok(RailsConfig { role: PeerRole::Client, ..handoff::rails_config(&transfer, &rdma, false)? })
}

fn object_tier(settings: &Settings, builder: StoreBuilder) -> Result<StoreBuilder, Failure> {
    let tier = &settings.object_tier;
    let config = ObjectTierConfig {
        url: tier.url.clone(),
        endpoint: tier.endpoint.clone(),
        region: tier.region.clone(),
        credentials_file: tier.credentials_file.clone(),
        allow_http: tier.allow_http,
        run: tier.run_blocks(),
        ttl: tier.ttl.0,
        buffer_bytes: tier.buffers.0,
        deadline: tier.deadline.0,
        fingerprint: FINGERPRINT,
    };
    // `kvasir_kv_stats` has the store's own counts of this tier.
    let (tier, _counters) = ObjectTier::open(&config, &builder)
        .map_err(|error| Failure::new(Status::Failed, format!("open: [object_tier]: {error}")))?;
    Ok(builder.other(Box::new(tier)))
}
