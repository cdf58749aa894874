//! Bounded reading of small kernel files below a root directory.
//!
//! The same code reads the real machine (`/`) and a fixture tree. Only regular files are read (a pipe would
//! block), and only up to a named size. Unprintable bytes become `?`, so that a
//! firmware string cannot write escape codes to a terminal. Symbolic links are taken by their text;
//! following them is left to the kernel, which ends loops with an error.

use std::cmp::Ordering;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Largest part of a file that is read, in bytes. The largest file read is `/proc/self/mountinfo`.
const FILE_BYTES_MAX: u64 = 256 * 1024;

/// Largest number of directory entries that are read.
const ENTRIES_MAX: usize = 4096;

/// The directory that stands for `/`.
pub(crate) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Reads the bytes of a file, at most `bytes_max`.
    pub(crate) fn bytes(&self, path: &str, bytes_max: u64) -> Option<Vec<u8>> {
        let path = self.root.join(path);
        if !fs::metadata(&path).ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        fs::File::open(&path).ok()?.take(bytes_max).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// Reads a file's text without surrounding space; `None` when it is empty.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        let bytes = self.bytes(path, FILE_BYTES_MAX)?;
        let text: String = bytes.iter().map(|&byte| printable(byte)).collect();
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// Reads a file that should hold one short value; a longer value is cut.
    pub(crate) fn label(&self, path: &str) -> Option<String> {
        const LABEL_CHARACTERS_MAX: usize = 64;
        let text = self.text(path)?;
        let line = text.lines().next()?;
        Some(line.chars().take(LABEL_CHARACTERS_MAX).collect())
    }

    /// Reads the first word of a file as a number.
    pub(crate) fn number<T: FromStr>(&self, path: &str) -> Option<T> {
        self.label(path)?.split_whitespace().next()?.parse().ok()
    }

    /// Reads a file like `0x15b3` or `0x020700`.
    pub(crate) fn hex(&self, path: &str) -> Option<u32> {
        let label = self.label(path)?;
        u32::from_str_radix(label.trim_start_matches("0x"), 16).ok()
    }

    /// Reads a NUMA node number; the kernel writes -1 where the firmware does not tell it.
    pub(crate) fn numa_node(&self, path: &str) -> Option<u32> {
        u32::try_from(self.number::<i64>(path)?).ok()
    }

    /// Returns the names in a directory, with numbers in them sorted as numbers.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.root.join(path)) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .take(ENTRIES_MAX)
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.bytes().all(|byte| byte.is_ascii_graphic()))
            .collect();
        names.sort_by(|left, right| natural(left, right));
        names
    }

    /// Returns the target of a symbolic link, as written.
    pub(crate) fn link(&self, path: &str) -> Option<String> {
        fs::read_link(self.root.join(path)).ok()?.into_os_string().into_string().ok()
    }

    /// Returns the last component of a symbolic link: a driver, a group.
    pub(crate) fn link_name(&self, path: &str) -> Option<String> {
        let link = self.link(path)?;
        let name = link.rsplit('/').next()?;
        (!name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic())).then(|| name.to_owned())
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }
}

fn printable(byte: u8) -> char {
    match byte {
        b'\n' | b'\t' | b' '..=b'~' => char::from(byte),
        0 => ' ',
        _ => '?',
    }
}

/// Natural order: `mlx5_2` before `mlx5_10`.
pub(crate) fn natural(left: &str, right: &str) -> Ordering {
    let split = |name: &str| {
        let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let (stem, number) = name.split_at(name.len() - digits);
        (stem.to_owned(), number.parse::<u64>().unwrap_or(0))
    };
    split(left).cmp(&split(right)).then_with(|| left.cmp(right))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_sort_as_numbers() {
        let mut names = ["mlx5_10", "mlx5_2", "eth0", "mlx5_1", "9", "10", ""];
        names.sort_by(|left, right| natural(left, right));
        assert_eq!(names, ["", "9", "10", "eth0", "mlx5_1", "mlx5_2", "mlx5_10"]);
    }

    #[test]
    fn escape_codes_do_not_get_through() {
        assert_eq!([0x1b, b'[', 0xff, b'a', 0].map(printable), ['?', '[', '?', 'a', ' ']);
    }
}
