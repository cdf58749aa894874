//! A roster that changes continuously under load: workers are added, drained, removed, killed and replaced at
//! the same address while requests are running. No request may fail; at the end the index holds exactly the
//! blocks of the remaining workers, and memory use is as before.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use router_fleet::{AddedWorker, DEFAULT_POOL, Fleet, FleetConfig, WorkerState, name_of};
use router_gateway::{Gateway, Tuning, router};
use router_radix::Tier;
use router_tokens::ModelText;
use tokio::net::TcpStream;
use tools_mocker::{Mock, MockConfig};

use crate::gateway::{config, fleet_config, fleet_of, listen, tuning};
use crate::results::{self, Better};
use crate::soak::{
    Answer, PROMPTS, RequestKind, body, exchange, expected_answers, footprint, mix, wait_until_idle,
};

/// Most mock workers in the roster.
const SLOTS: usize = 24;
/// Least number of serving workers: below it no worker is drained, removed, replaced or killed.
const SERVING_MIN: usize = 6;
const CLIENTS: u64 = 64;
/// Number of names that never answer. Each is added and removed again, and must leave no state behind.
const UNREACHABLE_WORKERS: u64 = 10_000;
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
const INDEX_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) fn run(seconds: u64, changes_per_second: u64, rate: u64, seed: u64) -> Result<()> {
    println!(
        "# churn: {seconds} s, {changes_per_second} changes of the roster and {rate} requests a second, {SLOTS} mock \
         workers, seed {seed}"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(churn(Duration::from_secs(seconds), changes_per_second, rate, seed))
}

/// A mock worker that may be in the roster.
struct Slot {
    /// `None` between two processes.
    mock: Option<Mock>,
    address: SocketAddr,
    /// Number of workers described for this address so far.
    uid: u64,
    is_listed: bool,
    is_draining: bool,
}

#[derive(Debug, Default)]
struct ChangeCounts {
    added: u64,
    drained: u64,
    removed: u64,
    replaced: u64,
    killed: u64,
}

fn mock_config() -> Result<MockConfig> {
    Ok(MockConfig { eos_one_in: 0, events: true, replay: true, ..MockConfig::tiny()? })
}

async fn churn(time: Duration, changes_per_second: u64, rate: u64, seed: u64) -> Result<()> {
    let mut slots = Vec::new();
    for _ in 0..SLOTS {
        let mock = Mock::start(mock_config()?, "127.0.0.1:0".parse()?).await?;
        let address = mock.address();
        slots.push(Slot { mock: Some(mock), address, uid: 0, is_listed: false, is_draining: false });
    }
    let health = Duration::from_millis(200);
    let fleet = fleet_of(FleetConfig { health_interval: health, ..fleet_config("tiny") }, &[])?;
    let second = Duration::from_secs(1);
    let tuning = Tuning { retries: 8, stall: second, answer_within: 5 * second, ..tuning() };
    let gateway = Gateway::new(config(ModelText::tiny()?), tuning, Arc::clone(&fleet));
    let gateway = gateway.map_err(anyhow::Error::msg)?;
    let address = listen(router(Arc::clone(&gateway))).await?.trim_start_matches("http://").to_owned();
    for slot in &mut slots {
        add(&fleet, slot)?;
    }
    ready(&fleet, SLOTS).await?;
    let expected = Arc::new(expected_answers(&address).await?);
    // Two parts, because the growth of a warm-up (connections, memory of allocators) is not a leak.
    let mut changes = ChangeCounts::default();
    let warm_up = time / 5;
    let first = run_phase(
        &fleet,
        &mut slots,
        &address,
        &expected,
        warm_up,
        changes_per_second,
        rate,
        seed,
        &mut changes,
    );
    let mut served = first.await?;
    let before = footprint()?;
    let rest = time - warm_up;
    let second = run_phase(
        &fleet,
        &mut slots,
        &address,
        &expected,
        rest,
        changes_per_second,
        rate,
        seed ^ 1,
        &mut changes,
    );
    served += second.await?;
    // Names that are added and removed for good.
    for number in 0..UNREACHABLE_WORKERS {
        let url = format!("http://127.0.0.1:1/{number}");
        ensure!(fleet.add(added(&url, 0), None).is_err(), "{url} is no worker");
        // No process listens on this port: a connection is refused at once.
        let url = format!("http://127.1.{}.{}:1", number / 250, number % 250 + 1);
        fleet.add(added(&url, 0), None)?;
        fleet.remove(&name_of(&url))?;
    }
    for slot in slots.iter_mut().filter(|slot| !slot.is_listed || slot.is_draining) {
        add(&fleet, slot)?;
    }
    ready(&fleet, SLOTS).await?;
    let mocks: Vec<&Mock> = slots.iter().filter_map(|slot| slot.mock.as_ref()).collect();
    wait_until_idle(&gateway, &mocks).await?;
    let indexed_blocks = compared(&fleet, &slots).await?;
    let after = footprint()?;
    let ChangeCounts { added, drained, removed, replaced, killed } = changes;
    let total = added + drained + removed + replaced + killed;
    results::add("churn", "requests", ("1/s", Better::Higher), &[served as f64 / time.as_secs_f64()]);
    results::add(
        "churn",
        "changes of the roster",
        ("1/s", Better::Higher),
        &[total as f64 / time.as_secs_f64()],
    );
    println!(
        "{served} requests answered rightly, 0 failed; {total} changes: {added} added, {drained} drained or put back, {removed} \
         removed, {replaced} replaced at the same address, {killed} killed and started again"
    );
    println!(
        "index equals truth: {indexed_blocks} blocks on {SLOTS} workers; {UNREACHABLE_WORKERS} dead names left nothing"
    );
    println!(
        "memory {} MiB before, {} after; descriptors {} before, {} after",
        before.0, after.0, before.1, after.1
    );
    let snapshot = fleet.snapshot().len();
    println!("snapshot {snapshot} bytes; workers in the roster {}", fleet.workers().len());
    let kinds = [added, drained, removed, replaced, killed];
    ensure!(kinds.iter().all(|&count| count > 0), "some kind of change was never made");
    let expected = (time.as_secs_f64() * rate as f64 * 0.5) as u64;
    ensure!(served >= expected, "{served} requests are fewer than the rate asks for");
    // A block takes about 30 bytes; names of dead workers would count too.
    ensure!(snapshot < 4096 + 64 * indexed_blocks, "the snapshot holds more than the workers' blocks");
    ensure!(fleet.workers().len() == SLOTS, "workers are left over");
    ensure!(after.0 < before.0 + 48, "memory is left over");
    ensure!(after.1 < before.1 + 2 * SLOTS * CLIENTS as usize, "descriptors are left over");
    Ok(())
}

fn added(url: &str, uid: u64) -> AddedWorker {
    AddedWorker {
        url: url.to_owned(),
        role: String::new(),
        pool: DEFAULT_POOL.to_owned(),
        uid: (uid > 0).then(|| uid.to_string()),
    }
}

/// Adds a worker to the roster, ready to serve.
fn add(fleet: &Arc<Fleet>, slot: &mut Slot) -> Result<()> {
    fleet.add(added(&format!("http://{}", slot.address), slot.uid), None)?;
    (slot.is_listed, slot.is_draining) = (true, false);
    Ok(())
}

async fn ready(fleet: &Fleet, count: usize) -> Result<()> {
    let deadline = Instant::now() + INDEX_TIMEOUT;
    while fleet.ready_count() < count {
        if Instant::now() >= deadline {
            let workers = fleet.workers();
            let late = workers.values().filter(|worker| worker.state() != WorkerState::Ready);
            let late: Vec<String> = late
                .map(|worker| format!("{} is {}: {}", worker.name, worker.state().name(), worker.reason()))
                .collect();
            bail!("{} of {count} workers are ready: {}", fleet.ready_count(), late.join("; "));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Runs load and changes for a time. Returns the number of answered requests.
#[allow(clippy::too_many_arguments)]
async fn run_phase(
    fleet: &Arc<Fleet>,
    slots: &mut [Slot],
    address: &str,
    expected: &Arc<Vec<Vec<String>>>,
    time: Duration,
    changes_per_second: u64,
    rate: u64,
    seed: u64,
    changes: &mut ChangeCounts,
) -> Result<u64> {
    let is_stopped = Arc::new(AtomicBool::new(false));
    let load =
        tokio::spawn(load(address.to_owned(), Arc::clone(expected), Arc::clone(&is_stopped), rate, seed));
    let started = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / changes_per_second as u32);
    let mut number = 0_u64;
    while started.elapsed() < time && !load.is_finished() {
        ticks.tick().await;
        number += 1;
        change(fleet, slots, mix(seed ^ number.wrapping_mul(0x9E37_79B9)), changes).await?;
    }
    is_stopped.store(true, Ordering::Relaxed);
    let served = load.await??;
    for slot in slots.iter_mut().filter(|slot| slot.mock.is_none()) {
        let is_down = || {
            fleet
                .workers()
                .get(&slot.address.to_string())
                .is_none_or(|worker| worker.state() == WorkerState::Down)
        };
        while !is_down() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        restart(slot).await?;
    }
    Ok(served)
}

/// Makes one change of the roster, unless too few workers would be left to serve.
async fn change(fleet: &Arc<Fleet>, slots: &mut [Slot], draw: u64, changes: &mut ChangeCounts) -> Result<()> {
    let is_ready = |slot: &Slot| {
        let workers = fleet.workers();
        workers.get(&slot.address.to_string()).is_some_and(|worker| worker.state() == WorkerState::Ready)
    };
    let serving = slots.iter().filter(|slot| is_ready(slot)).count();
    let slot = &mut slots[(draw >> 32) as usize % SLOTS];
    let name = slot.address.to_string();
    if slot.mock.is_none() {
        // Two runs of a mock process cannot be told apart, so each end must have been noticed.
        let is_down = fleet.workers().get(&name).is_none_or(|worker| worker.state() == WorkerState::Down);
        if is_down {
            restart(slot).await?;
        }
        return Ok(());
    }
    if !slot.is_listed {
        add(fleet, slot)?;
        changes.added += 1;
        return Ok(());
    }
    if slot.is_draining {
        // Return to service, or removal.
        if draw.is_multiple_of(2) {
            fleet.serve_again(&name)?;
            slot.is_draining = false;
            changes.drained += 1;
        } else {
            fleet.remove(&name)?;
            slot.is_listed = false;
            changes.removed += 1;
        }
        return Ok(());
    }
    if serving <= SERVING_MIN {
        return Ok(());
    }
    match draw % 10 {
        0..=3 => {
            fleet.drain(&name)?;
            slot.is_draining = true;
            changes.drained += 1;
        }
        4..=5 => {
            fleet.remove(&name)?;
            slot.is_listed = false;
            changes.removed += 1;
        }
        6..=8 => {
            // A new worker by its description: the index forgets the blocks of the previous one.
            slot.uid += 1;
            add(fleet, slot)?;
            changes.replaced += 1;
        }
        _ => {
            // The process ends; another one starts at its address once the gateway has noticed.
            if let Some(mock) = slot.mock.take() {
                mock.stop().await;
            }
            changes.killed += 1;
        }
    }
    Ok(())
}

async fn restart(slot: &mut Slot) -> Result<()> {
    let fresh = Mock::start(mock_config()?, slot.address).await;
    slot.mock = Some(fresh.context("the port of the one before")?);
    Ok(())
}

/// Sends requests at a fixed rate, independent of earlier ones. Returns the number answered correctly; any
/// other end is an error.
async fn load(
    address: String,
    expected: Arc<Vec<Vec<String>>>,
    is_stopped: Arc<AtomicBool>,
    rate: u64,
    seed: u64,
) -> Result<u64> {
    let next = Arc::new(AtomicU64::new(0));
    let started = tokio::time::Instant::now();
    let clients = (0..CLIENTS).map(|_| {
        let (address, next, is_stopped) = (address.clone(), Arc::clone(&next), Arc::clone(&is_stopped));
        let expected = Arc::clone(&expected);
        tokio::spawn(async move {
            let mut stream: Option<TcpStream> = None;
            let mut right = 0;
            while !is_stopped.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep_until(started + Duration::from_secs_f64(number as f64 / rate as f64))
                    .await;
                let draw = mix(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
                let kind = match draw % 100 {
                    0..45 => RequestKind::Whole,
                    45..80 => RequestKind::Streamed,
                    _ => RequestKind::Completion,
                };
                let prompt = (draw >> 32) % PROMPTS;
                let mut connection = match stream.take() {
                    Some(connection) => connection,
                    None => TcpStream::connect(&address).await?,
                };
                let body = body(prompt, kind);
                let answer =
                    tokio::time::timeout(ANSWER_WITHIN, exchange(&mut connection, &body, kind)).await;
                let answer = answer.with_context(|| format!("request {number}: no end of its answer"))?;
                match answer.with_context(|| format!("request {number}"))? {
                    Answer::Text(text) => {
                        let wanted = &expected[prompt as usize][usize::from(kind == RequestKind::Completion)];
                        ensure!(text == *wanted, "request {number}: {text:?} instead of {wanted:?}");
                    }
                    Answer::Refused(status) => bail!("request {number} was refused with {status}"),
                    Answer::Broken => bail!("the stream of request {number} broke"),
                    Answer::Disconnected => bail!("request {number} has no answer"),
                }
                right += 1;
                stream = Some(connection);
            }
            Ok(right)
        })
    });
    let mut right = 0;
    for client in clients.collect::<Vec<_>>() {
        right += client.await??;
    }
    Ok(right)
}

/// Compares the blocks that the index knows of each worker with those of the worker. Returns their number.
async fn compared(fleet: &Fleet, slots: &[Slot]) -> Result<usize> {
    let deadline = Instant::now() + INDEX_TIMEOUT;
    loop {
        let ranks = fleet.ranks();
        let mut differing = Vec::new();
        let mut total = 0;
        for slot in slots {
            let name = slot.address.to_string();
            let rank = ranks.iter().find(|rank| rank.run.name == name).context("a worker without a run")?;
            let known = fleet.index.write().blocks_of(rank.run.member)[Tier::Device as usize] as usize;
            let held = slot.mock.as_ref().map_or(0, |mock| mock.stats().known_blocks);
            total += held;
            if known != held {
                differing.push(format!("{name}: {known} known, {held} held"));
            }
        }
        let entries = fleet.index.write().usage().entries;
        if differing.is_empty() && entries == total {
            return Ok(total);
        }
        if Instant::now() >= deadline {
            bail!("the index has {entries} entries, the workers {total} blocks; {}", differing.join("; "));
        }
        // Events may still be in transit.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
