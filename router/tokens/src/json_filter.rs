//! The `tojson` filter as `transformers` defines it: Python's `json.dumps`, not HTML-escaped, non-ASCII kept.

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;

struct Style {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ascii: bool,
    sort_keys: bool,
}

pub(crate) fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = match indent {
        Some(width) if !width.is_none() && !width.is_undefined() => Some(match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(width.clone())?.min(16)),
        }),
        _ => None,
    };
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair")),
        None => (if indent.is_some() { ",".to_owned() } else { ", ".to_owned() }, ": ".to_owned()),
    };
    let style = Style {
        indent,
        item_separator,
        key_separator,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let json = serde_json::to_value(&value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let mut out = String::new();
    style.write(&json, 0, &mut out);
    Ok(Value::from_safe_string(out))
}

impl Style {
    fn new_line(&self, level: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..level).for_each(|_| out.push_str(indent));
        }
    }

    fn write(&self, value: &Json, level: usize, out: &mut String) {
        match value {
            Json::Null => out.push_str("null"),
            Json::Bool(true) => out.push_str("true"),
            Json::Bool(false) => out.push_str("false"),
            Json::Number(number) => out.push_str(&number.to_string()),
            Json::String(text) => self.write_string(text, out),
            Json::Array(items) if items.is_empty() => out.push_str("[]"),
            Json::Object(fields) if fields.is_empty() => out.push_str("{}"),
            Json::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.separate(index, level, out);
                    self.write(item, level + 1, out);
                }
                self.new_line(level, out);
                out.push(']');
            }
            Json::Object(fields) => {
                out.push('{');
                let mut fields: Vec<_> = fields.iter().collect();
                if self.sort_keys {
                    fields.sort_by(|a, b| a.0.cmp(b.0));
                }
                for (index, (key, item)) in fields.into_iter().enumerate() {
                    self.separate(index, level, out);
                    self.write_string(key, out);
                    out.push_str(&self.key_separator);
                    self.write(item, level + 1, out);
                }
                self.new_line(level, out);
                out.push('}');
            }
        }
    }

    fn separate(&self, index: usize, level: usize, out: &mut String) {
        if index > 0 {
            out.push_str(&self.item_separator);
        }
        self.new_line(level + 1, out);
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                other if u32::from(other) < 0x20 || (self.ascii && u32::from(other) > 0x7F) => {
                    let mut units = [0; 2];
                    for unit in other.encode_utf16(&mut units) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                other => out.push(other),
            }
        }
        out.push('"');
    }
}
