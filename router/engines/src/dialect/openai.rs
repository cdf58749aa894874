//! A service outside the cluster that speaks OpenAI's API: a fallback for a pool of one's own.
//!
//! Nothing is asked of it but what clients ask: each question would be an API call, counted against its limits. So it is
//! taken to be well until requests fail, has no KV events, and keeps no prefix that routing could know of.

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::{Description, Dialect, Engine, Hints, Report, Role};
use crate::client::{EngineClient, EngineError};

/// Block size that is used for load accounting only.
const BLOCK_TOKENS: usize = 16;

#[derive(Debug)]
pub(super) struct OpenAi;

impl Dialect for OpenAi {
    fn engine(&self) -> Engine {
        Engine::OpenAi
    }

    fn describe<'a>(
        &'a self,
        client: &'a EngineClient,
        hints: &'a Hints,
    ) -> BoxFuture<'a, Result<Description, EngineError>> {
        async move {
            let Some(model) = hints.model.clone() else {
                return Err(
                    client.protocol("an OpenAI service needs the name of its model: set `pool.model`")
                );
            };
            Ok(Description {
                engine: Engine::OpenAi,
                version: "unknown".to_owned(),
                models: vec![model],
                role: Some(Role::Both),
                context_tokens: 0,
                block_tokens: BLOCK_TOKENS,
                blocks: 0,
                lower_blocks: [0; 2],
                keeps_prefixes: false,
                retains_blocks: false,
                instance: None,
                feeds: vec![None],
                data_plane: None,
                bootstrap: None,
            })
        }
        .boxed()
    }

    fn alive<'a>(&'a self, _: &'a EngineClient) -> BoxFuture<'a, Result<Option<u64>, EngineError>> {
        std::future::ready(Ok(None)).boxed()
    }

    fn report<'a>(&'a self, _: &'a EngineClient) -> BoxFuture<'a, Result<Report, EngineError>> {
        std::future::ready(Ok(Report::default())).boxed()
    }

    fn takes_extensions(&self) -> bool {
        false
    }
}
