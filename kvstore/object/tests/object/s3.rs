//! The tier over HTTP with signatures.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use kvstore_object::{
    Credentials, FailureCause, Location, ObjectConfig, ObjectTier, Outcome, S3Config, Secret,
};

use crate::support::faults::{Fault, Plan};
use crate::support::server::{BUCKET, Double};
use crate::support::{assert_true, blocks, chain, later_clock, soon};

const PAYLOAD: usize = 5000;

fn s3(config: &mut ObjectConfig) -> &mut S3Config {
    match &mut config.location {
        Location::S3(s3) => s3,
        Location::Directory(_) => panic!("the double speaks S3"),
    }
}

#[tokio::test]
async fn requests_are_signed_and_few() {
    let double = Double::start().await;
    let chain = chain(1, 83);
    let config = ObjectConfig { run_concurrency: 4, ..double.config() };
    let tier = ObjectTier::open(config.clone()).expect("opens");
    assert_eq!(tier.look_up(&chain, soon()).await, 0);
    assert_eq!(double.requests("GET"), 1, "a cold chain of 20 runs costs one request");
    for run in chain[..40].chunks(4) {
        assert_eq!(tier.put(&blocks(run, PAYLOAD), soon()).await, Ok(Outcome::Stored));
    }
    let stranger = ObjectTier::open(config).expect("opens");
    let before = double.requests("GET");
    assert_eq!(stranger.look_up(&chain, soon()).await, 40);
    let asked = double.requests("GET") - before;
    assert!((11..=14).contains(&asked), "{asked}: ten runs, one miss, at most three asked for too many");
    let before = double.requests("GET");
    assert_eq!(stranger.look_up(&chain[..40], soon()).await, 40, "known");
    assert_eq!(double.requests("GET"), before);
    let (before, bytes) = (double.requests("GET"), double.state.body_bytes.load(Ordering::Relaxed));
    assert_true(&stranger.get(&chain, 5..6, soon()).await, &chain[5..6], PAYLOAD);
    assert_eq!(double.requests("GET"), before + 1);
    let bytes = double.state.body_bytes.load(Ordering::Relaxed) - bytes;
    assert_eq!(bytes, PAYLOAD as u64, "a block's read fetches the block alone");
    let read = stranger.get(&chain, 2..39, soon()).await;
    assert_eq!(read.len(), 37);
    assert_true(&read, &chain[2..39], PAYLOAD);
    assert_eq!(double.requests("GET"), before + 1 + 10, "one request for each run");
    assert_eq!(double.requests("GET list"), 0, "never listed");
    assert_eq!(double.state.bad_signatures.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn large_metas_cost_a_second_read() {
    let double = Double::start().await;
    let chain = chain(1, 4);
    let config = ObjectConfig { index_read_bytes: 512, ..double.config() };
    let mut run = blocks(&chain, PAYLOAD);
    run[1].meta = vec![9; 3000].into();
    ObjectTier::open(config.clone()).expect("opens").put(&run, soon()).await.expect("stored");
    let tier = ObjectTier::open(config).expect("opens");
    let before = double.requests("GET");
    assert_eq!(tier.look_up(&chain, soon()).await, 4);
    assert_eq!(double.requests("GET") - before, 2);
    assert_eq!(tier.get(&chain, 1..2, soon()).await[0].meta, run[1].meta);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_writers_one_stores_also_in_parts() {
    let double = Double::start().await;
    // 4 blocks of 3 MiB: three parts of at most 5 MiB.
    for (round, payload) in [PAYLOAD, PAYLOAD, PAYLOAD, 3 << 20].into_iter().enumerate() {
        let chain = chain(round as u32, 4);
        let run = Arc::new(blocks(&chain, payload));
        let parts = double.requests("PUT upload");
        let writers = (0..4).map(|_| {
            let tier = ObjectTier::open(double.config()).expect("opens");
            let run = run.clone();
            tokio::spawn(async move { tier.put(&run, soon()).await })
        });
        let outcomes = join_all(writers).await;
        let count =
            |wanted| outcomes.iter().filter(|outcome| matches!(outcome, Ok(Ok(o)) if *o == wanted)).count();
        assert_eq!((count(Outcome::Stored), count(Outcome::Present)), (1, 3), "{outcomes:?}");
        let parts = double.requests("PUT upload") - parts;
        assert_eq!(parts > 0, payload > 1 << 20, "{parts} parts");
        assert_eq!(double.uploads(), 0, "none left unfinished");
        let reader = ObjectTier::open(double.config()).expect("opens");
        let read = reader.get(&chain, 0..4, soon()).await;
        assert_eq!(read.len(), 4);
        assert_true(&read, &chain, payload);
    }
}

#[tokio::test]
async fn a_server_without_conditions_is_used_without() {
    for payload in [PAYLOAD, 2 << 20] {
        let double = Double::start().await;
        double.state.knows_no_conditions.store(true, Ordering::Relaxed);
        let tier = ObjectTier::open(double.config()).expect("opens");
        for conversation in 0..2 {
            let chain = chain(conversation, 4);
            assert_eq!(tier.put(&blocks(&chain, payload), soon()).await, Ok(Outcome::Stored));
            assert_eq!(tier.put(&blocks(&chain, payload), soon()).await, Ok(Outcome::Present));
        }
        assert_eq!(tier.counters().get("unconditional_puts"), 2);
        assert_eq!(double.uploads(), 0);
    }
}

#[tokio::test]
async fn a_lost_answer_is_found_out() {
    let mut stored = 0;
    for (payload, seed) in [(PAYLOAD, 3), (2 << 20, 3), (2 << 20, 4), (2 << 20, 5)] {
        let double = Double::start().await;
        let tier = ObjectTier::open(double.config()).expect("opens");
        let chain = chain(1, 4);
        assert_eq!(tier.look_up(&chain, soon()).await, 0);
        double.plan(Plan::new(seed, 500, &[Fault::LostAnswer(500)]));
        let outcome = tier.put(&blocks(&chain, payload), soon()).await;
        double.plan(Plan::none());
        println!("{payload} bytes: {outcome:?} after {} faults", double.state.faults.load(Ordering::Relaxed));
        let fresh = ObjectTier::open(double.config()).expect("opens");
        let there = fresh.look_up(&chain, soon()).await;
        assert!(there == 4 || outcome.is_err(), "what is said to be there is");
        stored += there;
        assert_true(&fresh.get(&chain, 0..4, soon()).await, &chain, payload);
    }
    assert!(stored > 0, "not all failed");
}

#[tokio::test]
async fn wrong_keys_are_refused_and_named() {
    let double = Double::start().await;
    let mut config = double.config();
    s3(&mut config).credentials = Credentials::Keys {
        access_key_id: Secret::new("AKIDEXAMPLE"),
        secret_access_key: Secret::new("wrong"),
        session_token: Secret::default(),
    };
    let tier = ObjectTier::open(config).expect("opens");
    let chain = chain(1, 4);
    let error = tier.put(&blocks(&chain, PAYLOAD), soon()).await.expect_err("refused");
    assert_eq!(error.cause(), Some(FailureCause::Denied));
    let text = error.to_string();
    for part in ["put", BUCKET, "kvasir/v1/000000000000feed/", "status 403"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(double.state.bad_signatures.load(Ordering::Relaxed) > 0 && double.keys().is_empty());
    assert_eq!(tier.counters().get("retries"), 0, "asking again would not help");
    let mut config = double.config();
    s3(&mut config).credentials = Credentials::Anonymous;
    let tier = ObjectTier::open(config).expect("opens");
    assert_eq!(tier.look_up(&chain, soon()).await, 0);
    let error = tier.delete(chain[3], soon()).await.expect_err("refused");
    assert_eq!(error.cause(), Some(FailureCause::Denied));
}

#[tokio::test]
async fn the_sweep_goes_page_by_page_and_on_where_it_was() {
    let double = Double::start().await;
    double.state.page_objects.store(7, Ordering::Relaxed);
    let clock = later_clock();
    let config =
        ObjectConfig { ttl: Some(Duration::from_secs(60)), sweep_deletes_per_s: 100_000, ..double.config() };
    let tier = ObjectTier::open_with_clock(config.clone(), clock.clone()).expect("opens");
    let last_layout = ObjectConfig { layout_fingerprint: 3, ..config.clone() };
    let last_layout = ObjectTier::open(last_layout).expect("opens");
    for conversation in 0..60 {
        let run = blocks(&chain(conversation, 4), 10);
        let tier = if conversation % 3 == 0 { &last_layout } else { &tier };
        assert_eq!(tier.put(&run, soon()).await, Ok(Outcome::Stored));
    }
    double.insert("kvasir/v1/readme", "stays".into());
    double.insert("other/v1/x", "stays".into());
    let young = tier.sweep(1000, soon()).await.expect("sweeps");
    assert_eq!((young.listed, young.deleted, young.complete), (60, 0, true));
    clock.advance(Duration::from_secs(61));
    let (mut deleted, mut sweeps) = (0, 0);
    loop {
        let report = tier.sweep(13, soon()).await.expect("sweeps");
        assert!(report.deleted <= 13);
        (deleted, sweeps) = (deleted + report.deleted, sweeps + 1);
        if report.complete {
            break;
        }
        assert!(sweeps < 20, "it ends");
    }
    assert_eq!((deleted, tier.counters().get("swept_objects")), (60, 60), "other layouts too");
    assert_eq!(double.keys(), ["kvasir/v1/readme", "other/v1/x"]);
    assert!(sweeps >= 5);
}

#[tokio::test]
async fn the_sweep_keeps_to_its_rate() {
    let double = Double::start().await;
    let clock = later_clock();
    let config =
        ObjectConfig { ttl: Some(Duration::from_secs(60)), sweep_deletes_per_s: 50, ..double.config() };
    let tier = ObjectTier::open_with_clock(config, clock.clone()).expect("opens");
    // One folder, so that the rate holds within it: the keys are made, not hashed.
    for number in 0..11 {
        let key = format!("kvasir/v1/000000000000feed/ab/ab{number:030x}.kvr");
        double.insert(&key, "x".into());
    }
    clock.advance(Duration::from_secs(61));
    let started = std::time::Instant::now();
    assert_eq!(tier.sweep(100, soon()).await.expect("sweeps").deleted, 11);
    assert!(started.elapsed() >= Duration::from_millis(200), "ten pauses of 20 ms");
}

#[tokio::test]
async fn puts_in_flight_are_limited() {
    let double = Double::start().await;
    let tier = ObjectTier::open(ObjectConfig { puts_max: 2, ..double.config() }).expect("opens");
    double.plan(Plan::always(Fault::Slow(Duration::from_millis(1))));
    let runs: Vec<_> = (0..6).map(|conversation| blocks(&chain(conversation, 4), PAYLOAD)).collect();
    let outcomes = join_all(runs.iter().map(|run| tier.put(run, soon()))).await;
    let throttled = outcomes.iter().filter(|outcome| **outcome == Ok(Outcome::Throttled)).count();
    assert_eq!(throttled, 4, "{outcomes:?}");
    assert_eq!(tier.counters().get("throttled_puts"), 4);
    double.plan(Plan::always(Fault::Status(503)));
    let outcome = tier.put(&runs[5], soon()).await;
    assert_eq!(outcome, Ok(Outcome::Throttled), "the server asks to slow down");
}
