//! `kvasir worker`: runs engine, data plane and tiers of one worker process.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use control_config::Settings;
use dataplane_rails::{RailCounters, Rails, Transport};
use dataplane_transfer::{StageSnapshot, TransferCounters, TransferNode, TransferService};
use kvstore_store::Store;
use router_engines::client::WorkerDescription;
use router_engines::exposition::{self, HistogramSeries};
use router_tls::{PlainListener, TlsListener};
use tools_engine::server::{WorkerState, router};
use tools_engine::{Engine, EventPublisher, KvPool, Services};
use xxhash_rust::xxh3::xxh3_64;

use crate::http::StopSource;
use crate::rails;
use crate::tiers::{self, Blocks, OpenTiers, TierCounters};
use crate::{GlobalArgs, Role, compose, exposure, http, process, secret, tls};

pub(crate) fn run(
    common: &GlobalArgs,
    role: Role,
    listen: Option<SocketAddr>,
    threads: Option<usize>,
    instance: Option<&str>,
    stop_source: StopSource,
) -> Result<ExitCode> {
    let settings = process::start(common)?;
    let threads = threads.unwrap_or(settings.engine.threads as usize);
    let threads = if threads == 0 { process::available_cores() } else { threads };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let listen = listen.unwrap_or(settings.worker.listen);
    runtime.block_on(work(&settings, common.supervised, role, listen, threads, instance, stop_source))?;
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

async fn work(
    settings: &Settings,
    is_supervised: bool,
    role: Role,
    listen: SocketAddr,
    threads: usize,
    instance: Option<&str>,
    stop_source: StopSource,
) -> Result<()> {
    let key = secret::of_worker(settings, is_supervised)?;
    let has_secret = dataplane_rails::shared_key(&settings.transfer.secret_file)?.is_secret();
    let said = [
        exposure::of_worker(settings, listen, key.is_some()),
        exposure::of_transfer(settings, settings.transfer.listen, has_secret),
    ];
    said.into_iter().flatten().for_each(|said| tracing::warn!("{said}"));
    // Within `serve` the gateway connects over loopback.
    let tls = if is_supervised { None } else { tls::worker(settings)? };
    let listener = http::bind(listen).await?;
    let model = compose::model(settings)?;
    let text = compose::model_text(settings)?;
    let name = compose::model_name(settings);
    let config = compose::engine(settings, model.config(), threads);
    let layout = KvPool::layout_of(model.config(), settings.engine.block_tokens as usize)?;
    let kv = KvPool::new(layout, settings.engine.blocks as usize, compose::pages(settings))?;
    let engine = Engine::new();

    let inbox = engine.inbox();
    let counters = Arc::new(TransferCounters::default());
    let Rails { bond, address, names, kinds, counters: rail_counters } =
        rails::open(settings, kv.slots().slab())?;
    tracing::info!("blocks move over {}", names.join(", "));
    let pieces = compose::pieces(&layout, model.fingerprint());
    let node = TransferNode::new(bond, pieces, compose::limits(settings), Arc::clone(&counters));
    let notices = inbox.clone();
    let transfer = TransferService::start(node, rails::thread_policy(settings)?, move |notice| {
        notices.transfer_notice(notice)
    })?;

    let blocks = Blocks {
        bytes: layout.block_bytes(),
        tokens: layout.tokens,
        // `plain` stays in the fingerprint so that disks of earlier releases are recognised.
        fingerprint: model.fingerprint() ^ layout.fingerprint() ^ xxh3_64(b"plain"),
        host_slots: compose::host_blocks(settings, &layout),
        pages: compose::pages(settings),
        instance,
    };
    let lower_blocks = [blocks.host_slots, settings.disk_tier.capacity.0 as usize / blocks.bytes.max(1)];
    let opened = tiers::open(settings, &blocks, move |moved| inbox.store_moved(moved))?;
    let (store, survivors, tier_counters) = match opened {
        Some(OpenTiers { store, survivors, counters, .. }) => (Some(store), survivors, counters),
        None => (None, Vec::new(), TierCounters::default()),
    };
    let topic = format!("kv@{}@{name}", listener.local_addr()?);
    let (events, replay) = (settings.worker.events, settings.worker.replay);
    let bound = EventPublisher::bind(&events.ip().to_string(), events.port(), replay.port(), topic).await;
    let (publisher, sink) = bound.map_err(anyhow::Error::msg)?;

    let services = Services { transfer: Some(transfer), store: store.clone(), survivors, events: Some(sink) };
    let kept = store.clone();
    let slots = Arc::clone(kv.slots());
    let handle = engine.start(config, model, text, kv, services)?;
    let description = WorkerDescription {
        role: role.name().to_owned(),
        model: name,
        context_tokens: handle.context_tokens(),
        block_tokens: settings.engine.block_tokens as usize,
        blocks: slots.slot_count(),
        lower_blocks,
        instance: u64::from(std::process::id()) << 32 | u64::from(start_nanos()),
        events: Some(publisher.addresses().events.clone()),
        replay: Some(publisher.addresses().replay.clone()),
        data_plane: rails::data_plane_address(address),
    };
    let state = WorkerState {
        engine: handle.clone(),
        description,
        slots,
        started: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs(),
        body_bytes_max: settings.gateway.body_max.0 as usize,
        key,
        transports: kinds.into_iter().map(Transport::name).collect(),
        more_metrics: Box::new(move |out| {
            transfer_metrics(out, &counters);
            if let Some(store) = &store {
                store_metrics(out, store);
            }
            tier_counters.render(out);
            rail_metrics(out, &rail_counters);
        }),
    };
    let stop = http::stop_signals(stop_source, settings.serve.drain)?;
    match tls {
        None => http::serve(PlainListener::new(listener), router(state), stop).await,
        Some(tls) => {
            tokio::spawn(Arc::clone(&tls).watch(tls::CHECK_INTERVAL));
            http::serve(TlsListener::new(listener, tls), router(state), stop).await;
        }
    }
    handle.stop();
    if let Some(store) = kept {
        // Flushes the disk writes to stable storage.
        store.close();
    }
    Ok(())
}

fn start_nanos() -> u32 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.subsec_nanos())
}

/// Appends the counters of all rails: each metric once, with a series for each rail that has it.
fn rail_metrics(out: &mut String, rails: &[RailCounters]) {
    type Series<'a> = Vec<(&'a str, u64)>;
    let mut metrics: BTreeMap<&str, (&str, Series<'_>)> = BTreeMap::new();
    for rail in rails {
        for (name, help, value) in (rail.read)() {
            metrics.entry(name).or_insert((help, Vec::new())).1.push((&rail.name, value));
        }
    }
    for (name, (help, series)) in metrics {
        let labels: Vec<(String, u64)> =
            series.into_iter().map(|(rail, value)| (format!("rail=\"{rail}\""), value)).collect();
        let series = labels.iter().map(|(labels, value)| (labels.as_str(), *value));
        exposition::family(out, &format!("kvasir_rail_{name}"), help, series);
    }
}

fn transfer_metrics(out: &mut String, transfer: &TransferCounters) {
    for (name, help, value) in transfer.snapshot() {
        exposition::metric(out, &format!("kvasir_transfer_{name}"), help, value);
    }
    let stages = transfer.stages.snapshot().into_iter().map(|StageSnapshot { stage, cumulative, sum_us }| {
        let seconds = |micros: u64| micros as f64 / 1e6;
        let bounds = cumulative.into_iter().map(|(bound, count)| (bound.map(seconds), count));
        let labels = format!("stage=\"{}\"", stage.name());
        HistogramSeries { labels, cumulative: bounds.collect(), sum: seconds(sum_us) }
    });
    let help = "Times of the stages of hand-offs: reserve, first_part, verify and whole at the receiver, write, sum and \
                finish at the sender";
    exposition::histogram(out, "kvasir_transfer_stage_seconds", help, &stages.collect::<Vec<_>>());
}

pub(crate) fn store_metrics(out: &mut String, store: &Store) {
    for (name, help, value) in store.counters().snapshot() {
        exposition::metric(out, &format!("kvasir_host_{name}"), help, value);
    }
    let [host, disk] = store.blocks();
    exposition::metric(out, "kvasir_host_blocks", "Blocks in host memory (level)", host);
    exposition::metric(out, "kvasir_disk_blocks", "Blocks on the disk (level)", disk);
    exposition::metric(
        out,
        "kvasir_host_leased_slots",
        "Host slots under way (level)",
        store.leased_slots() as u64,
    );
    exposition::metric(
        out,
        "kvasir_host_retained_blocks",
        "Blocks that are retained, on the disk or, without one, in host memory (level)",
        store.retained_blocks() as u64,
    );
}
