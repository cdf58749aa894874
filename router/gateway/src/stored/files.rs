//! Files that clients upload, and files that batches write (`/v1/files`). A file is stored in parts, so
//! that no file is ever in memory as a whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, ready};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{Path, Request};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt, stream};
use router_database::{Collection, Error, Key, Transaction};
use router_openai::ApiError;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::responses::to_document;
use super::{FILES_MAX, Owner, Paging, Stored, Uploader, answered, not_found, refusal};
use crate::request::boundary_of;
use crate::service::{fresh_id, unix_time};

/// Largest file in bytes; OpenAI's limit for a batch.
const FILE_BYTES_MAX: u64 = 200 << 20;
/// Bytes of a part. A part with its key fits into pages of a power of two.
const PART_BYTES: usize = (1 << 20) - (4 << 10);
/// Bytes of a form that may arrive without any of the file's: its other fields, and the heads of its parts.
const BESIDE_BYTES_MAX: u64 = 2 << 20;
/// Time for an upload, plus one second for every `UPLOAD_BYTES_PER_SECOND` bytes.
const UPLOAD_WITHIN: Duration = Duration::from_secs(60);
const UPLOAD_BYTES_PER_SECOND: u64 = 256 << 10;
/// Longest name of a file and of its purpose.
const NAME_BYTES_MAX: usize = 256;
/// Purposes of files, as OpenAI's API has them.
const PURPOSES: [&str; 6] = ["assistants", "batch", "fine-tune", "vision", "user_data", "evals"];

/// A file's description, without its bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FileRecord {
    pub(crate) id: String,
    pub(crate) bytes: u64,
    pub(crate) created_at: u64,
    pub(crate) expires_at: u64,
    pub(crate) filename: String,
    pub(crate) purpose: String,
    pub(crate) parts: u32,
}

impl FileRecord {
    fn shown(&self) -> Value {
        json!({
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at,
            "expires_at": self.expires_at, "filename": self.filename, "purpose": self.purpose, "status": "processed",
        })
    }

    pub(crate) fn key(tenant: &Arc<str>, id: &str) -> Key {
        Key::new(tenant, Collection::File, id)
    }

    /// Returns the key of a part. All ids have the same length, so that no id is a prefix of another.
    pub(crate) fn part_key(tenant: &Arc<str>, id: &str, part: u32) -> Key {
        Key::new(tenant, Collection::FilePart, format!("{id}/{part:08x}"))
    }

    pub(crate) async fn find(stored: &Stored, tenant: &Arc<str>, id: &str) -> Result<Option<Self>, Error> {
        stored.load(Self::key(tenant, id)).await
    }
}

/// Pauses between attempts to delete the rest of a broken upload while the database is busy: for about two
/// minutes.
const CLEAN_UP_PAUSE: Duration = Duration::from_millis(100);
const CLEAN_UP_PAUSE_MAX: Duration = Duration::from_secs(100);

/// A file that is being uploaded. Dropping an incomplete upload deletes its parts.
struct Upload {
    stored: Arc<Stored>,
    tenant: Arc<str>,
    id: String,
    expires: u64,
    buffer: Vec<u8>,
    bytes: u64,
    parts: u32,
    started: Instant,
    /// Whether a write has been started, so that there may be something to delete.
    has_written: bool,
    is_finished: bool,
}

impl Upload {
    fn new(owner: &Owner) -> Self {
        Self {
            stored: Arc::clone(&owner.stored),
            tenant: Arc::clone(&owner.tenant),
            id: format!("file-{}", fresh_id()),
            expires: owner.stored.database.expires(),
            buffer: Vec::new(),
            bytes: 0,
            parts: 0,
            started: Instant::now(),
            has_written: false,
            is_finished: false,
        }
    }

    /// Returns the time by which the next piece must arrive.
    fn due(&self) -> tokio::time::Instant {
        let pace = Duration::from_secs(self.bytes / UPLOAD_BYTES_PER_SECOND);
        (self.started + UPLOAD_WITHIN + pace).into()
    }

    async fn push(&mut self, bytes: &[u8]) -> Result<(), ApiError> {
        self.bytes += bytes.len() as u64;
        if self.bytes > FILE_BYTES_MAX {
            let message = format!("The file has more than {FILE_BYTES_MAX} bytes.");
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message, "body_too_large"));
        }
        self.buffer.extend_from_slice(bytes);
        while self.buffer.len() >= PART_BYTES {
            let rest = self.buffer.split_off(PART_BYTES);
            let part = std::mem::replace(&mut self.buffer, rest);
            self.write(part).await?;
        }
        Ok(())
    }

    async fn write(&mut self, part: Vec<u8>) -> Result<(), ApiError> {
        let (key, expires) = (FileRecord::part_key(&self.tenant, &self.id, self.parts), self.expires);
        self.parts += 1;
        self.has_written = true;
        let write = move |transaction: &mut Transaction<'_>| transaction.put(key, expires, part);
        self.stored.database.write(write).await.map_err(|error| refusal(&error))
    }

    async fn finish(mut self, filename: String, purpose: String) -> Result<FileRecord, ApiError> {
        if !self.buffer.is_empty() {
            let part = std::mem::take(&mut self.buffer);
            self.write(part).await?;
        }
        let record = FileRecord {
            id: self.id.clone(),
            bytes: self.bytes,
            created_at: unix_time(),
            expires_at: self.expires,
            filename,
            purpose,
            parts: self.parts,
        };
        let (key, expires, document) =
            (FileRecord::key(&self.tenant, &self.id), self.expires, to_document(&record));
        self.has_written = true;
        let write = move |transaction: &mut Transaction<'_>| transaction.put(key, expires, document);
        self.stored.database.write(write).await.map_err(|error| refusal(&error))?;
        self.is_finished = true;
        Ok(record)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.is_finished || !self.has_written {
            return;
        }
        let (stored, tenant, prefix) =
            (Arc::clone(&self.stored), Arc::clone(&self.tenant), format!("{}/", self.id));
        let record = FileRecord::key(&tenant, &self.id);
        tokio::spawn(async move {
            let mut pause = CLEAN_UP_PAUSE;
            loop {
                let (tenant, record, prefix) = (Arc::clone(&tenant), record.clone(), prefix.clone());
                let delete = move |transaction: &mut Transaction<'_>| {
                    // The record too: its write may have been in progress when the client disconnected.
                    transaction.delete(record)?;
                    transaction.delete_all(&tenant, Collection::FilePart, &prefix)
                };
                match stored.database.write(delete).await {
                    Ok(()) => return,
                    Err(Error::Busy) if pause < CLEAN_UP_PAUSE_MAX => tokio::time::sleep(pause).await,
                    Err(error) => {
                        tracing::warn!(%error, "the parts of a broken upload stay until their time is over");
                        return;
                    }
                }
                pause *= 2;
            }
        });
    }
}

fn bad_form(error: impl std::fmt::Display) -> ApiError {
    ApiError::malformed(format!("The body is no form with a file: {error}."))
}

fn slow() -> ApiError {
    ApiError::new(StatusCode::REQUEST_TIMEOUT, "The file did not arrive in time.", "body_too_slow")
}

/// Returns the frames of a body, one at a time: the form parser takes the next frame once it has parsed the
/// one before. The parser keeps bytes that it cannot parse yet, so the stream ends with an error when too
/// many bytes arrive that are not the file's.
fn frames(body: Body, taken: Arc<AtomicU64>) -> impl Stream<Item = Result<Bytes, std::io::Error>> + Send {
    let (mut data, mut got, mut rests) = (body.into_data_stream(), 0_u64, false);
    stream::poll_fn(move |context| {
        rests = !rests;
        if !rests {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let Some(frame) = ready!(data.poll_next_unpin(context)) else { return Poll::Ready(None) };
        let frame = frame.map_err(std::io::Error::other);
        got += frame.as_ref().map_or(0, |frame| frame.len() as u64);
        let is_too_much = got.saturating_sub(taken.load(Ordering::Relaxed)) > BESIDE_BYTES_MAX;
        Poll::Ready(Some(match is_too_much {
            true => Err(std::io::Error::other("the fields beside the file are too large")),
            false => frame,
        }))
    })
}

async fn upload(owner: &Owner, request: Request) -> Result<FileRecord, ApiError> {
    owner.stored.has_room(&owner.tenant, Collection::File, FILES_MAX).await?;
    let boundary = boundary_of(request.headers())?;
    let taken = Arc::new(AtomicU64::new(0));
    let mut form = multer::Multipart::new(frames(request.into_body(), Arc::clone(&taken)), boundary);
    let mut upload = Upload::new(owner);
    let (mut filename, mut purpose) = (None, None);
    loop {
        let field = tokio::time::timeout_at(upload.due(), form.next_field()).await.map_err(|_| slow())?;
        let Some(mut field) = field.map_err(bad_form)? else { break };
        let name = field.name().unwrap_or_default().to_owned();
        let is_file = name == "file";
        if is_file && filename.is_some() {
            return Err(ApiError::invalid("file", "There are two files: one is taken."));
        }
        if is_file {
            filename = Some(field.file_name().unwrap_or("file").to_owned());
        }
        let mut text = Vec::new();
        loop {
            let chunk = tokio::time::timeout_at(upload.due(), field.chunk()).await.map_err(|_| slow())?;
            let Some(chunk) = chunk.map_err(bad_form)? else { break };
            if is_file {
                taken.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                upload.push(&chunk).await?;
            } else if text.len() + chunk.len() <= NAME_BYTES_MAX {
                text.extend_from_slice(&chunk);
            } else {
                return Err(ApiError::invalid(&name, format!("`{name}` is too long.")));
            }
        }
        if name == "purpose" {
            purpose = String::from_utf8(text).ok();
        }
    }
    let filename = filename.ok_or_else(|| ApiError::invalid("file", "`file` is required."))?;
    if filename.len() > NAME_BYTES_MAX || filename.chars().any(char::is_control) {
        return Err(ApiError::invalid("file", "The file's name is too long, or has control characters."));
    }
    let purpose = purpose.filter(|purpose| PURPOSES.contains(&purpose.as_str()));
    let purpose = purpose
        .ok_or_else(|| ApiError::invalid("purpose", format!("`purpose` must be one of {PURPOSES:?}.")))?;
    upload.finish(filename, purpose).await
}

/// `POST /v1/files`, a form with `purpose` and `file`.
pub(crate) async fn create(Uploader(owner): Uploader, request: Request) -> Response {
    let uploaded = upload(&owner, request).await.map(|record| record.shown());
    answered(owner, uploaded)
}

async fn load(owner: &Owner, id: &str) -> Result<FileRecord, ApiError> {
    let found = FileRecord::find(&owner.stored, &owner.tenant, id).await.map_err(|error| refusal(&error))?;
    found.ok_or_else(|| not_found("File", id))
}

/// `GET /v1/files`.
pub(crate) async fn list(owner: Owner, Paging(query): Paging) -> Response {
    let records = owner.stored.all::<FileRecord>(&owner.tenant, Collection::File);
    let listed = records.await.map_err(|error| refusal(&error)).and_then(|mut records| {
        records.retain(|record| query.purpose.as_ref().is_none_or(|purpose| *purpose == record.purpose));
        records.sort_by_key(|record| record.created_at);
        query.page_of(records, |record| &record.id, |record| record.shown())
    });
    answered(owner, listed)
}

/// `GET /v1/files/{id}`.
pub(crate) async fn retrieve(owner: Owner, Path(id): Path<String>) -> Response {
    let found = load(&owner, &id).await.map(|record| record.shown());
    answered(owner, found)
}

/// `GET /v1/files/{id}/content`.
pub(crate) async fn content(owner: Owner, Path(id): Path<String>) -> Response {
    let record = match load(&owner, &id).await {
        Ok(record) => record,
        Err(error) => return error.into_response(),
    };
    let bytes = record.bytes;
    // The owner's permit is held until the last part is read.
    let parts = stream::unfold(0, move |part| {
        let (stored, key) =
            (Arc::clone(&owner.stored), FileRecord::part_key(&owner.tenant, &record.id, part));
        let is_over = part == record.parts;
        async move {
            if is_over {
                return None;
            }
            let read =
                stored.database.get(key).await.and_then(|bytes| {
                    bytes.ok_or_else(|| Error::Storage("a part of a file is gone".to_owned()))
                });
            Some((read, part + 1))
        }
    });
    let head = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, bytes.to_string()),
    ];
    (head, Body::from_stream(parts)).into_response()
}

/// `DELETE /v1/files/{id}`.
pub(crate) async fn delete(owner: Owner, Path(id): Path<String>) -> Response {
    let (tenant, name) = (Arc::clone(&owner.tenant), id.clone());
    let deleted = owner.stored.database.write(move |transaction| {
        let was_there = transaction.delete(FileRecord::key(&tenant, &name))?;
        if was_there {
            transaction.delete_all(&tenant, Collection::FilePart, &format!("{name}/"))?;
        }
        Ok(was_there)
    });
    let deleted = match deleted.await {
        Ok(true) => Ok(json!({ "id": id, "object": "file", "deleted": true })),
        Ok(false) => Err(not_found("File", &id)),
        Err(error) => Err(refusal(&error)),
    };
    answered(owner, deleted)
}

/// The lines of a file, in order.
pub(crate) struct Lines {
    stored: Arc<Stored>,
    tenant: Arc<str>,
    record: FileRecord,
    next_part: u32,
    buffer: Vec<u8>,
    at: usize,
    line_bytes_max: usize,
}

/// Reason why a file's next line cannot be read.
#[derive(Debug)]
pub(crate) enum LineError {
    TooLong,
    /// A part of the file no longer exists.
    Gone,
    Database(Error),
}

impl Lines {
    pub(crate) fn new(
        stored: &Arc<Stored>,
        tenant: &Arc<str>,
        record: FileRecord,
        line_bytes_max: usize,
    ) -> Self {
        let (stored, tenant) = (Arc::clone(stored), Arc::clone(tenant));
        Self { stored, tenant, record, next_part: 0, buffer: Vec::new(), at: 0, line_bytes_max }
    }

    /// Returns the next line that is not blank, without its line end.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<u8>>, LineError> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.buffer[self.at..]) {
                if end > self.line_bytes_max {
                    return Err(LineError::TooLong);
                }
                let line = self.buffer[self.at..self.at + end].trim_ascii().to_vec();
                self.at += end + 1;
                if !line.is_empty() {
                    return Ok(Some(line));
                }
                continue;
            }
            self.buffer.drain(..std::mem::take(&mut self.at));
            if self.buffer.len() > self.line_bytes_max {
                return Err(LineError::TooLong);
            }
            if self.next_part == self.record.parts {
                let last = std::mem::take(&mut self.buffer).trim_ascii().to_vec();
                return Ok((!last.is_empty()).then_some(last));
            }
            let key = FileRecord::part_key(&self.tenant, &self.record.id, self.next_part);
            let part = self.stored.database.get(key).await.map_err(LineError::Database)?;
            self.buffer.extend_from_slice(&part.ok_or(LineError::Gone)?);
            self.next_part += 1;
        }
    }
}
