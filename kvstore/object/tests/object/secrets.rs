//! Secrets never appear: a canary secret and token go through every operation, against a service that repeats
//! them in every error's body, code and headers, with every log line of every library recorded.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvstore_object::{Credentials, Location, ObjectConfig, ObjectTier};
use tokio::time::Instant;

use crate::support::faults::{Fault, Plan};
use crate::support::server::{Double, account};
use crate::support::{Directory, blocks, chain, later_clock, soon};

/// Records everything that is logged or printed.
#[derive(Clone, Default)]
struct Record(Arc<Mutex<Vec<u8>>>);

impl Record {
    fn add(&self, text: impl std::fmt::Debug + std::fmt::Display) {
        let mut bytes = self.0.lock().expect("no panic with the lock");
        writeln!(bytes, "{text}\n{text:?}\n{text:#?}").expect("memory");
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().expect("no panic with the lock")).into_owned()
    }
}

impl Write for Record {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic with the lock").write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_canary_never_sings() {
    let (record, logs) = (Record::default(), Record::default());
    let writer = logs.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    // Set for this thread, which runs all of this test.
    let _guard = tracing_subscriber::util::SubscriberInitExt::set_default(subscriber);
    let double = Double::start().await;
    let account = account();
    let token = account.token.clone().expect("has one");
    *double.state.echo.lock().expect("no panic with the lock") = format!("{} {token}", account.secret);

    let statuses =
        [200, 204, 206, 301, 304, 307, 400, 401, 403, 404, 405, 409, 411, 412, 416, 429, 500, 501, 503];
    let mut faults: Vec<Fault> = statuses.map(Fault::Status).to_vec();
    faults.extend([
        Fault::Reset,
        Fault::Truncate,
        Fault::ShortObject,
        Fault::BitFlip,
        Fault::WrongETag,
        Fault::LostAnswer(500),
        Fault::Hang,
    ]);
    let (small, large) = (blocks(&chain(1, 4), 100), blocks(&chain(2, 4), 2 << 20));
    let stored = blocks(&chain(3, 4), 100);
    ObjectTier::open(double.config()).expect("opens").put(&stored, soon()).await.expect("stored");
    let mut errors = 0;
    for fault in faults {
        let clock = later_clock();
        let config = ObjectConfig {
            breaker_failures: 1000,
            request_timeout: Duration::from_millis(300),
            ttl: Some(Duration::from_secs(60)),
            delete_damaged: false,
            ..double.config()
        };
        record.add(format!("{config:?} {config:#?}"));
        let tier = ObjectTier::open_with_clock(config, clock.clone()).expect("opens");
        let short = || Instant::now() + Duration::from_millis(400);
        double.plan(Plan::always(fault));
        let chain = chain(3, 4);
        tier.look_up(&chain, short()).await;
        tier.get(&chain, 0..4, short()).await;
        for run in [&small, &large] {
            if let Err(error) = tier.put(run, short()).await {
                record.add(error);
                errors += 1;
            }
        }
        if let Err(error) = tier.delete(small[3].identity, short()).await {
            record.add(error);
            errors += 1;
        }
        if let Err(error) = tier.sweep(10, short()).await {
            record.add(error);
            errors += 1;
        }
        record.add(format!("{tier:?} {tier:#?}"));
    }
    let mut config = double.config();
    if let Location::S3(s3) = &mut config.location {
        s3.endpoint = Some(format!("http://user:{token}@127.0.0.1:9"));
    }
    record.add(ObjectTier::open(config).expect_err("a password in the endpoint is refused"));

    let directory = Directory::new();
    let path = directory.0.join("junk.pem");
    std::fs::write(&path, &account.secret).expect("written");
    let mut config = double.config();
    if let Location::S3(s3) = &mut config.location {
        s3.ca_bundle = Some(path.clone());
    }
    record.add(ObjectTier::open(config.clone()).expect_err("no certificate"));
    if let Location::S3(s3) = &mut config.location {
        s3.ca_bundle = None;
        s3.credentials = Credentials::File { path, profile: "default".into() };
    }
    record.add(ObjectTier::open(config).expect_err("neither keys nor a safe mode"));

    let (text, logged) = (record.text(), logs.text());
    println!("{errors} errors, {} bytes of errors, {} bytes of logs", text.len(), logged.len());
    assert!(errors > 60, "{errors}: every path failed");
    for status in ["400", "403", "500", "501", "409"] {
        assert!(text.contains(&format!("status {status}")), "{status} was seen");
    }
    assert!(text.contains("secret_access_key: set") && text.contains("session_token: set"));
    for (place, text) in [("errors", &text), ("logs", &logged)] {
        for canary in [&account.secret, &token] {
            let found = text.lines().find(|line| line.contains(canary.as_str()));
            assert!(found.is_none(), "{place}: {found:?}");
        }
    }
    // Checks the test itself: the logs are recorded, and the service does repeat the canary.
    tracing::trace!("rig {}", account.secret);
    assert!(logs.text().contains(&account.secret), "a planted line is found");
    assert!(logged.len() > 10_000, "the libraries' lines are recorded");
}
