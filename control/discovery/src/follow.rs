//! The task between the sources and the fleet: receives updates, and publishes the merged endpoints.
//!
//! A single change is published at once. Updates that arrive in the pause after it are published together:
//! the pause is at least `PUBLISH_PAUSE`, and `PAUSE_FACTOR` times as long as publishing took, so that a
//! continuously changing fleet of thousands costs at most a twentieth of a core.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::endpoint::Endpoint;
use crate::roster::{Roster, SourceStatus};
use crate::update::Update;

/// Shortest time between two publications.
const PUBLISH_PAUSE: Duration = Duration::from_millis(20);

/// The pause after a publication is this many times as long as the publication took.
const PAUSE_FACTOR: u32 = 19;

/// Most updates that wait to be applied. A source that has a further update waits.
const UPDATES_MAX: usize = 1024;

/// An update in the channel.
#[derive(Debug)]
struct Sent {
    source: usize,
    update: Update,
    at: Instant,
}

/// Sending end of a source's channel.
#[derive(Debug, Clone)]
pub struct Sender {
    source: usize,
    sender: mpsc::Sender<Sent>,
}

/// Receiving end of the updates, for [`follow`].
#[derive(Debug)]
pub struct Receiver(mpsc::Receiver<Sent>);

/// Merged endpoints, and the state of the sources.
#[derive(Debug)]
pub struct Batch {
    /// Merged endpoints; `None` if only the state of sources has changed.
    pub endpoints: Option<Vec<Endpoint>>,
    /// State of each source, in the order of the sources.
    pub sources: Vec<SourceStatus>,
    /// Time at which a source reported the oldest update of this batch.
    pub reported: Instant,
}

/// Creates a sender for each of `sources` sources.
#[must_use]
pub fn channel(sources: usize) -> (Vec<Sender>, Receiver) {
    let (sender, receiver) = mpsc::channel(UPDATES_MAX);
    let senders = (0..sources).map(|source| Sender { source, sender: sender.clone() }).collect();
    (senders, Receiver(receiver))
}

impl Sender {
    /// Sends an update, waiting while the channel is full; returns whether there is still a receiver.
    pub async fn send(&self, update: Update) -> bool {
        let sent = Sent { source: self.source, update, at: now() };
        self.sender.send(sent).await.is_ok()
    }
}

/// Applies updates to the roster and passes the result to `publish`. Ends with the last sender.
pub async fn follow(mut roster: Roster, mut updates: Receiver, mut publish: impl FnMut(Batch)) {
    loop {
        let expiry = roster.next_expiry().map(tokio::time::Instant::from_std);
        let first = tokio::select! {
            sent = updates.0.recv() => match sent {
                Some(sent) => Some(sent),
                None => return,
            },
            () = at(expiry) => None,
        };
        let (now, began) = (now(), Instant::now());
        let reported = first.as_ref().map_or(now, |sent| sent.at);
        let mut is_changed = roster.expire(now);
        let mut next = first;
        let mut left = UPDATES_MAX;
        while let Some(Sent { source, update, .. }) = next {
            is_changed |= roster.apply(source, update, now);
            left -= 1;
            next = if left == 0 { None } else { updates.0.try_recv().ok() };
        }
        let endpoints = is_changed.then(|| roster.endpoints());
        publish(Batch { endpoints, sources: roster.status(), reported });
        tokio::time::sleep(PUBLISH_PAUSE.max(began.elapsed() * PAUSE_FACTOR)).await;
    }
}

/// Returns the time of Tokio's clock, which tests can pause.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Waits until `time`; without a time it never returns.
async fn at(time: Option<tokio::time::Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::source_state::RemovalLimit;
    use crate::update::Object;

    fn listed(urls: &[&str]) -> Update {
        Update::Listed(urls.iter().map(|url| Object::of(Endpoint::new(*url))).collect())
    }

    #[tokio::test]
    async fn updates_are_published_together_and_suspects_end_in_time() {
        let guard = RemovalLimit { share: 0.5, time: Duration::from_secs(2) };
        let roster = Roster::new(vec!["a".to_owned(), "b".to_owned()], guard);
        let (senders, receiver) = channel(2);
        let published: Arc<Mutex<Vec<Batch>>> = Arc::default();
        for number in 0..50 {
            let url = format!("http://a:{number}");
            assert!(senders[0].send(Update::Changed(Object::of(Endpoint::new(url)))).await);
        }
        let into = Arc::clone(&published);
        let task =
            tokio::spawn(follow(roster, receiver, move |batch| into.lock().expect("lock").push(batch)));
        // Waits for the condition only, however slow the machine is.
        let until = async |is_so: fn(&[Batch]) -> bool| {
            let began = Instant::now();
            while !is_so(&published.lock().expect("lock")) {
                assert!(
                    began.elapsed() < Duration::from_secs(30),
                    "{:?}",
                    published.lock().expect("lock").last()
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        until(|published| !published.is_empty()).await;
        {
            let published = published.lock().expect("lock");
            let count = published[0].endpoints.as_ref().map(Vec::len);
            assert_eq!((published.len(), count), (1, Some(50)), "fifty updates are one publication");
        }
        assert!(senders[0].send(listed(&[])).await);
        assert!(senders[1].send(Update::Failed("refused".to_owned())).await);
        until(|published| published.last().is_some_and(|batch| batch.sources[0].suspects == 50)).await;
        until(|published| published.last().is_some_and(|batch| batch.sources[0].endpoints == 0)).await;
        {
            let published = published.lock().expect("lock");
            let last = published.last().expect("published");
            assert_eq!(last.endpoints.as_ref().map(Vec::len), Some(0), "their time is up");
            assert_eq!(last.sources[1].error.as_deref(), Some("refused"));
        }
        drop(senders);
        task.await.expect("it ends with its senders");
    }
}
