//! A request's JSON body as received, with the positions of its top-level fields.
//!
//! A field is parsed only when it is read, and a body with changes is assembled from the client's own bytes. So a prompt of
//! 220 KB is scanned once, unknown fields reach the engine unchanged, and numbers keep their spelling. Of a name that
//! occurs twice the last counts, as it does in Python's parser, and only that one is passed on.
//!
//! The fields of a form are stored as JSON text.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use bytestring::ByteString;
use http::HeaderValue;
use serde::de::IgnoredAny;

use crate::form::{Form, FormFile};
use crate::{ApiError, Entries, Entry};

/// Most top-level fields of a request.
const FIELDS_MAX: usize = 256;

/// Longest text of a field that is an option: a number, a flag, or an object of a few.
const OPTION_BYTES_MAX: usize = 16 << 10;

#[derive(Debug, Clone)]
enum Raw {
    /// Position of the text in the body.
    Original(Range<usize>),
    /// JSON text set by the gateway. Legs and attempts share it.
    Set(ByteString),
}

impl Raw {
    fn in_text<'a>(&'a self, text: &'a str) -> &'a str {
        match self {
            Self::Original(range) => &text[range.clone()],
            Self::Set(own) => own,
        }
    }

    /// Compares lengths first: most names differ there.
    fn is(&self, wanted: &str, text: &str) -> bool {
        match self {
            Self::Original(range) => {
                range.len() == wanted.len() && text.as_bytes()[range.clone()] == *wanted.as_bytes()
            }
            Self::Set(own) => own == wanted,
        }
    }
}

#[derive(Debug, Clone)]
struct Field {
    /// The name without quotes and escapes.
    name: Raw,
    raw: Raw,
}

/// A JSON object with its top-level fields by name.
#[derive(Debug, Clone)]
pub struct RawBody {
    text: ByteString,
    fields: Vec<Field>,
    is_changed: bool,
    /// The form, if the body is one.
    form: Option<Arc<Form>>,
}

impl RawBody {
    /// Parses a body, which must be one JSON object, and locates its fields.
    pub fn parse(bytes: Bytes) -> Result<Self, ApiError> {
        let malformed = |error: String| ApiError::malformed(format!("The body is not JSON: {error}."));
        let text = ByteString::try_from(bytes).map_err(|error| malformed(error.to_string()))?;
        let checked = serde_json::from_str::<IgnoredAny>(&text);
        checked.map_err(|error| malformed(error.to_string()))?;
        let refused = |why: &str| ApiError::malformed(format!("The body must be a JSON object: {why}."));
        if !text.trim_ascii_start().starts_with('{') {
            return Err(refused(&format!("it is {}", kind(text.trim_ascii_start()))));
        }
        let place = |part: &str| {
            let start = part.as_ptr() as usize - text.as_ptr() as usize;
            start..start + part.len()
        };
        let (mut fields, mut seen, mut has_repeats) = (Vec::<Field>::with_capacity(16), 0, false);
        for Entry { name, value } in Entries::of(&text) {
            let name = name.unwrap_or_default();
            // Repeated names are counted too: each is searched for among the names before it.
            seen += 1;
            if seen > FIELDS_MAX {
                return Err(refused(&format!("it has more than {FIELDS_MAX} fields")));
            }
            let raw = Raw::Original(place(value));
            if let Some(before) = fields.iter_mut().find(|field| field.name.is(&name, &text)) {
                before.raw = raw;
                has_repeats = true;
                continue;
            }
            let name = match name {
                Cow::Borrowed(name) if name.contains('\\') => {
                    return Err(refused(&format!("the name \"{name}\" is no text")));
                }
                Cow::Borrowed(name) => Raw::Original(place(name)),
                Cow::Owned(name) => Raw::Set(name.into()),
            };
            fields.push(Field { name, raw });
        }
        Ok(Self { text, fields, is_changed: has_repeats, form: None })
    }

    /// Makes a body of the gateway's own fields.
    #[must_use]
    pub fn of_fields(fields: &serde_json::Map<String, serde_json::Value>) -> Self {
        let field = |(name, value): (&String, &serde_json::Value)| Field {
            name: Raw::Set(name.as_str().into()),
            raw: Raw::Set(value.to_string().into()),
        };
        let fields = fields.iter().map(field).collect();
        Self { text: ByteString::new(), fields, is_changed: true, form: None }
    }

    /// Makes a form with these fields and a file. The boundary must not occur in any of them.
    #[must_use]
    pub fn of_form(
        fields: &serde_json::Map<String, serde_json::Value>,
        file: FormFile,
        boundary: String,
    ) -> Self {
        Self { form: Some(Arc::new(Form::new(file, boundary))), ..Self::of_fields(fields) }
    }

    /// Length of the received body in bytes; for a form, of its file and its fields.
    #[must_use]
    pub fn len(&self) -> usize {
        let of_form = |form: &Arc<Form>| {
            form.file_bytes() + self.fields.iter().map(|field| self.text_of(field).len()).sum::<usize>()
        };
        self.text.len() + self.form.as_ref().map_or(0, of_form)
    }

    /// Whether the received body is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The `content-type` of [`Self::to_bytes`].
    #[must_use]
    pub fn content_type(&self) -> HeaderValue {
        let of_form = self.form.as_ref().and_then(|form| form.content_type());
        of_form.unwrap_or(HeaderValue::from_static("application/json"))
    }

    /// The JSON text of a field, unless it is absent or null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        let field = self.fields.iter().find(|field| field.name.is(name, &self.text))?;
        Some(self.text_of(field)).filter(|text| *text != "null")
    }

    /// Names of the fields that are present and not null.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let is_there = |field: &&Field| self.text_of(field) != "null";
        self.fields.iter().filter(is_there).map(|field| self.name_of(field))
    }

    fn text_of<'a>(&'a self, field: &'a Field) -> &'a str {
        field.raw.in_text(&self.text)
    }

    fn name_of<'a>(&'a self, field: &'a Field) -> &'a str {
        field.name.in_text(&self.text)
    }

    fn parsed<'a, T: serde::Deserialize<'a>>(
        &'a self,
        name: &str,
        what: &str,
    ) -> Result<Option<T>, ApiError> {
        let Some(text) = self.get(name) else { return Ok(None) };
        serde_json::from_str(text)
            .map(Some)
            .map_err(|_| ApiError::invalid(name, format!("`{name}` must be {what}, not {}.", kind(text))))
    }

    /// Returns a boolean field.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.parsed(name, "true or false")
    }

    /// Returns an integer field that is at least `low`.
    pub fn integer(&self, name: &str, low: i64) -> Result<Option<i64>, ApiError> {
        let number: Option<i64> = self.parsed(name, "an integer")?;
        match number {
            Some(number) if number < low => {
                Err(ApiError::invalid(name, format!("`{name}` is {number}, but must be at least {low}.")))
            }
            other => Ok(other),
        }
    }

    /// Returns a string field.
    pub fn text(&self, name: &str) -> Result<Option<Cow<'_, str>>, ApiError> {
        match self.get(name) {
            // A string without escapes is returned as it is in the body.
            Some(text) if text.starts_with('"') && !text.contains('\\') => {
                Ok(Some(Cow::Borrowed(&text[1..text.len() - 1])))
            }
            _ => Ok(self.parsed::<String>(name, "a string")?.map(Cow::Owned)),
        }
    }

    /// Returns a field as a parsed value.
    pub fn value(&self, name: &str) -> Option<serde_json::Value> {
        self.get(name).and_then(|text| serde_json::from_str(text).ok())
    }

    /// Returns the parsed value of an option; `None` also if its text is longer than an option may be. Cost is bounded.
    #[must_use]
    pub fn option(&self, name: &str) -> Option<serde_json::Value> {
        let text = self.get(name).filter(|text| text.len() <= OPTION_BYTES_MAX)?;
        serde_json::from_str(text).ok()
    }

    /// Whether the object in field `name` has the flag `inner` set.
    #[must_use]
    pub fn inner_flag(&self, name: &str, inner: &str) -> bool {
        self.option(name).is_some_and(|value| value[inner] == true)
    }

    /// Replaces a field by JSON text, or adds it.
    pub fn set(&mut self, name: &str, json: impl Into<ByteString>) {
        self.is_changed = true;
        let raw = Raw::Set(json.into());
        match self.fields.iter_mut().find(|field| field.name.is(name, &self.text)) {
            Some(field) => field.raw = raw,
            None => self.fields.push(Field { name: Raw::Set(name.into()), raw }),
        }
    }

    /// Removes a field; returns whether it was present.
    pub fn remove(&mut self, name: &str) -> bool {
        let before = self.fields.len();
        self.retain(|field| field != name);
        self.fields.len() < before
    }

    /// Removes the fields for which `is_kept` returns false.
    pub fn retain(&mut self, mut is_kept: impl FnMut(&str) -> bool) {
        let before = self.fields.len();
        self.fields.retain(|field| is_kept(field.name.in_text(&self.text)));
        self.is_changed |= self.fields.len() < before;
    }

    /// Returns the body for the engine: the client's own bytes when nothing was changed.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        if let Some(form) = &self.form {
            return form.to_bytes(self.fields.iter().map(|field| (self.name_of(field), self.text_of(field))));
        }
        if !self.is_changed {
            return self.text.as_bytes().clone();
        }
        let field_bytes =
            |field: &Field| field.name.in_text(&self.text).len() + self.text_of(field).len() + 4;
        let mut out = Vec::with_capacity(2 + self.fields.iter().map(field_bytes).sum::<usize>());
        out.push(b'{');
        for (number, field) in self.fields.iter().enumerate() {
            if number > 0 {
                out.push(b',');
            }
            quote(self.name_of(field), &mut out);
            out.push(b':');
            out.extend_from_slice(self.text_of(field).as_bytes());
        }
        out.push(b'}');
        out.into()
    }
}

fn quote(name: &str, out: &mut Vec<u8>) {
    // Writing to memory cannot fail.
    let _infallible = serde_json::to_writer(out, name);
}

/// Kind of a JSON text, in words.
fn kind(text: &str) -> &'static str {
    match text.as_bytes().first() {
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number of another kind",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn body(text: &str) -> RawBody {
        RawBody::parse(Bytes::copy_from_slice(text.as_bytes())).expect("parses")
    }

    #[test]
    fn an_unchanged_body_is_the_same_bytes() {
        let text = r#" {"a" : 1.50, "b":[1, 2],"c":"x"} "#;
        let bytes = Bytes::copy_from_slice(text.as_bytes());
        let same = RawBody::parse(bytes.clone()).expect("parses").to_bytes();
        assert_eq!(same.as_ptr(), bytes.as_ptr());
        assert_eq!(same, bytes);
    }

    #[test]
    fn changes_touch_nothing_else() {
        let mut body =
            body(r#"{"keep": 1.50e2 , "odd\"name": {"deep":[null, "\u00e9"]}, "gone":1, "set": "old"}"#);
        assert!(body.remove("gone") && !body.remove("gone"));
        body.set("set", "true");
        body.set("new", "[1]");
        let bytes = body.to_bytes();
        let text = std::str::from_utf8(&bytes).expect("UTF-8");
        assert_eq!(text, r#"{"keep":1.50e2,"odd\"name":{"deep":[null, "\u00e9"]},"set":true,"new":[1]}"#);
        let value: Value = serde_json::from_str(text).expect("JSON");
        assert_eq!(value["odd\"name"]["deep"], json!([null, "é"]));
        assert_eq!(body.get("set"), Some("true"));
    }

    #[test]
    fn of_a_repeated_name_the_last_counts_alone() {
        let body = body(r#"{"model":"a","model":"b"}"#);
        assert_eq!(body.text("model").expect("a text").as_deref(), Some("b"));
        assert_eq!(&body.to_bytes()[..], br#"{"model":"b"}"#);
    }

    #[test]
    fn a_tree_is_that_of_its_text() {
        // With serde_json's feature `raw_value` this object would be read as the text of its member, unscreened. The feature is off,
        // and no dependency may switch it on.
        let text = r#"{"$serde_json::private::RawValue": "{\"hidden\": 1}"}"#;
        let tree: Value = serde_json::from_str(text).expect("JSON");
        assert_eq!(tree["hidden"], Value::Null);
        assert!(tree["$serde_json::private::RawValue"].is_string());
    }

    #[test]
    fn complaints_name_the_field() {
        let body = body(r#"{"n": "3", "stream": 1, "model": 5, "low": 0, "esc": "a\nb", "no": null}"#);
        assert_eq!(body.integer("n", 1).expect_err("no integer").param.as_deref(), Some("n"));
        assert_eq!(body.integer("low", 1).expect_err("too low").param.as_deref(), Some("low"));
        assert_eq!(body.flag("stream").expect_err("no flag").param.as_deref(), Some("stream"));
        assert!(body.text("model").expect_err("no text").message.contains("a number"));
        assert_eq!(body.text("esc").expect("a text").as_deref(), Some("a\nb"));
        assert_eq!(body.get("no"), None);
        for bad in ["", "[1]", "{\"a\":1", "{\"a\":1} x", "{\"a\":\u{7f}}", "{\"a\" 1}", "\u{feff}{}"] {
            let error = RawBody::parse(Bytes::copy_from_slice(bad.as_bytes())).expect_err(bad);
            assert_eq!(error.status, 400, "{bad}");
        }
        assert!(RawBody::parse(Bytes::from_static(b"{\"a\":\"\xff\"}")).is_err());
        // An invalid surrogate is a valid name to Python's parser, and its value could not be screened.
        assert!(RawBody::parse(Bytes::from_static(br#"{"\ud800":1}"#)).is_err());
        let many: Vec<String> = (0..300).map(|number| format!("\"f{number}\":1")).collect();
        assert!(RawBody::parse(format!("{{{}}}", many.join(",")).into()).is_err());
    }
}
