//! What the pool of `kvasir store` holds, for gateways (`gateway.stores`): `GET /kvasir/blocks?instance=I&after=S`.
//!
//! The store's thread sends what its tiers gain and lose to a thread of its own here, so that a gateway that asks for everything
//! never makes it wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use axum::Router;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use kvstore_store::{Medium, Moved, Survivor};
use router_events::store_changes::{Question, StoreLog};
use tokio::sync::watch;

/// A question is answered after this time even if nothing has changed.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// What the pool holds, and who waits for changes of it.
#[derive(Debug)]
pub(crate) struct HeldBlocks {
    log: Mutex<StoreLog>,
    sequence: watch::Sender<u64>,
    /// The server is to end: nobody waits any longer.
    is_closing: AtomicBool,
}

impl HeldBlocks {
    /// Of the store with this name: the blocks that were there when it started, and what it tells since.
    pub(crate) fn follow(
        name: &str,
        instance: u64,
        survivors: &[Survivor],
        moves: Receiver<Moved>,
    ) -> Result<Arc<Self>> {
        let mut log = StoreLog::new(name, instance);
        survivors.iter().for_each(|block| log.note(block.identity.0, tier(Medium::Disk), true));
        let sequence = watch::Sender::new(log.sequence());
        let held = Arc::new(Self { log: Mutex::new(log), sequence, is_closing: AtomicBool::new(false) });
        let following = Arc::clone(&held);
        std::thread::Builder::new().name("kvasir-held".to_owned()).spawn(move || {
            // Ends with the store.
            while let Ok(first) = moves.recv() {
                following.note(std::iter::once(first).chain(moves.try_iter()));
            }
        })?;
        Ok(held)
    }

    fn note(&self, moves: impl Iterator<Item = Moved>) {
        let mut log = self.lock();
        for moved in moves {
            match moved {
                Moved::Stored { identity, medium } => log.note(identity.0, tier(medium), true),
                Moved::Removed { identity, medium } => log.note(identity.0, tier(medium), false),
                _ => {}
            }
        }
        let sequence = log.sequence();
        // Those who wait look at the log with the channel locked.
        drop(log);
        self.sequence.send_replace(sequence);
    }

    /// Answers all who wait.
    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        // Those who wait look again, at both.
        self.sequence.send_modify(|_| {});
    }

    /// The route of the question.
    pub(crate) fn router(self: &Arc<Self>) -> Router {
        Router::new().route("/kvasir/blocks", get(answer)).with_state(Arc::clone(self))
    }

    fn lock(&self) -> MutexGuard<'_, StoreLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tier(medium: Medium) -> u8 {
    match medium {
        Medium::Host => 0,
        Medium::Disk => 1,
    }
}

async fn answer(State(held): State<Arc<HeldBlocks>>, Query(known): Query<Question>) -> Response {
    let mut sequence = held.sequence.subscribe();
    let is_news = |_: &u64| held.is_closing.load(Ordering::Relaxed) || held.lock().has_news(known);
    // Also when nothing changes: who asks sees that the store is alive.
    let _has_news = tokio::time::timeout(ANSWERED_WITHIN, sequence.wait_for(is_news)).await.is_ok();
    let told = tokio::task::spawn_blocking(move || {
        let told = held.lock().changes_after(known);
        serde_json::to_vec(&told)
    });
    match told.await {
        Ok(Ok(body)) => ([(CONTENT_TYPE, "application/json")], body).into_response(),
        _ => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    use control_config::Settings;
    use kvstore_block::BlockIdentity;
    use router_engines::key::EngineKeys;
    use router_fleet::{Fleet, StoreStatus};

    use crate::{compose, roster};

    async fn until(what: &str, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_so() {
            assert!(Instant::now() < deadline, "{what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_gateway_is_told_what_a_store_holds_and_forgets_it_with_the_store() {
        let stored = |number| Moved::Stored { identity: BlockIdentity([number; 16]), medium: Medium::Host };
        let removed = |number| Moved::Removed { identity: BlockIdentity([number; 16]), medium: Medium::Host };
        let (news, moves) = std::sync::mpsc::channel();
        news.send(stored(1)).expect("a listener");
        let held = HeldBlocks::follow("n0", 3, &[], moves).expect("a thread");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let server = tokio::spawn(axum::serve(listener, held.router()).into_future());

        let mut settings = Settings::default();
        settings.gateway.stores = vec![url.clone()];
        let access = compose::access(&settings, &[]).expect("defaults");
        let fleet = Fleet::start(roster::fleet(&settings, &access, EngineKeys::default()), 1);
        let shows = |answers, blocks| {
            let name = Some("n0".to_owned());
            fleet.stores.status() == [StoreStatus { url: url.clone(), name, answers, blocks }]
        };
        until("the first block", || shows(true, 1)).await;
        (2..100).for_each(|number| news.send(stored(number)).expect("a listener"));
        until("99 blocks", || shows(true, 99)).await;
        news.send(removed(7)).expect("a listener");
        until("one less", || shows(true, 98)).await;
        // A store that ends answers those who wait.
        let before = Instant::now();
        held.close();
        server.abort();
        until("nothing is left", || shows(false, 0)).await;
        assert!(before.elapsed() < ANSWERED_WITHIN, "{:?}", before.elapsed());
    }
}
