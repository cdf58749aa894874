//! The blocks that the pool of `kvasir store` holds, for gateways (`gateway.stores`): `GET /kvasir/blocks?instance=I&after=S`.
//!
//! A dedicated thread receives the changes of the store's tiers, so that a gateway that requests the whole
//! state never delays the store's thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use axum::Router;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use kvstore_store::{Medium, RecoveredBlock, StoreEvent};
use router_events::store_changes::{BLOCKS_PATH, ChangeLog, ChangesSince, LONG_POLL_MAX};
use tokio::sync::{Semaphore, watch};

/// Most answers that are built at a time: each may be a copy of the whole state.
const ANSWERS_MAX: usize = 2;

/// Log of the pool's blocks, and the long polls that wait for changes.
#[derive(Debug)]
pub(crate) struct BlockFeed {
    log: Mutex<ChangeLog>,
    sequence: watch::Sender<u64>,
    /// Whether the server is stopping: waiting requests are answered at once.
    is_closing: AtomicBool,
    answers: Semaphore,
}

impl BlockFeed {
    /// Creates the feed of the store `name` from the blocks that survived the restart, and follows its
    /// changes from `moves`.
    pub(crate) fn start(
        name: &str,
        instance: u64,
        survivors: &[RecoveredBlock],
        moves: Receiver<StoreEvent>,
    ) -> Result<Arc<Self>> {
        let mut log = ChangeLog::new(name, instance);
        survivors.iter().for_each(|block| log.set_held(block.identity, tier(Medium::Disk), true));
        let sequence = watch::Sender::new(log.sequence());
        let held = Arc::new(Self {
            log: Mutex::new(log),
            sequence,
            is_closing: AtomicBool::new(false),
            answers: Semaphore::new(ANSWERS_MAX),
        });
        let following = Arc::clone(&held);
        std::thread::Builder::new().name("kvasir-block-feed".to_owned()).spawn(move || {
            // The loop ends when the store drops its sender.
            while let Ok(first) = moves.recv() {
                following.apply(std::iter::once(first).chain(moves.try_iter()));
            }
        })?;
        Ok(held)
    }

    fn apply(&self, moves: impl Iterator<Item = StoreEvent>) {
        let mut log = self.lock();
        for moved in moves {
            match moved {
                StoreEvent::Stored { identity, medium } => log.set_held(identity, tier(medium), true),
                StoreEvent::Removed { identity, medium } => log.set_held(identity, tier(medium), false),
                _ => {}
            }
        }
        let sequence = log.sequence();
        // Released first: waiters lock it inside `wait_for`, which holds the channel's lock.
        drop(log);
        self.sequence.send_replace(sequence);
    }

    /// Answers all waiting requests.
    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        // Wakes waiters, which then see `is_closing`.
        self.sequence.send_modify(|_| {});
    }

    /// Returns the route of the feed.
    pub(crate) fn router(self: &Arc<Self>) -> Router {
        Router::new().route(BLOCKS_PATH, get(answer)).with_state(Arc::clone(self))
    }

    fn lock(&self) -> MutexGuard<'_, ChangeLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tier(medium: Medium) -> u8 {
    match medium {
        Medium::Host => 0,
        Medium::Disk => 1,
    }
}

async fn answer(State(feed): State<Arc<BlockFeed>>, Query(known): Query<ChangesSince>) -> Response {
    let mut sequence = feed.sequence.subscribe();
    let has_changes = |_: &u64| feed.is_closing.load(Ordering::Relaxed) || feed.lock().has_changes(known);
    // An answer without changes shows the gateway that the store is alive.
    let _changed = tokio::time::timeout(LONG_POLL_MAX, sequence.wait_for(has_changes)).await.is_ok();
    // The semaphore is never closed.
    let Ok(_turn) = feed.answers.acquire().await else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    let making = Arc::clone(&feed);
    let body = tokio::task::spawn_blocking(move || {
        let changes = making.lock().changes(known);
        serde_json::to_vec(&changes)
    });
    match body.await {
        Ok(Ok(body)) => ([(CONTENT_TYPE, "application/json")], body).into_response(),
        failed => {
            tracing::error!(?failed, "the list of the pool's blocks cannot be read");
            (StatusCode::INTERNAL_SERVER_ERROR, "the list of the pool's blocks cannot be read")
                .into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

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
        let stored =
            |number| StoreEvent::Stored { identity: BlockIdentity([number; 16]), medium: Medium::Host };
        let removed =
            |number| StoreEvent::Removed { identity: BlockIdentity([number; 16]), medium: Medium::Host };
        let (news, moves) = std::sync::mpsc::channel();
        news.send(stored(1)).expect("a listener");
        let feed = BlockFeed::start("n0", 3, &[], moves).expect("a thread");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let server = tokio::spawn(axum::serve(listener, feed.router()).into_future());

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
        // A stopping store answers the requests that wait.
        let before = Instant::now();
        feed.close();
        server.abort();
        until("nothing is left", || shows(false, 0)).await;
        assert!(before.elapsed() < LONG_POLL_MAX, "{:?}", before.elapsed());
    }
}
