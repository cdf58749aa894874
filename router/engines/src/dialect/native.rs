//! The reference engine: one request returns everything except the load, which is in `/metrics`.

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::prometheus::Metrics;
use super::transfers;
use super::{Description, Dialect, Engine, Feed, Hints, Report, Role, TokenCount};
use crate::client::{EngineClient, EngineError};

#[derive(Debug)]
pub(super) struct Native;

impl Dialect for Native {
    fn engine(&self) -> Engine {
        Engine::Native
    }

    fn describe<'a>(
        &'a self,
        client: &'a EngineClient,
        _hints: &'a Hints,
    ) -> BoxFuture<'a, Result<Description, EngineError>> {
        async move {
            let said = client.describe().await?;
            let role = Role::from_name(&said.role)
                .ok_or_else(|| client.protocol(format!("its role {:?} is unknown", said.role)))?;
            let feed =
                said.events.map(|events| Feed { events, replay: said.replay, bind: false, topic: None });
            Ok(Description {
                engine: Engine::Native,
                version: env!("CARGO_PKG_VERSION").to_owned(),
                models: vec![said.model],
                role: Some(role),
                context_tokens: said.context_tokens,
                block_tokens: said.block_tokens,
                blocks: said.blocks,
                lower_blocks: said.lower_blocks,
                keeps_prefixes: true,
                retains_blocks: said.lower_blocks[0] > 0,
                instance: Some(said.instance),
                feeds: vec![feed],
                data_plane: Some(said.data_plane),
                bootstrap: None,
            })
        }
        .boxed()
    }

    /// The description costs no more than `/health`, and contains the run number.
    fn alive<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Option<u64>, EngineError>> {
        async move { Ok(Some(client.describe().await?.instance)) }.boxed()
    }

    fn report<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Report, EngineError>> {
        async move {
            let text = client.get("/metrics").await?;
            let text = String::from_utf8_lossy(&text);
            let metrics = Metrics::parse(&text);
            let names = ("kvasir_engine_requests_running", "kvasir_engine_requests_waiting");
            let usage = ["kvasir_engine_kv_usage_ratio"];
            Ok(Report {
                instance: None,
                loads: metrics.loads("engine", names.0, names.1, &usage),
                requests_max: None,
                transfers: transfers::reports(&metrics, &transfers::NATIVE),
                stores: Vec::new(),
            })
        }
        .boxed()
    }

    fn returns_token_ids(&self) -> bool {
        true
    }

    fn token_count(&self) -> Option<TokenCount> {
        Some(TokenCount::Tokenize)
    }
}
