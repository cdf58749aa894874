//! Runs batches. Answers are written in the order of their lines, together with the batch's progress, so
//! that a gateway that was killed repeats only requests whose answers were not written.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{StatusCode, header};
use futures_util::{StreamExt, stream};
use router_access::Grant;
use router_database::{Collection, Error, Transaction};
use router_openai::{Entries, Entry, RawBody, Surface};
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use super::batches::{Batch, BatchStatus, Written, change, surface_of};
use super::files::{FileRecord, LineError, Lines};
use super::responses::{from_document, to_document};
use super::{Stored, TenantPermit};
use crate::request::serve;
use crate::service::{Gateway, fresh_id, unix_time};

/// Largest number of requests of a batch: OpenAI's limit.
const REQUESTS_MAX: u64 = 50_000;
/// Number of a file's errors that are reported.
const ERRORS_TOLD: usize = 20;
/// Largest request in bytes; one per permit may wait in memory.
const LINE_BYTES_MAX: usize = 1 << 20;
/// Interval at which answers are written. An answer behind an unfinished earlier one waits for that one.
const WRITTEN_EVERY: Duration = Duration::from_secs(5);
/// Largest answer of a request.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Number and bytes of answers at which they are written.
const TOGETHER_MAX: usize = 64;
const TOGETHER_BYTES: usize = 1 << 20;
/// First and longest pause before a retry, of a request that got no permit or of a database that was busy.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Longest client's id of a request, in bytes.
const CUSTOM_ID_MAX: usize = 512;
/// Characters of the client's id that are shown in an error.
const CUSTOM_ID_SHOWN: usize = 64;

/// Tenant and id of a batch.
pub(crate) type BatchName = (Arc<str>, String);

/// Grant of a batch's request, in place of a credential. Only the gateway itself adds it to a request.
#[derive(Debug, Clone)]
pub(crate) struct DelegatedGrant(pub(crate) Arc<Grant>);

/// Runs the unfinished batches of the database, and those that begin, until the gateway is dropped.
pub(crate) async fn run(gateway: Weak<Gateway>, mut begun: mpsc::UnboundedReceiver<BatchName>) {
    let Some(stored) = gateway.upgrade().and_then(|gateway| gateway.stored.clone()) else { return };
    let found = stored.database.read(|snapshot| {
        let mut names = Vec::<BatchName>::new();
        snapshot.walk_all(Collection::Batch, |tenant, id, document| {
            if from_document::<Batch>(document).is_ok_and(|batch| batch.status.is_active()) {
                names.push((tenant.into(), id.to_owned()));
            }
        })?;
        Ok(names)
    });
    match found.await {
        Ok(names) => names.into_iter().for_each(|name| start(&gateway, &stored, name)),
        Err(error) => tracing::error!(%error, "unfinished batches of the last run cannot be resumed"),
    }
    while let Some(name) = begun.recv().await {
        start(&gateway, &stored, name);
    }
}

fn start(gateway: &Weak<Gateway>, stored: &Arc<Stored>, name: BatchName) {
    let Some(gateway) = gateway.upgrade() else { return };
    let Some(stopped) = stored.running(&name) else { return };
    let stored = Arc::clone(stored);
    tokio::spawn(async move {
        let run = BatchRun {
            gateway,
            stored: Arc::clone(&stored),
            tenant: Arc::clone(&name.0),
            id: name.1.clone(),
            stopped,
        };
        let _running = Running { stored, name };
        run.run_to_end().await;
    });
}

/// Marks a batch as running. Once this is dropped, also by a panic, the batch may be run again.
struct Running {
    stored: Arc<Stored>,
    name: BatchName,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stored.ended(&self.name);
    }
}

/// A batch that is being run.
struct BatchRun {
    gateway: Arc<Gateway>,
    stored: Arc<Stored>,
    tenant: Arc<str>,
    id: String,
    /// True once the client has cancelled the batch.
    stopped: watch::Receiver<bool>,
}

/// End of a batch.
enum End {
    At(BatchStatus),
    Failed(&'static str),
}

const NO_FILE: End = End::Failed("The input file is gone.");
const NO_ROOM: End = End::Failed("There is no room for its answers.");

/// The answer to one line.
struct Answered {
    is_good: bool,
    line: Vec<u8>,
    /// Held until the answer is written: it bounds the answers that wait for an earlier one.
    _permit: TenantPermit,
}

/// Answers that are not written yet.
#[derive(Default)]
struct Pending {
    good: Vec<u8>,
    bad: Vec<u8>,
    completed: u64,
    failed: u64,
}

impl Pending {
    fn push(&mut self, answered: Answered) {
        let (file, count) = match answered.is_good {
            true => (&mut self.good, &mut self.completed),
            false => (&mut self.bad, &mut self.failed),
        };
        file.extend_from_slice(&answered.line);
        file.push(b'\n');
        *count += 1;
    }

    fn is_large(&self) -> bool {
        self.completed + self.failed >= TOGETHER_MAX as u64
            || self.good.len() + self.bad.len() >= TOGETHER_BYTES
    }
}

impl BatchRun {
    /// Runs the batch to its end. A busy database is retried; an answer that cannot be written ends the
    /// batch.
    async fn run_to_end(&self) {
        // A batch that is cancelled or expired needs no permit: it only ends.
        let _permit = tokio::select! {
            biased;
            () = self.stopped_or_expired() => None,
            permit = self.stored.runs.take(&self.tenant) => match permit {
                Some(permit) => Some(permit),
                None => return,
            },
        };
        let mut pause = PAUSE;
        loop {
            let error = match self.run().await {
                Ok(()) => return,
                Err(error) => error,
            };
            tracing::warn!(%error, batch = self.id, "a batch is interrupted");
            let ended = match error {
                Error::TenantFull(_) | Error::Full => self.finish(NO_ROOM).await,
                error => Err(error),
            };
            match ended {
                Ok(()) => return,
                Err(error) => tracing::warn!(%error, batch = self.id, "it is tried again"),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Waits until the batch is cancelled, expires or is deleted.
    async fn stopped_or_expired(&self) {
        let expires_at = loop {
            match self.batch().await {
                Ok(Some(batch)) => break batch.expires_at,
                Ok(None) => return,
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        };
        let mut stopped = self.stopped.clone();
        let left = Duration::from_secs(expires_at.saturating_sub(unix_time()));
        tokio::select! {
            () = async { drop(stopped.wait_for(|stopped| *stopped).await) } => {}
            () = tokio::time::sleep(left) => {}
        }
    }

    async fn run(&self) -> Result<(), Error> {
        let Some(batch) = self.batch().await? else { return Ok(()) };
        let batch = match batch.status {
            BatchStatus::Validating => match self.validated(&batch).await? {
                Some(batch) => batch,
                None => return Ok(()),
            },
            _ => batch,
        };
        if !batch.status.is_active() {
            return Ok(());
        }
        let end = match batch.status {
            BatchStatus::Cancelling => End::At(BatchStatus::Cancelled),
            _ => self.asked(&batch).await?,
        };
        self.finish(end).await
    }

    async fn batch(&self) -> Result<Option<Batch>, Error> {
        self.stored.load(Batch::key(&self.tenant, &self.id)).await
    }

    async fn change(&self, how: impl FnOnce(&mut Batch) + Send + 'static) -> Result<Option<Batch>, Error> {
        let key = Batch::key(&self.tenant, &self.id);
        self.stored.database.write(move |transaction| change(transaction, key, how)).await
    }

    async fn lines(&self, batch: &Batch) -> Result<Option<Lines>, Error> {
        let record = FileRecord::find(&self.stored, &self.tenant, &batch.input_file_id).await?;
        let line_bytes_max = LINE_BYTES_MAX.min(self.gateway.config.body_bytes_max);
        Ok(record.map(|record| Lines::new(&self.stored, &self.tenant, record, line_bytes_max)))
    }

    /// Reads the whole file once and returns the batch with its new status: failed if the file is invalid.
    /// `None`: the batch was deleted.
    async fn validated(&self, batch: &Batch) -> Result<Option<Batch>, Error> {
        let mut errors = Vec::new();
        let mut total = 0;
        match self.lines(batch).await? {
            None => errors.push(json!({ "code": "no_file", "message": "The input file is gone.", "line": null, "param": "input_file_id" })),
            Some(mut lines) => {
                let mut names = HashSet::new();
                while errors.len() < ERRORS_TOLD {
                    let line = match lines.next().await {
                        Ok(Some(line)) => line,
                        Ok(None) => break,
                        Err(LineError::Database(error)) => return Err(error),
                        Err(LineError::Gone) => {
                            errors.push(mistake(total + 1, "no_file", "The input file is gone."));
                            break;
                        }
                        Err(LineError::TooLong) => {
                            errors.push(mistake(total + 1, "line_too_long", "The line is larger than a request may be."));
                            break;
                        }
                    };
                    total += 1;
                    let problem = match BatchLine::parse(line.into(), &batch.endpoint) {
                        Err(problem) => Some(problem),
                        Ok(line) if !names.insert(line.custom_id.clone()) => {
                            let shown: String = line.custom_id.chars().take(CUSTOM_ID_SHOWN).collect();
                            Some(("duplicate_custom_id", format!("Another line has the custom_id {shown:?}.")))
                        }
                        Ok(_) if total > REQUESTS_MAX => {
                            Some(("too_many_requests", format!("There are more than {REQUESTS_MAX} requests.")))
                        }
                        Ok(_) => None,
                    };
                    if let Some((code, message)) = problem {
                        errors.push(mistake(total, code, &message));
                    }
                }
                if total == 0 && errors.is_empty() {
                    errors.push(mistake(0, "empty_file", "The input file has no requests."));
                }
            }
        }
        let changed = self.change(move |batch| {
            if batch.status != BatchStatus::Validating {
                return;
            }
            batch.total = total;
            match errors.is_empty() {
                true => batch.enter(BatchStatus::InProgress),
                false => batch.fail(errors),
            }
        });
        changed.await
    }

    /// Runs the requests that are not answered yet; returns the end of the batch.
    async fn asked(&self, batch: &Batch) -> Result<End, Error> {
        let Some(mut lines) = self.lines(batch).await? else { return Ok(NO_FILE) };
        for _ in 0..batch.done() {
            match lines.next().await {
                Ok(_) => {}
                Err(LineError::Database(error)) => return Err(error),
                Err(LineError::TooLong | LineError::Gone) => return Ok(NO_FILE),
            }
        }
        // A line is read when there is a permit for its request.
        let (stored, tenant) = (Arc::clone(&self.stored), Arc::clone(&self.tenant));
        let lines = stream::unfold(Some((lines, stored, tenant)), |state| async move {
            let (mut lines, stored, tenant) = state?;
            let permit = stored.lines.take(&tenant).await?;
            match lines.next().await {
                Ok(Some(line)) => Some((Ok((line, permit)), Some((lines, stored, tenant)))),
                Ok(None) => None,
                // Reading stops after an error.
                Err(error) => Some((Err(error), None)),
            }
        });
        let answers = lines.map(|line| async {
            match line {
                Ok((line, permit)) => self.answer(batch, line.into(), permit).await.map(Ok),
                Err(error) => Some(Err(error)),
            }
        });
        let mut answers = std::pin::pin!(answers.buffered(self.stored.batch_lines_max));
        let mut stopped = self.stopped.clone();
        let left = Duration::from_secs(batch.expires_at.saturating_sub(unix_time()));
        let mut over = std::pin::pin!(tokio::time::sleep(left));
        let mut pending = Pending::default();
        let mut often = tokio::time::interval(WRITTEN_EVERY);
        let end = loop {
            let next = tokio::select! {
                biased;
                () = async { drop(stopped.wait_for(|stopped| *stopped).await) } => break End::At(BatchStatus::Cancelled),
                () = &mut over => break End::At(BatchStatus::Expired),
                _ = often.tick() => {
                    self.write(std::mem::take(&mut pending)).await?;
                    continue;
                }
                next = answers.next() => next,
            };
            match next {
                None => break End::At(BatchStatus::Completed),
                Some(None) => break End::Failed("The key that began the batch is not valid any more."),
                Some(Some(Err(LineError::TooLong | LineError::Gone))) => break NO_FILE,
                Some(Some(Err(LineError::Database(error)))) => return Err(error),
                Some(Some(Ok(answered))) => pending.push(answered),
            }
            if pending.is_large() {
                self.write(std::mem::take(&mut pending)).await?;
            }
        };
        self.write(pending).await?;
        Ok(end)
    }

    /// Writes answers together with the batch's progress. A busy database is retried, so that no answered
    /// request is run twice.
    async fn write(&self, pending: Pending) -> Result<(), Error> {
        if pending.completed + pending.failed == 0 {
            return Ok(());
        }
        let (pending, mut pause) = (Arc::new(pending), PAUSE);
        loop {
            match self.try_write(Arc::clone(&pending)).await {
                Err(Error::Busy) => tokio::time::sleep(pause).await,
                written => return written,
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    async fn try_write(&self, pending: Arc<Pending>) -> Result<(), Error> {
        let (key, tenant) = (Batch::key(&self.tenant, &self.id), Arc::clone(&self.tenant));
        let written = self.stored.database.write(move |transaction| {
            let Some(batch) = transaction.get(&key)? else { return Ok(()) };
            let batch: Batch = from_document(&batch)?;
            let expires = batch.kept_until;
            let output =
                append(transaction, &tenant, &batch.output_file_id, batch.output, expires, &pending.good)?;
            let error =
                append(transaction, &tenant, &batch.error_file_id, batch.error, expires, &pending.bad)?;
            change(transaction, key, |batch| {
                (batch.output, batch.error) = (output, error);
                batch.completed += pending.completed;
                batch.failed += pending.failed;
            })?;
            Ok(())
        });
        written.await
    }

    /// Creates the records of the batch's files, and ends the batch.
    async fn finish(&self, end: End) -> Result<(), Error> {
        let (key, tenant) = (Batch::key(&self.tenant, &self.id), Arc::clone(&self.tenant));
        let finished = self.stored.database.write(move |transaction| {
            let changed = change(transaction, key, |batch| {
                batch.enter(BatchStatus::Finalizing);
                match end {
                    End::At(status) => batch.enter(status),
                    End::Failed(why) => batch.fail(vec![mistake(0, "failed", why)]),
                }
            });
            let Some(batch) = changed? else { return Ok(()) };
            let expires = batch.kept_until;
            for (id, file, name) in [
                (&batch.output_file_id, batch.output, "output"),
                (&batch.error_file_id, batch.error, "error"),
            ] {
                if file.bytes == 0 {
                    continue;
                }
                let record = FileRecord {
                    id: id.clone(),
                    bytes: file.bytes,
                    created_at: unix_time(),
                    expires_at: expires,
                    filename: format!("{}_{name}.jsonl", batch.id),
                    purpose: "batch_output".to_owned(),
                    parts: file.parts,
                };
                // A tenant over its quota keeps its answers: their bytes were counted.
                transaction.put_beyond_quota(FileRecord::key(&tenant, id), expires, to_document(&record))?;
            }
            Ok(())
        });
        finished.await
    }

    /// Runs the request of one line; `None` when the batch's key no longer exists.
    async fn answer(&self, batch: &Batch, line: Bytes, permit: TenantPermit) -> Option<Answered> {
        let line = match BatchLine::parse(line, &batch.endpoint) {
            Ok(line) => line,
            Err((code, message)) => {
                let error = json!({ "custom_id": null, "response": null, "error": { "code": code, "message": message } });
                return Some(Answered { is_good: false, line: to_document(&error), _permit: permit });
            }
        };
        let surface = surface_of(&batch.endpoint)?;
        let mut pause = PAUSE;
        loop {
            let grant = batch.grant(&self.gateway, &self.tenant)?;
            let (status, after, request_id, body) = self.ask(surface, &line.body, grant).await;
            if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
                // Retries until the batch expires, when this future is dropped.
                tokio::time::sleep(after.unwrap_or(pause).min(PAUSE_MAX)).await;
                pause = (pause * 2).min(PAUSE_MAX);
                continue;
            }
            let mut answer = json!({
                "id": format!("batch_req_{}", fresh_id()), "custom_id": line.custom_id, "error": null,
                "response": { "status_code": status.as_u16(), "request_id": request_id, "body": null },
            });
            let (is_good, line) = match body {
                Ok(body) => (status.is_success(), with_body(&answer, &body)),
                Err(message) => {
                    answer["error"] = json!({ "code": "no_answer", "message": message });
                    (false, to_document(&answer))
                }
            };
            return Some(Answered { is_good, line, _permit: permit });
        }
    }

    async fn ask(
        &self,
        surface: Surface,
        body: &Bytes,
        grant: Arc<Grant>,
    ) -> (StatusCode, Option<Duration>, String, Result<Bytes, &'static str>) {
        let mut request = Request::new(Body::from(body.clone()));
        request.extensions_mut().insert(DelegatedGrant(grant));
        let (head, body) = serve(Arc::clone(&self.gateway), request, surface).await.into_parts();
        let header = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let after = header(header::RETRY_AFTER.as_str()).and_then(|after| after.parse().ok());
        let request_id = header("x-request-id").unwrap_or_default().to_owned();
        let status = head.status;
        let body = to_bytes(body, ANSWER_BYTES_MAX).await;
        let body = body.map_err(|_| "The answer is too large for a batch, or broke off.");
        (status, after.map(Duration::from_secs), request_id, body)
    }
}

/// Returns an answer's line, with the body inserted unparsed if it is JSON: a parsed tree would be large.
fn with_body(answer: &Value, body: &[u8]) -> Vec<u8> {
    const PLACE: &str = "\"body\":null";
    let text = std::str::from_utf8(body).ok();
    let json = text.filter(|text| serde_json::from_str::<IgnoredAny>(text).is_ok());
    // The line must have no further line ends; JSON strings have none.
    let in_place = match json {
        Some(json) => json.replace(['\n', '\r'], " "),
        None => Value::from(String::from_utf8_lossy(body)).to_string(),
    };
    // The last match is the response's body: the client's own id is before it, or has its quotes escaped.
    let answer = answer.to_string();
    let Some(at) = answer.rfind(PLACE) else { return answer.into_bytes() };
    let (before, after) = (&answer[..at], &answer[at + PLACE.len()..]);
    [before, "\"body\":", &in_place, after].concat().into_bytes()
}

fn mistake(line: u64, code: &str, message: &str) -> Value {
    json!({ "code": code, "message": message, "line": line, "param": null })
}

/// Appends to a file.
fn append(
    transaction: &mut Transaction<'_>,
    tenant: &Arc<str>,
    id: &str,
    mut file: Written,
    expires: u64,
    bytes: &[u8],
) -> Result<Written, Error> {
    if !bytes.is_empty() {
        file.bytes += bytes.len() as u64;
        transaction.put(FileRecord::part_key(tenant, id, file.parts), expires, bytes.to_vec())?;
        file.parts += 1;
    }
    Ok(file)
}

/// A request of a batch.
#[derive(Debug)]
struct BatchLine {
    custom_id: String,
    body: Bytes,
}

impl BatchLine {
    /// Parses a line; an error is a code and a message. The body stays as the client wrote it.
    fn parse(line: Bytes, endpoint: &str) -> Result<Self, (&'static str, String)> {
        let fields = RawBody::parse(line.clone())
            .map_err(|error| ("invalid_json_line", error.message.replacen("The body", "The line", 1)))?;
        let text = |name: &str| fields.text(name).ok().flatten();
        let custom_id = text("custom_id").filter(|id| !id.is_empty() && id.len() <= CUSTOM_ID_MAX);
        let custom_id = custom_id.ok_or_else(|| {
            ("missing_custom_id", format!("`custom_id` must be a text of up to {CUSTOM_ID_MAX} bytes."))
        })?;
        if text("method").as_deref() != Some("POST") {
            return Err(("invalid_method", "`method` must be `POST`.".to_owned()));
        }
        if text("url").as_deref() != Some(endpoint) {
            return Err(("mismatched_endpoint", format!("`url` must be the batch's endpoint, {endpoint}.")));
        }
        let body = fields.get("body").filter(|body| body.starts_with('{'));
        let body = body.ok_or_else(|| ("missing_body", "`body` must be an object.".to_owned()))?;
        let is_stream = |entry: &Entry<'_>| entry.name.as_deref() == Some("stream");
        if Entries::of(body).filter(is_stream).last().is_some_and(|entry| entry.value == "true") {
            return Err((
                "invalid_request",
                "Answers of a batch are not streamed: leave `stream` out.".to_owned(),
            ));
        }
        Ok(Self { custom_id: custom_id.into_owned(), body: line.slice_ref(body.as_bytes()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_one_line() {
        let answer =
            json!({ "custom_id": "\"body\":null", "response": { "status_code": 200, "body": null } });
        let read = |body: &[u8]| -> Value {
            let line = with_body(&answer, body);
            assert!(!line.contains(&b'\n'));
            serde_json::from_slice(&line).expect("JSON")
        };
        let whole = read(b"{\n \"a\": [1.50,\r\n \"x\\ny\"]\n}");
        assert_eq!(whole["response"], json!({ "status_code": 200, "body": { "a": [1.50, "x\ny"] } }));
        assert_eq!(whole["custom_id"], "\"body\":null");
        assert_eq!(read(b"no\nJSON \xff")["response"]["body"], "no\nJSON \u{fffd}");
    }

    #[test]
    fn a_line_is_a_request() {
        let good = json!({ "custom_id": "1", "method": "POST", "url": "/v1/x", "body": { "model": "m" } });
        let line = BatchLine::parse(good.to_string().into(), "/v1/x").expect("a request");
        assert_eq!((line.custom_id.as_str(), &line.body[..]), ("1", &br#"{"model":"m"}"#[..]));
        for (field, value, code) in [
            ("custom_id", json!(null), "missing_custom_id"),
            ("custom_id", json!("x".repeat(513)), "missing_custom_id"),
            ("method", json!("GET"), "invalid_method"),
            ("url", json!("/v1/y"), "mismatched_endpoint"),
            ("body", json!("x"), "missing_body"),
            ("body", json!({ "stream": true }), "invalid_request"),
        ] {
            let mut bad = good.clone();
            bad[field] = value;
            let problem = BatchLine::parse(bad.to_string().into(), "/v1/x").expect_err("a problem");
            assert_eq!(problem.0, code, "{bad}");
        }
        let broken = BatchLine::parse(Bytes::from_static(b"{"), "/v1/x").expect_err("a problem");
        assert_eq!(broken.0, "invalid_json_line");
        assert!(broken.1.starts_with("The line is not JSON"), "{}", broken.1);
        let spelled = r#"{"custom_id":"1","method":"POST","url":"/v1/x","body":{"t":1.50e2,"stream":true,"stream":false}}"#;
        let line = BatchLine::parse(Bytes::from_static(spelled.as_bytes()), "/v1/x").expect("a request");
        assert_eq!(&line.body[..], br#"{"t":1.50e2,"stream":true,"stream":false}"#, "as its client wrote it");
    }
}
