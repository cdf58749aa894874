//! Forms with a file (RFC 7578), as clients send audio: fields beside the bytes of the file.

use bytes::{Bytes, BytesMut};
use http::HeaderValue;

use crate::Entries;

/// Field of vLLM's forms that requests the usage at the end of a stream.
pub const FORM_USAGE: &str = "stream_include_usage";

/// The file of a form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormFile {
    /// File name given by the client. Engines read the format from its extension.
    pub filename: String,
    /// Content type given by the client.
    pub content_type: Option<String>,
    /// Content of the file.
    pub bytes: Bytes,
}

/// File and boundary of a form. Its fields are those of the body.
#[derive(Debug)]
pub(crate) struct Form {
    file: FormFile,
    boundary: String,
}

impl Form {
    pub(crate) fn new(file: FormFile, boundary: String) -> Self {
        Self { file, boundary }
    }

    pub(crate) fn file_bytes(&self) -> usize {
        self.file.bytes.len()
    }

    pub(crate) fn content_type(&self) -> Option<HeaderValue> {
        HeaderValue::try_from(format!("multipart/form-data; boundary={}", self.boundary)).ok()
    }

    /// Writes the form with these fields, whose values are JSON. A form is always rebuilt, so that an engine's parser cannot
    /// find parts in it that were not checked here.
    pub(crate) fn to_bytes<'a>(&self, fields: impl Iterator<Item = (&'a str, &'a str)>) -> Bytes {
        let mut out = BytesMut::with_capacity(self.file.bytes.len() + 4096);
        for (name, json) in fields {
            if json.starts_with('[') {
                Entries::of(json).for_each(|entry| self.write_field(name, entry.value, &mut out));
            } else {
                self.write_field(name, json, &mut out);
            }
        }
        let FormFile { filename, content_type, bytes } = &self.file;
        let content_type = content_type.as_deref().unwrap_or("application/octet-stream");
        self.begin_part(&mut out);
        out.extend_from_slice(
            format!(
                "name=\"file\"; filename=\"{}\"\r\ncontent-type: {content_type}\r\n\r\n",
                plain(filename)
            )
            .as_bytes(),
        );
        out.extend_from_slice(bytes);
        out.extend_from_slice(format!("\r\n--{}--\r\n", self.boundary).as_bytes());
        out.freeze()
    }

    fn begin_part(&self, out: &mut BytesMut) {
        out.extend_from_slice(format!("--{}\r\ncontent-disposition: form-data; ", self.boundary).as_bytes());
    }

    /// Writes a part with a value: the text of a string, the JSON of anything else.
    fn write_field(&self, name: &str, json: &str, out: &mut BytesMut) {
        let text = serde_json::from_str::<String>(json);
        let text = text.as_deref().unwrap_or(json);
        self.begin_part(out);
        out.extend_from_slice(format!("name=\"{}\"\r\n\r\n{text}\r\n", plain(name)).as_bytes());
    }
}

/// Removes characters of a name that would end it or that a parser would interpret.
fn plain(name: &str) -> String {
    let is_plain = |letter: char| letter.is_alphanumeric() || " ._-()[]".contains(letter);
    name.chars().map(|letter| if is_plain(letter) { letter } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use crate::RawBody;

    use super::*;

    fn form(filename: &str) -> RawBody {
        let file = FormFile {
            filename: filename.to_owned(),
            content_type: Some("audio/wav".to_owned()),
            bytes: Bytes::from_static(b"RIFF\r\n--\0\xff"),
        };
        let fields = serde_json::json!({"model": "alias", "stream": true, "list[]": ["word", "segment"]});
        RawBody::of_form(fields.as_object().expect("an object"), file, "edge".to_owned())
    }

    #[test]
    fn a_form_is_written_with_its_changed_fields() {
        let mut body = form("a.wav");
        body.set("model", "\"real \\\"one\\\"\"");
        let part = |head: &str, text: &str| {
            format!("--edge\r\ncontent-disposition: form-data; {head}\r\n\r\n{text}\r\n")
        };
        let mut expected = [
            part("name=\"model\"", "real \"one\""),
            part("name=\"stream\"", "true"),
            part("name=\"list[]\"", "word"),
            part("name=\"list[]\"", "segment"),
        ]
        .concat()
        .into_bytes();
        expected.extend_from_slice(
            b"--edge\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\ncontent-type: audio/wav\r\n\r\n",
        );
        expected.extend_from_slice(b"RIFF\r\n--\0\xff\r\n--edge--\r\n");
        assert_eq!(String::from_utf8_lossy(&body.to_bytes()), String::from_utf8_lossy(&expected));
        assert_eq!(body.to_bytes(), expected);
        assert_eq!(body.content_type(), "multipart/form-data; boundary=edge");
        let fields = [r#""real \"one\"""#, "true", r#"["word","segment"]"#].concat();
        assert_eq!(body.len(), b"RIFF\r\n--\0\xff".len() + fields.len());
    }

    #[test]
    fn a_files_name_cannot_end_its_header() {
        let bytes = form("x\"\r\n\r\n--edge\\.wav").to_bytes();
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("filename=\"x_____--edge_.wav\"\r\n"), "{text}");
    }
}
