//! The same tests against an independent S3 service, for example moto: see `moto.sh`. Skipped, with a message,
//! unless `KVSTORE_OBJECT_S3_ENDPOINT` is set; the bucket `kv-bucket` must exist there.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use kvstore_object::{
    Credentials, FailureCause, Location, ObjectConfig, ObjectTier, Outcome, S3Config, Secret,
};

use crate::support::{FINGERPRINT, assert_true, blocks, chain, later_clock, quick, soon};

fn config() -> Option<ObjectConfig> {
    let Ok(endpoint) = std::env::var("KVSTORE_OBJECT_S3_ENDPOINT") else {
        println!("SKIPPED: KVSTORE_OBJECT_S3_ENDPOINT is not set; tests/moto.sh sets it");
        return None;
    };
    let key = |text: &str| Secret::new(text);
    let credentials = Credentials::Keys {
        access_key_id: key("testing"),
        secret_access_key: key("testing"),
        session_token: Secret::default(),
    };
    let mut s3 = S3Config::new("kv-bucket", credentials);
    let endpoint_is_plain = endpoint.starts_with("http://");
    s3.endpoint = Some(endpoint);
    s3.allow_http = endpoint_is_plain;
    s3.ca_bundle = std::env::var_os("KVSTORE_OBJECT_S3_CA").map(Into::into);
    s3.part_bytes = 5 << 20;
    let config = quick(ObjectConfig::new(Location::S3(s3), FINGERPRINT));
    Some(ObjectConfig { request_timeout: Duration::from_secs(20), ..config })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_independent_service_agrees() {
    let Some(config) = config() else { return };
    let start = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let number = start.expect("after 1970").as_micros();
    let config = ObjectConfig { prefix: format!("run-{number}"), ..config };
    let open = || ObjectTier::open(config.clone()).expect("opens");

    let long = chain(1, 22);
    let writer = open();
    assert_eq!(writer.look_up(&long, soon()).await, 0);
    for run in long[..20].chunks(4) {
        assert_eq!(writer.put(&blocks(run, 5000), soon()).await, Ok(Outcome::Stored));
    }
    let reader = open();
    assert_eq!(reader.look_up(&long, soon()).await, 20);
    let read = reader.get(&long, 3..22, soon()).await;
    assert_eq!(read.len(), 17);
    assert_true(&read, &long[3..], 5000);

    for (conversation, payload) in [(2, 5000), (3, 3 << 20)] {
        let chain = chain(conversation, 4);
        let run = Arc::new(blocks(&chain, payload));
        let writers = (0..4).map(|_| {
            let (tier, run) = (open(), run.clone());
            tokio::spawn(async move { tier.put(&run, soon()).await })
        });
        let outcomes = join_all(writers).await;
        let count =
            |wanted| outcomes.iter().filter(|outcome| matches!(outcome, Ok(Ok(o)) if *o == wanted)).count();
        println!("{payload} byte blocks, four writers: {outcomes:?}");
        if payload == 5000 {
            assert_eq!((count(Outcome::Stored), count(Outcome::Present)), (1, 3));
        } else {
            // Not every service supports the condition at the end of an upload in parts.
            assert_eq!(count(Outcome::Stored) + count(Outcome::Present), 4);
        }
        let read = open().get(&chain, 0..4, soon()).await;
        assert_eq!(read.len(), 4);
        assert_true(&read, &chain, payload);
    }

    writer.delete(long[7], soon()).await.expect("deleted");
    assert_eq!(open().look_up(&long, soon()).await, 4);
    let clock = later_clock();
    let sweeper = ObjectTier::open_with_clock(config.clone(), clock.clone()).expect("opens");
    assert_eq!(sweeper.sweep(100, soon()).await.expect("sweeps").deleted, 0);
    clock.advance(Duration::from_secs(8 * 24 * 3600));
    let report = sweeper.sweep(100, soon()).await.expect("sweeps");
    assert_eq!((report.deleted, report.complete), (6, true));
    assert_eq!(open().look_up(&long, soon()).await, 0);
    assert_eq!(writer.counters().get("failures"), 0);
}

#[tokio::test]
async fn an_unknown_certificate_authority_is_refused() {
    let Some(mut config) = config() else { return };
    let Location::S3(s3) = &mut config.location else { return };
    if s3.ca_bundle.take().is_none() {
        println!("SKIPPED: KVSTORE_OBJECT_S3_CA is not set; tests/moto.sh sets it for its second run");
        return;
    }
    let tier = ObjectTier::open(config).expect("opens");
    assert_eq!(tier.look_up(&chain(9, 4), soon()).await, 0);
    let error = tier.delete(chain(9, 4)[3], soon()).await.expect_err("no connection");
    assert_eq!(error.cause(), Some(FailureCause::Connection));
}
