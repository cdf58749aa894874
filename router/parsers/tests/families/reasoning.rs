//! Reasoning tags, alone and before calls, and the choice of formats.

use crate::harness::{c, check_with, r, t};
use router_parsers::{ReasoningFormat, ToolFormat};

#[test]
fn tags() {
    check_with(
        None,
        Some(ReasoningFormat::DeepSeekR1),
        &[
            ("Okay,\nso\n</think>\n\nHi <think>", vec![r("Okay,\nso\n"), c("\n\nHi <think>")]),
            ("<think>\nOkay</think>Hi", vec![r("\nOkay"), c("Hi")]),
            ("\n never ends </thin", vec![r("\n never ends </thin")]),
            (" \n", vec![r(" \n")]),
        ],
    );
    check_with(
        None,
        Some(ReasoningFormat::Qwen3),
        &[
            ("<think>\nHm\n</think>\n\nHi", vec![r("\nHm\n"), c("\n\nHi")]),
            ("Hi <think>no</think>", vec![c("Hi <think>no</think>")]),
            ("\n<thi", vec![c("\n<thi")]),
        ],
    );
    check_with(
        None,
        Some(ReasoningFormat::Mistral),
        &[
            ("[THINK]Hm[x][/THINK]Hi", vec![r("Hm[x]"), c("Hi")]),
            ("Well [THINK]Hm", vec![c("Well "), r("Hm")]),
        ],
    );
}

#[test]
fn reasoning_and_calls() {
    check_with(
        Some(ToolFormat::Hermes),
        Some(ReasoningFormat::Qwen3),
        &[(
            "<think>\nA <tool_call> maybe.\n</think>\n\n<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>",
            vec![r("\nA <tool_call> maybe.\n"), c("\n\n"), t("get_time", "{}")],
        )],
    );
    check_with(
        Some(ToolFormat::Glm45),
        Some(ReasoningFormat::Glm45),
        &[(
            "\n<think>Hm</think>\n<tool_call>get_time\n</tool_call>",
            vec![r("Hm"), c("\n"), t("get_time", "{}")],
        )],
    );
    check_with(
        Some(ToolFormat::KimiK2),
        Some(ReasoningFormat::KimiK2),
        &[(
            "Hm<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            vec![r("Hm"), t("get_time", "{}")],
        )],
    );
    check_with(
        Some(ToolFormat::ForcedNamed("get_time".into())),
        Some(ReasoningFormat::DeepSeekR1),
        &[("Hm</think>\n{}", vec![r("Hm"), t("get_time", "{}")])],
    );
    check_with(
        Some(ToolFormat::DeepSeekV3),
        Some(ReasoningFormat::DeepSeekR1),
        &[(
            "Hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            vec![r("Hm"), t("get_time", "{}")],
        )],
    );
}

#[test]
fn formats_are_detected_by_their_templates() {
    assert_eq!(ToolFormat::detect("{{ '<tool_call>' }}<arg_key>"), Some(ToolFormat::Glm45));
    assert_eq!(ToolFormat::detect("plain"), None);
    let qwen = ReasoningFormat::Qwen3;
    assert_eq!(qwen.after_prompt("…assistant\n<think>\n"), Some(ReasoningFormat::DeepSeekR1));
    assert_eq!(qwen.after_prompt("…<think>\n\n</think>\n\n"), None);
    assert_eq!(qwen.after_prompt("…assistant\n"), Some(qwen));
}
