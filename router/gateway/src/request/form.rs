//! Reads forms with a recording: form fields become fields of a body, so that they are screened and changed
//! like those of JSON.

use std::iter;

use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::{FutureExt, stream};
use memchr::memmem;
use router_openai::{ApiError, FORM_USAGE, FormFile, RawBody};
use serde_json::{Map, Value};

use crate::service::fresh_id;

/// Most parts of a form.
const PARTS_MAX: usize = 64;
/// Bytes of all fields beside the file: a prompt of 224 tokens is the longest text that engines take.
const TEXT_BYTES_MAX: usize = 256 << 10;
/// Longest name of a field, and of a file.
const NAME_BYTES_MAX: usize = 256;

/// Returns the boundary of a request's form, from its `content-type`.
pub(crate) fn boundary_of(headers: &HeaderMap) -> Result<String, ApiError> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    multer::parse_boundary(kind).map_err(|_| {
        let message = "The body must be a form: `content-type: multipart/form-data; boundary=…`.";
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message, "not_a_form")
    })
}

fn malformed(error: impl std::fmt::Display) -> ApiError {
    ApiError::malformed(format!("The body is no form with a file: {error}."))
}

/// Parses a form.
pub(super) fn parse(bytes: Bytes, boundary: String) -> Result<RawBody, ApiError> {
    // All bytes are in memory, so the parser never waits.
    let parsed = read(bytes, boundary).now_or_never();
    parsed.unwrap_or_else(|| Err(ApiError::internal("The form could not be read.")))
}

async fn read(bytes: Bytes, boundary: String) -> Result<RawBody, ApiError> {
    let whole = stream::iter(iter::once(Ok::<_, std::convert::Infallible>(bytes)));
    let mut form = multer::Multipart::new(whole, boundary);
    let (mut fields, mut file, mut parts, mut text_bytes) = (Map::new(), None, 0, 0);
    let edge = format!("kvasir-{}", fresh_id());
    while let Some(part) = form.next_field().await.map_err(malformed)? {
        parts += 1;
        if parts > PARTS_MAX {
            return Err(malformed(format_args!("it has more than {PARTS_MAX} parts")));
        }
        let name = part.name().filter(|name| is_name(name)).map(str::to_owned);
        let name = name.ok_or_else(|| malformed("a part has no name, or one that is not plain"))?;
        let filename = part.file_name().map(str::to_owned);
        let content_type = part.content_type().map(|kind| kind.essence_str().to_owned());
        let bytes = part.bytes().await.map_err(malformed)?;
        if memmem::find(&bytes, edge.as_bytes()).is_some() {
            return Err(malformed("one of its parts contains the boundary with which the gateway writes it"));
        }
        match (&*name, filename) {
            ("file", filename) if file.is_none() => {
                let filename = filename.unwrap_or_else(|| "file".to_owned());
                if filename.len() > NAME_BYTES_MAX {
                    return Err(ApiError::invalid("file", "The file's name is too long."));
                }
                file = Some(FormFile { filename, content_type, bytes });
            }
            ("file", _) => return Err(ApiError::invalid("file", "There are two files: one is taken.")),
            (_, Some(_)) => {
                return Err(ApiError::invalid(&name, format!("`{name}` is a file: only `file` may be one.")));
            }
            (_, None) => {
                text_bytes += bytes.len();
                if text_bytes > TEXT_BYTES_MAX {
                    let message = format!(
                        "The form's fields beside the file have more than {TEXT_BYTES_MAX} bytes with `{name}`."
                    );
                    return Err(ApiError::invalid(&name, message));
                }
                put(&mut fields, name, &bytes)?;
            }
        }
    }
    let file = file.ok_or_else(|| ApiError::invalid("file", "`file` is required."))?;
    Ok(RawBody::of_form(&fields, file, edge))
}

fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.[]".contains(&byte);
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.bytes().all(is_plain)
}

/// Adds a field. Names that end in `[]` make lists; any other occurs once.
fn put(fields: &mut Map<String, Value>, name: String, bytes: &[u8]) -> Result<(), ApiError> {
    let text = std::str::from_utf8(bytes)
        .map_err(|_| ApiError::invalid(&name, format!("`{name}` must be text in UTF-8.")))?;
    if name.ends_with("[]") {
        let list = fields.entry(name).or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(list) = list {
            list.push(text.into());
        }
        return Ok(());
    }
    if fields.contains_key(&name) {
        return Err(ApiError::invalid(&name, format!("`{name}` occurs twice.")));
    }
    // Flags that the gateway reads, in the spellings that pydantic accepts.
    let flag = match text.to_ascii_lowercase().as_str() {
        _ if !matches!(&*name, "stream" | FORM_USAGE) => None,
        "true" | "1" | "t" | "yes" | "y" | "on" => Some(true),
        "false" | "0" | "f" | "no" | "n" | "off" => Some(false),
        _ => None,
    };
    fields.insert(name, flag.map_or_else(|| text.into(), Value::Bool));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: &[u8] = b"RIFF\r\n--other\r\n\0\xff";

    /// A form of parts, each a head and its bytes.
    fn form(parts: &[(&str, &[u8])]) -> Result<RawBody, ApiError> {
        let mut bytes = Vec::new();
        for (head, text) in parts {
            bytes.extend_from_slice(
                format!("--edge\r\nContent-Disposition: form-data; {head}\r\n\r\n").as_bytes(),
            );
            bytes.extend_from_slice(text);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"--edge--\r\n");
        parse(bytes.into(), "edge".to_owned())
    }

    const FILE: (&str, &[u8]) =
        ("name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav; x=\"y\"", SOUND);

    #[test]
    fn fields_beside_the_file_are_bounded_and_counted() {
        let text = "a".repeat(TEXT_BYTES_MAX / 2);
        let small = form(&[FILE, ("name=\"model\"", b"m"), ("name=\"prompt\"", text.as_bytes())]);
        assert!(small.expect("a form").len() > SOUND.len() + text.len());
        let (one, other) = (("name=\"prompt\"", text.as_bytes()), ("name=\"language\"", text.as_bytes()));
        let error = form(&[FILE, one, ("name=\"model\"", b"m"), other]).expect_err("too much");
        assert_eq!(error.param.as_deref(), Some("language"));
    }

    #[test]
    fn the_fields_of_a_form_are_those_of_a_body() {
        let body = form(&[
            ("name=\"model\"", b"whisper"),
            ("name=\"stream\"", b"True"),
            ("name=\"timestamp_granularities[]\"", b"word"),
            FILE,
            ("name=\"timestamp_granularities[]\"", b"segment"),
        ])
        .expect("a form");
        assert_eq!(body.text("model").expect("a text").as_deref(), Some("whisper"));
        assert_eq!(body.flag("stream").expect("a flag"), Some(true));
        assert_eq!(body.get("timestamp_granularities[]"), Some(r#"["word","segment"]"#));
        // Parsing the serialized form gives the same fields.
        let kind = body.content_type();
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, kind)]);
        let again = parse(body.to_bytes(), boundary_of(&headers).expect("a boundary")).expect("a form");
        assert_eq!(again.get("timestamp_granularities[]"), body.get("timestamp_granularities[]"));
        let bytes = again.to_bytes();
        assert!(memmem::find(&bytes, SOUND).is_some());
        assert!(memmem::find(&bytes, b"filename=\"a.wav\"\r\ncontent-type: audio/wav\r\n").is_some());
    }

    #[test]
    fn complaints_name_the_field() {
        let param = |parts: &[(&str, &[u8])]| form(parts).expect_err("refused").param;
        assert_eq!(param(&[("name=\"model\"", b"m")]).as_deref(), Some("file"));
        assert_eq!(param(&[FILE, FILE]).as_deref(), Some("file"));
        assert_eq!(param(&[FILE, ("name=\"other\"; filename=\"b\"", b"")]).as_deref(), Some("other"));
        assert_eq!(
            param(&[FILE, ("name=\"model\"", b"m"), ("name=\"model\"", b"n")]).as_deref(),
            Some("model")
        );
        assert_eq!(param(&[FILE, ("name=\"prompt\"", b"\xff")]).as_deref(), Some("prompt"));
        for odd in ["name=\"a\\\"b\"", "name=\"\"", "nothing", "name=\"a;b\""] {
            assert_eq!(form(&[FILE, (odd, b"")]).expect_err(odd).status, StatusCode::BAD_REQUEST, "{odd}");
        }
        let many: Vec<(&str, &[u8])> = vec![("name=\"list[]\"", b""); PARTS_MAX + 1];
        assert_eq!(form(&many).expect_err("too many").status, StatusCode::BAD_REQUEST);
        for broken in ["", "--edge", "--edge\r\n\r\n", "{\"model\": \"m\"}"] {
            assert!(parse(Bytes::from_static(broken.as_bytes()), "edge".to_owned()).is_err(), "{broken}");
        }
        for kind in ["application/json", "multipart/form-data", "multipart/mixed; boundary=x"] {
            let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, kind.parse().expect("a kind"))]);
            assert_eq!(boundary_of(&headers).expect_err(kind).status, 415);
        }
    }
}
