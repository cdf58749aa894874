//! Configuration values with human-readable units: parsing, writing and description of each type.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use toml::de::DeValue;

/// A number of bytes, written like `"16 MiB"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

const BYTE_UNITS: [(&str, u64); 5] =
    [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];
const TIME_UNITS: [(&str, u64); 5] =
    [("us", 1), ("ms", 1000), ("s", 1_000_000), ("min", 60_000_000), ("h", 3_600_000_000)];

impl fmt::Display for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, size) = largest_unit(self.0, &BYTE_UNITS);
        write!(formatter, "{} {unit}", self.0 / size)
    }
}

fn largest_unit(value: u64, units: &[(&'static str, u64)]) -> (&'static str, u64) {
    let fits = |&&(_, size): &&(&str, u64)| value >= size && value.is_multiple_of(size);
    units.iter().rev().find(fits).copied().unwrap_or(units[0])
}

fn with_unit(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let split = text.find(|character: char| !character.is_ascii_digit())?;
    let (number, unit) = text.split_at(split);
    let size = units.iter().find(|(name, _)| *name == unit.trim())?.1;
    number.parse::<u64>().ok()?.checked_mul(size)
}

/// Paths of one or several devices or folders, written `"/a"` or `["/a", "/b"]`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Paths(pub Vec<String>);

impl Paths {
    /// Whether no path is named.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(String::is_empty)
    }

    /// Returns the path if there is exactly one.
    #[must_use]
    pub fn single(&self) -> Option<&str> {
        if let [path] = self.0.as_slice() { Some(path) } else { None }
    }
}

impl fmt::Display for Paths {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0.join(", "))
    }
}

/// Kind of value that a key takes, for documentation and schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// true or false.
    Flag,
    /// Text.
    Text,
    /// A number of bytes with a unit.
    Bytes,
    /// A time span with a unit.
    Duration,
    /// `ip:port`.
    Address,
    /// One of the given words.
    Choice(&'static [&'static str]),
    /// A list of texts.
    List,
    /// A path, or a list of paths.
    Paths,
}

/// Inclusive bounds of a value; `None`: no bound on that side.
pub type Range<T> = (Option<T>, Option<T>);

/// A type of configuration value.
pub trait Setting: Sized + Clone {
    /// Returns the kind of value.
    fn kind() -> Kind;
    /// Parses a TOML value. The error names the expected type.
    fn read(value: &DeValue<'_>) -> Result<Self, String>;
    /// Returns the value as TOML.
    fn write(&self) -> String;
    /// Whether the value lies in the range.
    fn is_within(&self, _range: &Range<Self>) -> bool {
        true
    }
}

fn text<'a>(value: &'a DeValue<'_>, expected: &str) -> Result<&'a str, String> {
    match value {
        DeValue::String(text) => Ok(text.as_ref()),
        other => Err(format!("expected {expected}, found {}", other.type_str())),
    }
}

fn between<T: PartialOrd>(value: &T, range: &Range<T>) -> bool {
    range.0.as_ref().is_none_or(|low| value >= low) && range.1.as_ref().is_none_or(|high| value <= high)
}

impl Setting for u64 {
    fn kind() -> Kind {
        Kind::Integer
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let bad = || format!("expected a whole number, found {}", value.type_str());
        match value {
            DeValue::Integer(integer) => {
                let digits = integer.as_str().replace('_', "");
                Self::from_str_radix(&digits, integer.radix())
                    .map_err(|_| format!("{digits} is not a whole number from 0"))
            }
            _ => Err(bad()),
        }
    }

    fn write(&self) -> String {
        self.to_string()
    }

    fn is_within(&self, range: &Range<Self>) -> bool {
        between(self, range)
    }
}

impl Setting for f64 {
    fn kind() -> Kind {
        Kind::Number
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let number = match value {
            DeValue::Float(float) => float.as_str().replace('_', ""),
            DeValue::Integer(integer) => integer.as_str().replace('_', ""),
            other => return Err(format!("expected a number, found {}", other.type_str())),
        };
        number.parse().map_err(|_| format!("{number} is not a number"))
    }

    fn write(&self) -> String {
        format!("{self:?}")
    }

    fn is_within(&self, range: &Range<Self>) -> bool {
        between(self, range)
    }
}

impl Setting for bool {
    fn kind() -> Kind {
        Kind::Flag
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        match value {
            DeValue::Boolean(flag) => Ok(*flag),
            other => Err(format!("expected true or false, found {}", other.type_str())),
        }
    }

    fn write(&self) -> String {
        self.to_string()
    }
}

impl Setting for String {
    fn kind() -> Kind {
        Kind::Text
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        text(value, "a string").map(str::to_owned)
    }

    fn write(&self) -> String {
        serde_json::Value::from(self.as_str()).to_string()
    }
}

impl Setting for Bytes {
    fn kind() -> Kind {
        Kind::Bytes
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let expected = "a size like \"16 MiB\" (units: B, KiB, MiB, GiB, TiB)";
        let given = text(value, expected)?;
        with_unit(given, &BYTE_UNITS).map(Self).ok_or_else(|| format!("expected {expected}, found {given:?}"))
    }

    fn write(&self) -> String {
        format!("\"{self}\"")
    }

    fn is_within(&self, range: &Range<Self>) -> bool {
        between(self, range)
    }
}

impl Setting for Duration {
    fn kind() -> Kind {
        Kind::Duration
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let expected = "a time like \"30s\" (units: us, ms, s, min, h)";
        let given = text(value, expected)?;
        let micros =
            with_unit(given, &TIME_UNITS).ok_or_else(|| format!("expected {expected}, found {given:?}"))?;
        Ok(Self::from_micros(micros))
    }

    fn write(&self) -> String {
        let micros = self.as_micros() as u64;
        let (unit, size) = largest_unit(micros, &TIME_UNITS);
        format!("\"{}{unit}\"", micros / size)
    }

    fn is_within(&self, range: &Range<Self>) -> bool {
        between(self, range)
    }
}

impl Setting for SocketAddr {
    fn kind() -> Kind {
        Kind::Address
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        let given = text(value, "an address like \"127.0.0.1:8000\"")?;
        given.parse().map_err(|_| format!("expected an address like \"127.0.0.1:8000\", found {given:?}"))
    }

    fn write(&self) -> String {
        format!("\"{self}\"")
    }
}

impl Setting for Vec<String> {
    fn kind() -> Kind {
        Kind::List
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        match value {
            DeValue::Array(items) => items.iter().map(|item| String::read(item.get_ref())).collect(),
            other => Err(format!("expected a list of strings, found {}", other.type_str())),
        }
    }

    fn write(&self) -> String {
        format!("[{}]", self.iter().map(Setting::write).collect::<Vec<_>>().join(", "))
    }
}

impl Setting for Paths {
    fn kind() -> Kind {
        Kind::Paths
    }

    fn read(value: &DeValue<'_>) -> Result<Self, String> {
        match value {
            DeValue::String(path) if path.is_empty() => Ok(Self::default()),
            DeValue::String(path) => Ok(Self(vec![path.as_ref().to_owned()])),
            DeValue::Array(_) => Vec::read(value).map(Self),
            other => Err(format!("expected a path or a list of paths, found {}", other.type_str())),
        }
    }

    fn write(&self) -> String {
        match self.0.as_slice() {
            [] => String::new().write(),
            [path] => path.write(),
            _ => self.0.write(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_and_written_back() {
        for (text, value) in [("16 MiB", 16 << 20), ("3KiB", 3072), ("7 B", 7), ("0 B", 0)] {
            assert_eq!(with_unit(text, &BYTE_UNITS), Some(value), "{text}");
        }
        for bad in ["16", "MiB", "1.5 GiB", "1 GB", "-1 B", "99999999999 TiB"] {
            assert_eq!(with_unit(bad, &BYTE_UNITS), None, "{bad}");
        }
        assert_eq!(Bytes(3 << 30).to_string(), "3 GiB");
        assert_eq!(Bytes(1536).to_string(), "1536 B");
        assert_eq!(Duration::from_secs(90).write(), "\"90s\"");
        assert_eq!(Duration::from_secs(120).write(), "\"2min\"");
        assert_eq!(Duration::from_micros(1500).write(), "\"1500us\"");
    }
}
