//! The size of a JSON text as a tree, found without building one.
//!
//! A tree takes up to a hundred times the bytes of its text (`[],[],…`: three bytes a list, 72 and more for its value), so
//! a body is counted before anything is parsed. One pass over the bytes, no allocation and no recursion; strings are
//! skipped with `memchr`. The parser decides whether the text is JSON: for other text the counts are undefined, but no
//! larger than its length.

use memchr::memchr2;

/// Bytes of a tree per value or name that is no number: a `Value` in a list that has just grown, or a bucket of a map with
/// its name.
const NODE_BYTES: usize = 256;
/// Bytes of a tree per number, which is an element of a list.
const NUMBER_BYTES: usize = 128;
/// Copies of a text that exist at a time while it is parsed, translated, rendered and tokenised.
const TEXT_COPIES: usize = 5;

/// Limits of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JsonLimits {
    /// Number of objects, lists, strings, names and literals.
    pub nodes: usize,
    /// Number of numbers.
    pub numbers: usize,
    /// Nesting depth of objects and lists.
    pub depth: usize,
}

/// Counts of the values in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JsonCounts {
    /// Number of objects, lists, strings, names and literals.
    pub nodes: usize,
    /// Number of numbers.
    pub numbers: usize,
    /// Largest nesting depth of objects and lists.
    pub depth: usize,
}

impl JsonCounts {
    /// Counts a text, up to its first excess; the error names the limit.
    pub fn of(text: &[u8], limits: &JsonLimits) -> Result<Self, String> {
        let mut counts = Self::default();
        let (mut depth, mut at) = (0_usize, 0);
        while let Some(&byte) = text.get(at) {
            at = match byte {
                b'"' => {
                    counts.nodes += 1;
                    end_of_string(text, at + 1)
                }
                b'{' | b'[' => {
                    counts.nodes += 1;
                    depth += 1;
                    counts.depth = counts.depth.max(depth);
                    at + 1
                }
                b'}' | b']' => {
                    depth = depth.saturating_sub(1);
                    at + 1
                }
                b'-' | b'0'..=b'9' => {
                    counts.numbers += 1;
                    end_of_scalar(text, at + 1)
                }
                b'a'..=b'z' => {
                    counts.nodes += 1;
                    end_of_scalar(text, at + 1)
                }
                _ => at + 1,
            };
            counts.check(limits)?;
        }
        Ok(counts)
    }

    fn check(&self, limits: &JsonLimits) -> Result<(), String> {
        if self.depth > limits.depth {
            return Err(format!(
                "The body has more than {} objects and lists inside each other.",
                limits.depth
            ));
        }
        if self.nodes > limits.nodes {
            return Err(format!(
                "The body has more than {} objects, lists, strings and names.",
                limits.nodes
            ));
        }
        if self.numbers > limits.numbers {
            return Err(format!("The body has more than {} numbers.", limits.numbers));
        }
        Ok(())
    }

    /// Upper bound of the bytes that processing a text of this shape takes, in addition to the text itself.
    #[must_use]
    pub fn work_bytes(&self, text_bytes: usize) -> usize {
        TEXT_COPIES * text_bytes + NODE_BYTES * self.nodes + NUMBER_BYTES * self.numbers
    }
}

/// End of the string whose first byte is at `at`.
pub(crate) fn end_of_string(text: &[u8], mut at: usize) -> usize {
    while let Some(found) = text.get(at..).and_then(|rest| memchr2(b'"', b'\\', rest)) {
        at += found;
        if text[at] == b'"' {
            return at + 1;
        }
        at += 2;
    }
    text.len()
}

fn end_of_scalar(text: &[u8], at: usize) -> usize {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    at + text[at..].iter().take_while(|byte| is_part(byte)).count()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const WIDE: JsonLimits = JsonLimits { nodes: 1 << 20, numbers: 1 << 20, depth: 128 };

    /// Counts the same from the parsed tree.
    fn counted(value: &Value, depth: usize, counts: &mut JsonCounts) {
        match value {
            Value::Number(_) => counts.numbers += 1,
            _ => counts.nodes += 1,
        }
        let inner: Vec<&Value> = match value {
            Value::Array(items) => items.iter().collect(),
            Value::Object(fields) => {
                counts.nodes += fields.len();
                fields.values().collect()
            }
            _ => return,
        };
        counts.depth = counts.depth.max(depth + 1);
        inner.into_iter().for_each(|value| counted(value, depth + 1, counts));
    }

    #[test]
    fn a_text_is_counted_as_its_tree() {
        for value in [
            json!({}),
            json!([[], [[]], {}]),
            json!({"a": -1.5e-7, "b": [true, null, false, 12, "x\\\"],[{"], "\"": {"c": ""}}),
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "[[[[ 1 2 3 \n é"}]}]}),
            json!("only a text"),
            json!(7),
        ] {
            let mut expected = JsonCounts::default();
            counted(&value, 0, &mut expected);
            for text in [value.to_string(), serde_json::to_string_pretty(&value).expect("JSON")] {
                assert_eq!(JsonCounts::of(text.as_bytes(), &WIDE), Ok(expected), "{text}");
            }
        }
    }

    #[test]
    fn a_body_of_nested_lists_is_refused_before_it_is_parsed() {
        let limits = JsonLimits { nodes: 1000, numbers: 100, depth: 128 };
        for (text, named) in [
            (format!("{{\"messages\":[{}[]]}}", "[],".repeat(5_000_000)), "1000 objects"),
            ("[".repeat(5_000_000), "128 objects and lists inside"),
            ("{\"a\":".repeat(1_000_000), "128 objects and lists inside"),
            (format!("[{}1]", "1,".repeat(5_000_000)), "100 numbers"),
            (format!("[{}\"\"]", "\"\",".repeat(5_000)), "1000 objects"),
        ] {
            let excess = JsonCounts::of(text.as_bytes(), &limits).expect_err("too large");
            assert!(excess.contains(named), "{excess}");
        }
    }

    #[test]
    fn any_bytes_have_a_shape() {
        for text in ["", "\"", "\"\\", "\"\\\"", "]]]", "-", "\u{0}\u{7f}{", "1e+5x,"] {
            let counts = JsonCounts::of(text.as_bytes(), &WIDE).expect("small");
            assert!(counts.nodes + counts.numbers <= text.len(), "{text:?}");
        }
    }
}
