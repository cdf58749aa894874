//! Deletes objects older than the time to live, folder by folder and page by page, so that memory stays flat
//! and a sweep that ran out of time continues where it was. The age is the server's time of last change: a
//! listing shows no other, and an object is written once. Covers every layout under the prefix, also those that
//! no node uses any more; deletes only keys of the tier's form.

use std::sync::PoisonError;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore};
use tokio::time::{Instant, sleep_until};

use crate::error::{FailureCause, ObjectError, Operation};
use crate::key::{is_object_key, root};
use crate::metrics::add;
use crate::tier::ObjectTier;

/// Maximum number of objects of a page.
const PAGE_OBJECTS: usize = 1000;

/// Result of a sweep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Number of objects listed.
    pub listed: u64,
    /// Number of objects deleted.
    pub deleted: u64,
    /// Whether the whole prefix was covered; otherwise the next sweep continues from here.
    pub complete: bool,
}

impl ObjectTier {
    /// Deletes expired objects until none is left, `deletes_max` were deleted, or the deadline has passed.
    pub async fn sweep(&self, deletes_max: u64, deadline: Instant) -> Result<SweepReport, ObjectError> {
        let mut report = SweepReport::default();
        if self.config.ttl.is_none() {
            return Ok(SweepReport { complete: true, ..report });
        }
        let after = self.sweep_after.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let result = self.sweep_folders(after, deletes_max, deadline, &mut report).await;
        match result {
            Err(error) if error.cause() == Some(FailureCause::Deadline) => Ok(report),
            Err(error) => Err(error),
            Ok(()) => Ok(report),
        }
    }

    async fn sweep_folders(
        &self,
        after: Option<String>,
        deletes_max: u64,
        deadline: Instant,
        report: &mut SweepReport,
    ) -> Result<(), ObjectError> {
        for layout in self.folders(root(&self.config.prefix), deadline).await? {
            if after.as_deref().is_some_and(|after| !after.starts_with(&layout) && *layout < *after) {
                continue;
            }
            for folder in self.folders(layout, deadline).await? {
                if after.as_deref().is_some_and(|after| *folder <= *after) {
                    continue;
                }
                if !self.sweep_folder(&folder, deletes_max, deadline, report).await? {
                    return Ok(());
                }
                *self.sweep_after.lock().unwrap_or_else(PoisonError::into_inner) = Some(folder);
            }
        }
        *self.sweep_after.lock().unwrap_or_else(PoisonError::into_inner) = None;
        report.complete = true;
        Ok(())
    }

    /// Lists the folders below a folder, sorted.
    async fn folders(&self, parent: String, deadline: Instant) -> Result<Vec<String>, ObjectError> {
        let path = Path::from(parent.as_str());
        let request = || self.backend.store.list_with_delimiter(Some(&path));
        let listed = self.request(Operation::List, &parent, deadline, request).await?;
        let mut folders: Vec<String> = listed.common_prefixes.into_iter().map(String::from).collect();
        folders.sort_unstable();
        Ok(folders)
    }

    /// Sweeps a folder. Returns whether it was completed.
    async fn sweep_folder(
        &self,
        folder: &str,
        deletes_max: u64,
        deadline: Instant,
        report: &mut SweepReport,
    ) -> Result<bool, ObjectError> {
        let interval = Duration::from_secs(1) / self.config.sweep_deletes_per_s;
        let mut offset = None;
        loop {
            let page = self.page(folder, offset.as_ref(), deadline).await?;
            report.listed += page.len() as u64;
            let mut next_delete = Instant::now();
            for object in &page {
                let changed_unix_ms = u64::try_from(object.last_modified.timestamp_millis()).unwrap_or(0);
                let key = object.location.as_ref();
                if !is_object_key(&self.config.prefix, key) || !self.is_expired(changed_unix_ms) {
                    continue;
                }
                if report.deleted >= deletes_max || next_delete >= deadline {
                    return Ok(false);
                }
                sleep_until(next_delete).await;
                next_delete = Instant::now() + interval;
                self.delete_key(key, deadline).await?;
                report.deleted += 1;
                add(&self.counters.swept_objects, 1);
            }
            match page.last() {
                Some(last) if self.backend.s3.is_some() && page.len() == PAGE_OBJECTS => {
                    offset = Some(last.location.clone());
                }
                _ => return Ok(true),
            }
        }
    }

    /// Lists a page of a folder. A directory is not sorted, so its folder is one page.
    async fn page(
        &self,
        folder: &str,
        offset: Option<&Path>,
        deadline: Instant,
    ) -> Result<Vec<ObjectMeta>, ObjectError> {
        let path = Path::from(folder);
        let page_objects = if self.backend.s3.is_some() { PAGE_OBJECTS } else { usize::MAX };
        let request = || {
            let listed = match offset {
                Some(offset) => self.backend.store.list_with_offset(Some(&path), offset),
                None => self.backend.store.list(Some(&path)),
            };
            listed.take(page_objects).try_collect::<Vec<_>>()
        };
        self.request(Operation::List, folder, deadline, request).await
    }
}
