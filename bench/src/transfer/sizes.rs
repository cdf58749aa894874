//! Parses sizes, lists of sizes, rows and durations of the command line.

use std::str::FromStr;
use std::time::Duration;

use dataplane_fabric::Rows;
use serde::{Deserialize, Serialize};

/// Largest piece.
pub(super) const PIECE_BYTES_MAX: u64 = 1 << 30;

/// Sizes of pieces, in the given order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes(pub Vec<u32>);

/// Rows of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowShape {
    /// Bytes of one row.
    pub bytes: u32,
    /// Bytes from row to row at the initiator.
    pub local_stride: u32,
    /// Bytes from row to row at the target.
    pub remote_stride: u32,
}

impl RowShape {
    /// Converts to the fabric's type.
    #[must_use]
    pub fn rows(self) -> Rows {
        Rows { bytes: self.bytes, local_stride: self.local_stride, remote_stride: self.remote_stride }
    }
}

/// `64`, `4K`, `64KiB`, `1M`, `2G`: powers of two.
pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| format!("'{text}' does not start with a number"))?;
    let shift = match unit {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        _ => return Err(format!("'{unit}' is no unit of bytes: K, M and G are")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("'{text}' is too much"))
}

pub(super) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 =
        text.trim_end_matches('s').parse().map_err(|_| format!("'{text}' is no number of seconds"))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(format!("'{text}' is no usable duration")),
    }
}

fn piece(text: &str) -> Result<u32, String> {
    match parse_bytes(text)? {
        bytes @ 1..=PIECE_BYTES_MAX => Ok(bytes as u32),
        bytes => Err(format!("a piece of {bytes} bytes; 1 to {PIECE_BYTES_MAX} are possible")),
    }
}

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Vec::new();
        for part in text.split(',') {
            let Some((first, rest)) = part.split_once("..") else {
                sizes.push(piece(part)?);
                continue;
            };
            let (last, factor) = rest.split_once(':').unwrap_or((rest, "2"));
            let (first, last) = (piece(first)?, piece(last)?);
            let factor: u32 = factor.parse().map_err(|_| format!("'{factor}' is no factor"))?;
            if first > last || factor < 2 {
                return Err(format!("'{part}' is no rising range"));
            }
            sizes.extend(
                std::iter::successors(Some(first), |size| size.checked_mul(factor))
                    .take_while(|&size| size <= last),
            );
        }
        Ok(Self(sizes))
    }
}

impl FromStr for RowShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split(':').map(piece).collect::<Result<Vec<_>, _>>()?;
        let [bytes, local_stride, remote_stride] = parts[..] else {
            return Err(format!("'{text}' is not BYTES:LOCAL:REMOTE"));
        };
        if local_stride < bytes || remote_stride < bytes {
            return Err(format!("'{text}': rows overlap, a stride is shorter than a row"));
        }
        Ok(Self { bytes, local_stride, remote_stride })
    }
}

/// `64 B`, `4 KiB`, `16 MiB`.
pub(super) fn human(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_lists_and_ranges() {
        for (text, expected) in [
            ("64", Ok(vec![64])),
            ("4K,64KiB,1M", Ok(vec![4096, 65536, 1 << 20])),
            ("64..512", Ok(vec![64, 128, 256, 512])),
            ("64..600", Ok(vec![64, 128, 256, 512])),
            ("4K..1M:4", Ok(vec![4096, 16384, 65536, 262_144, 1 << 20])),
            ("1,64..128", Ok(vec![1, 64, 128])),
            ("0", Err(())),
            ("2G", Err(())),
            ("", Err(())),
            ("4X", Err(())),
            ("K", Err(())),
            ("512..64", Err(())),
            ("64..512:1", Err(())),
            ("99999999999999999999", Err(())),
            ("99999999999G", Err(())),
        ] {
            assert_eq!(text.parse::<Sizes>().map(|sizes| sizes.0).map_err(|_| ()), expected, "{text}");
        }
    }

    #[test]
    fn rows_have_three_numbers_and_do_not_overlap() {
        let shape = RowShape { bytes: 256, local_stride: 512, remote_stride: 1024 };
        assert_eq!("256:512:1K".parse(), Ok(shape));
        for bad in ["256", "256:512", "256:128:512", "256:512:128", "0:1:1", "1:2:3:4"] {
            assert!(bad.parse::<RowShape>().is_err(), "{bad}");
        }
    }

    #[test]
    fn seconds_and_names_of_sizes() {
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_seconds("2s"), Ok(Duration::from_secs(2)));
        for bad in ["0", "-1", "x", "inf", "NaN"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
        for (bytes, name) in
            [(64, "64 B"), (4096, "4 KiB"), (1 << 20, "1 MiB"), (4097, "4097 B"), (1536, "1536 B")]
        {
            assert_eq!(human(bytes), name);
        }
    }
}
