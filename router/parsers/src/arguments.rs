//! Writes a call's arguments as JSON while the model writes them as XML-like elements.
//!
//! Strings are streamed; other values are held until their end, because only then their type shows.
//! Separators are written as Python's `json.dumps` writes them.

use crate::limits::{NULL_BYTES_MAX, VALUE_HELD_BYTES_MAX};
use crate::machine::prefix;
use crate::output::Sink;
use crate::python::push_escaped;
use crate::value::Kind;

/// The writer of one call's arguments.
#[derive(Debug, Default)]
pub(crate) struct ArgumentWriter {
    written: usize,
    value: Option<Pending>,
}

#[derive(Debug)]
struct Pending {
    kind: Kind,
    /// The text so far, unless it is streamed.
    held: Option<String>,
}

impl ArgumentWriter {
    /// Begins an argument.
    pub(crate) fn begin(&mut self, key: &str, kind: Kind, sink: &mut Sink<'_>) {
        let key = serde_json::Value::from(key).to_string();
        sink.arguments(if self.written == 0 { "{" } else { ", " });
        sink.arguments(&key);
        sink.arguments(": ");
        self.written += 1;
        let streamed = kind == Kind::String;
        if streamed {
            sink.arguments("\"");
        }
        self.value = Some(Pending { kind, held: (!streamed).then(String::new) });
    }

    /// Takes the next text of the value.
    pub(crate) fn push(&mut self, text: &str, sink: &mut Sink<'_>) {
        let Some(value) = &mut self.value else { return };
        let mut rest = text;
        if let Some(held) = &mut value.held {
            let part = prefix(rest, VALUE_HELD_BYTES_MAX.saturating_sub(held.len()));
            held.push_str(part);
            rest = &rest[part.len()..];
            let string = value.kind == Kind::NullableString && !may_be_null(held);
            if string || !rest.is_empty() {
                let held = value.held.take().unwrap_or_default();
                sink.arguments("\"");
                stream(&held, sink);
            } else {
                return;
            }
        }
        stream(rest, sink);
    }

    /// Ends the value.
    pub(crate) fn end(&mut self, sink: &mut Sink<'_>) {
        match self.value.take() {
            Some(Pending { kind, held: Some(held) }) => sink.arguments(&kind.render(&held)),
            Some(Pending { held: None, .. }) => sink.arguments("\""),
            None => {}
        }
    }

    /// Ends the arguments.
    pub(crate) fn close(&mut self, sink: &mut Sink<'_>) {
        self.end(sink);
        sink.arguments(if self.written == 0 { "{}" } else { "}" });
    }

    /// The output ended inside a value: what was held comes out as the model wrote it, and nothing is
    /// closed, as with any cut-off call.
    pub(crate) fn cut_off(&mut self, sink: &mut Sink<'_>) {
        if let Some(Pending { held: Some(held), .. }) = self.value.take() {
            sink.arguments(&held);
        }
    }
}

/// Whether a text is null or a beginning of it; what is not stays so however it goes on.
fn may_be_null(text: &str) -> bool {
    let word = text.trim();
    text.len() <= NULL_BYTES_MAX && ["null", "None"].iter().any(|null| null.starts_with(word))
}

fn stream(text: &str, sink: &mut Sink<'_>) {
    let mut escaped = String::with_capacity(text.len());
    text.chars().for_each(|c| push_escaped(c, &mut escaped));
    sink.arguments(&escaped);
}
