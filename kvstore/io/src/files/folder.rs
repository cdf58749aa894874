//! A folder of segment files of equal size, or one file.
//!
//! Files are preallocated when they are made, so that a full file system shows at start-up and not under load.
//! They are made under another name (`segment-0000.new`) and renamed once they are whole and synced, so a crash
//! meanwhile leaves nothing that a later start would take for a segment. An existing file of another size is
//! refused: growing or cutting it could lose data of the log above. Segments beyond the count are removed: they
//! would occupy space, and join again later with stale contents.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;

use super::make::{make_segment, no_direct, path_while_made};
use super::{Files, StoredFile, failed, lock, refused};
use crate::{IoError, IoErrorKind};

const LOCK_FILE: &str = "lock";

/// Settings of a folder of segment files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderConfig {
    /// Path of the folder, which is made if it is missing (its parent must exist).
    pub path: PathBuf,
    /// Bytes of each file, a multiple of `block_bytes`.
    pub segment_bytes: u64,
    /// Number of files. Files beyond it, left by a larger count, are removed with their contents.
    pub segment_count: u32,
    /// Whether files are opened with O_DIRECT, past the page cache.
    pub direct: bool,
    /// Whether zeros are written into new files. Takes as long as writing all of them; saves the file system
    /// from converting unwritten extents at each first write.
    pub write_zeros: bool,
    /// Alignment of requests, a power of two; at least what the device requires.
    pub block_bytes: usize,
}

impl FolderConfig {
    /// Returns settings with direct I/O and blocks of 4 KiB.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, segment_bytes: u64, segment_count: u32) -> Self {
        let path = path.into();
        Self { path, segment_bytes, segment_count, direct: true, write_zeros: false, block_bytes: 4096 }
    }
}

/// Opens `segment-0000`, `segment-0001`, … in the folder; missing ones are made and preallocated. Locks the
/// folder for as long as the result lives. Segments that follow without a gap, numbered `segment_count` and
/// above, are removed once all others could be opened.
pub fn open_folder(config: &FolderConfig) -> Result<Files, IoError> {
    let (files, _) = open_segments(config)?;
    remove_surplus_of(config)?;
    Ok(files)
}

/// Opens the segments without removing any; also returns those that were made.
fn open_segments(config: &FolderConfig) -> Result<(Files, Vec<PathBuf>), IoError> {
    let invalid = |reason: &str| {
        Err(refused("open the segments in", &config.path, IoErrorKind::Invalid, reason.to_owned()))
    };
    if !config.block_bytes.is_power_of_two() {
        return invalid("the block size is not a power of two");
    }
    if config.segment_bytes == 0 || !config.segment_bytes.is_multiple_of(config.block_bytes as u64) {
        return invalid("the segment size is not a multiple of the block size");
    }
    if config.segment_count == 0 {
        return invalid("no segments");
    }
    match rustix::fs::mkdir(&config.path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(failed("make the folder", &config.path, errno)),
    }
    let lock_path = config.path.join(LOCK_FILE);
    let lock_file = open(&lock_path, OFlags::CREATE | OFlags::RDWR)?;
    lock(&lock_file, &config.path)?;
    let paths: Vec<PathBuf> =
        (0..config.segment_count).map(|index| segment_path(&config.path, index)).collect();
    let missing: Vec<PathBuf> = paths.iter().filter(|path| !is_made(path)).cloned().collect();
    check_room(config, missing.len() as u64)?;
    let opened: Result<Vec<StoredFile>, IoError> =
        paths.iter().map(|path| open_segment(path, config)).collect();
    let files = match opened {
        Ok(files) => files,
        Err(error) => {
            give_back(&missing);
            return Err(error);
        }
    };
    let folder = open(&config.path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    rustix::fs::fsync(&folder).map_err(|errno| failed("fsync", &config.path, errno))?;
    Ok((Files { files, block_bytes: config.block_bytes, locks: vec![lock_file] }, missing))
}

/// Removes the segments that a failed start has made, so that it does not leave a full file system.
fn give_back(made: &[PathBuf]) {
    for path in made {
        let _absent = rustix::fs::unlink(path.as_path());
    }
}

/// Opens a folder on each of several devices as one set of files: the first segment of each folder, then the
/// second of each, and so on. `config.segment_count` is the total of all folders. Removes nothing, because
/// another list of folders looks like a smaller count: a caller that can interpret the segments' contents then
/// calls [`remove_surplus`].
pub fn open_folders(paths: &[PathBuf], config: &FolderConfig) -> Result<Files, IoError> {
    let each = segments_of_each(paths, config)?;
    let (mut folders, mut locks, mut made) = (Vec::new(), Vec::new(), Vec::new());
    for path in paths {
        match open_segments(&FolderConfig { path: path.clone(), segment_count: each, ..config.clone() }) {
            Ok((opened, new)) => {
                made.extend(new);
                locks.extend(opened.locks);
                folders.push(opened.files.into_iter());
            }
            Err(error) => {
                give_back(&made);
                return Err(error);
            }
        }
    }
    let mut files = Vec::with_capacity(config.segment_count as usize);
    for _ in 0..each {
        files.extend(folders.iter_mut().filter_map(Iterator::next));
    }
    Ok(Files { files, block_bytes: config.block_bytes, locks })
}

/// Removes the segments that follow those of [`open_folders`] without a gap: a larger count made them. The
/// caller must have the folders open.
pub fn remove_surplus(paths: &[PathBuf], config: &FolderConfig) -> Result<(), IoError> {
    let each = segments_of_each(paths, config)?;
    let config = |path: &PathBuf| FolderConfig { path: path.clone(), segment_count: each, ..config.clone() };
    paths.iter().try_for_each(|path| remove_surplus_of(&config(path)))
}

fn segments_of_each(paths: &[PathBuf], config: &FolderConfig) -> Result<u32, IoError> {
    let folders = u32::try_from(paths.len()).unwrap_or(u32::MAX);
    if folders == 0 || !config.segment_count.is_multiple_of(folders) {
        let reason = format!("{} segments cannot be shared out over {folders} folders", config.segment_count);
        let path = paths.first().unwrap_or(&config.path);
        return Err(refused("open the segments in", path, IoErrorKind::Invalid, reason));
    }
    Ok(config.segment_count / folders)
}

/// Whether a segment was made completely. An empty file of that name was not.
fn is_made(path: &Path) -> bool {
    path.metadata().is_ok_and(|status| status.len() > 0)
}

/// Fails before anything is made when the file system has less space than `missing` segments take. Another
/// process may take the space right after this, so preallocating may still fail.
fn check_room(config: &FolderConfig, missing: u64) -> Result<(), IoError> {
    let wanted = missing.saturating_mul(config.segment_bytes);
    let Ok(room) = rustix::fs::statvfs(&config.path) else { return Ok(()) };
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    if wanted <= free {
        return Ok(());
    }
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let reason = format!(
        "{missing} segments to make take {:.1} MiB, and the file system has {:.1} MiB free",
        mib(wanted),
        mib(free)
    );
    Err(refused("make segments in", &config.path, IoErrorKind::NoSpace, reason))
}

/// Opens one file, made and preallocated if it is missing, and locks it for as long as the result lives.
pub fn open_file(path: &Path, bytes: u64, direct: bool, write_zeros: bool) -> Result<Files, IoError> {
    let config = FolderConfig { direct, write_zeros, ..FolderConfig::new(path, bytes, 1) };
    if bytes == 0 || !bytes.is_multiple_of(config.block_bytes as u64) {
        let reason = format!("{bytes} bytes are not a multiple of {}", config.block_bytes);
        return Err(refused("open", path, IoErrorKind::Invalid, reason));
    }
    let stored = open_segment(path, &config)?;
    lock(&stored.file, path)?;
    Ok(Files { files: vec![stored], block_bytes: config.block_bytes, locks: Vec::new() })
}

pub(super) fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, IoError> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
        .map_err(|errno| failed("open", path, errno))
}

/// Removes the segments that follow the last one of the count without a gap: a larger count made them. Files
/// behind a gap were not made by this program, and stay. The caller has the folder's lock.
fn remove_surplus_of(config: &FolderConfig) -> Result<(), IoError> {
    let remove = |path: &Path| match rustix::fs::unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(failed("remove", path, errno)),
    };
    let mut end = config.segment_count;
    while segment_path(&config.path, end).symlink_metadata().is_ok() {
        end += 1;
    }
    // A segment that was being made when the process ended.
    remove(&path_while_made(&segment_path(&config.path, end)))?;
    // The last first, so that a crash leaves no gap.
    (config.segment_count..end).rev().try_for_each(|number| remove(&segment_path(&config.path, number)))
}

fn segment_path(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("segment-{number:04}"))
}

/// Opens an existing segment; `None` when it is missing, or was not made completely.
fn open_made(path: &Path, config: &FolderConfig) -> Result<Option<(OwnedFd, u64)>, IoError> {
    let direct = if config.direct { OFlags::DIRECT } else { OFlags::empty() };
    let file = match rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | direct, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::INVAL) if config.direct => return Err(no_direct(path)),
        opened => opened.map_err(|errno| failed("open", path, errno))?,
    };
    let status = rustix::fs::fstat(&file).map_err(|errno| failed("fstat", path, errno))?;
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
        return Err(refused("open", path, IoErrorKind::Invalid, "not a regular file".to_owned()));
    }
    let bytes = status.st_size as u64;
    Ok((bytes > 0).then_some((file, bytes)))
}

fn open_segment(path: &Path, config: &FolderConfig) -> Result<StoredFile, IoError> {
    let (file, bytes) = match open_made(path, config)? {
        Some(made) => made,
        None => (make_segment(path, config)?, config.segment_bytes),
    };
    if bytes != config.segment_bytes {
        let reason = format!(
            "it has {bytes} bytes, not {}, and files are never resized: remove the segments, or set `segment` to \
             {bytes} bytes again",
            config.segment_bytes
        );
        return Err(refused("open", path, IoErrorKind::Invalid, reason));
    }
    if config.direct {
        check_alignment(&file, path, config.block_bytes)?;
    }
    Ok(StoredFile { path: path.to_owned(), file, bytes: config.segment_bytes, is_device: false })
}

/// Compares the block size with the alignment of direct I/O (statx(2), STATX_DIOALIGN, Linux 6.1), where the
/// kernel tells it.
fn check_alignment(file: &OwnedFd, path: &Path, block_bytes: usize) -> Result<(), IoError> {
    const STATX_DIOALIGN: u32 = 0x2000; // include/uapi/linux/stat.h
    let wanted = StatxFlags::from_bits_retain(STATX_DIOALIGN);
    let Ok(status) = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted) else { return Ok(()) };
    if status.stx_mask & STATX_DIOALIGN == 0 {
        return Ok(());
    }
    let least = status.stx_dio_offset_align.max(status.stx_dio_mem_align) as usize;
    if least > block_bytes {
        let reason = format!("direct I/O wants multiples of {least} bytes here, blocks have {block_bytes}");
        return Err(refused("open", path, IoErrorKind::Invalid, reason));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("kvasir-io-{name}-{}", std::process::id()));
        let _absent = std::fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn segments_are_preallocated_once_and_locked() {
        let path = folder("segments");
        let config = FolderConfig { direct: false, ..FolderConfig::new(&path, 1 << 20, 3) };
        let files = open_folder(&config).expect("open");
        assert_eq!(files.geometry(4096, 1).files, vec![1 << 20; 3]);
        let status = std::fs::metadata(path.join("segment-0002")).expect("made");
        assert!(std::os::unix::fs::MetadataExt::blocks(&status) * 512 >= 1 << 20, "preallocated");

        let error = open_folder(&config).expect_err("locked");
        assert!(error.reason.contains(&format!("process {}", std::process::id())), "{error}");
        assert!(error.operation.contains("segments"), "{error}");
        drop(files);
        let files = open_folder(&config).expect("free again");
        drop(files);

        let other = FolderConfig { segment_bytes: 2 << 20, ..config.clone() };
        let error = open_folder(&other).expect_err("another size");
        assert!(error.kind == IoErrorKind::Invalid && error.operation.contains("segment-0000"), "{error}");
        assert!(error.reason.contains("remove the segments, or set `segment` to 1048576"), "{error}");
        std::fs::remove_dir_all(&path).expect("remove");
    }

    #[test]
    fn several_folders_are_one_set_of_files() {
        let path = folder("several");
        std::fs::create_dir(&path).expect("a folder");
        let paths: Vec<PathBuf> = ["one", "two", "three"].map(|name| path.join(name)).into();
        let config = FolderConfig { direct: false, ..FolderConfig::new(&path, 1 << 20, 6) };
        let files = open_folders(&paths, &config).expect("open");
        let names: Vec<PathBuf> =
            (0..6).filter_map(|file| Some(files.path(file)?.strip_prefix(&path).ok()?.to_owned())).collect();
        let wanted = ["one/segment-0000", "two/segment-0000", "three/segment-0000", "one/segment-0001"];
        assert!(names.iter().zip(wanted).all(|(name, wanted)| name == Path::new(wanted)), "{names:?}");
        assert_eq!((names.len(), files.count()), (6, 6));
        for path in &paths {
            assert!(open_folder(&FolderConfig { path: path.clone(), ..config.clone() }).is_err(), "locked");
        }
        drop(files);
        let twice = [paths[0].clone(), paths[0].clone()];
        assert!(open_folders(&twice, &config).expect_err("named twice").reason.contains("in use"));
        let seven = FolderConfig { segment_count: 7, ..config.clone() };
        assert!(open_folders(&paths, &seven).expect_err("seven").reason.contains("over 3 folders"));

        // With a further folder each has fewer segments: the surplus stays until the caller removes it.
        let four = [&paths[..], &[path.join("four")]].concat();
        let fewer = FolderConfig { segment_count: 4, ..config.clone() };
        let files = open_folders(&four, &fewer).expect("four folders");
        let has_second = |path: &PathBuf| path.join("segment-0001").exists();
        assert!(paths.iter().all(has_second) && !has_second(&four[3]));
        remove_surplus(&four, &fewer).expect("removed");
        assert!(!four.iter().any(has_second) && four.iter().all(|path| path.join("segment-0000").exists()));
        drop(files);
        // A start that fails at the last folder removes the segments it made in the others.
        std::fs::remove_dir_all(&four[3]).expect("remove");
        std::fs::write(&four[3], "in the way").expect("a file");
        open_folders(&four, &FolderConfig { segment_count: 12, ..config }).expect_err("no folder");
        assert!(!paths.iter().any(has_second), "given back");
        std::fs::remove_dir_all(&path).expect("remove");
    }

    #[test]
    fn what_cannot_be_opened_is_named() {
        let path = folder("nothing").join("below");
        let error = open_folder(&FolderConfig::new(&path, 4096, 1)).expect_err("no parent");
        assert!(error.operation.ends_with("below"), "{error}");
        for (bytes, count, block) in [(0, 1, 4096), (4095, 1, 4096), (4096, 0, 4096), (4096, 1, 1000)] {
            let config = FolderConfig { block_bytes: block, ..FolderConfig::new(&path, bytes, count) };
            assert_eq!(open_folder(&config).expect_err("unusable").kind, IoErrorKind::Invalid);
        }
        let error = open_file(Path::new("/dev/null"), 4096, false, false).expect_err("no file");
        assert!(error.reason.contains("regular"), "{error}");
    }

    #[test]
    fn no_room_is_an_error_and_leaves_no_stump() {
        let path = folder("full");
        let config = FolderConfig { direct: false, ..FolderConfig::new(&path, 1 << 50, 1) };
        let error = open_folder(&config).expect_err("a petabyte");
        assert_eq!(error.kind, IoErrorKind::NoSpace, "{error}");
        assert!(error.reason.contains("1 segments to make take 1073741824.0 MiB"), "{error}");
        let names = || -> Vec<_> {
            std::fs::read_dir(&path).expect("list").flatten().map(|entry| entry.file_name()).collect()
        };
        assert_eq!(names(), ["lock"]);

        // Each segment has room, all together do not: nothing is made.
        let free =
            rustix::fs::statvfs(&path).map(|room| room.f_bavail * room.f_frsize).expect("a file system");
        let segment_bytes = (free / 2).next_multiple_of(1 << 20);
        let several = FolderConfig { segment_count: 3, segment_bytes, ..config.clone() };
        assert_eq!(open_folder(&several).expect_err("too many").kind, IoErrorKind::NoSpace);
        assert_eq!(names(), ["lock"]);
        std::fs::remove_dir_all(&path).expect("remove");
    }

    #[test]
    fn a_start_that_fails_gives_back_what_it_made_and_nothing_else() {
        let path = folder("given-back");
        let config = FolderConfig { direct: false, ..FolderConfig::new(&path, 1 << 20, 1) };
        drop(open_folder(&config).expect("open"));
        std::fs::create_dir(path.join("segment-0003")).expect("in the way");
        open_folder(&FolderConfig { segment_count: 5, ..config.clone() })
            .expect_err("a folder is no segment");
        let mut names: Vec<_> =
            std::fs::read_dir(&path).expect("list").flatten().map(|entry| entry.file_name()).collect();
        names.sort();
        assert_eq!(names, ["lock", "segment-0000", "segment-0003"]);
        std::fs::remove_dir_all(&path).expect("remove");
    }

    #[test]
    fn a_crash_while_segments_are_made_does_not_matter() {
        let path = folder("crash");
        std::fs::create_dir(&path).expect("a folder");
        // A file cut short while it was filled, one that is too long, and an empty file of the final name.
        std::fs::write(path.join("segment-0000.new"), [7; 5000]).expect("write");
        std::fs::write(path.join("segment-0001.new"), vec![7; 3 << 20]).expect("write");
        std::fs::write(path.join("segment-0002"), []).expect("write");
        let config = FolderConfig { direct: false, ..FolderConfig::new(&path, 1 << 20, 3) };
        drop(open_folder(&config).expect("open"));
        for index in 0..3 {
            let bytes = std::fs::read(path.join(format!("segment-{index:04}"))).expect("made");
            assert!(bytes.len() == 1 << 20 && bytes.iter().all(|&byte| byte == 0), "{index}");
        }
        assert_eq!(std::fs::read_dir(&path).expect("list").count(), 4, "three segments and the lock");
        std::fs::remove_dir_all(&path).expect("remove");
    }

    #[test]
    fn segments_beyond_the_count_are_removed_and_nothing_else() {
        let path = folder("fewer");
        let config = FolderConfig { direct: false, ..FolderConfig::new(&path, 1 << 20, 4) };
        let files = open_folder(&config).expect("open");
        std::fs::write(path.join("segment-0003"), vec![7; 1 << 20]).expect("contents");
        let fewer = FolderConfig { segment_count: 2, ..config.clone() };
        open_folder(&fewer).expect_err("locked");
        assert!(path.join("segment-0003").exists(), "not without the lock");
        drop(files);
        let kept = ["segment-3", "segment-0003.old", "segment-0005"];
        std::fs::write(path.join("segment-0004.new"), "a stump").expect("write");
        kept.iter().for_each(|name| std::fs::write(path.join(name), "mine").expect("write"));
        open_folder(&FolderConfig { segment_bytes: 2 << 20, ..fewer.clone() }).expect_err("another size");
        assert!(path.join("segment-0003").exists(), "not before the others are known to be right");
        drop(open_folder(&fewer).expect("open"));
        let gone = ["segment-0002", "segment-0003", "segment-0004.new"];
        assert!(gone.iter().all(|name| !path.join(name).exists()));
        assert!(path.join("segment-0001").exists() && kept.iter().all(|name| path.join(name).exists()));
        drop(open_folder(&config).expect("open"));
        let again = std::fs::read(path.join("segment-0003")).expect("made anew");
        assert!(again.iter().all(|&byte| byte == 0), "nothing of what it held");
        std::fs::remove_dir_all(&path).expect("remove");
    }
}
