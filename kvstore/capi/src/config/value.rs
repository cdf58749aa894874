//! Sizes and times of a configuration, each with its unit.

use std::fmt;
use std::time::Duration;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer};

const UNITS: [(&str, u64); 5] =
    [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

/// A number of bytes, written like `"16 MiB"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl Size {
    fn parse(text: &str) -> Option<Self> {
        let split = text.find(|character: char| !character.is_ascii_digit())?;
        let (number, unit) = text.split_at(split);
        let size = UNITS.iter().find(|(name, _)| *name == unit.trim())?.1;
        number.parse::<u64>().ok()?.checked_mul(size).map(Self)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |&&(_, size): &&(&str, u64)| self.0 >= size && self.0.is_multiple_of(size);
        let (unit, size) = UNITS.iter().rev().find(fits).unwrap_or(&UNITS[0]);
        write!(formatter, "\"{} {unit}\"", self.0 / size)
    }
}

/// Folders, written `"/a"` or `["/a", "/b"]`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(from = "OneOrMore")]
pub(crate) struct Paths(pub(crate) Vec<String>);

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a path or a list of paths")]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl From<OneOrMore> for Paths {
    fn from(given: OneOrMore) -> Self {
        match given {
            OneOrMore::One(path) if path.is_empty() => Self::default(),
            OneOrMore::One(path) => Self(vec![path]),
            OneOrMore::More(paths) => Self(paths),
        }
    }
}

impl Paths {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(String::is_empty)
    }
}

impl fmt::Display for Paths {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "\"{}\"", self.0.join("\", \""))
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Size;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a size like \"16 MiB\" (units: B, KiB, MiB, GiB, TiB)")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Size, E> {
                Size::parse(text).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

/// A time, written like `"30s"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(crate) struct Time(pub(crate) Duration);

impl Time {
    fn parse(text: &str) -> Option<Self> {
        let split = text.find(|character: char| !character.is_ascii_digit())?;
        let (number, unit) = text.split_at(split);
        let number: u64 = number.parse().ok()?;
        let milliseconds = match unit.trim() {
            "ms" => Some(number),
            "s" => number.checked_mul(1000),
            "min" => number.checked_mul(60_000),
            "h" => number.checked_mul(3_600_000),
            _ => None,
        }?;
        Some(Self(Duration::from_millis(milliseconds)))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "\"{} ms\"", self.0.as_millis())
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| {
            D::Error::invalid_value(
                serde::de::Unexpected::Str(&text),
                &"a time like \"30s\" (units: ms, s, min, h)",
            )
        })
    }
}
