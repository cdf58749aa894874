//! The legs of a prefill→decode hand-off, before and after the worker runs them.
//!
//! * NIXL (vLLM): the prefill leg answers with the place of its blocks; the decode leg comes later and names them.
//! * Mooncake (vLLM): both legs come at once and meet by `transfer_id`; the prefill leg does not wait.
//! * Kvasir (vLLM with KvasirConnector): the same with a number, and the decode leg names the source of the blocks.
//! * SGLang: both legs come at once and meet by `bootstrap_room`; each waits for the other, and is refused if
//!   it does not come.

use std::sync::Arc;

use router_engines::connector_params::RETAIN_SECONDS;
use serde_json::{Value, json};

use super::parsed_request::{ParsedRequest, Surface};
use super::refusal::Refusal;
use super::request::BootstrapRooms;
use crate::fault::mix;
use crate::rendezvous::{self, RendezvousError, RendezvousGuard};
use crate::stats;
use crate::worker::Worker;
use crate::{Dialect, LoadFailure, Role, lease};

/// Address that mocks with KvasirConnector report as theirs.
pub(super) const DATA_PLANE: &str = "127.0.0.1:7400";

/// Properties of a request's leg that the worker needs.
#[derive(Debug, Default)]
pub(super) struct Leg {
    /// Name under which the blocks are leased.
    pub(super) lease: Option<String>,
    /// Whether the prompt's blocks came from another worker.
    pub(super) is_external: bool,
    /// Number of cached tokens that the decode leg reports.
    pub(super) report_cached: Option<usize>,
    room: Option<RendezvousGuard>,
    /// As in a prefill server of SGLang: the prompt and the first token are computed, whatever output the
    /// request asks for, and the leg ends once its blocks are fetched.
    pub(super) is_prompt_alone: bool,
    answers_transfer: bool,
}

fn not_met(_: RendezvousError) -> Refusal {
    Refusal::internal("The other leg of the hand-off did not come before the bootstrap timeout.")
}

/// Runs the steps before the computation.
pub(super) async fn before(worker: &Arc<Worker>, ask: &ParsedRequest, id: &str) -> Result<Leg, Refusal> {
    let config = &worker.config;
    if config.dialect == Dialect::Sglang {
        if config.role == Role::Both {
            return Ok(Leg::default());
        }
        let room = match &ask.rooms {
            Some(BootstrapRooms::One(room)) => Some(*room),
            Some(BootstrapRooms::Several(rooms)) if rooms.len() > 1 => {
                let words = "This mock takes one bootstrap room for each request.";
                return Err(Refusal::bad("bootstrap_room", words));
            }
            Some(BootstrapRooms::Several(rooms)) => rooms.first().copied().flatten(),
            None => None,
        };
        let words = "Invalid request: Disaggregated request received without bootstrap room id.";
        let room = room.ok_or_else(|| Refusal::bad("bootstrap_room", words))?;
        return sglang_leg(worker, format!("room:{room}"), config.role).await;
    }
    let Some(transfer) = &ask.transfer else { return Ok(Leg::default()) };
    if let (true, Some(seconds)) = (config.has_data_plane, transfer[RETAIN_SECONDS].as_u64()) {
        stats::add(&worker.counters.retain_seconds, seconds as usize);
    }
    let is_prefill = transfer["do_remote_decode"] == true;
    let is_decode = transfer["do_remote_prefill"] == true;
    if !is_prefill && !is_decode {
        return Ok(Leg::default());
    }
    if ask.prompts.len() * ask.choices != 1 {
        return Err(Refusal::bad("kv_transfer_params", "A hand-off is for one prompt and one choice."));
    }
    if let Some(id) = transfer["transfer_id"].as_str() {
        return meeting_leg(worker, format!("xfer:{id}"), is_prefill).await;
    }
    if let (true, Some(id)) = (config.has_data_plane, transfer["transfer_id"].as_u64()) {
        let is_told = is_prefill || transfer["from"]["tcp"] == DATA_PLANE;
        let kind = if is_prefill { "prefill" } else { "decode" };
        if transfer["kvasir"] != kind || !is_told {
            return Err(Refusal::bad("kv_transfer_params", "Not a leg of KvasirConnector's."));
        }
        return meeting_leg(worker, format!("kvasir:{id}"), is_prefill).await;
    }
    if is_prefill {
        // A salt makes the name hard to guess, as vLLM adds one to the request's id.
        let salt = mix(worker.config.seed ^ mix(id.bytes().fold(7, |hash, byte| mix(hash ^ u64::from(byte)))))
            as u32;
        let name = match ask.surface {
            Surface::Completion => format!("{id}-0-{salt:08x}"),
            _ => format!("{id}-{salt:08x}"),
        };
        return Ok(Leg { lease: Some(name), answers_transfer: true, ..Leg::default() });
    }
    let (engine, name) = (transfer["remote_engine_id"].as_str(), transfer["remote_request_id"].as_str());
    let is_pulled = matches!((engine, name), (Some(engine), Some(name)) if lease::pull(engine, name));
    // As 0.32 reports it: the tokens that the prefill worker had cached, not the ones transferred.
    let reported = transfer["remote_prefill_cached_tokens"].as_u64().map(|tokens| tokens as usize);
    loaded(worker, is_pulled, reported)
}

fn loaded(worker: &Worker, is_pulled: bool, report_cached: Option<usize>) -> Result<Leg, Refusal> {
    match (is_pulled, worker.config.load_failure) {
        (true, _) => Ok(Leg { is_external: true, report_cached, ..Leg::default() }),
        (false, LoadFailure::Recompute) => Ok(Leg::default()),
        (false, LoadFailure::Fail) => Err(Refusal::internal("Internal server error: the KV load failed.")),
    }
}

/// A leg of a hand-off whose legs come at once and meet by name.
async fn meeting_leg(worker: &Worker, name: String, is_prefill: bool) -> Result<Leg, Refusal> {
    let room = rendezvous::enter(&name).ok_or_else(Refusal::overloaded)?;
    if is_prefill {
        return Ok(Leg { lease: Some(name), room: Some(room), ..Leg::default() });
    }
    let pulled = match room.offered_by(worker.config.bootstrap_timeout).await {
        Ok((engine, _)) => lease::pull(&engine, &name),
        Err(_) => false,
    };
    room.fetched();
    loaded(worker, pulled, None)
}

async fn sglang_leg(worker: &Worker, name: String, role: Role) -> Result<Leg, Refusal> {
    let room = rendezvous::enter(&name).ok_or_else(Refusal::overloaded)?;
    let within = worker.config.bootstrap_timeout;
    if role == Role::Prefill {
        room.wait_for_decode(within).await.map_err(not_met)?;
        return Ok(Leg { lease: Some(name), room: Some(room), is_prompt_alone: true, ..Leg::default() });
    }
    let (engine, cached) = room.offered_by(within).await.map_err(not_met)?;
    let is_pulled = lease::pull(&engine, &name);
    room.fetched();
    if is_pulled { loaded(worker, true, Some(cached)) } else { Err(not_met(RendezvousError::GivenUp)) }
}

impl Leg {
    /// Runs the steps after the computation. Returns the answer's `kv_transfer_params`.
    pub(super) async fn after(
        &mut self,
        worker: &Arc<Worker>,
        prompt: usize,
        name: Option<&str>,
    ) -> Result<Option<Value>, Refusal> {
        let offered = name.and_then(|name| worker.offered(name));
        if let Some(room) = self.room.take() {
            match &offered {
                Some(offered) => room.offer(&worker.engine_id, offered.cached),
                // The output ended by itself: the decode leg has nothing to continue.
                None => room.give_up(),
            }
            if self.is_prompt_alone && offered.is_some() {
                room.is_fetched(worker.config.bootstrap_timeout).await.map_err(not_met)?;
            }
        }
        let (Some(name), Some(offered), true) = (name, offered, self.answers_transfer) else {
            return Ok(None);
        };
        Ok(Some(json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [offered.block_ids],
            "remote_engine_id": worker.engine_id, "remote_request_id": name, "remote_host": "127.0.0.1",
            "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": prompt,
            "remote_blocks_expiry_time": null, "transfer_mode": "pull",
            "remote_prefill_cached_tokens": offered.cached,
        })))
    }
}
