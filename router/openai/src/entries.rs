//! Members and elements of JSON text that was parsed before, found without parsing it again.
//!
//! One pass over the bytes, no recursion; strings are skipped with `memchr`. For text that is not JSON the entries are
//! undefined, but their number is bounded.

use std::borrow::Cow;

use crate::json_counts::end_of_string;

/// A member of an object, or an element of an array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<'a> {
    /// A member's name, without quotes and escapes.
    pub name: Option<Cow<'a, str>>,
    /// The value as JSON text.
    pub value: &'a str,
}

/// Iterates over the entries of an object or an array; other values have none.
#[derive(Debug, Clone)]
pub struct Entries<'a> {
    text: &'a str,
    at: usize,
    is_object: bool,
}

impl<'a> Entries<'a> {
    /// Returns the entries of this text.
    #[must_use]
    pub fn of(text: &'a str) -> Self {
        let text = text.trim_ascii();
        let is_object = text.starts_with('{');
        let at = if is_object || text.starts_with('[') { 1 } else { text.len() };
        Self { text, at, is_object }
    }

    fn skip(&mut self, is_skipped: impl Fn(u8) -> bool) {
        let rest = self.text.as_bytes().get(self.at..).unwrap_or_default();
        self.at += rest.iter().take_while(|&&byte| is_skipped(byte)).count();
    }

    /// Returns the value that begins at the cursor.
    fn value(&mut self) -> Option<&'a str> {
        let begin = self.at;
        self.at = end_of_value(self.text.as_bytes(), begin);
        self.text.get(begin..self.at).filter(|value| !value.is_empty())
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Entry<'a>;

    fn next(&mut self) -> Option<Entry<'a>> {
        self.skip(|byte| byte == b',' || byte.is_ascii_whitespace());
        let name = match self.is_object {
            false => None,
            true => {
                let quoted = self.value()?;
                self.skip(|byte| byte == b':' || byte.is_ascii_whitespace());
                let bare = Cow::Borrowed(quoted.trim_matches('"'));
                // Half a surrogate pair is invalid here and valid in Python's parser: such a name is returned as it is written, and its
                // value is visited all the same.
                Some(match quoted.contains('\\') {
                    true => serde_json::from_str(quoted).map_or(bare, Cow::Owned),
                    false => bare,
                })
            }
        };
        Some(Entry { name, value: self.value()? })
    }
}

/// End of the value that begins at `at`; `at` itself if there is no value.
fn end_of_value(text: &[u8], mut at: usize) -> usize {
    let mut depth = 0_usize;
    while let Some(&byte) = text.get(at) {
        at = match byte {
            b'"' => end_of_string(text, at + 1),
            b'{' | b'[' => {
                depth += 1;
                at + 1
            }
            b'}' | b']' if depth == 0 => return at,
            b'}' | b']' => {
                depth -= 1;
                at + 1
            }
            _ if depth > 0 => at + 1,
            _ => {
                let ends =
                    |byte: &u8| matches!(byte, b',' | b':' | b'}' | b']') || byte.is_ascii_whitespace();
                return at + text[at..].iter().take_while(|byte| !ends(byte)).count();
            }
        };
        if depth == 0 {
            break;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_entries_are_those_of_the_parser() {
        for value in [
            json!({}),
            json!([]),
            json!([[], [[]], {}, "a]\"b", -1.5e-7, null, true]),
            json!({"a": -1.5e-7, "b": [true, null, false, 12, "x\\\"],[{"], "\"é\n": {"c": ""}, "": "é"}),
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "[[[[ 1 2 3 \n é"}]}]}),
        ] {
            for text in [value.to_string(), format!(" {value:#}\n")] {
                let entries: Vec<(Option<String>, Value)> = Entries::of(&text)
                    .map(|entry| {
                        let value = serde_json::from_str(entry.value).expect("JSON");
                        (entry.name.map(Cow::into_owned), value)
                    })
                    .collect();
                let expected: Vec<(Option<String>, Value)> = match value.clone() {
                    Value::Array(items) => items.into_iter().map(|item| (None, item)).collect(),
                    Value::Object(fields) => {
                        fields.into_iter().map(|(name, item)| (Some(name), item)).collect()
                    }
                    _ => Vec::new(),
                };
                assert_eq!(entries, expected, "{text}");
            }
        }
        let odd = r#"{"\ud800":1,"b":2}"#;
        let names: Vec<_> = Entries::of(odd).filter_map(|entry| entry.name).collect();
        assert_eq!(names, [r"\ud800", "b"], "a name that is no text ends nothing");
        assert_eq!(Entries::of("12").count() + Entries::of("\"[1]\"").count() + Entries::of("").count(), 0);
    }

    #[test]
    fn of_any_text_there_is_an_end() {
        for text in [
            "[", "{", "[,", "{:", "{\"", "{\"a", "{\"a\"", "{\"a\":", "[\"\\é", "[:::", "{]}", "[}1",
            "{a:é,b}",
        ] {
            assert!(Entries::of(text).count() <= text.len(), "{text}");
        }
    }
}
