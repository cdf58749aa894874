//! Converts the backend's answers to responses.

use bytes::Bytes;
use serde_json::Value;

use crate::error::Error;
use crate::flags::Output;
use crate::proto::inference::infer_parameter::ParameterChoice;
use crate::proto::inference::{InferParameter, ModelInferResponse, ModelStreamInferResponse};
use crate::request::{ResponseSpec, VERSION};
use crate::wire::Writer;

/// Parameter that marks a request's last response.
const FINAL: &str = "triton_final_response";

/// Converts a whole answer: one choice for each prompt.
pub(crate) fn whole(ask: &ResponseSpec, answer: &Value) -> Result<ModelInferResponse, Error> {
    let mut choices: Vec<&Value> =
        answer["choices"].as_array().map_or_else(Vec::new, |list| list.iter().collect());
    choices.sort_by_key(|choice| choice["index"].as_u64().unwrap_or(0));
    if choices.len() != ask.prompts_count {
        let reason = format!("it has {} choices for {} prompts", choices.len(), ask.prompts_count);
        return Err(Error::Answer(reason));
    }
    written(ask, &choices, &answer["usage"])
}

/// Converts a chunk of a streamed answer; `None` if the chunk has no choice, for example one with only the
/// usage.
pub(crate) fn piece(ask: &ResponseSpec, chunk: &Value) -> Result<Option<Piece>, Error> {
    if !chunk["error"].is_null() {
        let message = crate::error::message_of(chunk.to_string().as_bytes());
        return Err(Error::Answer(message.unwrap_or_else(|| "the engine failed".to_owned())));
    }
    let Some(choice) = chunk["choices"].get(0) else { return Ok(None) };
    let response = written(ask, &[choice], &Value::Null)?;
    Ok(Some(Piece { response, is_last: choice["finish_reason"].is_string() }))
}

/// One response of a stream.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) response: ModelInferResponse,
    /// Whether this piece completes the answer.
    pub(crate) is_last: bool,
}

/// Wraps a response of a stream, with the mark whether it is the request's last.
pub(crate) fn streamed(mut response: ModelInferResponse, is_final: bool) -> ModelStreamInferResponse {
    mark(&mut response, is_final);
    ModelStreamInferResponse { error_message: String::new(), infer_response: Some(response) }
}

/// Returns the response without outputs that ends a request.
pub(crate) fn empty_final(ask: &ResponseSpec) -> ModelStreamInferResponse {
    streamed(named(&ask.id, &ask.model), true)
}

/// Returns the response that ends a request with an error.
pub(crate) fn failed(id: &str, model: &str, error: &Error) -> ModelStreamInferResponse {
    let mut response = named(id, model);
    mark(&mut response, true);
    ModelStreamInferResponse { error_message: error.to_string(), infer_response: Some(response) }
}

fn mark(response: &mut ModelInferResponse, is_final: bool) {
    let value = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(is_final)) };
    response.parameters.insert(FINAL.to_owned(), value);
}

fn named(id: &str, model: &str) -> ModelInferResponse {
    ModelInferResponse {
        model_name: model.to_owned(),
        model_version: VERSION.to_owned(),
        id: id.to_owned(),
        ..Default::default()
    }
}

fn written(ask: &ResponseSpec, choices: &[&Value], usage: &Value) -> Result<ModelInferResponse, Error> {
    let mut writer = Writer::new(ask.form);
    for output in &ask.outputs {
        match output {
            Output::Text => writer.texts(output.name(), &ask.shape, texts(ask, choices)?),
            Output::FinishReason => {
                let reasons = choices.iter().map(|choice| bytes_of(&choice["finish_reason"])).collect();
                writer.texts(output.name(), &ask.shape, reasons);
            }
            Output::Logprobs => {
                let logprobs =
                    choices.iter().map(|choice| Bytes::from(choice["logprobs"].to_string())).collect();
                writer.texts(output.name(), &ask.shape, logprobs);
            }
            Output::PromptCount => writer.count(output.name(), count(&usage["prompt_tokens"])?),
            Output::AnswerCount => writer.count(output.name(), count(&usage["completion_tokens"])?),
        }
    }
    let named = named(&ask.id, &ask.model);
    Ok(ModelInferResponse { outputs: writer.outputs, raw_output_contents: writer.raw, ..named })
}

fn texts(ask: &ResponseSpec, choices: &[&Value]) -> Result<Vec<Bytes>, Error> {
    let with_prefix = |(index, choice): (usize, &&Value)| {
        let text = choice["text"].as_str().ok_or_else(|| Error::Answer("a choice has no text".to_owned()))?;
        let prefix = ask.prefixes.as_ref().and_then(|prefixes| prefixes.get(index));
        Ok(Bytes::from([prefix.map_or("", String::as_str), text].concat()))
    };
    choices.iter().enumerate().map(with_prefix).collect()
}

/// Returns a text, empty where the value is not a string.
fn bytes_of(value: &Value) -> Bytes {
    Bytes::copy_from_slice(value.as_str().unwrap_or_default().as_bytes())
}

fn count(value: &Value) -> Result<u32, Error> {
    let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
    count.ok_or_else(|| Error::Answer("it has no usage".to_owned()))
}
