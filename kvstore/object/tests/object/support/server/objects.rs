//! Objects: storing, reading and listing.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::{Response, StatusCode};

use super::super::time;
use super::serving::Query;
use super::{BUCKET, Object, State, e_tag, locked, now_unix_s};

pub(super) fn answer(status: u16, bytes: Bytes) -> Response<Bytes> {
    let mut response = Response::new(bytes);
    *response.status_mut() = StatusCode::from_u16(status).expect("valid status");
    response
}

pub(super) fn failure(status: u16, code: &str) -> Response<Bytes> {
    answer(status, Bytes::copy_from_slice(code.as_bytes()))
}

/// Status and code.
type Refusal = (u16, &'static str);

pub(super) fn is_create(parts: &http::request::Parts) -> bool {
    parts.headers.get("if-none-match").is_some_and(|value| value == "*")
}

pub(super) fn store(state: &State, key: &str, create: bool, bytes: Bytes) -> Result<String, Refusal> {
    if create && state.knows_no_conditions.load(Ordering::Relaxed) {
        return Err((501, "NotImplemented"));
    }
    let e_tag = e_tag(&bytes);
    let mut objects = locked(&state.objects);
    if create && objects.contains_key(key) {
        return Err((412, "PreconditionFailed"));
    }
    objects.insert(key.to_owned(), Object { bytes, e_tag: e_tag.clone(), changed_unix_s: now_unix_s() });
    Ok(e_tag)
}

pub(super) fn with_e_tag(mut response: Response<Bytes>, e_tag: &str) -> Response<Bytes> {
    response.headers_mut().insert("etag", http::HeaderValue::from_str(e_tag).expect("hex"));
    response
}

pub(super) fn put_object(
    state: &State,
    key: &str,
    parts: &http::request::Parts,
    body: Bytes,
) -> Response<Bytes> {
    match store(state, key, is_create(parts), body) {
        Ok(e_tag) => with_e_tag(answer(200, Bytes::new()), &e_tag),
        Err((status, code)) => failure(status, code),
    }
}

pub(super) fn get_object(state: &State, key: &str, parts: &http::request::Parts) -> Response<Bytes> {
    let Some(object) = locked(&state.objects).get(key).cloned() else { return failure(404, "NoSuchKey") };
    let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    if header("if-match").is_some_and(|wanted| wanted != object.e_tag) {
        return failure(412, "PreconditionFailed");
    }
    let size = object.bytes.len();
    let range = header("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let mut response = match range {
        Some((first, last)) => {
            let Ok(first) = first.parse::<usize>() else { return failure(416, "InvalidRange") };
            let end = last.parse::<usize>().map_or(size, |last| (last + 1).min(size));
            if first >= end {
                return failure(416, "InvalidRange");
            }
            let mut response = answer(206, object.bytes.slice(first..end));
            let content = format!("bytes {first}-{}/{size}", end - 1);
            let content = http::HeaderValue::from_str(&content).expect("digits");
            response.headers_mut().insert("content-range", content);
            response
        }
        None => answer(200, object.bytes.clone()),
    };
    let changed = http::HeaderValue::from_str(&time::http(object.changed_unix_s)).expect("a date");
    response.headers_mut().insert("last-modified", changed);
    with_e_tag(response, &object.e_tag)
}

pub(super) fn list(state: &State, query: &Query) -> Response<Bytes> {
    let prefix = query.get("prefix").unwrap_or_default();
    let delimiter = query.get("delimiter");
    let after = query.get("continuation-token").or_else(|| query.get("start-after")).unwrap_or_default();
    let limit = state.page_objects.load(Ordering::Relaxed);
    let (mut contents, mut folders, mut last, mut more) = (String::new(), BTreeSet::new(), None, false);
    let objects = locked(&state.objects);
    let mut count = 0;
    for (key, object) in objects.iter() {
        let Some(rest) = key.strip_prefix(&prefix) else { continue };
        let folder = delimiter
            .as_ref()
            .and_then(|delimiter| rest.split_once(delimiter.as_str()))
            .map(|(folder, _)| format!("{prefix}{folder}/"));
        let name = folder.clone().unwrap_or_else(|| key.clone());
        if name <= after || folder.as_ref().is_some_and(|folder| folders.contains(folder)) {
            continue;
        }
        if count == limit {
            more = true;
            break;
        }
        count += 1;
        last = Some(name);
        match folder {
            Some(folder) => {
                folders.insert(folder);
            }
            None => contents.push_str(&format!(
                "<Contents><Key>{key}</Key><LastModified>{}</LastModified><ETag>{}</ETag><Size>{}</Size></Contents>",
                time::iso(object.changed_unix_s),
                object.e_tag.replace('"', "&quot;"),
                object.bytes.len()
            )),
        }
    }
    let folders: String = folders
        .iter()
        .map(|folder| format!("<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"))
        .collect();
    let token = last
        .filter(|_| more)
        .map(|last| format!("<NextContinuationToken>{last}</NextContinuationToken>"))
        .unwrap_or_default();
    let xml = format!(
        "<ListBucketResult><Name>{BUCKET}</Name><Prefix>{prefix}</Prefix><KeyCount>{count}</KeyCount>\
         <MaxKeys>{limit}</MaxKeys><IsTruncated>{more}</IsTruncated>{token}{contents}{folders}</ListBucketResult>"
    );
    answer(200, xml.into())
}
