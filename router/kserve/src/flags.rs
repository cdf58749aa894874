//! Options of a request beside sampling: streaming, and the outputs.

use serde_json::Value;

use crate::error::Error;
use crate::fields;
use crate::proto::inference::model_infer_request::InferRequestedOutputTensor;

/// An output that a client can request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    Text,
    FinishReason,
    Logprobs,
    PromptCount,
    AnswerCount,
}

impl Output {
    /// All outputs.
    pub(crate) const ALL: [Self; 5] =
        [Self::Text, Self::FinishReason, Self::Logprobs, Self::PromptCount, Self::AnswerCount];

    /// The tensor's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Text => "text_output",
            Self::FinishReason => "finish_reason",
            Self::Logprobs => "logprobs",
            Self::PromptCount => "num_input_tokens",
            Self::AnswerCount => "num_output_tokens",
        }
    }

    /// Returns the flag that requests the output, if it is not included by default.
    fn flag(self) -> Option<&'static str> {
        match self {
            Self::Text => None,
            Self::FinishReason => Some("return_finish_reason"),
            Self::Logprobs => Some("return_logprobs"),
            Self::PromptCount => Some("return_num_input_tokens"),
            Self::AnswerCount => Some("return_num_output_tokens"),
        }
    }

    fn is_count(self) -> bool {
        matches!(self, Self::PromptCount | Self::AnswerCount)
    }
}

/// The flags of a request, from tensors and parameters.
#[derive(Debug, Default)]
pub(crate) struct Flags {
    pub(crate) is_streamed: bool,
    pub(crate) includes_input: bool,
    wanted: Vec<Output>,
    pub(crate) has_empty_final: bool,
}

impl Flags {
    /// Takes a flag; false if the name is not a flag.
    pub(crate) fn take(&mut self, name: &str, value: &Value) -> Result<bool, Error> {
        let output = Output::ALL.into_iter().find(|output| output.flag() == Some(name));
        let is_own = matches!(
            name,
            "stream"
                | "streaming"
                | "exclude_input_in_output"
                | "return_cumulative_logprob"
                | "triton_enable_empty_final_response"
        );
        if output.is_none() && !is_own {
            return Ok(false);
        }
        let is_set = fields::flag(value).ok_or_else(|| Error::field(name, "must be true or false"))?;
        match (name, output) {
            (_, Some(output)) => {
                self.wanted.retain(|wanted| *wanted != output);
                self.wanted.extend(is_set.then_some(output));
            }
            ("stream" | "streaming", _) => self.is_streamed = is_set,
            ("exclude_input_in_output", _) => self.includes_input = !is_set,
            ("triton_enable_empty_final_response", _) => self.has_empty_final = is_set,
            (_, _) if is_set => return Err(Error::field(name, "is not supported")),
            (_, _) => {}
        }
        Ok(true)
    }

    /// Checks that streaming is possible: one prompt, and no prompt in the output.
    pub(crate) fn check_stream(&self, prompts_count: usize) -> Result<(), Error> {
        if self.is_streamed && prompts_count > 1 {
            let reason =
                format!("{prompts_count} prompts cannot be answered as a stream; send one a request");
            return Err(Error::field("text_input", reason));
        }
        if self.is_streamed && self.includes_input {
            return Err(Error::field("exclude_input_in_output", "cannot be false in a stream"));
        }
        Ok(())
    }

    /// Returns the named outputs; without names the text, its finish reason, and the outputs that flags
    /// request.
    pub(crate) fn outputs(
        &self,
        named: &[InferRequestedOutputTensor],
        has_logprobs: bool,
        prompts_count: usize,
    ) -> Result<Vec<Output>, Error> {
        let mut outputs = Vec::new();
        for output in named {
            let known = Output::ALL.into_iter().find(|known| known.name() == output.name);
            let known = known.ok_or_else(|| Error::field(&output.name, "is no output of this model"))?;
            if output.parameters.contains_key("shared_memory_region") {
                return Err(Error::field(&output.name, "shared memory is not supported"));
            }
            if !outputs.contains(&known) {
                outputs.push(known);
            }
        }
        if named.is_empty() {
            let comes = |output: &Output| match output {
                Output::Text | Output::FinishReason => true,
                Output::Logprobs => has_logprobs || self.wanted.contains(output),
                Output::PromptCount | Output::AnswerCount => self.wanted.contains(output),
            };
            outputs.extend(Output::ALL.into_iter().filter(comes));
        }
        // An engine only counts tokens of a whole answer.
        match outputs.iter().find(|output| output.is_count()) {
            Some(count) if self.is_streamed || prompts_count > 1 => {
                Err(Error::field(count.name(), "is only known for one prompt whose answer is not streamed"))
            }
            _ => Ok(outputs),
        }
    }
}
