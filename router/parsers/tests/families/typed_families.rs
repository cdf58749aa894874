//! Formats whose arguments become JSON here: Qwen3-Coder, GLM and pythonic calls.

use crate::harness::{c, check, cut, parse, t};
use router_parsers::{Output, ToolFormat, VALUE_HELD_BYTES_MAX};

#[test]
fn qwen_coder() {
    check(
        ToolFormat::QwenCoder,
        &[
            ("if a <b> then <func", vec![c("if a <b> then <func")]),
            (
                "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew \"York\"\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
                vec![
                    c("I look.\n"),
                    t("get_weather", r#"{"city": "New \"York\"\n", "days": 3}"#),
                    t("get_time", "{}"),
                ],
            ),
            (
                "<tool_call>\n<function=get_weather>\n<parameter=ratio>\n0.50\n</parameter>\n<parameter=detailed>\nTrue\n</parameter>\n<parameter=tags>\n['a', \"b\"]\n</parameter>\n<parameter=place>\n{\"lat\": 1}\n</parameter>\n<parameter=limit>\nnull\n</parameter>\n<parameter=unknown>\n7\n</parameter>\n</function>\n</tool_call>",
                vec![t(
                    "get_weather",
                    r#"{"ratio": 0.50, "detailed": true, "tags": ["a", "b"], "place": {"lat": 1}, "limit": null, "unknown": "7"}"#,
                )],
            ),
            // A text that is null, one that only begins with "null", and numbers that are invalid.
            (
                "<tool_call><function=get_weather><parameter=note>null</parameter><parameter=days>many</parameter></function></tool_call>",
                vec![t("get_weather", r#"{"note": null, "days": "many"}"#)],
            ),
            (
                "<tool_call><function=get_weather><parameter=note>\nnullable\n</parameter></function></tool_call>",
                vec![t("get_weather", r#"{"note": "nullable"}"#)],
            ),
            // Tolerated deviations: no opening tag, no closing tags.
            (
                "<function=get_time>\n<parameter=zone>\nUTC\n</parameter>\n</tool_call>",
                vec![t("get_time", r#"{"zone": "UTC"}"#)],
            ),
            (
                "<tool_call>\n<function=get_weather>\n<parameter=city>\nA\n<parameter=unit>\nB\n</function>\n</tool_call>",
                vec![t("get_weather", r#"{"city": "A", "unit": "B"}"#)],
            ),
            ("<function=other>x", vec![c("<function=other>x")]),
            ("<tool_call>\n{\"name\": \"f\"}", vec![c("<tool_call>\n{\"name\": \"f\"}")]),
            ("<tool_call>\n<function=get_time\n", vec![c("<tool_call>\n<function=get_time\n")]),
            (
                "<tool_call><function=get_time>oops</function>",
                vec![cut("get_time", "{}"), c("oops</function>")],
            ),
            (
                "<tool_call><function=get_time><parameter=zo\nne>x",
                vec![cut("get_time", "{}"), c("<parameter=zo\nne>x")],
            ),
            (
                "<tool_call><function=get_weather><parameter=city>Ab",
                vec![cut("get_weather", r#"{"city": "Ab"#)],
            ),
            (
                "<tool_call><function=get_weather><parameter=days>12",
                vec![cut("get_weather", r#"{"days": 12"#)],
            ),
        ],
    );
}

#[test]
fn a_string_value_is_streamed() {
    let start = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBer";
    let out = parse(&Some(ToolFormat::QwenCoder), None, [start]);
    assert!(
        matches!(out.get(1), Some(Output::ToolCallArguments { fragment, .. }) if fragment == r#"{"city": "Ber"#)
    );
}

#[test]
fn a_value_too_long_to_hold_is_a_string() {
    let long = "1".repeat(VALUE_HELD_BYTES_MAX + 5);
    let text =
        format!("<tool_call>get_weather\n<arg_key>days</arg_key><arg_value>{long}</arg_value></tool_call>");
    let tool = Some(ToolFormat::Glm45);
    let whole = parse(&tool, None, [text.as_str()]);
    let expected = format!("{{\"days\": \"{long}\"}}");
    assert!(
        matches!(whole.get(1), Some(Output::ToolCallArguments { fragment, .. }) if *fragment == expected)
    );
    for at in [VALUE_HELD_BYTES_MAX, VALUE_HELD_BYTES_MAX + 60, text.len() - 20] {
        assert_eq!(parse(&tool, None, [&text[..at], &text[at..]]), whole);
    }
}

#[test]
fn glm() {
    check(
        ToolFormat::Glm45,
        &[
            (
                "\nI ask.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>北京 <b></arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
                vec![
                    c("\nI ask.\n"),
                    t("get_weather", r#"{"city": "北京 <b>", "days": 2}"#),
                    t("get_time", "{}"),
                ],
            ),
            (
                "<tool_call>get_weather<arg_key>tags</arg_key><arg_value>[\"x\"]</arg_value><arg_key>any</arg_key><arg_value>5</arg_value><arg_key>new</arg_key><arg_value>text</arg_value></tool_call>",
                vec![t("get_weather", r#"{"tags": ["x"], "any": 5, "new": "text"}"#)],
            ),
            ("<tool_call>get_time</tool_call>ok", vec![t("get_time", "{}"), c("ok")]),
            ("<tool_call>{\"name\": \"f\"}</tool_call>", vec![c("<tool_call>{\"name\": \"f\"}</tool_call>")]),
            ("<tool_call>two words\n", vec![c("<tool_call>two words\n")]),
            ("<tool_call>get_ti", vec![c("<tool_call>get_ti")]),
            (
                "<tool_call>get_time\n<arg_key>zone</arg_key>\nUTC</tool_call>",
                vec![cut("get_time", "{}"), c("<arg_key>zone</arg_key>UTC</tool_call>")],
            ),
            (
                "<tool_call>get_time\n<arg_key>zone</arg_key><arg_value>U",
                vec![cut("get_time", r#"{"zone": "U"#)],
            ),
        ],
    );
}

#[test]
fn pythonic() {
    check(
        ToolFormat::Pythonic,
        &[
            ("Sure [1].", vec![c("Sure [1].")]),
            ("[link](http://x) and", vec![c("[link](http://x) and")]),
            (
                "[get_weather(city='San \"F\"', days=3, ratio=-.5, detailed=True), get_time()]",
                vec![
                    t("get_weather", r#"{"city": "San \"F\"", "days": 3, "ratio": -0.5, "detailed": true}"#),
                    t("get_time", "{}"),
                ],
            ),
            (
                "<|python_start|>[get_weather(tags=['a', \"b\\n\", '''c'd'''], place={'lat': 1.5, 'x': None, 2: ()}, any=[[], {},],)]<|python_end|>",
                vec![t(
                    "get_weather",
                    r#"{"tags": ["a", "b\n", "c'd"], "place": {"lat": 1.5, "x": null, "2": []}, "any": [[], {}]}"#,
                )],
            ),
            (
                "[get_time(zone='\\u00e9\\x41\\'\\q' )] then",
                vec![t("get_time", r#"{"zone": "éA'\\q"}"#), c("then")],
            ),
            ("[other(a=1)]", vec![c("[other(a=1)]")]),
            ("[get_time('UTC')]", vec![c("[get_time('UTC')]")]),
            ("[get_time(", vec![c("[get_time(")]),
            ("[get_time(zone=UTC)]", vec![cut("get_time", r#"{"zone": "#), c("UTC)]")]),
            ("[get_time(zone='U", vec![cut("get_time", r#"{"zone": "U"#)]),
            ("[get_weather(days=1, city]", vec![cut("get_weather", r#"{"days": 1"#), c("city]")]),
            ("[get_weather(days=12", vec![cut("get_weather", r#"{"days": 12"#)]),
            ("[get_time(), oops]", vec![t("get_time", "{}"), c(", oops]")]),
        ],
    );
}
