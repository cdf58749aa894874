//! Bodies of the two requests of one disaggregated request: the prefill leg and the decode leg.
//!
//! Two orders exist. *Sequential*: the prefill worker answers with an object that names its blocks, which the gateway passes
//! to the decode worker unread (vLLM's NixlConnector, TensorRT-LLM). *Concurrent*: both are asked at once and meet by a
//! number that the gateway draws (SGLang's bootstrap room, vLLM's MooncakeConnector, Kvasir's own).
//!
//! The prefill leg is the same request for one token, not streamed. Fields with which a client could steer a transfer
//! have been taken out of its body before. Sources: vLLM `docs/features/nixl_connector_usage.md`,
//! `MooncakeConnector.get_num_new_matched_tokens`; SGLang `docs/advanced_features/pd_disaggregation.md`; TensorRT-LLM
//! `docs/source/features/disagg-serving.md`.

use bytes::Bytes;
use router_openai::RawBody;
use serde_json::{Value, json};

use super::Description;
use crate::handoff::Handoff;

/// Prefill/decode protocols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Over Kvasir's data plane: the reference engine, vLLM with KvasirConnector.
    Kvasir,
    /// vLLM with NixlConnector, pulled by the decode worker.
    Nixl,
    /// vLLM with MooncakeConnector.
    Mooncake,
    /// SGLang.
    Bootstrap,
    /// TensorRT-LLM, context first.
    TensorRtLlm,
}

impl Protocol {
    /// Whether the decode leg needs the prefill leg's answer.
    #[must_use]
    pub fn is_sequential(self) -> bool {
        matches!(self, Self::Nixl | Self::TensorRtLlm)
    }
}

/// Values that both legs use.
#[derive(Debug, Clone, Copy)]
pub struct Pairing<'a> {
    /// Number drawn by the gateway, unique to this request.
    pub number: u64,
    /// The prefill worker.
    pub prefill: &'a Description,
    /// Data-parallel rank of the prefill worker that computes the prompt.
    pub prefill_rank: u16,
    /// The decode worker.
    pub decode: &'a Description,
    /// MooncakeConnector: the bootstrap server's URL and the engine's id there.
    pub mooncake: Option<(&'a str, &'a str)>,
}

impl Pairing<'_> {
    fn transfer_id(&self) -> String {
        format!("xfer-{:016x}", self.number)
    }

    /// TensorRT-LLM reserves numbers below 2^42 for its own use.
    fn global_id(&self) -> u64 {
        (1 << 42) | (self.number & ((1 << 62) - 1))
    }
}

/// Reason for which a leg's body cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LegError {
    /// The prefill worker's answer lacks what the decode worker needs.
    #[error("the prefill worker's answer has no {0}")]
    Missing(&'static str),
    /// The answer is not JSON.
    #[error("the prefill worker's answer is not understood: {0}")]
    Malformed(String),
    /// The prefill worker does not report the address of its data plane.
    #[error(
        "the prefill worker does not say where its data plane listens: vLLM needs KvasirConnector with a port in transfer.listen"
    )]
    NoDataPlane,
    /// The prefill worker reports no bootstrap server.
    #[error("the prefill worker names no bootstrap server")]
    NoBootstrap,
}

/// Answer of a prefill worker, as far as the decode leg and its check need it.
#[derive(Debug, Clone)]
pub struct PrefillAnswer {
    body: RawBody,
    /// Tokens of the prompt as the prefill worker counted them.
    pub prompt_tokens: Option<usize>,
    /// Cached tokens among `prompt_tokens`.
    pub cached_tokens: Option<usize>,
}

impl PrefillAnswer {
    /// Reads the answer of a prefill leg.
    pub fn parse(body: Bytes) -> Result<Self, LegError> {
        let body = RawBody::parse(body).map_err(|error| LegError::Malformed(error.message))?;
        let usage = body.value("usage").unwrap_or_default();
        let count = |value: &Value| value.as_u64().map(|count| count as usize);
        Ok(Self {
            prompt_tokens: count(&usage["prompt_tokens"]),
            cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
            body,
        })
    }

    /// Whether generation ended with the first token, so that nothing is handed over.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let choices = self.body.value("choices").unwrap_or_default();
        let reason = choices[0]["finish_reason"].as_str();
        reason.is_some_and(|reason| !matches!(reason, "length" | "not_finished"))
    }
}

/// The prefill leg's body.
pub fn prefill_leg(protocol: Protocol, body: &RawBody, pairing: &Pairing<'_>) -> Result<RawBody, LegError> {
    let mut leg = body.clone();
    if protocol == Protocol::Bootstrap {
        // SGLang's prefill worker stops by itself after the first token; both legs are the same request.
        bootstrap(&mut leg, pairing)?;
        return Ok(leg);
    }
    leg.set("max_tokens", "1");
    if leg.get("max_completion_tokens").is_some() {
        leg.set("max_completion_tokens", "1");
    }
    leg.set("stream", "false");
    for field in ["stream_options", "min_tokens", "echo", "logprobs", "top_logprobs", "prompt_logprobs"] {
        leg.remove(field);
    }
    // The decode worker computes the first token again, so the prefill leg needs no output constraints; except for TensorRT-LLM,
    // which hands its first token over.
    if protocol != Protocol::TensorRtLlm {
        leg.remove("structured_outputs");
    }
    match protocol {
        Protocol::Nixl => leg.set(
            "kv_transfer_params",
            "{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"remote_engine_id\":null,\
             \"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}",
        ),
        Protocol::Mooncake => {
            let id = pairing.transfer_id();
            let params = json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id});
            leg.set("kv_transfer_params", params.to_string());
        }
        Protocol::TensorRtLlm => {
            let params = json!({
                "request_type": "context_only", "disagg_request_id": pairing.global_id(),
                "schedule_style": "context_first",
            });
            leg.set("disaggregated_params", params.to_string());
        }
        Protocol::Kvasir => {
            // A decode worker that publishes no data plane is a single process; KvasirConnector refuses others.
            let receivers = pairing.decode.data_plane.as_ref().map_or(1, |place| place.processes);
            let handoff = Handoff::Prefill { transfer_id: pairing.number, receivers };
            leg.set("kv_transfer_params", handoff.to_json().to_string());
        }
        Protocol::Bootstrap => {}
    }
    Ok(leg)
}

/// The decode leg's body; `answer` is the prefill leg's when the protocol is sequential.
pub fn decode_leg(
    protocol: Protocol,
    body: &RawBody,
    pairing: &Pairing<'_>,
    answer: Option<&PrefillAnswer>,
) -> Result<RawBody, LegError> {
    let mut leg = body.clone();
    match protocol {
        Protocol::Nixl => {
            let answer = answer.ok_or(LegError::Missing("body"))?;
            let params = answer.body.get("kv_transfer_params");
            leg.set("kv_transfer_params", params.ok_or(LegError::Missing("kv_transfer_params"))?);
        }
        Protocol::Mooncake => {
            let (address, engine) = pairing.mooncake.ok_or(LegError::NoBootstrap)?;
            let params = json!({
                "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": pairing.transfer_id(),
                "remote_bootstrap_addr": address, "remote_engine_id": engine,
            });
            leg.set("kv_transfer_params", params.to_string());
        }
        Protocol::Bootstrap => bootstrap(&mut leg, pairing)?,
        Protocol::TensorRtLlm => {
            let answer = answer.ok_or(LegError::Missing("body"))?;
            generation_only(&mut leg, answer)?;
        }
        Protocol::Kvasir => {
            let from = pairing.prefill.data_plane.clone().ok_or(LegError::NoDataPlane)?;
            let first_process = u32::from(pairing.prefill_rank) * u32::from(from.processes);
            let handoff = Handoff::Decode { transfer_id: pairing.number, from, first_process };
            leg.set("kv_transfer_params", handoff.to_json().to_string());
        }
    }
    Ok(leg)
}

fn bootstrap(leg: &mut RawBody, pairing: &Pairing<'_>) -> Result<(), LegError> {
    let (host, port) = pairing.prefill.bootstrap.as_ref().ok_or(LegError::NoBootstrap)?;
    leg.set("bootstrap_host", json!(host).to_string());
    leg.set("bootstrap_port", port.to_string());
    // SGLang reads a signed 64-bit number.
    leg.set("bootstrap_room", (pairing.number & (i64::MAX as u64)).to_string());
    Ok(())
}

fn generation_only(leg: &mut RawBody, answer: &PrefillAnswer) -> Result<(), LegError> {
    let choices = answer.body.value("choices").unwrap_or_default();
    let mut params = choices[0]["disaggregated_params"].clone();
    if !params.is_object() {
        return Err(LegError::Missing("choices[0].disaggregated_params"));
    }
    params["request_type"] = json!("generation_only");
    let ids = answer.body.get("prompt_token_ids").map(str::to_owned);
    let ids = ids.or_else(|| choices[0]["prompt_token_ids"].as_array().map(|ids| json!(ids).to_string()));
    if let Some(ids) = ids {
        let field = if leg.get("messages").is_some() { "prompt_token_ids" } else { "prompt" };
        leg.set(field, ids);
    }
    if let Some(usage) = answer.body.get("usage") {
        params["ctx_usage"] = serde_json::from_str(usage).unwrap_or_default();
    }
    leg.set("disaggregated_params", params.to_string());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::Engine;
    use crate::handoff::DataPlaneAddress;

    fn description() -> Description {
        Description {
            engine: Engine::Vllm,
            version: String::new(),
            models: vec!["m".into()],
            role: None,
            context_tokens: 1,
            block_tokens: 16,
            blocks: 1,
            lower_blocks: [0; 2],
            keeps_prefixes: true,
            retains_blocks: false,
            instance: None,
            feeds: Vec::new(),
            data_plane: Some(DataPlaneAddress {
                host: "h".into(),
                cuda_ipc: None,
                shm: None,
                tcp: Some("1.2.3.4:5".into()),
                rdma: Vec::new(),
                processes: 2,
            }),
            bootstrap: Some(("10.0.0.1".into(), 8998)),
        }
    }

    fn body() -> RawBody {
        let text = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"max_completion_tokens":9,"min_tokens":3,
            "stream":true,"stream_options":{"include_usage":true},"logprobs":true,"top_logprobs":2,"future":1.0}"#;
        RawBody::parse(Bytes::from_static(text.as_bytes())).expect("parses")
    }

    fn json_of(body: &RawBody) -> Value {
        serde_json::from_slice(&body.to_bytes()).expect("JSON")
    }

    #[test]
    fn nixl_passes_the_answers_object_through_unread() {
        let description = description();
        let pairing = Pairing {
            number: 7,
            prefill: &description,
            prefill_rank: 3,
            decode: &description,
            mooncake: None,
        };
        let prefill = json_of(&prefill_leg(Protocol::Nixl, &body(), &pairing).expect("a leg"));
        assert_eq!(prefill["kv_transfer_params"]["do_remote_decode"], true);
        assert_eq!((&prefill["max_tokens"], &prefill["max_completion_tokens"]), (&json!(1), &json!(1)));
        assert_eq!((&prefill["stream"], &prefill["future"]), (&json!(false), &json!(1.0)));
        for gone in ["stream_options", "min_tokens", "logprobs", "top_logprobs"] {
            assert!(prefill.get(gone).is_none(), "{gone}");
        }
        // A flat list of old releases, a nested one of new releases, and unknown keys.
        for params in [
            r#"{"do_remote_prefill":true,"remote_block_ids":[1,2],"remote_engine_id":"e"}"#,
            r#"{"do_remote_prefill":true,"remote_block_ids":[[1,2],[3]],"tp_size":1,"future":[1.50]}"#,
        ] {
            let answer = format!(
                "{{\"choices\":[{{\"finish_reason\":\"length\"}}],\"usage\":{{\"prompt_tokens\":5,\
                \"prompt_tokens_details\":{{\"cached_tokens\":2}}}},\"kv_transfer_params\":{params}}}"
            );
            let answer = PrefillAnswer::parse(answer.into()).expect("an answer");
            assert_eq!((answer.prompt_tokens, answer.cached_tokens), (Some(5), Some(2)));
            assert!(!answer.is_complete());
            let decode = decode_leg(Protocol::Nixl, &body(), &pairing, Some(&answer)).expect("a leg");
            assert_eq!(decode.get("kv_transfer_params"), Some(params));
            assert_eq!(json_of(&decode)["max_completion_tokens"], 9);
        }
        let nothing = PrefillAnswer::parse(Bytes::from_static(b"{}")).expect("an answer");
        let missing = decode_leg(Protocol::Nixl, &body(), &pairing, Some(&nothing));
        assert_eq!(missing.expect_err("no params"), LegError::Missing("kv_transfer_params"));
    }

    #[test]
    fn both_legs_of_sglang_are_one_body() {
        let description = description();
        let pairing = Pairing {
            number: u64::MAX,
            prefill: &description,
            prefill_rank: 3,
            decode: &description,
            mooncake: None,
        };
        let mut client = body();
        client.set("bootstrap_room", "5");
        let prefill = prefill_leg(Protocol::Bootstrap, &client, &pairing).expect("a leg").to_bytes();
        let decode = decode_leg(Protocol::Bootstrap, &client, &pairing, None).expect("a leg").to_bytes();
        assert_eq!(prefill, decode);
        let leg: Value = serde_json::from_slice(&prefill).expect("JSON");
        assert_eq!(leg["bootstrap_room"], i64::MAX);
        assert_eq!((&leg["bootstrap_host"], &leg["bootstrap_port"]), (&json!("10.0.0.1"), &json!(8998)));
        assert_eq!(leg["stream"], true);
    }

    #[test]
    fn mooncake_and_kvasir_meet_by_a_number() {
        let description = description();
        let mooncake = Some(("http://10.0.0.1:8998", "engine-1"));
        let pairing =
            Pairing { number: 0x1f, prefill: &description, prefill_rank: 3, decode: &description, mooncake };
        for (protocol, name) in [(Protocol::Mooncake, "transfer_id"), (Protocol::Kvasir, "transfer_id")] {
            let prefill = json_of(&prefill_leg(protocol, &body(), &pairing).expect("a leg"));
            let decode = json_of(&decode_leg(protocol, &body(), &pairing, None).expect("a leg"));
            let (prefill, decode) = (&prefill["kv_transfer_params"], &decode["kv_transfer_params"]);
            assert_eq!(prefill[name], decode[name]);
            assert_eq!(
                (&prefill["do_remote_decode"], &decode["do_remote_prefill"]),
                (&json!(true), &json!(true))
            );
            if protocol == Protocol::Kvasir {
                assert_eq!(decode["first_process"], 6, "two for each of three ranks before");
                assert_eq!(prefill["receivers"], 2);
            }
            if protocol == Protocol::Mooncake {
                assert_eq!(prefill[name], "xfer-000000000000001f");
                assert_eq!(decode["remote_engine_id"], "engine-1");
            }
        }
        let without = Pairing { mooncake: None, ..pairing };
        assert_eq!(
            decode_leg(Protocol::Mooncake, &body(), &without, None).expect_err("none"),
            LegError::NoBootstrap
        );
    }

    #[test]
    fn tensorrt_llm_generates_from_the_contexts_tokens() {
        let description = description();
        let pairing = Pairing {
            number: 3,
            prefill: &description,
            prefill_rank: 3,
            decode: &description,
            mooncake: None,
        };
        let prefill = json_of(&prefill_leg(Protocol::TensorRtLlm, &body(), &pairing).expect("a leg"));
        assert_eq!(prefill["disaggregated_params"]["request_type"], "context_only");
        assert!(prefill["disaggregated_params"]["disagg_request_id"].as_u64().expect("an id") >= 1 << 42);
        let answer = br#"{"prompt_token_ids":[5,6],"usage":{"prompt_tokens":2},"choices":[{"finish_reason":"length",
            "disaggregated_params":{"request_type":"context_only","first_gen_tokens":[9],"encoded_opaque_state":"x"}}]}"#;
        let answer = PrefillAnswer::parse(Bytes::from_static(answer)).expect("an answer");
        let decode = decode_leg(Protocol::TensorRtLlm, &body(), &pairing, Some(&answer)).expect("a leg");
        let decode = json_of(&decode);
        assert_eq!(decode["disaggregated_params"]["request_type"], "generation_only");
        assert_eq!(decode["disaggregated_params"]["first_gen_tokens"], json!([9]));
        assert_eq!(decode["disaggregated_params"]["ctx_usage"]["prompt_tokens"], 2);
        assert_eq!(decode["prompt_token_ids"], json!([5, 6]));
        let over = br#"{"choices":[{"finish_reason":"stop"}]}"#;
        assert!(PrefillAnswer::parse(Bytes::from_static(over)).expect("an answer").is_complete());
    }
}
