//! The formats by name, and detection of a model's format from its name, its chat template or its prompt.

use crate::forced::Forced;
use crate::glm::Glm;
use crate::harmony::Harmony;
use crate::hermes::Hermes;
use crate::llama::Llama;
use crate::machine::Machine;
use crate::mistral::Mistral;
use crate::pythonic::Pythonic;
use crate::qwen_coder::QwenCoder;
use crate::reasoning::{INSIDE_THINK, KIMI_THINK, MISTRAL_THINK, Reasoning, THINK};
use crate::section::{DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, Section};

/// Format in which a model writes tool calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{…}</tool_call>`: Hermes, Qwen 2.5, Qwen 3.
    Hermes,
    /// `<function=…><parameter=…>`: Qwen3-Coder.
    QwenCoder,
    /// `{"name": …, "parameters": …}`, optionally after `<|python_tag|>`: Llama 3.
    Llama3,
    /// `[TOOL_CALLS]`: Mistral.
    Mistral,
    /// `<｜tool▁calls▁begin｜>` with a fenced block: DeepSeek V3 and R1.
    DeepSeekV3,
    /// `<｜tool▁calls▁begin｜>` without a fence: DeepSeek V3.1.
    DeepSeekV31,
    /// Harmony messages: GPT-OSS.
    Harmony,
    /// `<|tool_calls_section_begin|>`: Kimi K2.
    KimiK2,
    /// `<tool_call>` with `<arg_key>`: GLM 4.5.
    Glm45,
    /// `[f(a=1)]`: Llama 4.
    Pythonic,
    /// A grammar forces `[{"name": …, "parameters": …}]` (`tool_choice` is `required`).
    ForcedArray,
    /// A grammar forces the bare arguments of this function (`tool_choice` names it).
    ForcedNamed(String),
}

impl ToolFormat {
    /// A format by the name that vLLM or SGLang gives its parser. The forced formats have none.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name.to_ascii_lowercase().replace('-', "_").as_str() {
            "hermes" | "qwen" | "qwen25" | "qwen2_5" | "qwen3" => Self::Hermes,
            "qwen3_coder" | "qwen3_xml" | "qwen_coder" => Self::QwenCoder,
            "llama3" | "llama3_json" | "llama4_json" => Self::Llama3,
            "mistral" => Self::Mistral,
            "deepseek_v3" | "deepseekv3" | "deepseek_r1" => Self::DeepSeekV3,
            "deepseek_v31" | "deepseekv31" | "deepseek_v3_1" => Self::DeepSeekV31,
            "openai" | "gpt_oss" | "harmony" => Self::Harmony,
            "kimi_k2" => Self::KimiK2,
            "glm" | "glm4" | "glm45" | "glm47" => Self::Glm45,
            "pythonic" | "llama4" | "llama4_pythonic" => Self::Pythonic,
            _ => return None,
        })
    }

    /// Detects the format from the text of a chat template.
    #[must_use]
    pub fn detect(template: &str) -> Option<Self> {
        let has = |part: &str| template.contains(part);
        let first = [
            ("<|channel|>", Self::Harmony),
            ("<|tool_calls_section_begin|>", Self::KimiK2),
            ("<arg_key>", Self::Glm45),
            ("<function=", Self::QwenCoder),
            ("[TOOL_CALLS]", Self::Mistral),
            ("<tool_call>", Self::Hermes),
            ("<|python_start|>", Self::Pythonic),
            ("<|python_tag|>", Self::Llama3),
        ];
        if has("<｜tool▁calls▁begin｜>") {
            return Some(if has("```json") { Self::DeepSeekV3 } else { Self::DeepSeekV31 });
        }
        first.into_iter().find(|(part, _)| has(part)).map(|(_, format)| format)
    }

    pub(crate) fn forced(&self) -> bool {
        matches!(self, Self::ForcedArray | Self::ForcedNamed(_))
    }

    pub(crate) fn machine(self) -> Box<dyn Machine> {
        match self {
            Self::Hermes => Box::new(Hermes::new()),
            Self::QwenCoder => Box::new(QwenCoder::new()),
            Self::Llama3 => Box::new(Llama::new()),
            Self::Mistral => Box::new(Mistral::new()),
            Self::DeepSeekV3 => Box::new(Section::new(&DEEPSEEK_V3)),
            Self::DeepSeekV31 => Box::new(Section::new(&DEEPSEEK_V31)),
            Self::Harmony => Box::new(Harmony::new()),
            Self::KimiK2 => Box::new(Section::new(&KIMI_K2)),
            Self::Glm45 => Box::new(Glm::new()),
            Self::Pythonic => Box::new(Pythonic::new()),
            Self::ForcedArray => Box::new(Forced::list()),
            Self::ForcedNamed(name) => Box::new(Forced::named(name)),
        }
    }
}

/// Format in which a model writes its reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// The output begins inside `<think>`: DeepSeek R1, and every template that ends with `<think>`.
    DeepSeekR1,
    /// The model writes `<think>` itself: Qwen3.
    Qwen3,
    /// The model writes `<think>` itself, after a newline: GLM 4.5.
    Glm45,
    /// As R1; a section of calls also ends the reasoning: Kimi K2 Thinking.
    KimiK2,
    /// `[THINK]`, also after content: Magistral.
    Mistral,
    /// The `analysis` channel: GPT-OSS.
    Harmony,
}

impl ReasoningFormat {
    /// A format by the name that vLLM or SGLang gives its parser.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name.to_ascii_lowercase().replace('-', "_").as_str() {
            "deepseek_r1" | "deepseek_v3" | "qwen3_thinking" => Self::DeepSeekR1,
            "qwen3" => Self::Qwen3,
            "glm45" | "glm4" => Self::Glm45,
            "kimi_k2" => Self::KimiK2,
            "mistral" | "magistral" => Self::Mistral,
            "openai" | "openai_gptoss" | "gpt_oss" | "harmony" => Self::Harmony,
            _ => return None,
        })
    }

    /// Detects the format from the text of a chat template. Whether the output begins inside the reasoning
    /// depends on the request; ask [`ReasoningFormat::after_prompt`] for that.
    #[must_use]
    pub fn detect(template: &str) -> Option<Self> {
        let has = |part: &str| template.contains(part);
        let first = [
            ("<|channel|>", Self::Harmony),
            ("[THINK]", Self::Mistral),
            ("<|tool_calls_section_begin|>", Self::KimiK2),
            ("<arg_key>", Self::Glm45),
        ];
        let thinks = |format: Self| !matches!(format, Self::KimiK2 | Self::Glm45) || has("</think>");
        if let Some((_, format)) = first.into_iter().find(|(part, format)| has(part) && thinks(*format)) {
            return Some(format);
        }
        has("</think>").then_some(Self::Qwen3)
    }

    /// Returns the format of an output whose rendered prompt is `prompt`: after a prompt that ends with the opening tag the output
    /// begins inside the reasoning; after one that ends with the closing tag (thinking switched off) there is none.
    #[must_use]
    pub fn after_prompt(self, prompt: &str) -> Option<Self> {
        let prompt = prompt.trim_end();
        match self {
            Self::Harmony | Self::Mistral => Some(self),
            _ if prompt.ends_with("</think>") => None,
            Self::Qwen3 | Self::Glm45 if prompt.ends_with("<think>") => Some(Self::DeepSeekR1),
            _ => Some(self),
        }
    }

    pub(crate) fn stage(self) -> Option<Reasoning> {
        let tags = match self {
            Self::DeepSeekR1 => &INSIDE_THINK,
            Self::Qwen3 | Self::Glm45 => &THINK,
            Self::KimiK2 => &KIMI_THINK,
            Self::Mistral => &MISTRAL_THINK,
            Self::Harmony => return None,
        };
        Some(Reasoning::new(tags))
    }
}
