//! Posts each change of the wanted counts to a URL.
//!
//! ```text
//! POST URL
//! Authorization: Bearer KEY            (with a key)
//! {"decision_id": 7, "pools": [{"pool": "decode", "wanted": 3, "current": 2, "reason": "decode: 3 workers, …"}]}
//! ```
//!
//! A 2xx answer acknowledges the decision. Until then the same decision is posted again, with the same
//! `decision_id`, at growing intervals up to [`RETRY_MAX`]; a newer decision replaces it at once.
//! `decision_id` grows with each change of the wanted counts and starts from the milliseconds since 1970 at
//! start-up, so that it also grows over restarts. A receiver can ignore an id that it has seen.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{Method, Uri};
use router_engines::client::EngineClient;
use serde_json::{Value, json};

use crate::desired::{DesiredCounts, PoolTarget};

/// Time limit for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Pause after a first post that was not acknowledged; it doubles with each further post.
const RETRY_MIN: Duration = Duration::from_millis(500);
/// Longest pause between two posts of one decision.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Error of an invalid URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookError(String);

impl std::fmt::Display for WebhookError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:?} is not of the form http://HOST:PORT/PATH or https://HOST:PORT/PATH", self.0)
    }
}

impl std::error::Error for WebhookError {}

/// Destination of the posts.
#[derive(Debug)]
pub struct Webhook {
    client: EngineClient,
    path: String,
}

impl Webhook {
    /// Splits a URL into `SCHEME://HOST:PORT` and its path with the query.
    pub fn split(url: &str) -> Result<(String, String), WebhookError> {
        let error = || WebhookError(url.to_owned());
        let parsed: Uri = url.parse().map_err(|_| error())?;
        let scheme =
            parsed.scheme_str().filter(|scheme| ["http", "https"].contains(scheme)).ok_or_else(error)?;
        let authority =
            parsed.authority().filter(|authority| !authority.as_str().contains('@')).ok_or_else(error)?;
        let port = authority.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
        let path = parsed.path_and_query().map_or("/", |path| path.as_str());
        Ok((format!("{scheme}://{}:{port}", authority.host()), path.to_owned()))
    }

    /// Creates a webhook that posts to this path of the client's server. The client sends the key, if there
    /// is one.
    #[must_use]
    pub fn new(client: EngineClient, path: String) -> Self {
        Self { client, path }
    }

    /// Posts each change until the counts' sender is dropped.
    pub async fn run(self, mut counts: DesiredCounts) {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut decision_id = since_epoch.as_millis() as u64;
        let (mut attempted, mut acknowledged, mut retry) = (None, None, RETRY_MIN);
        loop {
            let pools = match counts.wait_for(|pools| pools.is_some() && wanted(pools) != acknowledged).await
            {
                Ok(pools) => pools.clone(),
                Err(_) => return,
            };
            let current = wanted(&pools);
            if current != attempted {
                (attempted, retry) = (current.clone(), RETRY_MIN);
                // A post whose answer is lost may have been carried out, so the previous acknowledgement no
                // longer holds.
                acknowledged = None;
                decision_id += 1;
            }
            match self.post(decision_id, &pools.unwrap_or_default()).await {
                Ok(()) => acknowledged = current,
                Err(error) => {
                    tracing::warn!(decision_id, ?retry, "the webhook did not take the decision: {error}");
                    let has_changed = counts.wait_for(|pools| wanted(pools) != attempted);
                    match tokio::time::timeout(retry, has_changed).await {
                        Ok(Ok(_)) => {}
                        Ok(Err(_)) => return,
                        Err(_) => retry = (retry * 2).min(RETRY_MAX),
                    }
                }
            }
        }
    }

    async fn post(&self, decision_id: u64, pools: &[PoolTarget]) -> Result<(), String> {
        let pools: Vec<Value> = pools
            .iter()
            .map(|pool| json!({"pool": pool.pool, "wanted": pool.wanted, "current": pool.current, "reason": pool.text}))
            .collect();
        let body = json!({"decision_id": decision_id, "pools": pools}).to_string();
        let posted = self.client.ask(Method::POST, &self.path, Bytes::from(body));
        match tokio::time::timeout(ANSWER_WITHIN, posted).await {
            Ok(answered) => answered.map(drop).map_err(|error| error.to_string()),
            Err(_) => Err(format!("no answer within {ANSWER_WITHIN:?}")),
        }
    }
}

/// Returns only the wanted counts.
fn wanted(pools: &Option<Vec<PoolTarget>>) -> Option<Vec<u32>> {
    pools.as_ref().map(|pools| pools.iter().map(|pool| pool.wanted).collect())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::extract::State;
    use axum::http::StatusCode;
    use axum::routing::post;

    use super::*;
    use crate::desired::desired_counts;

    #[test]
    fn a_url_has_a_scheme_a_host_and_a_path() {
        let split = |url: &str| Webhook::split(url).ok();
        let pair = |base: &str, path: &str| Some((base.to_owned(), path.to_owned()));
        assert_eq!(split("http://scaler:9000/hook?team=a"), pair("http://scaler:9000", "/hook?team=a"));
        assert_eq!(split("https://scaler"), pair("https://scaler:443", "/"));
        assert_eq!(split("http://[fd00::1]:80/x"), pair("http://[fd00::1]:80", "/x"));
        for bad in ["scaler:9000/hook", "ftp://scaler/x", "http://", "http://user:key@scaler/x", ""] {
            assert_eq!(split(bad), None, "{bad}");
        }
    }

    type Posts = Arc<Mutex<Vec<Value>>>;

    /// A receiver that refuses the first two posts and accepts all later ones.
    async fn receiver() -> (String, Posts) {
        async fn take(State(posts): State<Posts>, body: axum::body::Bytes) -> StatusCode {
            let mut posts = posts.lock().expect("a lock");
            posts.push(serde_json::from_slice(&body).expect("JSON"));
            if posts.len() < 3 { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::ACCEPTED }
        }
        let posts = Posts::default();
        let routes = axum::Router::new().route("/hook", post(take)).with_state(Arc::clone(&posts));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        tokio::spawn(async move { axum::serve(listener, routes).await });
        (url, posts)
    }

    #[tokio::test]
    async fn a_decision_is_posted_until_it_is_acknowledged_and_once_only() {
        let (url, posts) = receiver().await;
        let (sender, counts) = desired_counts();
        let running =
            tokio::spawn(Webhook::new(EngineClient::new(&url, None), "/hook".to_owned()).run(counts));
        let target =
            |wanted, current| PoolTarget { pool: "decode".to_owned(), wanted, current, text: "t".to_owned() };
        let count = |expected: usize| {
            let posts = Arc::clone(&posts);
            async move {
                while posts.lock().expect("a lock").len() < expected {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        };
        sender.publish(vec![target(3, 1)]);
        count(3).await;
        sender.publish(vec![target(3, 2)]);
        tokio::time::sleep(RETRY_MIN * 2).await;
        assert_eq!(posts.lock().expect("a lock").len(), 3, "workers that start are no new decision");
        sender.publish(vec![target(4, 3)]);
        count(4).await;
        drop(sender);
        running.await.expect("the webhook ends with the planner");
        let posts = posts.lock().expect("a lock").clone();
        let ids: Vec<u64> = posts.iter().filter_map(|post| post["decision_id"].as_u64()).collect();
        assert!(ids[0] == ids[1] && ids[1] == ids[2] && ids[3] == ids[2] + 1, "{ids:?}");
        assert_eq!(posts[3]["pools"], json!([{"pool": "decode", "wanted": 4, "current": 3, "reason": "t"}]));
    }
}
