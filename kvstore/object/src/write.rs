//! Puts and deletions.
//!
//! A put first looks the run up: a small read that avoids most uploads, finds objects that are too old or
//! damaged, and leaves only races to the conditional put. Of several writers one gets `Stored`, the others
//! `Present`; a writer whose answer was lost and who asks again also gets `Present`.
//!
//! An expired or damaged object is deleted and then put under the condition like any other. Without
//! conditions (the server answered 501) the last writer wins; all write the same blocks.
//!
//! A process that dies during an upload in parts leaves the parts on the server: give the bucket a lifecycle
//! rule that ends incomplete uploads.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use kvstore_block::BlockIdentity;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::time::Instant;

use crate::error::{FailureCause, ObjectError, Operation};
use crate::format::{Block, Encoded, encode};
use crate::metrics::add;
use crate::presence::{Presence, StoredRun};
use crate::read::Found;
use crate::request::after;
use crate::tier::{ObjectTier, Outcome};

/// Maximum number of parts of one upload in flight.
const PARTS_IN_FLIGHT: usize = 4;

impl ObjectTier {
    /// Stores a run: `run_blocks` consecutive blocks of a chain from a multiple of `run_blocks` on or, with
    /// `store_partial`, the first 1, 2, 4 … of them. The caller is responsible for the position.
    pub async fn put(&self, run: &[Block], deadline: Instant) -> Result<Outcome, ObjectError> {
        let outcome = self.put_run(run, deadline).await;
        let counters = &*self.counters;
        let outcome = match outcome {
            Err(error)
                if matches!(error.cause(), Some(FailureCause::SlowDown | FailureCause::BreakerOpen)) =>
            {
                Ok(Outcome::Throttled)
            }
            outcome => outcome,
        };
        match &outcome {
            Ok(Outcome::Stored) => add(&counters.stored_runs, 1),
            Ok(Outcome::Present) => add(&counters.present_runs, 1),
            Ok(Outcome::Throttled) => add(&counters.throttled_puts, 1),
            Err(_) => add(&counters.failed_puts, 1),
        }
        outcome
    }

    /// Deletes the run that ends with a block. A run that does not exist is no error.
    pub async fn delete(&self, last: BlockIdentity, deadline: Instant) -> Result<(), ObjectError> {
        self.presence.forget(&last);
        self.delete_key(&self.key(last), deadline).await
    }

    pub(crate) async fn delete_key(&self, key: &str, deadline: Instant) -> Result<(), ObjectError> {
        let path = Path::from(key);
        let request = || self.backend.store.delete(&path);
        match self.request(Operation::Delete, key, deadline, request).await {
            Err(error) if error.cause() == Some(FailureCause::NotFound) => Ok(()),
            Ok(()) => {
                add(&self.counters.deleted_objects, 1);
                Ok(())
            }
            failed => failed,
        }
    }

    async fn put_run(&self, run: &[Block], deadline: Instant) -> Result<Outcome, ObjectError> {
        let (blocks, run_blocks) = (run.len(), self.config.run_blocks);
        let store_partial = self.config.store_partial;
        let partial = store_partial && blocks < run_blocks && blocks.is_power_of_two();
        let Some(last) = run.last().filter(|_| blocks == run_blocks || partial).map(|block| block.identity)
        else {
            return Err(ObjectError::RunLength { blocks, run_blocks, store_partial });
        };
        let Ok(_permit) = self.puts.try_acquire() else { return Ok(Outcome::Throttled) };
        match self.find(last, deadline).await {
            Found::Run(_) => return Ok(Outcome::Present),
            // The damaged object may not be deleted, so it cannot be replaced.
            Found::Avoided if !self.config.delete_damaged => return Ok(Outcome::Throttled),
            Found::Avoided | Found::Expired => self.delete(last, deadline).await?,
            Found::Absent | Found::Unknown => {}
        }
        let (layout, alignment) = (self.config.layout_fingerprint, self.config.payload_alignment);
        let encoded = encode(layout, self.clock.unix_ms(), alignment, run)?;
        let key = self.key(last);
        // Several uploads may find at the same time that the service knows no conditional requests: each is tried again.
        let was_conditional = self.backend.conditional.load(Ordering::Relaxed);
        let uploaded = match self.upload(&key, &encoded, deadline).await {
            Err(error) if was_conditional && error.cause() == Some(FailureCause::NotImplemented) => {
                self.backend.conditional.store(false, Ordering::Relaxed);
                self.upload(&key, &encoded, deadline).await
            }
            uploaded => uploaded,
        };
        match uploaded {
            Ok(e_tag) => {
                add(&self.counters.written_bytes, encoded.index.object_bytes);
                let stored = StoredRun { index: encoded.index.into(), e_tag };
                self.presence.set(last, Presence::Present(stored), Instant::now());
                Ok(Outcome::Stored)
            }
            Err(error) if error.cause() == Some(FailureCause::Precondition) => {
                self.presence.forget(&last);
                Ok(Outcome::Present)
            }
            Err(error) if ends_upload(&error) => {
                // The server does not know the upload: an earlier attempt may have completed it, and its answer
                // was lost.
                self.presence.forget(&last);
                match self.find(last, deadline).await {
                    Found::Run(_) => Ok(Outcome::Present),
                    _ => Err(error),
                }
            }
            Err(error) => {
                self.presence.forget(&last);
                Err(error)
            }
        }
    }

    /// Uploads an object; returns its ETag.
    async fn upload(
        &self,
        key: &str,
        encoded: &Encoded,
        deadline: Instant,
    ) -> Result<Option<String>, ObjectError> {
        let conditional = self.backend.conditional.load(Ordering::Relaxed);
        add(&self.counters.unconditional_puts, u64::from(!conditional));
        if encoded.index.object_bytes > self.backend.part_bytes
            && let Some(s3) = &self.backend.s3
        {
            return self.upload_parts(s3, key, encoded, deadline).await;
        }
        let path = Path::from(key);
        let payload: PutPayload = encoded.pieces.iter().cloned().collect();
        let mode = if conditional { PutMode::Create } else { PutMode::Overwrite };
        let request = || {
            let options = PutOptions { mode: mode.clone(), ..PutOptions::default() };
            self.backend.store.put_opts(&path, payload.clone(), options)
        };
        Ok(self.request(Operation::Put, key, deadline, request).await?.e_tag)
    }

    async fn upload_parts<S: MultipartStore>(
        &self,
        s3: &S,
        key: &str,
        encoded: &Encoded,
        deadline: Instant,
    ) -> Result<Option<String>, ObjectError> {
        let path = &Path::from(key);
        let create = || s3.create_multipart(path);
        let id = self.request(Operation::CreateUpload, key, deadline, create).await?;
        let id = &id;
        let parts = split(&encoded.pieces, self.backend.part_bytes);
        let uploads = parts.into_iter().enumerate().map(|(number, part)| async move {
            let request = || s3.put_part(path, id, number, part.clone());
            self.request(Operation::PutPart, key, deadline, request).await
        });
        // Boxed, because the compiler cannot prove this stream `Send` for every lifetime.
        let uploaded = stream::iter(uploads).buffered(PARTS_IN_FLIGHT).boxed().try_collect::<Vec<_>>().await;
        let completed = match uploaded {
            Ok(parts) => {
                let request = || s3.complete_multipart(path, id, parts.clone());
                self.request(Operation::CompleteUpload, key, deadline, request).await
            }
            Err(error) => Err(error),
        };
        if completed.is_err() {
            let request = || s3.abort_multipart(path, id);
            let abort_deadline = after(self.config.request_timeout);
            // The bucket's lifecycle rule removes an upload that could not be aborted.
            let _ = self.request(Operation::Delete, key, abort_deadline, request).await;
        }
        Ok(completed?.e_tag)
    }
}

/// Whether completing an upload in parts failed because the server does not know the upload.
fn ends_upload(error: &ObjectError) -> bool {
    let ObjectError::Request { operation, cause, .. } = error else { return false };
    (*operation, *cause) == (Operation::CompleteUpload, FailureCause::NotFound)
}

/// Splits pieces into parts of the same size; the last may be shorter. Copies nothing.
fn split(pieces: &[Bytes], part_bytes: u64) -> Vec<PutPayload> {
    let (mut parts, mut part, mut room) = (Vec::new(), Vec::new(), part_bytes);
    for piece in pieces {
        let mut piece = piece.clone();
        while !piece.is_empty() {
            let taken = piece.split_to(room.min(piece.len() as u64) as usize);
            room -= taken.len() as u64;
            part.push(taken);
            if room == 0 {
                parts.push(part.drain(..).collect());
                room = part_bytes;
            }
        }
    }
    if !part.is_empty() {
        parts.push(part.into_iter().collect());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_bytes_in_order() {
        let pieces: Vec<Bytes> =
            [3, 0, 10, 5, 1].iter().map(|length| Bytes::from(vec![*length as u8; *length])).collect();
        for part_bytes in 1..25 {
            let parts = split(&pieces, part_bytes);
            let joined: Vec<u8> =
                parts.iter().flat_map(|part| part.iter().flat_map(|piece| piece.to_vec())).collect();
            assert_eq!(joined, pieces.concat());
            let (last, full) = parts.split_last().expect("19 bytes");
            assert!(full.iter().all(|part| part.content_length() as u64 == part_bytes));
            assert!((1..=part_bytes).contains(&(last.content_length() as u64)));
        }
    }
}
