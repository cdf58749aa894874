//! Uploads in parts.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::Response;

use super::objects::{answer, failure, is_create, store, with_e_tag};
use super::serving::Query;
use super::{BUCKET, State, Upload, e_tag, locked};

pub(super) fn create_upload(state: &State, key: &str) -> Response<Bytes> {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let id = format!("upload-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    locked(&state.uploads).insert(id.clone(), Upload { key: key.into(), ..Upload::default() });
    let xml = format!(
        "<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{key}</Key>\
         <UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
    );
    answer(200, xml.into())
}

pub(super) fn put_part(state: &State, id: &str, query: &Query, body: Bytes) -> Response<Bytes> {
    let mut uploads = locked(&state.uploads);
    let Some(upload) = uploads.get_mut(id) else { return failure(404, "NoSuchUpload") };
    let Some(number) = query.get("partNumber").and_then(|number| number.parse().ok()) else {
        return failure(400, "InvalidArgument");
    };
    let e_tag = e_tag(&body);
    upload.parts.insert(number, body);
    with_e_tag(answer(200, Bytes::new()), &e_tag)
}

pub(super) fn complete_upload(
    state: &State,
    id: &str,
    parts: &http::request::Parts,
    body: &[u8],
) -> Response<Bytes> {
    let body = String::from_utf8_lossy(body).replace("&quot;", "\"");
    let mut uploads = locked(&state.uploads);
    let Some(upload) = uploads.get(id) else { return failure(404, "NoSuchUpload") };
    let between = |text: &str, tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        rest.split_once(&format!("</{tag}>")).map(|(value, _)| value.to_owned())
    };
    let mut bytes = Vec::new();
    let listed: Vec<&str> = body.split("<Part>").skip(1).collect();
    for (position, part) in listed.iter().enumerate() {
        let number = between(part, "PartNumber").and_then(|number| number.parse::<u32>().ok());
        let Some(stored) = number.and_then(|number| upload.parts.get(&number)) else {
            return failure(400, "InvalidPart");
        };
        let tag = between(part, "ETag").unwrap_or_default();
        if tag.trim_matches('"') != e_tag(stored).trim_matches('"') {
            return failure(400, "InvalidPart");
        }
        if position + 1 < listed.len() && stored.len() < 5 << 20 {
            return failure(400, "EntityTooSmall");
        }
        bytes.extend_from_slice(stored);
    }
    let key = upload.key.clone();
    match store(state, &key, is_create(parts), bytes.into()) {
        Ok(e_tag) => {
            uploads.remove(id);
            let xml = format!(
                "<CompleteMultipartUploadResult><Location>x</Location><Bucket>{BUCKET}</Bucket>\
                 <Key>{key}</Key><ETag>{e_tag}</ETag></CompleteMultipartUploadResult>"
            );
            answer(200, xml.into())
        }
        Err((status, code)) => failure(status, code),
    }
}
