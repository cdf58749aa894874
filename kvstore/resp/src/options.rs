//! Parsing of arguments.

use std::borrow::Cow;
use std::time::Duration;

use crate::reply::Reply;
use crate::values::{Condition, Expiry, SetOptions, Value, ValueError};
use crate::wire::{SHORT_MAX, number};

/// `-ERR syntax error`.
pub(crate) const SYNTAX: Reply = Reply::Error(Cow::Borrowed("ERR syntax error"));
const NOT_AN_INTEGER: Reply = Reply::Error(Cow::Borrowed("ERR value is not an integer or out of range"));
const KEY_TOO_LONG: Reply = Reply::Error(Cow::Borrowed("ERR key is too long"));

/// Maximum expiry, about 30,000 years, so that no clock overflows.
const EXPIRY_MS_MAX: i64 = 1_000_000_000_000_000;

/// Returns a word in capitals; words longer than any known one become empty.
pub(crate) fn word(argument: &Value) -> String {
    let bytes = argument.contiguous().filter(|bytes| bytes.len() <= 32).unwrap_or_default();
    String::from_utf8_lossy(bytes).to_ascii_uppercase()
}

/// Checks a key: at most [`SHORT_MAX`] bytes.
pub(crate) fn key(argument: &Value) -> Result<&[u8], Reply> {
    argument.contiguous().filter(|key| key.len() <= SHORT_MAX).ok_or(KEY_TOO_LONG)
}

/// Parses an integer.
pub(crate) fn integer(argument: &Value) -> Result<i64, Reply> {
    argument.contiguous().and_then(number).ok_or(NOT_AN_INTEGER)
}

/// Parses a time in units of `unit_ms` into milliseconds; it may lie in the past.
pub(crate) fn milliseconds(argument: &Value, unit_ms: i64, command: &str) -> Result<i64, Reply> {
    integer(argument)?
        .checked_mul(unit_ms)
        .filter(|time| time.abs() <= EXPIRY_MS_MAX)
        .ok_or_else(|| Reply::error(format!("ERR invalid expire time in '{command}' command")))
}

/// Parses a lifetime that begins now.
pub(crate) fn life(argument: &Value, unit_ms: i64, command: &str) -> Result<Duration, Reply> {
    match u64::try_from(milliseconds(argument, unit_ms, command)?) {
        Ok(time) if time > 0 => Ok(Duration::from_millis(time)),
        _ => Err(Reply::error(format!("ERR invalid expire time in '{command}' command"))),
    }
}

/// Parses the arguments after the value in `SET`: the options, and whether the old value is wanted.
pub(crate) fn set_options(arguments: &[Value]) -> Result<(SetOptions, bool), Reply> {
    let (mut options, mut previous) = (SetOptions::default(), false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let word = word(argument);
        match word.as_str() {
            "NX" | "XX" if options.condition == Condition::Always => {
                options.condition = if word == "NX" { Condition::IfAbsent } else { Condition::IfPresent };
            }
            "GET" => previous = true,
            "KEEPTTL" if options.expiry == Expiry::Never => options.expiry = Expiry::Keep,
            "EX" | "PX" if options.expiry == Expiry::Never => {
                let unit_ms = if word == "EX" { 1000 } else { 1 };
                options.expiry = Expiry::After(life(rest.next().ok_or(SYNTAX)?, unit_ms, "set")?);
            }
            _ => return Err(SYNTAX),
        }
    }
    Ok((options, previous))
}

/// Returns the range of bytes that `GETRANGE` means: both ends included, negative ones count from the end.
pub(crate) fn range(start: i64, end: i64, length: usize) -> std::ops::Range<usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    let absolute = |at: i64| if at < 0 { at.saturating_add(length).max(0) } else { at.min(length) };
    if length == 0 || (start < 0 && end < 0 && start > end) {
        return 0..0;
    }
    let (start, end) = (absolute(start), absolute(end).saturating_add(1).min(length));
    // Both are between 0 and the length, which fits.
    let index = |at: i64| usize::try_from(at).unwrap_or(0);
    if start < end { index(start)..index(end) } else { 0..0 }
}

impl From<ValueError> for Reply {
    fn from(error: ValueError) -> Self {
        Self::error(format!("ERR {error}"))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn arguments(line: &'static str) -> Vec<Value> {
        line.split_whitespace().map(|word| Value::from(Bytes::from(word))).collect()
    }

    #[test]
    fn options_of_set() {
        let options = |condition, expiry| SetOptions { condition, expiry };
        let ten = Expiry::After(Duration::from_secs(10));
        let cases = [
            ("", Some((options(Condition::Always, Expiry::Never), false))),
            ("ex 10 nx", Some((options(Condition::IfAbsent, ten), false))),
            ("XX px 10000 GET", Some((options(Condition::IfPresent, ten), true))),
            ("keepttl", Some((options(Condition::Always, Expiry::Keep), false))),
            ("NX XX", None),
            ("EX", None),
            ("EX 0", None),
            ("EX -1", None),
            ("PX 1x", None),
            ("EX 9223372036854775807", None),
            ("EX 1 PX 1", None),
            ("EX 1 KEEPTTL", None),
            ("EXAT 1", None),
        ];
        for (line, expected) in cases {
            assert_eq!(set_options(&arguments(line)).ok(), expected, "{line}");
        }
    }

    #[test]
    fn ranges_as_redis_counts_them() {
        let text = "This is a string";
        let cases = [
            (0, 3, "This"),
            (-3, -1, "ing"),
            (0, -1, text),
            (10, 100, "string"),
            (5, 3, ""),
            (-1, -3, ""),
            (100, 200, ""),
            (-100, 3, "This"),
            (i64::MIN, i64::MAX, text),
            (0, -100, "T"),
        ];
        for (start, end, expected) in cases {
            assert_eq!(&text[range(start, end, text.len())], expected, "{start} {end}");
        }
        assert_eq!(range(0, -1, 0), 0..0);
    }
}
