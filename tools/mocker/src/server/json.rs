//! JSON by hand: answers are written into one buffer, without a tree.

use std::fmt::Write;

/// Appends a number.
pub(super) fn number(out: &mut String, value: impl std::fmt::Display) {
    // Writing to a String cannot fail.
    let _infallible = write!(out, "{value}");
}

/// Appends a text with quotes; most texts of a mock need no escapes.
pub(super) fn text(out: &mut String, text: &str) {
    if text.bytes().all(|byte| byte >= 0x20 && byte != b'"' && byte != b'\\') {
        out.push('"');
        out.push_str(text);
        out.push('"');
    } else {
        out.push_str(&serde_json::Value::from(text).to_string());
    }
}

/// Appends an array of numbers, or null.
pub(super) fn ids(out: &mut String, ids: Option<&[u32]>) {
    let Some(ids) = ids else {
        out.push_str("null");
        return;
    };
    out.push('[');
    for (index, id) in ids.iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        number(out, id);
    }
    out.push(']');
}
