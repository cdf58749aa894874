//! Names of spans and attributes.
//!
//! `gen_ai.*`, `server.*`, `http.*` and `error.type` follow OpenTelemetry's semantic conventions for generative AI
//! (status: development, so each name is defined once, here); `kvasir.*` are this appliance's own. The conventions have
//! a span per call of a model; the gateway has a tree: the root, of kind server, is the request, and each leg, of kind
//! client, one call of an engine. No attribute holds text of a prompt or an answer.

/// Names of spans below the root, whose name is `{operation} {model}`, as in `chat llama-3`.
pub mod span {
    /// Waiting at the gate.
    pub const QUEUE: &str = "queue";
    /// Tokenisation, the template included.
    pub const TOKENISE: &str = "tokenise";
    /// The choice of workers.
    pub const ROUTE: &str = "route";
    /// The call of the worker that computes the prompt, when another one decodes.
    pub const PREFILL: &str = "prefill";
    /// Transfer of blocks from one worker to another.
    pub const TRANSFER: &str = "kv_transfer";
    /// The call of the worker that generates the answer.
    pub const DECODE: &str = "decode";
}

/// Names of events of spans.
pub mod event {
    /// The first token was sent to the client.
    pub const FIRST_TOKEN: &str = "first_token";
    /// An engine failed and another one is tried.
    pub const RETRY: &str = "retry";
}

/// Values of [`GEN_AI_OPERATION_NAME`].
pub mod operation {
    /// A chat completion, on any surface.
    pub const CHAT: &str = "chat";
    /// A completion of plain text.
    pub const TEXT_COMPLETION: &str = "text_completion";
    /// Embeddings.
    pub const EMBEDDINGS: &str = "embeddings";
}

/// Operation of the request: one of [`operation`].
pub const GEN_AI_OPERATION_NAME: &str = "gen_ai.operation.name";
/// Engine that serves the model, such as `vllm`. Text.
pub const GEN_AI_PROVIDER_NAME: &str = "gen_ai.provider.name";
/// The requested model. Text.
pub const GEN_AI_REQUEST_MODEL: &str = "gen_ai.request.model";
/// Finish reason of each choice. An array of texts.
pub const GEN_AI_RESPONSE_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// Time to the first chunk, in seconds. Float.
pub const GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: &str = "gen_ai.response.time_to_first_chunk";
/// Tokens of the prompt, cached ones included. Integer.
pub const GEN_AI_USAGE_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
/// Tokens of the answer. Integer.
pub const GEN_AI_USAGE_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
/// Tokens of the prompt that were cached. Integer.
pub const GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
/// The engine's host, on a leg. Text.
pub const SERVER_ADDRESS: &str = "server.address";
/// The engine's port, on a leg. Integer.
pub const SERVER_PORT: &str = "server.port";
/// The HTTP status, of the request or of a leg. Integer.
pub const HTTP_RESPONSE_STATUS_CODE: &str = "http.response.status_code";
/// Kind of failure, as a code instead of a message.
pub const ERROR_TYPE: &str = "error.type";

/// The gateway's id of the request. Text.
pub const KVASIR_REQUEST_ID: &str = "kvasir.request_id";
/// Tenant to which the request is charged. Text.
pub const KVASIR_TENANT: &str = "kvasir.tenant";
/// Blocks of the prompt. Integer.
pub const KVASIR_BLOCKS: &str = "kvasir.blocks";
/// Leading blocks that the chosen worker held. Integer.
pub const KVASIR_OVERLAP_BLOCKS: &str = "kvasir.overlap_blocks";
/// The worker that computed the prompt. Text.
pub const KVASIR_PREFILL_WORKER: &str = "kvasir.prefill_worker";
/// The worker that generated the answer. Text.
pub const KVASIR_DECODE_WORKER: &str = "kvasir.decode_worker";
/// Predicted time to the first token, in milliseconds. Float.
pub const KVASIR_PREDICTED_MS: &str = "kvasir.predicted_ms";
/// Bytes of the blocks that were moved. Integer.
pub const KVASIR_TRANSFER_BYTES: &str = "kvasir.transfer.bytes";
/// Blocks that were moved. Integer.
pub const KVASIR_TRANSFER_BLOCKS: &str = "kvasir.transfer.blocks";
/// On a root: spans left out because the trace was full. Integer.
pub const KVASIR_DROPPED_SPANS: &str = "kvasir.dropped_spans";
/// Value of [`ERROR_TYPE`] on a root whose request was dropped before its end.
pub const ABANDONED: &str = "abandoned";
