//! Converts a request to the body of a completion, and to the attributes that its answer needs.
//!
//! Precedence of duplicates: a tensor of its own wins over the request's parameters, and these over
//! `sampling_parameters`. Triton's reserved parameters are not passed to the engine: of them `timeout` (in
//! microseconds) bounds the request, and `triton_enable_empty_final_response` requests a mark at the end.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::error::Error;
use crate::fields;
use crate::flags::{Flags, Output};
use crate::proto::inference::infer_parameter::ParameterChoice;
use crate::proto::inference::{InferParameter, ModelInferRequest};
use crate::wire::{self, Form, Tensor, Values};

/// The only version of every model.
pub(crate) const VERSION: &str = "1";

/// Parameters that Triton reserves, beside all that begin with `triton_`.
const RESERVED: [&str; 6] =
    ["sequence_id", "sequence_start", "sequence_end", "priority", "headers", "binary_data_output"];

/// Attributes of the request that determine the form of its answer.
#[derive(Debug, Clone)]
pub(crate) struct ResponseSpec {
    pub(crate) id: String,
    pub(crate) model: String,
    pub(crate) form: Form,
    /// Shape of `text_input`, and so of the outputs.
    pub(crate) shape: Vec<i64>,
    pub(crate) prompts_count: usize,
    /// The prompts, if they are part of the output.
    pub(crate) prefixes: Option<Vec<String>>,
    pub(crate) outputs: Vec<Output>,
    pub(crate) has_empty_final: bool,
}

/// A parsed request.
#[derive(Debug, Clone)]
pub(crate) struct ParsedRequest {
    pub(crate) ask: ResponseSpec,
    pub(crate) body: Bytes,
    pub(crate) is_streamed: bool,
    pub(crate) timeout: Option<Duration>,
}

impl ParsedRequest {
    /// Parses a request.
    pub(crate) fn read(request: ModelInferRequest) -> Result<Self, Error> {
        check_version(&request.model_name, &request.model_version)?;
        let (tensors, form) = wire::read(request.inputs, request.raw_input_contents)?;
        check_names(&tensors)?;
        let prompts = prompts(find(&tensors, "text_input"))?;
        let shape = find(&tensors, "text_input").map_or_else(Vec::new, |tensor| tensor.shape.clone());

        let mut flags = Flags::default();
        let mut body = Map::new();
        let mut timeout = None;
        if let Some(tensor) = find(&tensors, "sampling_parameters") {
            for (name, value) in object_of(tensor)? {
                if !flags.take(&name, &value)? {
                    fields::set(&mut body, &name, value)?;
                }
            }
        }
        for (name, parameter) in request.parameters {
            let value = parameter_of(&name, parameter)?;
            if name == "timeout" {
                timeout = micros(&value)?;
            } else if !flags.take(&name, &value)? && !is_reserved(&name) {
                fields::set(&mut body, &name, value)?;
            }
        }
        for tensor in &tensors {
            if matches!(tensor.name.as_str(), "text_input" | "sampling_parameters") {
                continue;
            }
            let value = fields::value_of(tensor)?;
            if !flags.take(&tensor.name, &value)? {
                if !fields::is_known(&tensor.name) {
                    return Err(Error::field(&tensor.name, "is no input of this model"));
                }
                fields::set(&mut body, &tensor.name, value)?;
            }
        }

        flags.check_stream(prompts.len())?;
        let outputs = flags.outputs(&request.outputs, body.contains_key("logprobs"), prompts.len())?;
        if outputs.contains(&Output::Logprobs) && !body.contains_key("logprobs") {
            body.insert("logprobs".to_owned(), Value::from(1));
        }
        let ask = ResponseSpec {
            id: request.id,
            form,
            shape,
            prompts_count: prompts.len(),
            prefixes: flags.includes_input.then(|| prompts.clone()),
            outputs,
            has_empty_final: flags.has_empty_final,
            model: request.model_name,
        };
        let body = finish(body, &ask.model, prompts, flags.is_streamed);
        Ok(Self { ask, body, is_streamed: flags.is_streamed, timeout })
    }
}

/// Checks the version, of which models have only one here.
pub(crate) fn check_version(model: &str, version: &str) -> Result<(), Error> {
    if model.is_empty() {
        return Err(Error::Request("`model_name` is missing".to_owned()));
    }
    if version.is_empty() || version == VERSION {
        return Ok(());
    }
    Err(Error::NotFound(format!("the model `{model}` has no version `{version}`, only `{VERSION}`")))
}

fn find<'a>(tensors: &'a [Tensor], name: &str) -> Option<&'a Tensor> {
    tensors.iter().find(|tensor| tensor.name == name)
}

fn check_names(tensors: &[Tensor]) -> Result<(), Error> {
    let mut seen = HashSet::new();
    match tensors.iter().find(|tensor| !seen.insert(tensor.name.as_str())) {
        Some(twice) => Err(Error::field(&twice.name, "is given twice")),
        None => Ok(()),
    }
}

/// Returns the texts of `text_input`, of shape `[N]` or `[N, 1]`.
fn prompts(tensor: Option<&Tensor>) -> Result<Vec<String>, Error> {
    let Some(tensor) = tensor else { return Err(Error::field("text_input", "is missing")) };
    let Values::Bytes(texts) = &tensor.values else {
        return Err(Error::field(&tensor.name, "must be of type BYTES"));
    };
    if texts.is_empty() || !matches!(tensor.shape.as_slice(), [_] | [_, 1]) {
        let reason =
            format!("the shape must be [N] or [N, 1] with at least one text, not {:?}", tensor.shape);
        return Err(Error::field(&tensor.name, reason));
    }
    texts.iter().map(|text| fields::text_of(&tensor.name, text).map(str::to_owned)).collect()
}

fn object_of(tensor: &Tensor) -> Result<Map<String, Value>, Error> {
    let wrong = || Error::field(&tensor.name, "must be one JSON object of type BYTES");
    let Values::Bytes(texts) = &tensor.values else { return Err(wrong()) };
    let [text] = texts.as_slice() else { return Err(wrong()) };
    serde_json::from_slice(text).map_err(|_| wrong())
}

fn parameter_of(name: &str, parameter: InferParameter) -> Result<Value, Error> {
    match parameter.parameter_choice {
        Some(ParameterChoice::BoolParam(flag)) => Ok(Value::from(flag)),
        Some(ParameterChoice::Int64Param(number)) => Ok(Value::from(number)),
        Some(ParameterChoice::Uint64Param(number)) => Ok(Value::from(number)),
        Some(ParameterChoice::StringParam(text)) => Ok(Value::from(text)),
        Some(ParameterChoice::DoubleParam(number)) if number.is_finite() => Ok(Value::from(number)),
        Some(ParameterChoice::DoubleParam(_)) => Err(Error::field(name, "must be finite")),
        None => Err(Error::field(name, "has no value")),
    }
}

fn is_reserved(name: &str) -> bool {
    RESERVED.contains(&name) || name.starts_with("triton_")
}

/// Parses Triton's `timeout`; 0 is none.
fn micros(value: &Value) -> Result<Option<Duration>, Error> {
    let micros = value.as_u64().ok_or_else(|| Error::field("timeout", "must be a number of microseconds"))?;
    Ok((micros > 0).then(|| Duration::from_micros(micros)))
}

fn finish(mut body: Map<String, Value>, model: &str, mut prompts: Vec<String>, is_streamed: bool) -> Bytes {
    let prompt = if prompts.len() == 1 { Value::from(prompts.remove(0)) } else { Value::from(prompts) };
    body.insert("model".to_owned(), Value::from(model));
    body.insert("prompt".to_owned(), prompt);
    body.insert("stream".to_owned(), Value::from(is_streamed));
    Bytes::from(Value::Object(body).to_string())
}
