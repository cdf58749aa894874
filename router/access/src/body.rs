//! Policy for the fields of a client's body that engines may see.
//!
//! Unlike headers, a body has too many harmless fields, and new ones with each release, to list those that
//! pass: a gateway that dropped a new sampling parameter would answer wrongly and silently. So the steering
//! fields are listed, each with its reason ([`BODY_FIELDS`]). Fields for routers or engines' own parts are
//! removed; a field whose absence would change the answer is refused ([`Screen`](crate::Screen), which also
//! checks nested fields).
//!
//! Pure functions over names; no allocation.

use crate::headers::Decision;

/// Fields of a body that steer or endanger an engine: name, decision unless the field is allowed, and
/// reason.
pub const BODY_FIELDS: [(&str, Decision, &str); 29] = [
    ("kv_transfer_params", Decision::Strip, "names a host, a port and blocks that the worker then reads"),
    ("ec_transfer_params", Decision::Strip, "the same for encodings of images"),
    ("bootstrap_host", Decision::Strip, "SGLang: the host that the decode worker fetches blocks from"),
    ("bootstrap_port", Decision::Strip, "SGLang: its port"),
    ("bootstrap_room", Decision::Strip, "SGLang: whose blocks; a guessed room is another tenant's prompt"),
    (
        "disaggregated_params",
        Decision::Strip,
        "TensorRT-LLM: which context request's blocks to take over, from where",
    ),
    ("disagg_request_id", Decision::Strip, "TensorRT-LLM: the global id under which blocks are handed over"),
    ("routed_dp_rank", Decision::Strip, "SGLang: picks the rank, past the gateway's accounts"),
    ("data_parallel_rank", Decision::Strip, "the same, by its older name and in vLLM"),
    ("disagg_prefill_dp_rank", Decision::Strip, "SGLang: picks the rank that blocks are fetched from"),
    ("nvext", Decision::Strip, "Dynamo: picks the worker, and brings token ids past the template"),
    ("cache_salt", Decision::Replace, "a client that knows another tenant's salt can probe its cache"),
    ("priority", Decision::Replace, "engines serve lower numbers first, so everybody would send the lowest"),
    (
        "request_id",
        Decision::Replace,
        "vLLM's connectors read addresses out of it, and one in use is an error",
    ),
    ("rid", Decision::Replace, "SGLang's request id; one in use is an error, and it can be aborted by it"),
    ("vllm_xargs", Decision::Strip, "goes to plug-ins of the engine, connectors among them"),
    ("custom_logit_processor", Decision::Strip, "SGLang: serialised code that the engine runs"),
    ("logits_processors", Decision::Strip, "vLLM: names code that the engine loads and runs"),
    ("lora_path", Decision::Strip, "SGLang: the adapter by name or path, past the list of allowed models"),
    ("lora_request", Decision::Strip, "TensorRT-LLM: the adapter by path, past the allowed models"),
    ("conversation_params", Decision::Strip, "TensorRT-LLM: whose conversation it is, for its own router"),
    (
        "stop_regex",
        Decision::Refuse,
        "SGLang: its scheduler runs it, and one that backtracks stalls all requests",
    ),
    ("chat_template", Decision::Refuse, "a program in Jinja that the engine would run"),
    ("documents", Decision::Refuse, "a variable of the chat template"),
    ("mm_processor_kwargs", Decision::Refuse, "sets how much an image costs the engine"),
    ("media_io_kwargs", Decision::Refuse, "sets how much an image or a video costs the engine"),
    ("prompt_embeds", Decision::Refuse, "a tensor that the engine would unpack"),
    ("input_embeds", Decision::Refuse, "a tensor that the engine would unpack"),
    (
        "session_params",
        Decision::Refuse,
        "goes on from the blocks of a session, which may be another tenant's",
    ),
];

/// Policy for the fields of a body.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BodyPolicy {
    /// Names of [`BODY_FIELDS`] that pass nevertheless, where clients are trusted, for example behind
    /// another router.
    pub allowed: Vec<String>,
}

impl BodyPolicy {
    /// Returns the decision for a top-level field of a body. Field names are compared exactly, as engines
    /// do.
    #[must_use]
    pub fn field(&self, name: &str) -> Decision {
        match BODY_FIELDS.iter().find(|(listed, _, _)| *listed == name) {
            Some((_, decision, _)) if !self.allowed.iter().any(|allowed| allowed == name) => *decision,
            _ => Decision::Pass,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_fields() {
        let (closed, open) =
            (BodyPolicy::default(), BodyPolicy { allowed: vec!["kv_transfer_params".to_owned()] });
        for (index, (name, decision, why)) in BODY_FIELDS.iter().enumerate() {
            assert_eq!(closed.field(name), *decision);
            assert!(!why.is_empty() && *decision != Decision::Pass);
            assert!(BODY_FIELDS[..index].iter().all(|(earlier, _, _)| earlier != name), "{name} twice");
            let expected = if *name == "kv_transfer_params" { Decision::Pass } else { *decision };
            assert_eq!(open.field(name), expected, "{name}");
        }
        for name in ["messages", "temperature", "Priority", ""] {
            assert_eq!(closed.field(name), Decision::Pass, "{name}");
        }
    }
}
