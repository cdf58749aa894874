//! The reference engine: one question tells everything.

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::{Description, Dialect, Engine, Feed, Hints, Pulse, Role};
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
            let feed = said.events.map(|events| Feed { events, replay: said.replay, bind: false });
            Ok(Description {
                engine: Engine::Native,
                version: env!("CARGO_PKG_VERSION").to_owned(),
                models: vec![said.model],
                role: Some(role),
                context_tokens: said.context_tokens,
                block_tokens: said.block_tokens,
                blocks: said.blocks,
                lower_blocks: said.lower_blocks,
                instance: Some(said.instance),
                feeds: vec![feed],
                data_plane: Some(said.data_plane),
                bootstrap: None,
            })
        }
        .boxed()
    }

    fn pulse<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Pulse, EngineError>> {
        async move {
            let said = client.describe().await?;
            Ok(Pulse { instance: Some(said.instance), loads: Vec::new() })
        }
        .boxed()
    }

    fn returns_token_ids(&self) -> bool {
        true
    }
}
