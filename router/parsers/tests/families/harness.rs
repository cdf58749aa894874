//! Harness of the families' tables: an example is parsed whole, in every division into two pieces and character by character,
//! and each time gives the expected result.

use router_parsers::{CallIds, Output, Parser, ReasoningFormat, Tool, ToolFormat};
use serde_json::json;

/// Expected output, with adjacent pieces joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Say {
    R(String),
    C(String),
    /// A complete call: name and arguments.
    T(String, String),
    /// An incomplete call: name and arguments.
    Cut(String, String),
}

pub(crate) fn r(text: &str) -> Say {
    Say::R(text.to_owned())
}

pub(crate) fn c(text: &str) -> Say {
    Say::C(text.to_owned())
}

pub(crate) fn t(name: &str, arguments: &str) -> Say {
    Say::T(name.to_owned(), arguments.to_owned())
}

pub(crate) fn cut(name: &str, arguments: &str) -> Say {
    Say::Cut(name.to_owned(), arguments.to_owned())
}

/// The functions that all examples offer.
pub(crate) fn tools() -> Vec<Tool> {
    let schema = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer"},
            "limit": {"type": ["integer", "null"]},
            "ratio": {"type": "number"},
            "detailed": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"$ref": "#/$defs/Place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "any": {}
        },
        "$defs": {"Place": {"type": "object"}}
    });
    vec![
        Tool::new("get_weather", schema),
        Tool::new("get_time", json!({"type": "object", "properties": {"zone": {"type": "string"}}})),
    ]
}

pub(crate) fn parse<'a>(
    tool: &Option<ToolFormat>,
    reasoning: Option<ReasoningFormat>,
    pieces: impl IntoIterator<Item = &'a str>,
) -> Vec<Output> {
    let mut parser = Parser::new(tool.clone(), reasoning, &tools(), CallIds::seeded(7));
    let mut out = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut out);
    }
    parser.finish(&mut out);
    join(out)
}

/// Joins adjacent pieces of one kind.
fn join(out: Vec<Output>) -> Vec<Output> {
    let mut joined: Vec<Output> = Vec::new();
    for piece in out {
        match (joined.last_mut(), piece) {
            (Some(Output::Reasoning(last)), Output::Reasoning(text))
            | (Some(Output::Content(last)), Output::Content(text)) => last.push_str(&text),
            (
                Some(Output::ToolCallArguments { index: last_index, fragment: last }),
                Output::ToolCallArguments { index, fragment },
            ) if *last_index == index => last.push_str(&fragment),
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

pub(crate) fn say(out: &[Output]) -> Vec<Say> {
    let mut said = Vec::new();
    let (mut name_now, mut arguments, mut open) = (String::new(), String::new(), None);
    for (position, piece) in out.iter().enumerate() {
        match piece {
            Output::Reasoning(text) => said.push(r(text)),
            Output::Content(text) => said.push(c(text)),
            Output::ToolCallStart { index, name, id } => {
                assert_eq!(open, None, "a call starts inside a call, at {position}: {out:?}");
                assert!(!id.is_empty());
                (name_now, arguments, open) = (name.clone(), String::new(), Some(*index));
            }
            Output::ToolCallArguments { index, fragment } => {
                assert_eq!(open, Some(*index), "{out:?}");
                arguments.push_str(fragment);
            }
            Output::ToolCallEnd { index, complete } => {
                assert_eq!(open.take(), Some(*index), "{out:?}");
                if *complete {
                    let parsed = serde_json::from_str::<serde_json::Value>(&arguments);
                    assert!(parsed.is_ok(), "complete, but not JSON: {arguments}");
                    said.push(t(&name_now, &arguments));
                } else {
                    said.push(cut(&name_now, &arguments));
                }
            }
        }
    }
    assert_eq!(open, None, "a call never ends: {out:?}");
    said
}

/// One row of a table: the model's text and the expected output.
pub(crate) type Example<'a> = (&'a str, Vec<Say>);

/// Checks a table without reasoning.
pub(crate) fn check(tool: ToolFormat, examples: &[Example<'_>]) {
    check_with(Some(tool), None, examples);
}

pub(crate) fn check_with(
    tool: Option<ToolFormat>,
    reasoning: Option<ReasoningFormat>,
    examples: &[Example<'_>],
) {
    for (text, expected) in examples {
        let whole = parse(&tool, reasoning, [*text]);
        assert_eq!(&say(&whole), expected, "{tool:?} {reasoning:?}, whole: {text}");
        for (at, _) in text.char_indices() {
            let split = parse(&tool, reasoning, [&text[..at], &text[at..]]);
            assert_eq!(split, whole, "{tool:?}, divided at {at}: {text}");
        }
        let characters = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]);
        assert_eq!(parse(&tool, reasoning, characters), whole, "{tool:?}, by characters: {text}");
    }
}
