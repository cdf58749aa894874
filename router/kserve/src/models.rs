//! Metadata and configuration of models. All models have the same tensors, so only the names come from the
//! backend.

use http::HeaderMap;

use crate::backend::Backend;
use crate::config::Config;
use crate::error::Error;
use crate::infer::{accepted, json_of};
use crate::proto::inference::model_metadata_response::TensorMetadata;
use crate::proto::inference::{
    DataType, ModelConfig, ModelInput, ModelMetadataResponse, ModelOutput, ModelTransactionPolicy,
};
use crate::request::VERSION;

/// Platform of the models, a field that Triton's clients expect.
const PLATFORM: &str = "openai_completions";

/// An input or output: name, datatype, length (-1 is any), and whether it is required.
type TensorSpec = (&'static str, DataType, i64, bool);

/// Inputs that need no JSON. Sampling parameters may also be tensors of their own; the usual ones are
/// listed.
const INPUTS: [TensorSpec; 14] = [
    ("text_input", DataType::TypeString, -1, true),
    ("stream", DataType::TypeBool, 1, false),
    ("sampling_parameters", DataType::TypeString, 1, false),
    ("exclude_input_in_output", DataType::TypeBool, 1, false),
    ("return_finish_reason", DataType::TypeBool, 1, false),
    ("return_logprobs", DataType::TypeBool, 1, false),
    ("return_num_input_tokens", DataType::TypeBool, 1, false),
    ("return_num_output_tokens", DataType::TypeBool, 1, false),
    ("max_tokens", DataType::TypeInt32, 1, false),
    ("temperature", DataType::TypeFp32, 1, false),
    ("top_p", DataType::TypeFp32, 1, false),
    ("top_k", DataType::TypeInt32, 1, false),
    ("random_seed", DataType::TypeUint64, 1, false),
    ("stop_words", DataType::TypeString, -1, false),
];

const OUTPUTS: [TensorSpec; 5] = [
    ("text_output", DataType::TypeString, -1, true),
    ("finish_reason", DataType::TypeString, -1, false),
    ("logprobs", DataType::TypeString, -1, false),
    ("num_input_tokens", DataType::TypeUint32, 1, false),
    ("num_output_tokens", DataType::TypeUint32, 1, false),
];

/// Returns the names of the models that a client with these headers may use.
pub(crate) async fn names<B: Backend>(
    backend: &B,
    config: &Config,
    headers: HeaderMap,
) -> Result<Vec<String>, Error> {
    let answer = accepted(backend.models(headers).await).await?;
    let answer = json_of(answer, config.answer_bytes_max).await?;
    let Some(list) = answer["data"].as_array() else {
        return Err(Error::Answer("it lists no models".to_owned()));
    };
    Ok(list.iter().filter_map(|model| model["id"].as_str().map(str::to_owned)).collect())
}

/// Returns the metadata of a model.
pub(crate) fn metadata(name: String) -> ModelMetadataResponse {
    let described = |(name, datatype, length, _): &TensorSpec| TensorMetadata {
        name: (*name).to_owned(),
        datatype: written(*datatype).to_owned(),
        shape: vec![*length],
    };
    ModelMetadataResponse {
        name,
        versions: vec![VERSION.to_owned()],
        platform: PLATFORM.to_owned(),
        inputs: INPUTS.iter().map(described).collect(),
        outputs: OUTPUTS.iter().map(described).collect(),
    }
}

/// Returns the configuration of a model, from which clients read whether it streams.
pub(crate) fn configuration(name: String) -> ModelConfig {
    let input = |(name, datatype, length, is_required): &TensorSpec| ModelInput {
        name: (*name).to_owned(),
        data_type: (*datatype).into(),
        dims: vec![*length],
        optional: !is_required,
    };
    let output = |(name, datatype, length, _): &TensorSpec| ModelOutput {
        name: (*name).to_owned(),
        data_type: (*datatype).into(),
        dims: vec![*length],
    };
    ModelConfig {
        name,
        platform: PLATFORM.to_owned(),
        max_batch_size: 0,
        input: INPUTS.iter().map(input).collect(),
        output: OUTPUTS.iter().map(output).collect(),
        backend: PLATFORM.to_owned(),
        model_transaction_policy: Some(ModelTransactionPolicy { decoupled: true }),
    }
}

/// Returns the name of a datatype in metadata and requests.
fn written(datatype: DataType) -> &'static str {
    match datatype {
        DataType::TypeBool => "BOOL",
        DataType::TypeUint32 => "UINT32",
        DataType::TypeUint64 => "UINT64",
        DataType::TypeInt32 => "INT32",
        DataType::TypeInt64 => "INT64",
        DataType::TypeFp32 => "FP32",
        DataType::TypeFp64 => "FP64",
        DataType::TypeString => "BYTES",
        DataType::TypeInvalid => "INVALID",
    }
}
