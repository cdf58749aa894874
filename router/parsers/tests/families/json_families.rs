//! Hermes, Llama 3, Mistral and forced calls.

use crate::harness::{c, check, cut, parse, t};
use router_parsers::{HEADER_BYTES_MAX, Output, ToolFormat};

#[test]
fn hermes() {
    check(
        ToolFormat::Hermes,
        &[
            ("Hello, 世界! 1 < 2 and <tool", vec![c("Hello, 世界! 1 < 2 and <tool")]),
            (
                "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich 🏔\", \"days\": 3}}\n</tool_call>",
                vec![t("get_weather", r#"{"city": "Zürich 🏔", "days": 3}"#)],
            ),
            (
                "Let me look.\n\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>\nDone.",
                vec![
                    c("Let me look.\n\n"),
                    t("get_weather", r#"{"city": "Paris"}"#),
                    t("get_time", "{}"),
                    c("Done."),
                ],
            ),
            // The arguments come first, spelled `parameters`, beside unknown keys.
            (
                r#"<tool_call>{"type": "function", "n": -1.5e3, "x": [1, {"y": "}"}], "parameters": {"city":"Oslo"}, "name": "get_weather"}</tool_call>"#,
                vec![t("get_weather", r#"{"city":"Oslo"}"#)],
            ),
            (r#"<tool_call>{"name": "get_time"}</tool_call>"#, vec![t("get_time", "{}")]),
            // Keys after the arguments are dropped once the object is whole, and come out when it is not.
            (
                r#"<tool_call>{"name": "get_time", "arguments": {}, "id": "x"}</tool_call>"#,
                vec![t("get_time", "{}")],
            ),
            (
                r#"<tool_call>{"name": "get_time", "arguments": {}, "id": "x"#,
                vec![t("get_time", "{}"), c(r#", "id": "x"#)],
            ),
            // A marker inside a string is text.
            (
                r#"<tool_call>{"name": "get_time", "arguments": {"zone": "a</tool_call>\"}b"}}</tool_call>"#,
                vec![t("get_time", r#"{"zone": "a</tool_call>\"}b"}"#)],
            ),
            // The closing tag is missing.
            (r#"<tool_call>{"name": "get_time", "arguments": {}} so"#, vec![t("get_time", "{}"), c("so")]),
            (r#"<tool_call>{"name": "get_time", "arguments": {}}"#, vec![t("get_time", "{}")]),
            // Cut off.
            (
                r#"<tool_call>{"name": "get_weather", "arguments": {"city": "Par"#,
                vec![cut("get_weather", r#"{"city": "Par"#)],
            ),
            (r#"x<tool_call>{"name": "get_wea"#, vec![c(r#"x<tool_call>{"name": "get_wea"#)]),
            // Malformed before and after the start.
            (
                "<tool_call>\nget_weather(Paris)\n</tool_call>",
                vec![c("<tool_call>\nget_weather(Paris)\n</tool_call>")],
            ),
            (
                r#"<tool_call>{"nam": "f", "arguments": {}}</tool_call>"#,
                vec![c(r#"<tool_call>{"nam": "f", "arguments": {}}</tool_call>"#)],
            ),
            (
                r#"<tool_call><tool_call>{"name": "get_time", "arguments": {}}</tool_call>"#,
                vec![c("<tool_call>"), t("get_time", "{}")],
            ),
            (
                r#"<tool_call>{"name": "get_time", "arguments": {'zone': 'utc',}}</tool_call>"#,
                vec![cut("get_time", r#"{'zone': 'utc',}"#)],
            ),
            (
                r#"<tool_call>{"name": "get_time", "arguments": {"zone": [1}}</tool_call>"#,
                vec![cut("get_time", r#"{"zone": [1"#), c("}}</tool_call>")],
            ),
        ],
    );
}

#[test]
fn arguments_are_given_out_as_they_come() {
    let start = r#"<tool_call>{"name": "get_weather", "arguments": {"city": "Pa"#;
    let out = parse(&Some(ToolFormat::Hermes), None, [start]);
    assert!(
        matches!(out.get(1), Some(Output::ToolCallArguments { fragment, .. }) if fragment == r#"{"city": "Pa"#)
    );
}

#[test]
fn a_header_without_end_is_content() {
    let text = format!("<tool_call>{{\"name\": \"{}", "n".repeat(3 * HEADER_BYTES_MAX));
    let tool = Some(ToolFormat::Hermes);
    let whole = parse(&tool, None, [text.as_str()]);
    assert_eq!(whole, vec![Output::Content(text.clone())]);
    for at in [HEADER_BYTES_MAX - 1, HEADER_BYTES_MAX, HEADER_BYTES_MAX + 1] {
        assert_eq!(parse(&tool, None, [&text[..at], &text[at..]]), whole);
    }
}

#[test]
fn llama() {
    check(
        ToolFormat::Llama3,
        &[
            ("It is sunny {today}.", vec![c("It is sunny {today}.")]),
            (
                r#"{"name": "get_weather", "parameters": {"city": "San Francisco, CA"}}"#,
                vec![t("get_weather", r#"{"city": "San Francisco, CA"}"#)],
            ),
            (
                r#"{"name": "get_weather", "parameters": {"city": "a;b"}}; {"type": "function", "name": "get_time", "parameters": {}}"#,
                vec![t("get_weather", r#"{"city": "a;b"}"#), t("get_time", "{}")],
            ),
            (
                "<|python_tag|>{\"name\": \"get_time\", \"parameters\": {\"zone\": \"UTC\"}}",
                vec![t("get_time", r#"{"zone": "UTC"}"#)],
            ),
            (
                "I look: <|python_tag|>{\"name\": \"get_time\", \"arguments\": {}}",
                vec![c("I look: "), t("get_time", "{}")],
            ),
            // A JSON answer is no call.
            (r#"{"name": "Ada", "born": 1815}"#, vec![c(r#"{"name": "Ada", "born": 1815}"#)]),
            (r#"{"name": "other", "parameters": {}}"#, vec![c(r#"{"name": "other", "parameters": {}}"#)]),
            ("\n {\"a\": 1}", vec![c("\n {\"a\": 1}")]),
            // A built-in tool.
            (
                "<|python_tag|>brave_search.call(query=\"x\")",
                vec![c("<|python_tag|>brave_search.call(query=\"x\")")],
            ),
            (r#"{"name": "get_time", "parameters": {}}; what"#, vec![t("get_time", "{}"), c("; what")]),
        ],
    );
}

#[test]
fn mistral() {
    check(
        ToolFormat::Mistral,
        &[
            ("A list [1, 2] and [TOOL", vec![c("A list [1, 2] and [TOOL")]),
            (
                r#"[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Nice"}}, {"arguments": {"zone": "]"}, "name": "get_time"}]"#,
                vec![t("get_weather", r#"{"city": "Nice"}"#), t("get_time", r#"{"zone": "]"}"#)],
            ),
            (
                r#"Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Lyon"}[TOOL_CALLS]get_time[ARGS]{}"#,
                vec![c("Sure."), t("get_weather", r#"{"city": "Lyon"}"#), t("get_time", "{}")],
            ),
            (
                r#"[TOOL_CALLS]get_weather{"city": "Lyon"}[TOOL_CALLS]get_time{}"#,
                vec![t("get_weather", r#"{"city": "Lyon"}"#), t("get_time", "{}")],
            ),
            (
                r#"[TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS] {"zone": "x"}"#,
                vec![t("get_time", r#"{"zone": "x"}"#)],
            ),
            ("[TOOL_CALLS] []", vec![c("[TOOL_CALLS] []")]),
            ("[TOOL_CALLS]get time[ARGS]{}", vec![c("[TOOL_CALLS]get time[ARGS]{}")]),
            ("[TOOL_CALLS]get_time[ARGS]5", vec![c("[TOOL_CALLS]get_time[ARGS]5")]),
            ("[TOOL_CALLS]get_time", vec![c("[TOOL_CALLS]get_time")]),
            (
                r#"[TOOL_CALLS][{"name": "get_time", "arguments": {}}, 5]"#,
                vec![t("get_time", "{}"), c(", 5]")],
            ),
            (r#"[TOOL_CALLS]get_time[ARGS]{"zone"#, vec![cut("get_time", r#"{"zone"#)]),
        ],
    );
}

#[test]
fn mistral_ids_are_the_models_own_or_nine_letters() {
    let text = "[TOOL_CALLS]a[CALL_ID]x1[ARGS]{}[TOOL_CALLS]b[ARGS]{}";
    let out = parse(&Some(ToolFormat::Mistral), None, [text]);
    let ids: Vec<&str> = out
        .iter()
        .filter_map(|piece| match piece {
            Output::ToolCallStart { id, .. } => Some(id.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(ids.first(), Some(&"x1"));
    assert!(ids.get(1).is_some_and(|id| id.len() == 9 && id.chars().all(char::is_alphanumeric)));
}

#[test]
fn forced() {
    check(
        ToolFormat::ForcedArray,
        &[
            (
                r#"[{"name": "get_weather", "parameters": {"city": "Bern"}}, {"name": "get_time", "parameters": {}}]"#,
                vec![t("get_weather", r#"{"city": "Bern"}"#), t("get_time", "{}")],
            ),
            ("[]", vec![c("[]")]),
            (r#"[{"name": "get_time", "parameters": {"a"#, vec![cut("get_time", r#"{"a"#)]),
            ("I cannot.", vec![c("I cannot.")]),
        ],
    );
    check(
        ToolFormat::ForcedNamed("get_time".into()),
        &[
            ("{\"zone\": \"UTC\"}", vec![t("get_time", "{\"zone\": \"UTC\"}")]),
            ("\n{\"zone\": {}}\n x", vec![t("get_time", "{\"zone\": {}}"), c("x")]),
            ("{\"zone\": tru}", vec![cut("get_time", "{\"zone\": tru}")]),
            (" no", vec![c(" no")]),
        ],
    );
}
