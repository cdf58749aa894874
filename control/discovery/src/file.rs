//! Workers listed in a file, or in the files of a folder.
//!
//! The file is polled twice a second and read when it is unchanged between two polls, so that a partly
//! written file is not read. All files of a folder with a known extension are read together (except hidden
//! ones, which a mounted ConfigMap contains). A file that is missing or has a mistake has no effect: the last
//! workers stay.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::endpoint::Endpoint;
use crate::file_format::Format;
use crate::follow::Sender;
use crate::update::{Object, Update};

const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Largest file, as in llm-d.
const BYTES_MAX: u64 = 1 << 20;
/// Most files in a folder.
const FILES_MAX: usize = 1024;

/// A file or a folder that lists workers.
#[derive(Debug, Clone)]
pub struct FileSource {
    path: PathBuf,
}

/// A file with the fingerprint of its state: device, inode, size, and the time of the last change, including
/// that of its permissions, in seconds and nanoseconds.
type Stamp = (PathBuf, [i64; 5]);

impl FileSource {
    /// Creates the source of the file or folder at this path.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Name of the source in the status.
    #[must_use]
    pub fn name(&self) -> String {
        format!("file {}", self.path.display())
    }

    /// Reports the workers whenever the files have changed, until nothing receives the updates.
    pub async fn watch(self, sender: Sender) {
        let (mut last, mut taken, mut failed) = (None, None, None);
        loop {
            let path = self.path.clone();
            let found = tokio::task::spawn_blocking(move || stamps(&path)).await;
            let now = found.unwrap_or_else(|error| Err(error.to_string()));
            // The first poll is used at once: a starting gateway waits for its workers.
            let is_steady = last.is_none() || last.as_ref() == Some(&now);
            if is_steady && taken.as_ref() != Some(&now) {
                let stamps = now.clone();
                let read = tokio::task::spawn_blocking(move || stamps.and_then(|stamps| read(&stamps))).await;
                let read = read.unwrap_or_else(|error| Err(error.to_string()));
                // A failure may pass although the file is unchanged: it is read again, and an equal failure
                // is reported once.
                let is_news = read.as_ref().err() != failed.as_ref() || read.is_ok();
                failed = read.as_ref().err().cloned();
                taken = read.is_ok().then(|| now.clone());
                let update = match read {
                    Ok(endpoints) => Update::Listed(endpoints.into_iter().map(Object::of).collect()),
                    Err(reason) => Update::Failed(reason),
                };
                if is_news && !sender.send(update).await {
                    return;
                }
            }
            last = Some(now);
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }

    #[cfg(test)]
    fn read(&self) -> Result<Vec<Endpoint>, String> {
        stamps(&self.path).and_then(|stamps| read(&stamps))
    }
}

/// Returns the files to read, or an error that names the unreadable path.
fn stamps(path: &Path) -> Result<Vec<Stamp>, String> {
    let of = |error: std::io::Error| format!("{}: {error}", path.display());
    let stamp = |path: PathBuf, found: &std::fs::Metadata| {
        (
            path,
            [found.dev() as i64, found.ino() as i64, found.size() as i64, found.ctime(), found.ctime_nsec()],
        )
    };
    let found = std::fs::metadata(path).map_err(of)?;
    if !found.is_dir() {
        return Ok(vec![stamp(path.to_owned(), &found)]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(of)? {
        let file = entry.map_err(of)?.path();
        let is_hidden = file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if is_hidden || format_of(&file).is_none() {
            continue;
        }
        let found = std::fs::metadata(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        if found.is_file() {
            files.push(stamp(file, &found));
        }
        if files.len() > FILES_MAX {
            return Err(format!("{}: there are more than {FILES_MAX} files", path.display()));
        }
    }
    files.sort();
    Ok(files)
}

fn format_of(file: &Path) -> Option<Format> {
    file.extension().and_then(|ending| ending.to_str()).and_then(Format::of_ending)
}

/// Reads the workers of all files.
fn read(files: &[Stamp]) -> Result<Vec<Endpoint>, String> {
    let mut all = Vec::new();
    for (file, stamp) in files {
        let of = |problem: String| format!("{}: {problem}", file.display());
        let format =
            format_of(file).ok_or_else(|| of("its name ends in none of .toml, .yaml, .json".to_owned()))?;
        if stamp[2] as u64 > BYTES_MAX {
            return Err(of(format!("it has more than {BYTES_MAX} bytes")));
        }
        let text = std::fs::read_to_string(file).map_err(|error| of(error.to_string()))?;
        all.extend(format.parse(&text).map_err(of)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::follow::channel;
    use crate::follow::follow;
    use crate::roster::Roster;
    use crate::source_state::RemovalLimit;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("kvasir-discovery-{name}-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        std::fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    #[test]
    fn a_folder_is_all_its_files_and_mistakes_name_the_file() {
        let folder = folder("folder");
        std::fs::write(folder.join("b.toml"), "[[worker]]\nurl = \"http://b:1\"\n").expect("written");
        std::fs::write(folder.join("a.yaml"), "endpoints: [{address: a, port: 1}]\n").expect("written");
        std::fs::write(folder.join("notes.txt"), "no workers").expect("written");
        std::fs::write(folder.join(".hidden.toml"), "no TOML").expect("written");
        let source = FileSource::new(folder.clone());
        let urls = |source: &FileSource| -> Result<Vec<String>, String> {
            Ok(source.read()?.into_iter().map(|endpoint| endpoint.url).collect())
        };
        assert_eq!(urls(&source), Ok(vec!["http://a:1".to_owned(), "http://b:1".to_owned()]));
        std::fs::write(folder.join("c.toml"), "[[worker]]\n").expect("written");
        let error = urls(&source).expect_err("a worker without a URL");
        assert!(error.contains("c.toml: line 1"), "{error}");
        std::fs::write(folder.join("c.toml"), vec![b'#'; (BYTES_MAX + 1) as usize]).expect("written");
        assert!(urls(&source).expect_err("too large").contains("c.toml: it has more than"));
        std::fs::remove_dir_all(&folder).expect("removed");
        assert!(urls(&source).expect_err("there is nothing").contains("No such file"));
        assert!(urls(&FileSource::new("/etc/hostname".into())).expect_err("no form").contains("hostname"));
    }

    /// A file is repaired, broken and removed while it is watched.
    #[tokio::test]
    async fn a_file_is_followed_and_mistakes_change_nothing() {
        let folder = folder("watched");
        let file = folder.join("workers.toml");
        std::fs::write(&file, "[[worker]]\nurl = \"http://a:1\"\n").expect("written");
        let (mut senders, receiver) = channel(1);
        let (batches, mut published) = tokio::sync::mpsc::unbounded_channel();
        let source = FileSource::new(file.clone());
        let guard = RemovalLimit { share: 1.0, time: Duration::ZERO };
        let roster = Roster::new(vec![source.name()], guard);
        tokio::spawn(follow(roster, receiver, move |batch| drop(batches.send(batch))));
        tokio::spawn(source.watch(senders.remove(0)));
        let mut next = async || {
            let batch = tokio::time::timeout(Duration::from_secs(20), published.recv());
            batch.await.expect("in time").expect("it goes on")
        };
        let urls = |endpoints: &[Endpoint]| -> Vec<String> {
            endpoints.iter().map(|endpoint| endpoint.url.clone()).collect()
        };
        assert_eq!(urls(&next().await.endpoints.expect("workers")), ["http://a:1"]);
        std::fs::write(&file, "[[worker]]\nurl = \"http://b:1\"\n").expect("written");
        assert_eq!(urls(&next().await.endpoints.expect("workers")), ["http://b:1"]);
        std::fs::write(&file, "[[worker]\n").expect("written");
        let broken = next().await;
        assert!(broken.endpoints.is_none() && broken.sources[0].endpoints == 1);
        assert!(broken.sources[0].error.as_ref().is_some_and(|error| error.contains("line 1")));
        std::fs::remove_file(&file).expect("removed");
        let removed = next().await;
        assert!(removed.sources[0].error.as_ref().is_some_and(|error| error.contains("No such file")));
        std::fs::write(&file, "").expect("written");
        assert_eq!(next().await.endpoints, Some(Vec::new()), "an empty file lists none");
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
