//! Events of an engine that publishes none but tells them when it is asked (TensorRT-LLM).

use std::sync::PoisonError;
use std::time::Duration;

use router_engines::client::EngineClient;
use router_events::subscribe::SubscriptionContext;
use router_events::trtllm::Decoder;

const PATH: &str = "/kv_cache_events";
/// Pause between polls that return no events.
const PAUSE: Duration = Duration::from_millis(20);
/// Pause after a failed poll.
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(1);
/// The engine itself may wait for events for some seconds.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);

/// Asks again and again until it is aborted; `begun` is called when the first answer is in the index.
pub(crate) async fn poll(client: EngineClient, followed: SubscriptionContext, begun: impl Fn()) {
    let mut decoder = Decoder::default();
    let mut is_first = true;
    let mut complained = false;
    let SubscriptionContext { follower, index, resync } = followed;
    loop {
        let asked = tokio::time::timeout(ANSWER_WITHIN, client.post_large(PATH, bytes::Bytes::new()));
        let answer = tokio::select! {
            answer = asked => answer.map_err(|_| "no answer in time".to_owned()),
            () = resync.notified() => {
                follower.lock().unwrap_or_else(PoisonError::into_inner).start_over(&mut index.write());
                continue;
            }
        };
        let told = answer.and_then(|answer| answer.map_err(|error| error.to_string()));
        // Decoded before the index is locked.
        let events = told.and_then(|answer| decoder.decode(&answer).map_err(|error| error.to_string()));
        match events {
            Ok(events) => {
                let count = events.len();
                follower.lock().unwrap_or_else(PoisonError::into_inner).polled(&mut index.write(), events);
                complained = false;
                if std::mem::replace(&mut is_first, false) {
                    begun();
                }
                if count == 0 {
                    tokio::time::sleep(PAUSE).await;
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut complained, true) {
                    tracing::warn!(worker = client.base(), error, "KV events cannot be polled");
                }
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
            }
        }
    }
}
