//! Sampling parameters and stop conditions, parsed and checked.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::fields::kind;
use crate::request::CHOICES_MAX;
use crate::{ApiError, Fields, STRUCTURED_OUTPUTS, StructuredOutput};

/// Largest number of stop strings.
const STOP_STRINGS_MAX: usize = 16;
/// Longest stop string: after each token the text so far is compared with it.
const STOP_BYTES_MAX: usize = 1 << 10;

/// Sampling parameters and stop conditions of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Softmax temperature; 0 is greedy.
    pub temperature: f32,
    /// Probability mass of the smallest set of tokens that is sampled from.
    pub top_p: f32,
    /// Number of most likely tokens that are sampled from; 0: all.
    pub top_k: u32,
    /// Least probability of a sampled token, relative to the most likely one.
    pub min_p: f32,
    /// Subtracted from a token's logit per earlier occurrence in the output.
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it occurred in the output.
    pub presence_penalty: f32,
    /// Divides (multiplies, if negative) the logits of tokens that occurred in prompt or output.
    pub repetition_penalty: f32,
    /// Seed of the random numbers; makes sampling repeatable.
    pub seed: Option<u64>,
    /// Values added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Largest number of tokens to generate; `None`: up to the context length.
    pub max_tokens: Option<usize>,
    /// Least number of tokens before the output may end.
    pub min_tokens: usize,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// Whether the stop string is part of the output.
    pub include_stop: bool,
    /// Whether to continue after an end-of-sequence token.
    pub ignore_eos: bool,
    /// Whether special tokens are left out of the text.
    pub skip_special_tokens: bool,
    /// Number of alternatives with log-probabilities; `None`: no log-probabilities.
    pub logprobs: Option<u32>,
    /// Number of independent outputs.
    pub n: u32,
    /// Number of prompt tokens at the end that are output of an interrupted run of the same request.
    pub resumed_tokens: usize,
    /// JSON that the output must match; set by [`Sampling::constrain`].
    pub structured: Option<Arc<StructuredOutput>>,
    /// Parameters with defaults that the client gave. The others are left to the engine's own defaults.
    given: ExplicitParameters,
}

/// Parameters with defaults, in the order of the bits of [`ExplicitParameters`].
const WITH_DEFAULTS: [&str; 10] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
];

/// A set of the parameters in [`WITH_DEFAULTS`], one bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct ExplicitParameters(u16);

/// Name of the vLLM extra argument that carries [`Sampling::resumed_tokens`].
const RESUMED_TOKENS: &str = "kvasir_resumed_tokens";

impl Sampling {
    pub(super) fn parse(fields: Fields<'_>) -> Result<Self, ApiError> {
        let xargs = match fields.get("vllm_xargs") {
            None => None,
            Some(Value::Object(xargs)) => Some(Fields(xargs)),
            Some(other) => {
                return Err(ApiError::invalid(
                    "vllm_xargs",
                    format!("`vllm_xargs` must be an object, not {}.", kind(other)),
                ));
            }
        };
        let resumed = xargs.map(|xargs| xargs.integer(RESUMED_TOKENS, 0, i64::from(u32::MAX))).transpose()?;
        let structured = StructuredOutput::parse(fields)?;
        let mut sampling = Self {
            temperature: fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0),
            top_p: positive(fields, "top_p", 1.0)?.unwrap_or(1.0),
            top_k: fields.integer("top_k", -1, i64::from(u32::MAX))?.map_or(0, |k| k.max(0) as u32),
            min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0),
            frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            repetition_penalty: positive(fields, "repetition_penalty", 10.0)?.unwrap_or(1.0),
            seed: fields.integer("seed", i64::MIN, i64::MAX)?.map(|seed| seed as u64),
            logit_bias: logit_bias(fields)?,
            max_tokens: None,
            min_tokens: fields.integer("min_tokens", 0, i64::from(u32::MAX))?.unwrap_or(0) as usize,
            stop: stop(fields)?,
            stop_token_ids: fields.token_ids("stop_token_ids")?.unwrap_or_default(),
            include_stop: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
            ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
            skip_special_tokens: fields.flag("skip_special_tokens")?.unwrap_or(true),
            logprobs: None,
            n: fields.integer("n", 1, CHOICES_MAX)?.unwrap_or(1) as u32,
            resumed_tokens: resumed.flatten().unwrap_or(0) as usize,
            structured: None,
            given: ExplicitParameters(
                (0..WITH_DEFAULTS.len())
                    .fold(0, |given, bit| given | u16::from(fields.get(WITH_DEFAULTS[bit]).is_some()) << bit),
            ),
        };
        if let Some(structured) = structured {
            sampling.constrain(structured);
        }
        Ok(sampling)
    }

    /// Constrains the output to JSON of a schema. The output ends exactly at the end of the JSON.
    pub fn constrain(&mut self, output: StructuredOutput) {
        self.structured = Some(Arc::new(output));
        self.ignore_eos = false;
        self.min_tokens = 0;
    }

    /// Returns the parameters as fields of a completions request to an engine, without `n` and `stop`. Defaults that the client
    /// did not give are left out: an engine may have others, from its model's `generation_config`.
    #[must_use]
    pub fn to_engine_fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        let mut put = |name: &str, value: Value| drop(fields.insert(name.to_owned(), value));
        let with_defaults = [
            (json!(self.temperature), self.temperature == 1.0),
            (json!(self.top_p), self.top_p == 1.0),
            (json!(if self.top_k == 0 { -1 } else { i64::from(self.top_k) }), self.top_k == 0),
            (json!(self.min_p), self.min_p == 0.0),
            (json!(self.frequency_penalty), self.frequency_penalty == 0.0),
            (json!(self.presence_penalty), self.presence_penalty == 0.0),
            (json!(self.repetition_penalty), self.repetition_penalty == 1.0),
            (json!(self.min_tokens), self.min_tokens == 0),
            (json!(self.ignore_eos), !self.ignore_eos),
            (json!(self.skip_special_tokens), self.skip_special_tokens),
        ];
        for (bit, (value, is_default)) in with_defaults.into_iter().enumerate() {
            if !is_default || self.given.0 >> bit & 1 == 1 {
                put(WITH_DEFAULTS[bit], value);
            }
        }
        if let Some(seed) = self.seed {
            put("seed", json!(seed as i64));
        }
        if let Some(max_tokens) = self.max_tokens {
            put("max_tokens", json!(max_tokens));
        }
        if let Some(top) = self.logprobs {
            put("logprobs", json!(top));
        }
        if !self.stop_token_ids.is_empty() {
            put("stop_token_ids", json!(self.stop_token_ids));
        }
        if !self.logit_bias.is_empty() {
            let bias: Map<String, Value> =
                self.logit_bias.iter().map(|(id, bias)| (id.to_string(), json!(bias))).collect();
            put("logit_bias", Value::Object(bias));
        }
        if let Some(structured) = &self.structured {
            put(STRUCTURED_OUTPUTS, structured.to_json());
        }
        if self.resumed_tokens > 0 {
            put("vllm_xargs", json!({ RESUMED_TOKENS: self.resumed_tokens }));
        }
        fields
    }
}

fn positive(fields: Fields<'_>, name: &str, high: f64) -> Result<Option<f32>, ApiError> {
    match fields.number(name, 0.0, high)? {
        Some(number) if number <= 0.0 => {
            Err(ApiError::invalid(name, format!("`{name}` must be greater than 0.")))
        }
        other => Ok(other),
    }
}

fn stop(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    let bad = |message: &str| ApiError::invalid("stop", format!("`stop` {message}"));
    let stops = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(several)) => several
            .iter()
            .map(|stop| stop.as_str().map(str::to_owned).ok_or_else(|| bad("must hold strings only.")))
            .collect::<Result<_, _>>()?,
        Some(other) => {
            return Err(bad(&format!("must be a string or an array of strings, not {}.", kind(other))));
        }
    };
    if stops.len() > STOP_STRINGS_MAX {
        return Err(bad(&format!("has {} strings, more than {STOP_STRINGS_MAX}.", stops.len())));
    }
    if stops.iter().any(|stop| stop.len() > STOP_BYTES_MAX) {
        return Err(bad(&format!("has a string of more than {STOP_BYTES_MAX} bytes.")));
    }
    if stops.iter().any(String::is_empty) {
        return Err(bad("must not hold an empty string."));
    }
    Ok(stops)
}

fn logit_bias(fields: Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let bad = |message: String| ApiError::invalid("logit_bias", message);
    let bias = match fields.get("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(bias)) => bias,
        Some(other) => return Err(bad(format!("`logit_bias` must be an object, not {}.", kind(other)))),
    };
    bias.iter()
        .map(|(id, bias)| {
            let id: u32 = id
                .parse()
                .map_err(|_| bad(format!("`logit_bias` has the key {id:?}, which is no token id.")))?;
            let value = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
            let value = value.ok_or_else(|| {
                bad(format!("`logit_bias` of token {id} must be a number from -100 to 100."))
            })?;
            Ok((id, value as f32))
        })
        .collect()
}
