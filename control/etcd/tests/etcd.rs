//! The source, registrations and the election against a real etcd.

use std::time::{Duration, Instant};

use control_discovery::{Batch, RemovalLimit, Roster, channel, follow};
use control_etcd::{Client, ClientConfig, EtcdLease, EtcdSource, Registration, Worker};
use tokio::sync::{mpsc, watch};

#[path = "../../../tests/system/support/etcd.rs"]
#[expect(unreachable_pub, reason = "a module of test binaries")]
mod support;

use support::Etcd;

const PREFIX: &str = "/kvasir";

fn client(etcd: &Etcd) -> Client {
    let config = ClientConfig { endpoints: vec![etcd.url()], ..ClientConfig::default() };
    Client::new(config).expect("an endpoint")
}

/// Workers as a gateway sees them.
struct Seen {
    batches: mpsc::UnboundedReceiver<Batch>,
    urls: Vec<String>,
    error: Option<String>,
    suspects: usize,
}

impl Seen {
    fn start(client: Client, relist: Duration) -> Self {
        let source = EtcdSource::new(client, PREFIX, relist);
        let guard = RemovalLimit { share: 0.5, time: Duration::from_secs(600) };
        let roster = Roster::new(vec![source.name()], guard);
        let (mut senders, receiver) = channel(1);
        let (sender, batches) = mpsc::unbounded_channel();
        tokio::spawn(follow(roster, receiver, move |batch| drop(sender.send(batch))));
        tokio::spawn(source.watch(senders.remove(0)));
        Self { batches, urls: Vec::new(), error: None, suspects: 0 }
    }

    /// Applies updates until `is_there`; returns how long that took.
    async fn until(&mut self, what: &str, is_there: impl Fn(&Self) -> bool) -> Duration {
        let began = Instant::now();
        while !is_there(self) {
            let batch = tokio::time::timeout(Duration::from_secs(40), self.batches.recv()).await;
            let batch = batch.unwrap_or_else(|_| panic!("{what}: {:?} {:?}", self.urls, self.error));
            let Batch { endpoints, sources, .. } = batch.expect("it goes on");
            if let Some(endpoints) = endpoints {
                let url =
                    |endpoint: &control_discovery::Endpoint| format!("{} {:?}", endpoint.url, endpoint.state);
                self.urls = endpoints.iter().map(url).collect();
            }
            self.error = sources[0].error.clone();
            self.suspects = sources[0].suspects;
        }
        began.elapsed()
    }
}

fn worker(url: &str) -> Worker {
    Worker { url: url.to_owned(), ..Worker::default() }
}

#[tokio::test]
async fn keys_are_workers_and_an_etcd_that_is_away_changes_nothing() {
    let Some(mut etcd) = Etcd::start("etcd-source", &[]) else { return };
    let mut seen = Seen::start(client(&etcd), Duration::from_secs(300));
    etcd.ctl(&["put", "/kvasir/workers/a", "http://a:1"]);
    seen.until("a key", |seen| seen.urls == ["http://a:1 Ready"]).await;
    etcd.ctl(&["put", "/kvasir/workers/bad", "nonsense"]);
    seen.until("the mistake", |seen| seen.error.as_ref().is_some_and(|error| error.starts_with("bad: ")))
        .await;
    etcd.ctl(&["del", "/kvasir/workers/bad"]);
    seen.until("the mistake to be mended", |seen| seen.error.is_none()).await;
    assert_eq!(seen.urls, ["http://a:1 Ready"]);
    etcd.ctl(&["put", "/kvasir/others/b", "http://b:1"]);

    let mut registration = Registration::new(client(&etcd), PREFIX, "r", worker("http://r:1"));
    assert!(registration.renew().await.expect("written"));
    assert!(!registration.renew().await.expect("renewed"));
    seen.until("the registration", |seen| seen.urls.len() == 2).await;

    // etcd is down, then up again with its data.
    etcd.kill();
    seen.until("the failure", |seen| seen.error.is_some()).await;
    assert_eq!(seen.urls.len(), 2);
    assert!(registration.renew().await.is_err());
    etcd.restart();
    let back = seen.until("etcd to be back", |seen| seen.error.is_none()).await;
    println!("etcd is read again {back:?} after it was started");
    assert!(!registration.renew().await.expect("renewed"), "the lease outlives a restart");

    // etcd is up again without its data: missing workers are suspect, and trusted again when they register
    // again.
    etcd.restart_empty();
    seen.until("the guard", |seen| seen.suspects == 2).await;
    assert_eq!(seen.urls.len(), 2);
    assert!(registration.renew().await.expect("written anew"));
    seen.until("one to be trusted again", |seen| seen.suspects == 1).await;
    etcd.ctl(&["put", "/kvasir/workers/a", "http://a:1"]);
    seen.until("both to be trusted again", |seen| seen.suspects == 0).await;

    registration.drain().await.expect("told");
    seen.until("it to drain", |seen| seen.urls.contains(&"http://r:1 Draining".to_owned())).await;
    registration.remove().await.expect("removed");
    let gone = seen.until("it to be gone", |seen| seen.urls == ["http://a:1 Ready"]).await;
    println!("a worker that says goodbye is gone after {gone:?}");

    // The registration is not renewed any more: the worker is served while it answers.
    let mut silent = Registration::new(client(&etcd), PREFIX, "s", worker("http://s:1"));
    silent.renew().await.expect("written");
    seen.until("it", |seen| seen.urls.len() == 2).await;
    drop(silent);
    let expired = seen.until("its lease to run out", |seen| seen.suspects == 1).await;
    assert!(expired > Duration::from_secs(5), "{expired:?}");
    assert_eq!(seen.urls.len(), 2);
}

#[tokio::test]
async fn lists_have_pages_and_what_was_compacted_is_listed_anew() {
    let Some(etcd) = Etcd::start("etcd-pages", &[]) else { return };
    const KEYS: usize = 1200;
    for chunk in (0..KEYS).collect::<Vec<_>>().chunks(100) {
        // A transaction of etcdctl: no comparisons, the puts, and no other operations.
        let puts: String = chunk
            .iter()
            .map(|number| format!("put /kvasir/workers/n{number:04} http://n{number}:1\n"))
            .collect();
        etcd.transaction(&puts);
    }
    let began = Instant::now();
    let mut seen = Seen::start(client(&etcd), Duration::from_secs(2));
    seen.until("all keys", |seen| seen.urls.len() == KEYS).await;
    println!("{KEYS} workers are listed after {:?}", began.elapsed());
    // The history is compacted between two lists.
    for round in 0..3 {
        etcd.ctl(&["put", "/kvasir/workers/last", &format!("http://last:{}", round + 1)]);
        let revision = etcd.revision();
        etcd.ctl(&["compact", &revision]);
        let url = format!("http://last:{} Ready", round + 1);
        seen.until("the change", |seen| seen.urls.contains(&url)).await;
    }
}

#[tokio::test]
async fn a_user_shows_its_password_and_its_token_is_renewed() {
    let Some(etcd) = Etcd::start("etcd-auth", &["--auth-token-ttl", "3"]) else { return };
    etcd.ctl(&["user", "add", "root:secret"]);
    etcd.ctl(&["user", "grant-role", "root", "root"]);
    etcd.ctl(&["auth", "enable"]);
    let config = |user: Option<(&str, &str)>| ClientConfig {
        endpoints: vec![etcd.url()],
        user: user.map(|(name, password)| (name.to_owned(), password.to_owned())),
        ..ClientConfig::default()
    };
    let register = |user| {
        Registration::new(Client::new(config(user)).expect("a client"), PREFIX, "a", worker("http://a:1"))
    };
    let error = register(None).renew().await.expect_err("nobody").to_string();
    assert!(error.contains("user name is empty"), "{error}");
    let error = register(Some(("root", "wrong"))).renew().await.expect_err("wrong").to_string();
    assert!(error.contains("authentication failed") && !error.contains("wrong"), "{error}");
    let mut registered = register(Some(("root", "secret")));
    registered.renew().await.expect("written");
    let mut seen =
        Seen::start(Client::new(config(Some(("root", "secret")))).expect("a client"), Duration::from_secs(1));
    seen.until("the worker", |seen| seen.urls == ["http://a:1 Ready"]).await;
    // Longer than the token's lifetime: the token is refused once, and fetched again.
    tokio::time::sleep(Duration::from_secs(6)).await;
    let mut renewed = registered.renew().await;
    if renewed.is_err() {
        renewed = registered.renew().await;
    }
    renewed.expect("a new token");
}

struct Candidate {
    leads: watch::Receiver<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Candidate {
    fn start(etcd: &Etcd, identity: &str) -> Self {
        let (sender, leads) = watch::channel(false);
        let lease = EtcdLease::new(client(etcd), PREFIX, "control", identity);
        Self { leads, task: tokio::spawn(control_discovery::election::run(lease, sender)) }
    }

    async fn until(&mut self, leads: bool) -> Duration {
        let began = Instant::now();
        let changed =
            tokio::time::timeout(Duration::from_secs(40), self.leads.wait_for(|now| *now == leads)).await;
        changed.expect("in time").expect("it runs");
        began.elapsed()
    }
}

#[tokio::test]
async fn one_of_two_leads_and_the_other_one_takes_over() {
    let Some(mut etcd) = Etcd::start("etcd-leader", &[]) else { return };
    let mut first = Candidate::start(&etcd, "first");
    first.until(true).await;
    assert!(etcd.ctl(&["get", "--print-value-only", "/kvasir/leaders/control"]).starts_with("first"));
    let mut second = Candidate::start(&etcd, "second");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(*first.leads.borrow() && !*second.leads.borrow());
    // The leader is killed: the second candidate has to wait until the lease expires.
    first.task.abort();
    let after_death = second.until(true).await;
    // The leader stops: its lease is released.
    let mut third = Candidate::start(&etcd, "third");
    tokio::time::sleep(Duration::from_secs(1)).await;
    drop(second.leads);
    second.task.await.expect("no panic");
    let after_release = third.until(true).await;
    assert!(after_release < Duration::from_secs(5), "{after_release:?}");
    // etcd is down: the leader gives up before its lease has expired.
    etcd.kill();
    let gave_up = third.until(false).await;
    assert!(gave_up <= Duration::from_secs(11), "{gave_up:?}");
    etcd.restart();
    let led_again = third.until(true).await;
    println!(
        "another process leads {after_death:?} after the leader's death, {after_release:?} after its end; without etcd a leader \
         gives up after {gave_up:?}, and leads again {led_again:?} after etcd is back"
    );
}
