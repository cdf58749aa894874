//! A service with every kind of failure: no wrong block is served, deadlines hold, retries stay in their
//! budget, and a dead service is a miss at once.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant as Wall};

use kvstore_object::{FailureCause, Location, ObjectConfig, ObjectTier, Outcome};
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::support::faults::{Fault, Plan};
use crate::support::server::Double;
use crate::support::{Random, assert_true, blocks, chain, soon};

const PAYLOAD: usize = 3000;

/// Half of the service's answers have a fault of any kind; two clusters use it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_wrong_is_ever_served() {
    let seeds = [1, 2, 3];
    println!("seeds {seeds:?}");
    let faults = [
        Fault::Status(500),
        Fault::Status(503),
        Fault::LostAnswer(500),
        Fault::Reset,
        Fault::Truncate,
        Fault::ShortObject,
        Fault::Slow(Duration::from_millis(1)),
        Fault::WrongETag,
        Fault::BitFlip,
    ];
    let (mut served, mut damaged_reads, mut stored) = (0, 0, 0);
    for seed in seeds {
        let double = Double::start().await;
        double.plan(Plan::new(seed, 500, &faults));
        let config = ObjectConfig {
            retry_percent: 100,
            breaker_failures: 1000,
            present_ttl: Duration::from_millis(20),
            absent_ttl: Duration::ZERO,
            avoid_ttl: Duration::from_millis(5),
            ..double.config()
        };
        let tiers = [0, 1].map(|_| ObjectTier::open(config.clone()).expect("opens"));
        let chains: Vec<_> = (0..6).map(|conversation| chain(conversation, 12)).collect();
        let mut random = Random(seed);
        for _ in 0..250 {
            let chain = &chains[random.below(chains.len())];
            let tier = &tiers[random.below(2)];
            let run = random.below(3) * 4;
            match random.below(4) {
                0 => {
                    let outcome = tier.put(&blocks(&chain[run..run + 4], PAYLOAD), soon()).await;
                    stored += u32::from(outcome == Ok(Outcome::Stored));
                }
                1 => assert!(tier.look_up(chain, soon()).await <= chain.len()),
                _ => {
                    let read = tier.get(chain, run..12, soon()).await;
                    assert_true(&read, &chain[run..], PAYLOAD);
                    served += read.len();
                }
            }
        }
        for tier in &tiers {
            damaged_reads += tier.counters().get("damaged_reads");
        }
        assert!(double.state.faults.load(Ordering::Relaxed) > 150, "the service did fail");
    }
    println!("{served} blocks served, {damaged_reads} damaged reads, {stored} runs stored");
    assert!(served > 400 && damaged_reads > 30 && stored > 10, "every path ran");
}

#[tokio::test]
async fn retries_stay_in_their_budget() {
    for (percent, burst) in [(0, 0), (10, 5), (50, 0)] {
        let double = Double::start().await;
        double.plan(Plan::new(7, 700, &[Fault::Status(500), Fault::Status(503), Fault::Reset]));
        let config = ObjectConfig {
            retry_percent: percent,
            retry_burst: burst,
            attempts_max: 10,
            breaker_failures: 1000,
            absent_ttl: Duration::ZERO,
            ..double.config()
        };
        let tier = ObjectTier::open(config).expect("opens");
        for conversation in 0..300 {
            tier.look_up(&chain(conversation, 4), soon()).await;
        }
        let counters = tier.counters();
        let (requests, retries) = (counters.get("requests"), counters.get("retries"));
        let seen = double.requests("");
        let allowed = requests * u64::from(percent) / 100 + u64::from(burst.max(1));
        println!("{percent} % + {burst}: {requests} requests, {retries} retries, {seen} seen by the service");
        assert!(seen <= requests + retries, "no request but the counted ones");
        assert!(retries <= allowed, "{retries} of {allowed}");
        assert_eq!(retries == 0, percent == 0, "and they are used");
        assert!(counters.get("retries_denied") > 0);
    }
}

/// Services that accept connections and never answer, or accept none.
#[tokio::test]
async fn a_dead_service_costs_a_deadline_and_then_nothing() {
    let deadline = Duration::from_millis(300);
    let double = Double::start().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        listener.local_addr().expect("bound")
    };
    for address in [silent.local_addr().expect("bound"), closed] {
        let mut config =
            ObjectConfig { breaker_failures: 2, breaker_pause: Duration::from_secs(60), ..double.config() };
        if let Location::S3(s3) = &mut config.location {
            s3.endpoint = Some(format!("http://{address}"));
        }
        let tier = ObjectTier::open(config).expect("opens");
        let chain = chain(1, 64);
        let mut waits = Vec::new();
        for _ in 0..4 {
            let started = Wall::now();
            assert_eq!(tier.look_up(&chain, Instant::now() + deadline).await, 0);
            waits.push(started.elapsed());
        }
        println!("{waits:?}");
        assert!(waits.iter().all(|wait| *wait < deadline * 2), "{waits:?}");
        assert!(waits[3] < deadline / 10, "the breaker is open: {waits:?}");
        assert!(tier.counters().get("breaker_rejections") > 0);
        assert_eq!(tier.counters().get("breaker_opened"), 1);
        let outcome = tier.put(&blocks(&chain[..4], PAYLOAD), soon()).await;
        assert_eq!(outcome, Ok(Outcome::Throttled));
        assert!(tier.get(&chain, 0..8, soon()).await.is_empty());
        let error = tier.delete(chain[3], soon()).await.expect_err("refused");
        assert_eq!(error.cause(), Some(FailureCause::BreakerOpen));
    }
}

#[tokio::test]
async fn the_breaker_closes_when_the_service_is_back() {
    let double = Double::start().await;
    let pause = Duration::from_millis(100);
    let config = ObjectConfig {
        breaker_failures: 3,
        breaker_pause: pause,
        retry_percent: 0,
        retry_burst: 0,
        ..double.config()
    };
    let tier = ObjectTier::open(config).expect("opens");
    let chain = chain(1, 4);
    double.plan(Plan::always(Fault::Status(500)));
    for _ in 0..5 {
        tier.look_up(&chain, soon()).await;
    }
    let seen = double.requests("");
    assert_eq!(seen, 3);
    double.plan(Plan::none());
    assert_eq!(tier.put(&blocks(&chain, PAYLOAD), soon()).await, Ok(Outcome::Throttled));
    assert_eq!(double.requests(""), seen, "nothing was sent");
    tokio::time::sleep(pause).await;
    assert_eq!(tier.put(&blocks(&chain, PAYLOAD), soon()).await, Ok(Outcome::Stored));
    assert_eq!(tier.get(&chain, 0..4, soon()).await.len(), 4);
}

#[tokio::test]
async fn callers_in_a_hurry_do_not_open_the_breaker() {
    let double = Double::start().await;
    let config = ObjectConfig { breaker_failures: 1, absent_ttl: Duration::ZERO, ..double.config() };
    let tier = ObjectTier::open(config).expect("opens");
    double.plan(Plan::always(Fault::Hang));
    for _ in 0..5 {
        tier.look_up(&chain(1, 4), Instant::now() + Duration::from_millis(20)).await;
    }
    assert_eq!(tier.counters().get("deadlines"), 5);
    assert_eq!(tier.counters().get("breaker_opened"), 0);
    tier.look_up(&chain(1, 4), Instant::now() + Duration::from_millis(200)).await;
    assert_eq!(tier.counters().get("breaker_opened"), 1, "this one waited long enough");
}

#[tokio::test]
async fn slow_bytes_end_at_the_deadline() {
    let double = Double::start().await;
    let tier = ObjectTier::open(double.config()).expect("opens");
    let chain = chain(1, 16);
    for run in chain.chunks(4) {
        tier.put(&blocks(run, PAYLOAD), soon()).await.expect("stored");
    }
    let fresh = ObjectTier::open(double.config()).expect("opens");
    assert_eq!(fresh.look_up(&chain, soon()).await, 16);
    double.plan(Plan::always(Fault::Slow(Duration::from_millis(100))));
    let (started, deadline) = (Wall::now(), Duration::from_millis(300));
    let read = fresh.get(&chain, 0..16, Instant::now() + deadline).await;
    let wait = started.elapsed();
    assert!(read.is_empty() && wait < deadline * 2, "{} blocks after {wait:?}", read.len());
    assert!(fresh.counters().get("deadlines") > 0);
    double.plan(Plan::none());
    assert_true(&fresh.get(&chain, 0..16, soon()).await, &chain, PAYLOAD);
}

#[tokio::test]
async fn one_spoilt_transfer_does_not_cost_the_object() {
    let double = Double::start().await;
    let chain = chain(1, 4);
    let tier = ObjectTier::open(double.config()).expect("opens");
    tier.put(&blocks(&chain, PAYLOAD), soon()).await.expect("stored");
    let mut healed = 0;
    for seed in 0..20 {
        let reader = ObjectTier::open(double.config()).expect("opens");
        double.plan(Plan::new(seed, 300, &[Fault::BitFlip]));
        let read = reader.get(&chain, 0..4, soon()).await;
        assert_true(&read, &chain, PAYLOAD);
        let counters = reader.counters();
        let spoilt = counters.get("damaged_reads") > 0;
        healed += u32::from(spoilt && read.len() == 4 && counters.get("damaged_objects") == 0);
        if double.keys().is_empty() {
            double.plan(Plan::none());
            let writer = ObjectTier::open(double.config()).expect("opens");
            assert_eq!(writer.put(&blocks(&chain, PAYLOAD), soon()).await, Ok(Outcome::Stored));
        }
    }
    println!("{healed} of 20 reads were spoilt once and then right");
    assert!(healed > 0);
}
