//! Terminal status line of `serve`, with the values of the gateway's status route.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use router_engines::client::EngineClient;
use serde_json::Value;

const STATUS_PERIOD: Duration = Duration::from_secs(1);
/// Time limit of a status query, so that a gateway that hangs does not keep this process from its signals.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// The status line.
pub(super) struct Status {
    client: EngineClient,
    shown: Instant,
    tokens: u64,
    is_terminal: bool,
}

impl Status {
    pub(super) fn new(client: EngineClient) -> Self {
        Self { client, shown: Instant::now(), tokens: 0, is_terminal: std::io::stderr().is_terminal() }
    }

    async fn fetch(&self) -> Option<Value> {
        let body = tokio::time::timeout(ANSWER_WITHIN, self.client.get("/kvasir/status")).await.ok()?.ok()?;
        serde_json::from_slice(&body).ok()
    }

    pub(super) async fn all_ready(&self) -> bool {
        let Some(status) = self.fetch().await else { return false };
        let workers = status["workers"].as_array();
        workers.is_some_and(|workers| workers.iter().all(|worker| worker["ready"] == true))
    }

    pub(super) async fn show(&mut self) {
        let passed = self.shown.elapsed();
        if passed < STATUS_PERIOD || !self.is_terminal {
            return;
        }
        self.shown = Instant::now();
        let Some(status) = self.fetch().await else { return };
        let number = |name: &str| status[name].as_u64().unwrap_or(0);
        let tokens = number("generated_tokens");
        let rate = tokens.saturating_sub(self.tokens) as f64 / passed.as_secs_f64();
        self.tokens = tokens;
        let workers = status["workers"].as_array().map_or(&[][..], Vec::as_slice);
        let ready = workers.iter().filter(|worker| worker["ready"] == true).count();
        let cached = 100.0 * number("cached_tokens") as f64 / number("prompt_tokens").max(1) as f64;
        eprint!(
            "\r{ready}/{} workers · {} active · {rate:.0} tokens/s · {cached:.0} % of prompt tokens cached · {} moved mid-stream   ",
            workers.len(),
            number("active"),
            number("migrations"),
        );
    }
}
