//! Time for which a client wants the blocks of its prompt retained: `prompt_cache_retention` of chats, completions and
//! responses, to which [`crate::anthropic`] converts `cache_control`.

use std::borrow::Cow;
use std::time::Duration;

use crate::{ApiError, RawBody};

/// The field's name.
pub(crate) const PROMPT_CACHE_RETENTION: &str = "prompt_cache_retention";

/// Removes the field from a body and returns its value: engines do not use it, and some refuse unknown fields. Zero: no
/// longer than any other prompt's blocks (`"in_memory"`).
pub fn take_prompt_cache_retention(body: &mut RawBody) -> Result<Duration, ApiError> {
    let text = body.text(PROMPT_CACHE_RETENTION)?.map(Cow::into_owned);
    body.remove(PROMPT_CACHE_RETENTION);
    let Some(text) = text else { return Ok(Duration::ZERO) };
    let wrong = || {
        ApiError::invalid(
            PROMPT_CACHE_RETENTION,
            format!(
                "`{PROMPT_CACHE_RETENTION}` must be \"in_memory\", or a time like \"24h\", \"5m\" or \"30s\", not {text:?}."
            ),
        )
    };
    match text.as_str() {
        // Older clients spell it with a hyphen.
        "in_memory" | "in-memory" => Ok(Duration::ZERO),
        text => parse(text).ok_or_else(wrong),
    }
}

/// Parses a whole number of seconds, minutes, hours or days.
pub(crate) fn parse(text: &str) -> Option<Duration> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => return None,
    };
    let is_plain = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let number: u32 = is_plain.then(|| number.parse().ok()).flatten()?;
    Some(Duration::from_secs(u64::from(number) * seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_taken_out_and_others_named() {
        let taken = |value: &str| {
            let text = format!("{{\"model\":\"m\",\"prompt_cache_retention\":{value}}}");
            let mut body = RawBody::parse(text.into()).expect("JSON");
            let taken = take_prompt_cache_retention(&mut body);
            let is_there = body.get(PROMPT_CACHE_RETENTION).is_some();
            taken.map(|time| (time.as_secs(), is_there)).map_err(|error| format!("{error:?}"))
        };
        for (value, seconds) in [
            ("\"24h\"", 86_400),
            ("\"5m\"", 300),
            ("\"90s\"", 90),
            ("\"7d\"", 604_800),
            ("\"0s\"", 0),
            ("\"in_memory\"", 0),
            ("\"in-memory\"", 0),
        ] {
            assert_eq!(taken(value), Ok((seconds, false)), "{value}");
        }
        for value in ["\"\"", "\"h\"", "\"1\"", "\"-1h\"", "\"+1h\"", "\"1w\"", "\"99999999999h\"", "\"1é\""]
        {
            let error = taken(value).expect_err(value);
            assert!(error.contains("must be \\\"in_memory\\\""), "{value}: {error}");
        }
        assert!(taken("3").expect_err("a number").contains("prompt_cache_retention"));
        assert_eq!(taken("null"), Ok((0, false)));
    }
}
