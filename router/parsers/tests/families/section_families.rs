//! DeepSeek, Kimi K2 and GPT-OSS.

use crate::harness::{c, check, cut, parse, r, t};
use router_parsers::{Output, ToolFormat};

#[test]
fn deepseek_v3() {
    let call = |name: &str, arguments: &str| {
        format!(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        )
    };
    let two = format!(
        "I check.<｜tool▁calls▁begin｜>{}\n{}<｜tool▁calls▁end｜>",
        call("get_weather", r#"{"city": "北京", "x": "```"}"#),
        call("get_time", "{}")
    );
    let wrong =
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>code<｜tool▁sep｜>x\n```json\n{}\n```<｜tool▁call▁end｜>";
    let second = format!(
        "<｜tool▁calls▁begin｜>{}\n<｜tool▁call▁begin｜>function<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        call("get_time", "{}")
    );
    check(
        ToolFormat::DeepSeekV3,
        &[
            ("plain <｜tool", vec![c("plain <｜tool")]),
            (
                &two,
                vec![c("I check."), t("get_weather", r#"{"city": "北京", "x": "```"}"#), t("get_time", "{}")],
            ),
            (wrong, vec![c(wrong)]),
            (
                &second,
                vec![
                    t("get_time", "{}"),
                    c("<｜tool▁call▁begin｜>function<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
                ],
            ),
            ("<｜tool▁calls▁begin｜> so", vec![c("<｜tool▁calls▁begin｜> so")]),
            ("<｜tool▁calls▁begin｜>", vec![c("<｜tool▁calls▁begin｜>")]),
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{\"zone\": \"U",
                vec![cut("get_time", "{\"zone\": \"U")],
            ),
        ],
    );
}

#[test]
fn deepseek_v31() {
    check(
        ToolFormat::DeepSeekV31,
        &[
            (
                "Yes<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Bonn\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                vec![c("Yes"), t("get_weather", r#"{"city": "Bonn"}"#), t("get_time", "{}")],
            ),
            ("<｜tool▁call▁begin｜>get_time<｜tool▁sep｜><｜tool▁call▁end｜>", vec![t("get_time", "{}")]),
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{\"a\": 01}<｜tool▁call▁end｜>",
                vec![cut("get_time", r#"{"a": 01}"#)],
            ),
            (
                "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>none<｜tool▁call▁end｜>",
                vec![c("<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>none<｜tool▁call▁end｜>")],
            ),
        ],
    );
}

#[test]
fn kimi() {
    let text = "On it.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Kiel\"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    check(
        ToolFormat::KimiK2,
        &[
            (text, vec![c("On it."), t("get_weather", r#"{"city": "Kiel"}"#), t("get_time", "{}")]),
            (
                "<|tool_calls_section_begin|>\n<|tool_call_begin|> get_time:3 <|tool_call_argument_begin|> {} <|tool_call_end|>\n<|tool_calls_section_end|>",
                vec![t("get_time", "{}")],
            ),
            (
                "<|tool_call_begin|>get_time<|tool_call_argument_begin|>{}<|tool_call_end|>",
                vec![c("<|tool_call_begin|>get_time<|tool_call_argument_begin|>{}<|tool_call_end|>")],
            ),
        ],
    );
    let out = parse(&Some(ToolFormat::KimiK2), None, [text]);
    let own =
        out.iter().any(|p| matches!(p, Output::ToolCallStart { id, .. } if id == "functions.get_time:1"));
    assert!(own);
}

#[test]
fn harmony() {
    check(
        ToolFormat::Harmony,
        &[
            (
                "<|channel|>analysis<|message|>Simple: 2 < 3.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
                vec![r("Simple: 2 < 3."), c("2 + 2 = 4.")],
            ),
            (
                "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\":\"Ulm\"}<|call|>",
                vec![r("Need it."), t("get_weather", r#"{"city":"Ulm"}"#)],
            ),
            // The recipient stands in the role part; a preamble; two calls; the engine kept its stop token to itself.
            (
                "<|channel|>commentary<|message|>**Plan**<|end|><|start|>assistant to=functions.get_time<|channel|>commentary<|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{\"city\": \"Rom\"}",
                vec![c("**Plan**"), t("get_time", "{}"), t("get_weather", r#"{"city": "Rom"}"#)],
            ),
            (
                " to=functions.get_time<|channel|>commentary json<|message|> {\"zone\": 1} <|call|>",
                vec![t("get_time", r#"{"zone": 1}"#)],
            ),
            ("<|channel|>commentary to=functions.get_time<|message|><|call|>", vec![t("get_time", "{}")]),
            // A built-in tool; the end of the first message is missing.
            (
                "<|channel|>analysis to=python code<|message|>1+1<|channel|>final<|message|>2",
                vec![r("1+1"), c("2")],
            ),
            ("No header <|end|>", vec![c("No header ")]),
            ("<|channel|>anal", vec![c("<|channel|>anal")]),
            ("<|channel|>other<|message|>x", vec![c("<|channel|>other<|message|>x")]),
            (
                "<|channel|>commentary to=functions.get_time<|message|>{\"a\":1} b c<|call|>",
                vec![cut("get_time", "{\"a\":1}b c")],
            ),
        ],
    );
}
